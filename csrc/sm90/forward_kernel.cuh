// Algorithm 1 of the paper on wgmma: warp-specialised and persistent. One producer warp finds the column
// tiles that a row tile visits and has TMA fetch them; each consumer warpgroup owns 64 query rows; a storer
// warp for each of them has TMA take O away.
#pragma once

#include <climits>
#include <type_traits>

#include "common/mask_fragment.cuh"
#include "common/softmax.cuh"
#include "common/tile_order.cuh"
#include "sm90/operand.cuh"
#include "sm90/ptx.cuh"
#include "sm90/row_intervals.cuh"
#include "sm90/split_rows.cuh"
#include "sm90/wgmma.cuh"

namespace flashmask::sm90 {

inline constexpr int kMaxSmemBytes = 232448;

struct ForwardArguments {
  CUtensorMap q, k, v, o;  // boxes: 64 rows (q, o) or block_n rows (k, v) of one panel; splits: see there
  ForwardParams params;
  MaskTiles mask;
  int row_tiles;
  int work_count;        // row_tiles * Hq * B
  unsigned* ticket;      // zeroed; the next row tile that nobody has taken
  float exponent_scale;  // exponent_scale(softmax_scale)
  bool negated;          // softmax_scale < 0
  SplitArguments split;
  TileOrder order;  // of row tiles
};

// A head's row tiles descend, so under causality the longest come first, or come as the order says.
struct RowTileWork {
  int row_tile;  // -1: no more work
  int head;
  int batch;

  __device__ __forceinline__ RowTileWork(int number, const ForwardArguments& arguments) {
    const Shape& shape = arguments.params.shape;
    const TileOrder& order = arguments.order;
    int plane = number / arguments.row_tiles;
    int rank = number % arguments.row_tiles;
    if (order.heads_in_turns != nullptr) {
      const RankInPlane at(number, arguments.row_tiles, static_cast<int>(shape.batch) * shape.heads_q,
                           __ldg(order.heads_in_turns));
      plane = at.plane;
      rank = at.rank;
    }
    head = plane % shape.heads_q;
    batch = plane / shape.heads_q;
    row_tile = order.tiles != nullptr ? order.tile(batch, head, rank) : arguments.row_tiles - 1 - rank;
  }
};

// A split of a row tile. What reads the same part of K and V comes together.
struct SplitWork {
  int row_tile;  // -1: no more work
  int head;      // the first of those that are packed
  int batch;
  int split;

  __device__ __forceinline__ SplitWork(int number, const ForwardArguments& arguments) {
    const Shape& shape = arguments.params.shape;
    const SplitPlan& plan = arguments.split.plan;
    const int units = shape.heads_q / shape.heads_k / plan.pack;  // of a K head's query heads
    row_tile = number % plan.row_tiles;
    number /= plan.row_tiles;
    const int unit = number % units;
    number /= units;
    split = number % plan.splits;
    number /= plan.splits;
    head = (number % shape.heads_k * units + unit) * plan.pack;
    batch = number / shape.heads_k;
  }
};

template <typename Element_, int kHeadDim_, int kHeadDimV_, int kConsumers_, int kBlockN_, int kStages_,
          bool kDense_, bool kSplit_>
struct ForwardConfig {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kHeadDimV = kHeadDimV_;
  static constexpr int kConsumers = kConsumers_;  // warpgroups
  static constexpr int kBlockM = 64 * kConsumers;
  static constexpr int kBlockN = kBlockN_;
  static constexpr int kStages = kStages_;  // of K and of V
  static constexpr bool kDense = kDense_;   // test mode: the mask is read from a dense matrix
  static constexpr bool kSplit = kSplit_;   // few query rows: row tiles and key columns as SplitPlan says
  static constexpr bool kDropout = false;
  static constexpr bool kDeterministic = false;
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 232 : 160;
  static_assert(kConsumers == 2 || kConsumers == 3,
                "the register file is divided for two or three consumers");
  static_assert(128 * (kProducerRegisters + kConsumers * kConsumerRegisters) <= 65536, "registers of an SM");
  static_assert(kBlockN % 16 == 0, "P is read 16 columns at a time");

  using QTile = Operand<kBlockM, kHeadDim>;
  using KTile = Operand<kBlockN, kHeadDim>;
  using VTile = Operand<kBlockN, kHeadDimV>;
  using OTile = Operand<kBlockM, kHeadDimV>;

  using Work = std::conditional_t<kSplit, SplitWork, RowTileWork>;

  // One entry of the K ring.
  struct Step {
    int tile;  // a column tile or -1: none, since the row tile sees no key or there is no more work
    // Of each consumer's rows TileVisit's, of slots that are in Smem::slots; kOpens: the first entry of a row
    // tile; kHidden: this consumer's rows see nothing of the column tile.
    uint32_t touched[kConsumers];
  };
  static constexpr uint32_t kOpens = 1u << 31, kHidden = 1u << 30;

  // What it is to one consumer.
  struct OwnStep {
    int tile;
    uint32_t touched;

    __device__ __forceinline__ bool opens() const { return static_cast<int>(touched) < 0; }
    __device__ __forceinline__ bool hidden() const { return (touched & kHidden) != 0; }
  };

  // O takes the place of its Q, a consumer's rows that of its rows; a split's goes from registers to memory.
  // Where there is room for a second stage of Q, that of the next row tile comes while this one is worked on.
  static_assert(OTile::kBytes <= QTile::kBytes, "O fits where Q was");
  static constexpr int kSlotBytes = static_cast<int>(sizeof(Slot) + kConsumers * sizeof(__half2));
  static constexpr int kRingBytes =
      kStages * (KTile::kBytes + VTile::kBytes + kMaxSlots * kBlockN * kSlotBytes);
  static constexpr int kQStages = 2 * QTile::kBytes + kRingBytes + 1024 <= kMaxSmemBytes ? 2 : 1;

  struct alignas(1024) Smem {
    char q[kQStages][QTile::kBytes];
    char k[kStages][KTile::kBytes];
    char v[kStages][VTile::kBytes];
    alignas(128) Slot slots[kStages][kMaxSlots][kBlockN];
    alignas(128) __half2 intervals[kStages][kConsumers][kMaxSlots][kBlockN];  // see row_interval()
    Step steps[kStages];
    Work works[kQStages];
    Barrier q_full[kQStages], q_empty[kQStages];
    Barrier o_full[kQStages][kConsumers];
    Barrier k_full[kStages], k_empty[kStages];
    Barrier v_full[kStages], v_empty[kStages];
  };
  static_assert(sizeof(Smem) <= kMaxSmemBytes, "Hopper offers a block 227 KB of shared memory");
};

// Where a pipeline stands: stage and the parity of its barriers.
template <int kStages>
struct Stage {
  int index = 0;
  int parity = 0;

  __device__ __forceinline__ void advance() {
    if (++index == kStages) {
      index = 0;
      parity ^= 1;
    }
  }
};

// The producer warp. All its lanes walk together; an elected one speaks.
template <class Config>
class Producer {
 public:
  __device__ __forceinline__ Producer(const ForwardArguments& arguments, typename Config::Smem& smem,
                                      int lane)
      : arguments_(arguments), smem_(smem), lane_(lane) {}

  __device__ __forceinline__ void run() {
    int number = __shfl_sync(~0u, take_ticket(), 0);
    while (number < arguments_.work_count) {
      const int next = take_ticket();  // ahead of its use, so that the round trip is hidden
      produce(typename Config::Work(number, arguments_));
      number = __shfl_sync(~0u, next, 0);
    }
    typename Config::Work end(0, arguments_);
    end.row_tile = -1;
    push_without_tile(end);
  }

 private:
  // Words of Step::touched.
  struct Touched {
    uint32_t of[Config::kConsumers];
  };

  // Lane 0's value counts. Of an atomicAdd() ptxas makes one for all lanes that take part and waits for its
  // result at once.
  __device__ __forceinline__ int take_ticket() {
    return lane_ == 0 ? static_cast<int>(atomicInc(arguments_.ticket, INT_MAX)) : 0;
  }

  __device__ __forceinline__ void produce(const typename Config::Work& work) {
    const MaskTiles& mask = arguments_.mask;
    const Shape& shape = arguments_.params.shape;
    const MaskPlane plane = plane_at(mask, plane_index(mask, shape, work.batch, work.head));
    const int head_k = work.head / (shape.heads_q / shape.heads_k);
    int group_rows = 64;
    TileSpan span{0, mask.tile_count};
    if constexpr (Config::kSplit) {
      group_rows = arguments_.split.plan.group_rows;
      span = tiles_of_split(arguments_.split.plan, work.split, mask.tile_count);
    }
    const int block_rows = Config::kConsumers * group_rows;
    const int row_begin = work.row_tile * block_rows;
    const int row_end = min(static_cast<int>(shape.seqlen_q), row_begin + block_rows);
    const int group_end =
        Config::kSplit ? (span.end + kTilesPerGroup - 1) / kTilesPerGroup : mask.group_count;
    bool any = false;

    for (int base = span.begin / kTilesPerGroup; base < group_end; base += 32) {
      const bool live =
          base + lane_ < group_end && visits_group(mask, plane, base + lane_, row_begin, row_end);
      for (uint32_t groups = __ballot_sync(~0u, live); groups != 0; groups &= groups - 1) {
        const int first = (base + __ffs(static_cast<int>(groups)) - 1) * kTilesPerGroup;
        TileVisit visit{false, 0};
        if (first + lane_ < span.end && (!Config::kSplit || first + lane_ >= span.begin))
          visit = visit_tile(mask, plane, first + lane_, row_begin, row_end);
        Touched touched{};
        if (visit.touched != 0)
          touched = touched_of_groups(plane, first + lane_, row_begin, row_end, group_rows);
        for (uint32_t tiles = __ballot_sync(~0u, visit.visited); tiles != 0; tiles &= tiles - 1) {
          const int bit = __ffs(static_cast<int>(tiles)) - 1;
          const int tile = first + bit;
          Touched here;
          uint32_t added = any ? 0 : Config::kOpens;
          if (int64_t{tile + 1} * Config::kBlockN > shape.seqlen_k) added |= touch_bits_of_any(1);
          for (int g = 0; g < Config::kConsumers; ++g) {
            here.of[g] = __shfl_sync(~0u, touched.of[g], bit) | added;
          }
          push_k(tile, here, plane, head_k, work.batch);
          push_due_v();  // before Q, which may have to wait for what needs V
          if (!any) load_q(work);
          any = true;
          due_ = {tile, head_k, work.batch};
        }
      }
    }
    if (!any) push_without_tile(work);
  }

  // Of a tile that some slot touches, what it is to each consumer.
  __device__ __forceinline__ Touched touched_of_groups(const MaskPlane& plane, int tile, int row_begin,
                                                       int row_end, int group_rows) const {
    Touched touched;
#pragma unroll
    for (int g = 0; g < Config::kConsumers; ++g) {
      const int begin = row_begin + g * group_rows, end = min(row_end, begin + group_rows);
      const TileVisit visit = visit_tile(arguments_.mask, plane, tile, begin, end);
      touched.of[g] = begin < end && visit.visited ? visit.touched : Config::kHidden;
    }
    return touched;
  }

  // The entry of a row tile that visits no column tile, or of no row tile. Q is not read, but O of the row
  // tile takes its place.
  __device__ __forceinline__ void push_without_tile(const typename Config::Work& work) {
    push_due_v();
    smem_.k_empty[k_.index].wait(k_.parity ^ 1);
    if (elect_one()) {
      smem_.steps[k_.index].tile = -1;
      for (uint32_t& touched : smem_.steps[k_.index].touched) touched = Config::kOpens;
      smem_.k_full[k_.index].arrive();
    }
    __syncwarp();
    k_.advance();
    smem_.q_empty[q_.index].wait(q_.parity ^ 1);  // after the entry, which the O in its place waits for
    if (elect_one()) {
      smem_.works[q_.index] = work;
      smem_.q_full[q_.index].arrive();
    }
    __syncwarp();
    q_.advance();
  }

  __device__ __forceinline__ void load_q(const typename Config::Work& work) {
    smem_.q_empty[q_.index].wait(q_.parity ^ 1);
    char* shared = smem_.q[q_.index];
    Barrier& full = smem_.q_full[q_.index];
    if (elect_one()) {
      smem_.works[q_.index] = work;
      if constexpr (Config::kSplit) {
        const SplitPlan& plan = arguments_.split.plan;
        load_packed_q<Config>(shared, &arguments_.q, full, plan,
                              work.row_tile * Config::kConsumers * plan.group_rows, work.head, work.batch);
      } else {
        full.arrive_expect(Config::QTile::kBytes);
        for (int panel = 0; panel < Config::QTile::kPanels; ++panel) {
          for (int rows = 0; rows < Config::kConsumers; ++rows) {
            tma_load(shared + panel * Config::QTile::kPanelBytes + rows * 64 * 128, &arguments_.q, full,
                     panel * 64, work.row_tile * Config::kBlockM + rows * 64, work.head, work.batch);
          }
        }
      }
    }
    __syncwarp();
    q_.advance();
  }

  __device__ __forceinline__ void push_k(int tile, const Touched& touched, const MaskPlane& plane, int head_k,
                                         int batch) {
    const int stage = k_.index;
    uint32_t any_touched = 0;
#pragma unroll
    for (int g = 0; g < Config::kConsumers; ++g) any_touched |= touched.of[g];
    smem_.k_empty[stage].wait(k_.parity ^ 1);
    if (elect_one()) {
      constexpr int kSlotBytes = Config::kBlockN * static_cast<int>(sizeof(Slot));
      smem_.steps[stage].tile = tile;
#pragma unroll
      for (int g = 0; g < Config::kConsumers; ++g) smem_.steps[stage].touched[g] = touched.of[g];
      smem_.k_full[stage].arrive_expect(Config::KTile::kBytes + __popc(any_touched & kSlotBits) * kSlotBytes);
      for (int panel = 0; panel < Config::KTile::kPanels; ++panel) {
        tma_load(smem_.k[stage] + panel * Config::KTile::kPanelBytes, &arguments_.k, smem_.k_full[stage],
                 panel * 64, tile * Config::kBlockN, head_k, batch);
      }
      for (uint32_t slots = any_touched & kSlotBits; slots != 0; slots &= slots - 1) {
        const int slot = __ffs(static_cast<int>(slots)) - 1;
        const int64_t column = (int64_t{slot} * arguments_.mask.tile_count + tile) * Config::kBlockN;
        bulk_load(smem_.slots[stage][slot], plane.slots + column, kSlotBytes, smem_.k_full[stage]);
      }
    }
    __syncwarp();
    k_.advance();
  }

  // V follows the K of the tile after.
  __device__ __forceinline__ void push_due_v() {
    if (due_.tile < 0) return;
    const int stage = v_.index;
    smem_.v_empty[stage].wait(v_.parity ^ 1);
    if (elect_one()) {
      smem_.v_full[stage].arrive_expect(Config::VTile::kBytes);
      for (int panel = 0; panel < Config::VTile::kPanels; ++panel) {
        tma_load(smem_.v[stage] + panel * Config::VTile::kPanelBytes, &arguments_.v, smem_.v_full[stage],
                 panel * 64, due_.tile * Config::kBlockN, due_.head_k, due_.batch);
      }
    }
    __syncwarp();
    v_.advance();
    due_.tile = -1;
  }

  const ForwardArguments& arguments_;
  typename Config::Smem& smem_;
  int lane_;
  struct {
    int tile = -1;
    int head_k, batch;
  } due_;  // the tile whose V has not been fetched
  Stage<Config::kQStages> q_;
  Stage<Config::kStages> k_, v_;
};

// Stores O of one consumer, row tile by row tile, and gives its rows of Q back. One thread.
template <class Config>
__device__ __forceinline__ void run_storer(const ForwardArguments& arguments, typename Config::Smem& smem,
                                           int group) {
  for (Stage<Config::kQStages> q;; q.advance()) {
    smem.q_full[q.index].wait(q.parity);
    const typename Config::Work work = smem.works[q.index];
    if (work.row_tile < 0) return;
    smem.o_full[q.index][group].wait(q.parity);
    for (int panel = 0; panel < Config::OTile::kPanels; ++panel) {
      tma_store(&arguments.o, smem.q[q.index] + panel * Config::OTile::kPanelBytes + group * 64 * 128,
                panel * 64, work.row_tile * Config::kBlockM + group * 64, work.head, work.batch);
    }
    bulk_commit();
    bulk_wait_read();
    smem.q_empty[q.index].arrive();
  }
}

// One consumer warpgroup: 64 rows of every row tile that its block takes.
template <class Config>
class Consumer {
 public:
  using Element = typename Config::Element;
  using Step = typename Config::OwnStep;
  static constexpr int kN8 = Config::kBlockN / 8, kO8 = Config::kHeadDimV / 8;
  using ScoreProduct = Wgmma<Element, Config::kBlockN, false>;
  using OutputProduct = Wgmma<Element, Config::kHeadDimV, true>;
  using Scores = float[1][kN8][4];
  using Output = float[1][kO8][4];
  using Probabilities = uint32_t[Config::kBlockN / 16][4];

  __device__ __forceinline__ Consumer(const ForwardArguments& arguments, typename Config::Smem& smem,
                                      int group, int thread)
      : arguments_(arguments), smem_(smem), group_(group), thread_(thread) {}

  __device__ __forceinline__ void run() {
    if (group_ == Config::kConsumers - 1) pass_turn();
    Step step = next_step();
    for (;;) {
      smem_.q_full[q_.index].wait(q_.parity);
      if (smem_.works[q_.index].row_tile < 0) break;
      step = step.tile < 0 ? store_nothing() : consume(step);
      q_.advance();
    }
  }

 private:
  // Groups issue their products in turns, so that the softmax of one lies under the products of the others.
  // Named barriers: 0 is __syncthreads; then one a group, at which it waits and the group before it arrives.
  // Then, for the intervals of each group.
  static constexpr int kTurnBarrier = 1;
  static constexpr int kIntervalBarrier = kTurnBarrier + Config::kConsumers;

  __device__ __forceinline__ void wait_for_turn() { named_barrier_sync(kTurnBarrier + group_, 256); }
  __device__ __forceinline__ void pass_turn() {
    named_barrier_arrive(kTurnBarrier + (group_ + 1) % Config::kConsumers, 256);
  }

  // The entry of the K ring that comes next, once its K is there.
  __device__ __forceinline__ Step next_step() {
    smem_.k_full[k_.index].wait(k_.parity);
    const typename Config::Step& step = smem_.steps[k_.index];
    return {step.tile, step.touched[group_]};
  }

  // A row tile without column tiles. Returns the entry after it.
  __device__ __forceinline__ Step store_nothing() {
    const typename Config::Work work = smem_.works[q_.index];
    release(smem_.k_empty[k_.index]);
    k_.advance();
    if constexpr (Config::kSplit) release(smem_.q_empty[q_.index]);
    Output output;
    set_zero(output);
    store(work, OnlineSoftmax<1>(), output);
    return next_step();
  }

  // A row tile, from its first entry on. Returns the entry after it.
  __device__ __forceinline__ Step consume(Step step) {
    const typename Config::Work work = smem_.works[q_.index];
    OnlineSoftmax<1> softmax;
    Output output;
    set_zero(output);
    do {
      step = step.hidden() ? pass_over(step) : consume_run(step, work, softmax, output);
    } while (!step.opens());
    if constexpr (Config::kSplit) release(smem_.q_empty[q_.index]);
    store(work, softmax, output);
    return step;
  }

  // A column tile of which this consumer's rows see nothing.
  __device__ __forceinline__ Step pass_over(const Step& step) {
    release(smem_.k_empty[k_.index]);
    k_.advance();
    if (!step.opens()) {
      wait_for_turn();
      pass_turn();
    }
    smem_.v_full[v_.index].wait(v_.parity);
    release(smem_.v_empty[v_.index]);
    v_.advance();
    return next_step();
  }

  // Column tiles up to one that is hidden or another row tile's.
  __device__ __forceinline__ Step consume_run(Step step, const typename Config::Work& work,
                                              OnlineSoftmax<1>& softmax, Output& output) {
    Probabilities p;
    start_run(step, work, softmax, output, p);
    for (step = next_step(); !step.opens() && !step.hidden();) {
      Scores scores;
      wait_for_turn();
      multiply_scores(scores);
      smem_.v_full[v_.index].wait(v_.parity);
      multiply_output(output, p);
      pass_turn();
      prepare_mask(step, work);
      wgmma_wait<1>();
      pin(flat(scores));
      float rescale[1][2];
      weigh(scores, step, work, softmax, rescale);
      step = next_step();  // while O += P V runs
      wgmma_wait_behind<0>(__float_as_uint(scores[0][kN8 - 1][1]) | __float_as_uint(scores[0][kN8 - 1][3]));
      pin(flat(output));
      release(smem_.v_empty[v_.index]);
      v_.advance();
      rescale_output(output, rescale);
      round(scores, p);
    }
    finish_run(output, p);
    return step;
  }

  // The first column tile: there is no O += P V yet that could run beside its S.
  __device__ __forceinline__ void start_run(const Step& step, const typename Config::Work& work,
                                            OnlineSoftmax<1>& softmax, Output& output, Probabilities& p) {
    Scores scores;
    if (!step.opens()) wait_for_turn();
    multiply_scores(scores);
    if (!step.opens()) pass_turn();
    prepare_mask(step, work);
    wgmma_wait<0>();
    pin(flat(scores));
    float rescale[1][2];
    weigh(scores, step, work, softmax, rescale);
    if (!step.opens()) rescale_output(output, rescale);
    round(scores, p);
  }

  // The last O += P V.
  __device__ __forceinline__ void finish_run(Output& output, const Probabilities& p) {
    smem_.v_full[v_.index].wait(v_.parity);
    multiply_output(output, p);
    wgmma_wait<0>();
    pin(flat(output));
    release(smem_.v_empty[v_.index]);
    v_.advance();
  }

  static __device__ __forceinline__ void set_zero(Output& output) {
#pragma unroll
    for (int n = 0; n < kO8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) output[0][n][e] = 0.f;
  }

  template <int kCount>
  static __device__ __forceinline__ float (&flat(float (&fragments)[1][kCount][4]))
      [kCount * 4] { return reinterpret_cast<float (&)[kCount * 4]>(fragments); }

  // A barrier that counts warps: lane 0 speaks for its warp once all lanes are done.
  __device__ __forceinline__ void release(Barrier& barrier) {
    __syncwarp();
    if (thread_ % 32 == 0) barrier.arrive();
  }

  // Starts S = Q K^T.
  __device__ __forceinline__ void multiply_scores(Scores& scores) {
    const uint32_t q = Config::QTile::columns_base(shared_address(smem_.q[q_.index]));
    const uint32_t k = Config::KTile::columns_base(shared_address(smem_.k[k_.index]));
    pin(flat(scores));
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < Config::kHeadDim / 16; ++d) {
      ScoreProduct::ss(flat(scores), Config::QTile::depth_columns(q, group_ * 64, d),
                       Config::KTile::depth_columns(k, 0, d), d > 0);
    }
    wgmma_commit();
  }

  // Starts O += P V.
  __device__ __forceinline__ void multiply_output(Output& output, const Probabilities& p) {
    const uint32_t v = Config::VTile::rows_base(shared_address(smem_.v[v_.index]));
    pin(flat(output));
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < Config::kBlockN / 16; ++n) {
      OutputProduct::rs(flat(output), p[n], Config::VTile::depth_rows(v, n), true);
    }
    wgmma_commit();
  }

  // The first query row of this consumer's.
  __device__ __forceinline__ int first_row(const typename Config::Work& work) const {
    if constexpr (Config::kSplit) {
      return (work.row_tile * Config::kConsumers + group_) * arguments_.split.plan.group_rows;
    }
    return work.row_tile * Config::kBlockM + group_ * 64;
  }

  // While S is computed: what those slots mask of this consumer's rows of whose intervals some start and some
  // end in the tile. (Where they do only one of it, comparing is as fast without.) Nobody reads what lay
  // there any more: all have given back the K stage before.
  __device__ __forceinline__ void prepare_mask(const Step& step, const typename Config::Work& work) {
    const uint32_t prepared = with_both_ends(step.touched);
    if (Config::kDense || prepared == 0) return;
#pragma unroll 1
    for (uint32_t slots = prepared; slots != 0; slots &= slots - 1) {
      const int slot = __ffs(static_cast<int>(slots)) - 1;
      for (int column = thread_; column < Config::kBlockN; column += 128) {
        smem_.intervals[k_.index][group_][slot][column] =
            row_interval(smem_.slots[k_.index][slot][column], first_row(work));
      }
    }
    named_barrier_sync(kIntervalBarrier + group_, 128);
  }

  // Masks the scores of a step, gives its K stage back, and turns scores into weights.
  __device__ __forceinline__ void weigh(Scores& scores, const Step& step, const typename Config::Work& work,
                                        OnlineSoftmax<1>& softmax, float (&rescale)[1][2]) {
    int lane_row = thread_ / 32 * 16 + thread_ % 32 / 4;  // of this consumer's
    int row_step = 8;
    if constexpr (Config::kSplit) {
      const SplitPlan& plan = arguments_.split.plan;
      row_step = packed_row(plan, lane_row + 8).row;
      lane_row = packed_row(plan, lane_row).row;
      row_step -= lane_row;
    }
    const int lane_column = 2 * (thread_ % 4);
    const auto row_of = [](int) { return 0; };
    const auto column_of = [](int n) { return 8 * n; };
    if (arguments_.negated) negate(scores);
    if constexpr (Config::kDense) {
      const Shape& shape = arguments_.params.shape;
      mask_by_dense(scores, dense_plane(arguments_.mask, shape, work.batch, work.head), shape.seqlen_q,
                    shape.seqlen_k, first_row(work) + lane_row, step.tile * Config::kBlockN + lane_column,
                    row_of, column_of, row_step);
    } else {
#pragma unroll 1
      for (uint32_t slots = step.touched & kSlotBits; slots != 0; slots &= slots - 1) {
        const int slot = __ffs(static_cast<int>(slots)) - 1;
        with_ends(step.touched, slot, [&](auto starts, auto ends) {
          if constexpr (decltype(starts)::value && decltype(ends)::value) {
            mask_by_intervals(scores[0], smem_.intervals[k_.index][group_][slot] + lane_column,
                              row_pair(lane_row, lane_row + row_step));
          } else {
            mask_by_slot<decltype(starts)::value, decltype(ends)::value>(
                scores, smem_.slots[k_.index][slot], first_row(work) + lane_row, lane_column, row_of,
                column_of, row_step);
          }
        });
      }
    }
    release(smem_.k_empty[k_.index]);
    k_.advance();
    softmax.advance(scores, arguments_.exponent_scale, rescale);
  }

  // O to the new maximum. Rare once the large keys have been met: the warp votes on both rows at once.
  static __device__ __forceinline__ void rescale_output(Output& output, const float (&rescale)[1][2]) {
    if (__any_sync(~0u, rescale[0][0] != 1.f || rescale[0][1] != 1.f)) {
#pragma unroll
      for (int n = 0; n < kO8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) output[0][n][e] *= rescale[0][e / 2];
    }
  }

  // Weights to the 16-bit A fragments of the second product.
  static __device__ __forceinline__ void round(const Scores& scores, Probabilities& p) {
#pragma unroll
    for (int n = 0; n < kN8; ++n) {
      p[n / 2][n % 2 * 2] = pack<Element>(scores[0][n][0], scores[0][n][1]);
      p[n / 2][n % 2 * 2 + 1] = pack<Element>(scores[0][n][2], scores[0][n][3]);
    }
  }

  __device__ __forceinline__ void store(const typename Config::Work& work, const OnlineSoftmax<1>& softmax,
                                        const Output& output) {
    if constexpr (Config::kSplit) {
      store_split<Config>(arguments_.split, arguments_.params, work, group_, thread_, softmax, output,
                          arguments_.exponent_scale);
    } else {
      store_tile(work, softmax, output);
    }
  }

  // lse to memory, O to the place of its Q, from where the storer takes it.
  __device__ __forceinline__ void store_tile(const RowTileWork& work, const OnlineSoftmax<1>& softmax,
                                             const Output& output) {
    const Shape& shape = arguments_.params.shape;
    float* lse = static_cast<float*>(arguments_.params.lse) +
                 (int64_t{work.batch} * shape.heads_q + work.head) * shape.seqlen_q;
    uint32_t lane = thread_ % 32;
    asm volatile("" : "+r"(lane));  // or the compiler keeps the addresses of O in registers all the time
    const int warp_row = group_ * 64 + thread_ / 32 * 16;
    float inverse[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float sum = softmax.total(0, h);
      inverse[h] = sum == 0.f ? 0.f : 1.f / sum;
      const int row = work.row_tile * Config::kBlockM + warp_row + 8 * h + static_cast<int>(lane / 4);
      if (lane % 4 == 0 && row < shape.seqlen_q) lse[row] = softmax.lse(0, h, sum, arguments_.exponent_scale);
    }
    char* place = smem_.q[q_.index];
#pragma unroll
    for (int n = 0; n < kO8; n += 2) {
      uint32_t matrices[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float (&pair)[4] = output[0][n + i / 2];
        matrices[i] = pack<Element>(pair[i % 2 * 2] * inverse[i % 2], pair[i % 2 * 2 + 1] * inverse[i % 2]);
      }
      store_matrices(place + Config::OTile::offset(warp_row + static_cast<int>(lane % 16),
                                                   n + static_cast<int>(lane / 16)),
                     matrices);
    }
    fence_async_shared();
    release(smem_.o_full[q_.index][group_]);
  }

  const ForwardArguments& arguments_;
  typename Config::Smem& smem_;
  int group_;
  int thread_;
  Stage<Config::kQStages> q_;
  Stage<Config::kStages> k_, v_;
};

// Grid: as many blocks as run at once; each takes row tiles until none is left.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    forward_kernel(const __grid_constant__ ForwardArguments arguments) {
  extern __shared__ __align__(1024) char smem_raw[];
  auto& smem = *reinterpret_cast<typename Config::Smem*>(smem_raw);
  const int warp = uniform(threadIdx.x / 32);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Config::kQStages; ++stage) {
      smem.q_full[stage].init(1);
      smem.q_empty[stage].init(Config::kSplit ? 4 * Config::kConsumers : Config::kConsumers);
      for (Barrier& barrier : smem.o_full[stage]) barrier.init(4);
    }
    for (int stage = 0; stage < Config::kStages; ++stage) {
      smem.k_full[stage].init(1);
      smem.k_empty[stage].init(4 * Config::kConsumers);
      smem.v_full[stage].init(1);
      smem.v_empty[stage].init(4 * Config::kConsumers);
    }
    fence_barrier_init();
    prefetch_descriptor(&arguments.q);
    prefetch_descriptor(&arguments.k);
    prefetch_descriptor(&arguments.v);
    if (!Config::kSplit) prefetch_descriptor(&arguments.o);
  }
  if constexpr (Config::kSplit) clear_unused_q<Config>(smem.q[0], arguments.split.plan);
  __syncthreads();
  if (warp < 4) {
    shrink_registers<Config::kProducerRegisters>();
    if (warp == 0) {
      Producer<Config>(arguments, smem, threadIdx.x % 32).run();
    } else if (!Config::kSplit && warp <= Config::kConsumers && threadIdx.x % 32 == 0) {
      run_storer<Config>(arguments, smem, warp - 1);
    }
  } else {
    grow_registers<Config::kConsumerRegisters>();
    Consumer<Config>(arguments, smem, warp / 4 - 1, threadIdx.x % 128).run();
  }
}

}  // namespace flashmask::sm90
