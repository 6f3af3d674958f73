// Algorithm 2 of the paper on wgmma: a block takes column tiles, each of one key head, until none is left. It
// walks the rows of all query heads of the key head or, in short calls, of a part of them (sum_parts.cuh).
// Each consumer warpgroup owns 64 key columns, keeps their dK and dV in registers and computes S and dP
// transposed, so that P and dS are A operands where they lie; dS alone passes through shared memory, for dQ,
// whose head dims or rows the warpgroups divide. dQ is added to an fp32 workspace in bulk, from shared
// memory.
//
// The consumers take turns: while one computes exponentials, the products of the other run. So they stand
// about half a step apart, which is possible because dQ of a step, the only product that needs both, is
// computed one step later.
#pragma once

#include "common/block_place.cuh"
#include "common/row_runs.cuh"
#include "common/softmax.cuh"
#include "sm90/backward_arguments.cuh"
#include "sm90/column_fragments.cuh"
#include "sm90/dq_writer.cuh"
#include "sm90/operand.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/ptx.cuh"
#include "sm90/row_producer.cuh"
#include "sm90/wgmma.cuh"

namespace flashmask::sm90 {

template <class Config>
class ColumnConsumer;

template <typename Element_, int kHeadDim_, int kHeadDimV_, int kBlockM_, int kQStages_, bool kDeterministic_,
          bool kDense_>
struct BackwardConfig {
  using Element = Element_;
  using Consumer = ColumnConsumer<BackwardConfig>;
  using Helper = std::conditional_t<kDeterministic_, DqWriter<BackwardConfig>, PartWriter<BackwardConfig>>;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kHeadDimV = kHeadDimV_;
  static constexpr int kConsumers = 2;
  static constexpr int kBlockM = kBlockM_;
  static constexpr int kBlockN = 64 * kConsumers;
  static constexpr int kQStages = kQStages_;  // of Q and what comes with it
  static constexpr int kStages = 2;           // of dO and what comes with it, and of dS
  static constexpr bool kPersistent = true;   // a block takes column tiles until none is left
  static constexpr bool kTickets = true;      // and draws their numbers
  static constexpr bool kParts = true;        // short calls divide the query heads of a key head
  // The first that comes to a row tile's dQ stores it, so that nobody clears it; in free order only where few
  // come (kFewVisits).
  static constexpr bool kFirstStores = true;
  static constexpr bool kDeterministic = kDeterministic_;  // dQ is added in a fixed order
  static constexpr int kWriters = kDeterministic ? 3 : 2;  // of dQ: by turns, else one for each consumer
  static constexpr bool kDense = kDense_;
  static constexpr bool kDropout = false;
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kHelpers = kWriters;
  static constexpr int kTurns = kDeterministic ? 1 : kConsumers;  // counters of a row tile
  // The consumers divide the rows of dQ where there are 128, else its head dims: a panel each, though the
  // last may be half empty.
  static constexpr bool kDqByRows = kBlockM == 128;
  static constexpr int kDqColumns = 64;  // of a consumer
  static_assert(kQStages >= 2, "Q of the next row tile comes while this one's is read");
  static_assert(kWriters <= 3, "the producer leaves three warps to spare");
  static_assert(kBlockM == 64 || kBlockM == 128, "a consumer's part of dQ has a warpgroup's 64 rows");
  static_assert((kHeadDim + 63) / 64 == (kDqByRows ? 1 : kConsumers), "a consumer has one panel of dQ");

  using QTile = Operand<kBlockM, kHeadDim>;
  using DoTile = Operand<kBlockM, kHeadDimV>;
  using KTile = Operand<kBlockN, kHeadDim>;
  using VTile = Operand<kBlockN, kHeadDimV>;
  using DsTile = Operand<kBlockM, kBlockN>;

  // One entry of the ring of row tiles; tile -1 ends the list of a column tile, of all its query heads.
  struct Step {
    int tile;       // among those of all heads and samples
    int row;        // its first; at the end, whether another column tile follows
    uint32_t work;  // TileVisit::touched, and kEmptyRows
  };
  static constexpr uint32_t kEmptyRows = 1u << 31;  // some row of the tile sees no key

  // A row tile whose dQ will come; tile -1: no more.
  struct Departure {
    int tile;
    int row;
    int column_tile;  // whose dQ it is
  };

  // A consumer's part of a row tile's dQ that has come; tile -1: no more.
  struct Part {
    int tile;
    int next;  // whose will come after it; -1: not known
  };

  struct alignas(1024) Smem {
    char k[KTile::kBytes];
    char v[VTile::kBytes];  // dV passes through here at the end
    char q[kQStages][QTile::kBytes];
    char dout[kStages][DoTile::kBytes];
    char ds[kStages][DsTile::kBytes];                    // and dK here
    alignas(128) float dq[kConsumers][64 * kDqColumns];  // as DqWorkspace lays it out
    alignas(128) float lse[kQStages][kBlockM];
    alignas(128) float delta[kStages][kBlockM];
    alignas(128) Slot slots[kStages][kMaxSlots][kBlockN];
    Step steps[kQStages];
    BlockPlace place;   // of the column tile whose K and V are here or on their way
    BlockPlace next;    // of the column tile being fetched, and its row tiles: the producer's, which
    RowRuns runs;       // has no registers for them
    int first, number;  // of the column tile that the block takes first, and then next
    Barrier kv_full, kv_empty;
    Barrier q_full[kQStages], q_empty[kQStages], dout_full[kStages], dout_empty[kStages], ds_full[kStages];
    // Deterministic order.
    NearTiles near[kHelpers];
    Departure departures[kWriters];  // the next that a writer sees to
    Barrier departures_full[kWriters], departures_empty[kWriters], dq_full[kWriters];
    Barrier dq_empty;
    // Free order.
    Part parts[kConsumers];
    Barrier part_full[kConsumers], part_empty[kConsumers];

    __device__ __forceinline__ void init_barriers() {
      kv_full.init(1);
      kv_empty.init(kConsumers);
      for (int stage = 0; stage < kQStages; ++stage) {
        q_full[stage].init(1);
        q_empty[stage].init(4 * kConsumers);
      }
      for (int stage = 0; stage < kStages; ++stage) {
        dout_full[stage].init(1);
        dout_empty[stage].init(4 * kConsumers);
        ds_full[stage].init(4 * kConsumers);
      }
      for (int writer = 0; writer < kWriters; ++writer) {
        departures_full[writer].init(1);
        departures_empty[writer].init(1);
        dq_full[writer].init(4 * kConsumers);
      }
      dq_empty.init(1);
      for (int group = 0; group < kConsumers; ++group) {
        part_full[group].init(4);
        part_empty[group].init(1);
      }
    }
  };
  static_assert(KTile::kBytes <= kStages * DsTile::kBytes, "dK passes through the places of dS");
  static_assert(sizeof(Smem) <= kMaxSmemBytes, "Hopper offers a block 227 KB of shared memory");
};

// One consumer warpgroup: 64 key columns.
template <class Config>
class ColumnConsumer {
 public:
  using Element = typename Config::Element;
  static constexpr int kM8 = Config::kBlockM / 8;    // query columns of S^T, in eights
  static constexpr int kM16 = Config::kBlockM / 16;  // depth of dV += P^T dO and dK += dS^T Q
  static constexpr int kDk8 = Config::kHeadDim / 8, kDv8 = Config::kHeadDimV / 8;
  static constexpr int kDq8 = Config::kDqColumns / 8;
  using ScoreProduct = Wgmma<Element, Config::kBlockM, false>;
  using DkProduct = Wgmma<Element, Config::kHeadDim, true>;
  using DvProduct = Wgmma<Element, Config::kHeadDimV, true>;
  using DqProduct = Wgmma<Element, Config::kDqColumns, true>;
  using Fragments = uint32_t[kM16][4];
  using Scores = float[1][kM8][4];
  using DqPart = float[1][kDq8][4];
  using Statistics = float2[kM8];

  __device__ __forceinline__ ColumnConsumer(const BackwardArguments& arguments, typename Config::Smem& smem,
                                            int group, int thread)
      : arguments_(arguments), smem_(smem), group_(group), thread_(thread) {}

  __device__ __forceinline__ void run() {
    scale_ = static_cast<float>(arguments_.params.softmax_scale * 1.4426950408889634);
    if (group_ == 1) named_barrier_arrive(kTurnBarrier, 256);  // the first turn is the other's
    while (consume_columns()) {
    }
    if constexpr (!Config::kDeterministic) {
      smem_.part_empty[group_].wait(rows_.index ^ taken_ ^ 1);
      announce_part(-1, -1);
    }
  }

 private:
  // Named barriers: 0 is __syncthreads; one for both consumers, one for each one's own threads, one for each
  // one's turn.
  static constexpr int kBothBarrier = 1;
  static constexpr int kGroupBarrier = 2;
  static constexpr int kTurnBarrier = 4;

  __device__ __forceinline__ void release(Barrier& barrier) {
    __syncwarp();
    if (thread_ % 32 == 0) barrier.arrive();
  }

  __device__ __forceinline__ typename Config::Step next_step() {
    smem_.q_full[q_.index].wait(q_.parity);
    return smem_.steps[q_.index];
  }

  // A column tile; whether another follows.
  __device__ __forceinline__ bool consume_columns() {
    set_zero(dk_);
    set_zero(dv_);
    dq_tile_ = -1;
    smem_.kv_full.wait(taken_);
    typename Config::Step step = next_step();
    for (; step.tile >= 0; step = next_step()) {
      consume(step);
      q_.advance();
      rows_.advance();
    }
    release(smem_.q_empty[q_.index]);                 // the entry that ends the list
    smem_.dout_full[rows_.index].wait(rows_.parity);  // passed: no phase may go by unseen
    release(smem_.dout_empty[rows_.index]);
    place_ = smem_.place;
    DqPart dq;
    multiply_dq(dq);  // without any row tile of nothing, and dropped
    if (arguments_.columns != nullptr) {
      store_part();
    } else {
      store_dv();  // in the place of this consumer's keys of V, which only it has read
    }
    wgmma_wait<0>();
    pin(flat(dq));
    named_barrier_sync(kBothBarrier, 256);  // nobody reads K or dS any more
    if (thread_ == 0) {
      bulk_wait_read();         // nor dV
      smem_.kv_empty.arrive();  // the next K and V come while dQ and dK leave
    }
    if (dq_tile_ >= 0) hand_over_dq(dq, -1);
    if (arguments_.columns == nullptr && arguments_.params.dk.data != nullptr) {
      store<typename Config::KTile>(dk_, smem_.ds[0], &arguments_.dk,
                                    static_cast<float>(arguments_.params.softmax_scale));
    }
    if (thread_ == 0) bulk_wait_read();   // the block's shared memory must outlive its copies
    release(smem_.ds_full[rows_.index]);  // as every entry does, and here: nobody reads what lies there
    q_.advance();
    rows_.advance();
    taken_ ^= 1;
    return step.row != 0;
  }

  // One row tile. dP is in flight under the exponentials, dV and dQ of the row tile before under dS, dK under
  // the departure of both; what this leaves of the tensor cores' time the other consumer takes.
  __device__ __forceinline__ void consume(const typename Config::Step& step) {
    const int stage = rows_.index;
    if (step.work & Config::kEmptyRows) clear_empty_rows(stage);
    // Before the products: they leave loads next to nothing of shared memory's bandwidth.
    Statistics lse, delta;
    load_statistics(lse, smem_.lse[q_.index]);
    Scores s, dp;
    multiply_scores(s);
    smem_.dout_full[stage].wait(rows_.parity);
    multiply_dp(dp);
    named_barrier_sync(kTurnBarrier + group_, 256);
    wgmma_wait<1>();
    pin(flat(s));
    weigh(s, lse, step);
    pin(flat(s));
    named_barrier_arrive(kTurnBarrier + (group_ ^ 1), 256);
    Fragments p, ds;
    round_fragments<Element>(s, p);
    load_statistics(delta, smem_.delta[stage]);
    multiply_rows<DvProduct, typename Config::DoTile>(dv_, p, smem_.dout[stage]);
    DqPart dq;  // in the first row tile of nothing, and dropped
    multiply_dq(dq);
    wgmma_wait_behind<2>(settled(p));
    pin(flat(dp));
    differentiate(p, delta, dp);
    round_fragments<Element>(dp, ds);
    wgmma_wait_behind<0>(settled(ds));
    multiply_rows<DkProduct, typename Config::QTile>(dk_, ds, smem_.q[q_.index]);
    pin(flat(dv_));
    pin(flat(dq));
    release(smem_.dout_empty[stage]);
    hand_over(ds, dq, step.tile);
    dq_tile_ = step.tile;
    wgmma_wait<0>();
    pin(flat(dk_));
    release(smem_.q_empty[q_.index]);
  }

  // The lse or delta of this lane's columns of S^T, loaded here and not where they are used.
  __device__ __forceinline__ void load_statistics(Statistics& statistics, const float* rows) {
#pragma unroll
    for (int n = 0; n < kM8; ++n) {
      statistics[n] = load_statistic(rows, n, thread_);
      asm volatile("" : "+f"(statistics[n].x), "+f"(statistics[n].y)::"memory");
    }
  }

  // Starts S^T = K Q^T of the stage at hand.
  __device__ __forceinline__ void multiply_scores(float (&s)[1][kM8][4]) {
    const uint32_t k = Config::KTile::columns_base(shared_address(smem_.k));
    const uint32_t q = Config::QTile::columns_base(shared_address(smem_.q[q_.index]));
    pin(flat(s));
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < Config::kHeadDim / 16; ++d) {
      ScoreProduct::ss(flat(s), Config::KTile::depth_columns(k, group_ * 64, d),
                       Config::QTile::depth_columns(q, 0, d), d > 0);
    }
    wgmma_commit();
  }

  // Starts dP^T = V dO^T.
  __device__ __forceinline__ void multiply_dp(float (&dp)[1][kM8][4]) {
    const uint32_t v = Config::VTile::columns_base(shared_address(smem_.v));
    const uint32_t dout = Config::DoTile::columns_base(shared_address(smem_.dout[rows_.index]));
    pin(flat(dp));
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < Config::kHeadDimV / 16; ++d) {
      ScoreProduct::ss(flat(dp), Config::VTile::depth_columns(v, group_ * 64, d),
                       Config::DoTile::depth_columns(dout, 0, d), d > 0);
    }
    wgmma_commit();
  }

  // Starts gradient += weights times a tile of rows: dV += P^T dO, dK += dS^T Q.
  template <class Product, class Tile, int kCount>
  __device__ __forceinline__ void multiply_rows(float (&gradient)[1][kCount][4], const Fragments& weights,
                                                const char* shared) {
    const uint32_t tile = Tile::rows_base(shared_address(shared));
    pin(flat(gradient));
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kM16; ++i) Product::rs(flat(gradient), weights[i], Tile::depth_rows(tile, i), true);
    wgmma_commit();
  }

  // Starts this consumer's part of dQ = dS K of the row tile before, once both consumers have stored their
  // dS.
  __device__ __forceinline__ void multiply_dq(float (&dq)[1][kDq8][4]) {
    const int stage = rows_.index ^ 1;
    smem_.ds_full[stage].wait(rows_.index == 0 ? rows_.parity ^ 1 : rows_.parity);
    const uint32_t ds = Config::DsTile::columns_base(shared_address(smem_.ds[stage]));
    const uint32_t k = Config::KTile::rows_base(shared_address(smem_.k));
    const int row = Config::kDqByRows ? group_ * 64 : 0;
    const int column = Config::kDqByRows ? 0 : group_ * Config::kDqColumns;
    pin(flat(dq));
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < Config::kBlockN / 16; ++j) {
      DqProduct::ss(flat(dq), Config::DsTile::depth_columns(ds, row, j),
                    Config::KTile::depth_rows(k, j, column), j > 0);
    }
    wgmma_commit();
  }

  // S^T to P^T. Masked elements are put to 0 last: before, which infinity stands for them would hang on the
  // sign of the scale.
  __device__ __forceinline__ void weigh(Scores& s, const Statistics& lse, const typename Config::Step& step) {
#pragma unroll
    for (int n = 0; n < kM8; ++n) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        s[0][n][2 * h] = exp2_approx(s[0][n][2 * h] * scale_ - lse[n].x);
        s[0][n][2 * h + 1] = exp2_approx(s[0][n][2 * h + 1] * scale_ - lse[n].y);
      }
    }
    clear_masked<Config>(s, arguments_, smem_, rows_.index, step, lane_key(), thread_);
  }

  // dP^T to dS^T = P^T (dP^T - delta).
  static __device__ __forceinline__ void differentiate(const Fragments& p, const Statistics& delta,
                                                       Scores& dp) {
#pragma unroll
    for (int n = 0; n < kM8; ++n) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 weights = unpack<Element>(p[n / 2][n % 2 * 2 + h]);
        dp[0][n][2 * h] = weights.x * (dp[0][n][2 * h] - delta[n].x);
        dp[0][n][2 * h + 1] = weights.y * (dp[0][n][2 * h + 1] - delta[n].y);
      }
    }
  }

  // This lane's first row of S^T within the column tile: a key.
  __device__ __forceinline__ int lane_key() const {
    return group_ * 64 + thread_ / 32 * 16 + thread_ % 32 / 4;
  }

  // What comes in for a row that sees no key must not come out, even if it is not finite (and times P = 0 is
  // NaN).
  __device__ __forceinline__ void clear_empty_rows(int stage) {
    constexpr int kChunks = Config::kHeadDimV / 8;
    static_assert(Config::kBlockM * kChunks % 256 == 0, "all threads clear as often");
    smem_.dout_full[stage].wait(rows_.parity);
#pragma unroll 1
    for (int first = 0; first < Config::kBlockM * kChunks; first += 256) {
      const int index = first + group_ * 128 + thread_;
      const int row = index / kChunks, chunk = index % kChunks;
      if (smem_.lse[q_.index][row] == INFINITY) {
        *reinterpret_cast<int4*>(smem_.dout[stage] + Config::DoTile::offset(row, chunk)) = {0, 0, 0, 0};
      }
    }
    fence_async_shared();
    named_barrier_sync(kBothBarrier, 256);
  }

  // This consumer's columns of dS to shared memory, and dQ of the row tile before, if there is one; word of
  // both to those who wait. When the other consumer knows that dS is there it also knows that nobody reads
  // the dS before any more. `tile` is the row tile of dS.
  __device__ __forceinline__ void hand_over(const Fragments& ds, const DqPart& dq, int tile) {
    const int lane = thread_ % 32;
    const int query = lane / 16 * 8 + lane % 8, chunk = group_ * 8 + thread_ / 32 * 2 + lane / 8 % 2;
    char* place = smem_.ds[rows_.index] + Config::DsTile::offset(query, chunk);
#pragma unroll
    for (int i = 0; i < kM16; ++i) {
      store_matrices_transposed(place + i * Config::DsTile::offset(16, 0),
                                ds[i]);  // the swizzle repeats every 8 rows
    }
    if (dq_tile_ >= 0) {
      hand_over_dq(dq, tile);
    } else {
      fence_async_shared();
    }
    release(smem_.ds_full[rows_.index]);
  }

  // Word to this consumer's writer of a row tile whose dQ is there, and of the next one.
  __device__ __forceinline__ void announce_part(int tile, int next) {
    if (thread_ == 0) smem_.parts[group_] = {tile, next};
    release(smem_.part_full[group_]);
  }

  // This consumer's part of dQ of the row tile before to shared memory, as the workspace lays it out, once
  // the writers have taken away the dQ that lies there. `next` is the row tile after it, -1 if not known.
  __device__ __forceinline__ void hand_over_dq(const DqPart& dq, int next) {
    // The phases are row tiles, as those of a stage of two but for the entries that end column tiles.
    Barrier& empty = Config::kDeterministic ? smem_.dq_empty : smem_.part_empty[group_];
    empty.wait(rows_.index ^ taken_);
#pragma unroll
    for (int n = 0; n < kDq8; ++n) {
      *reinterpret_cast<float4*>(smem_.dq[group_] + DqWorkspace<Config>::offset(thread_ / 32, n) +
                                 thread_ % 32 * 4) =
          make_float4(dq[0][n][0], dq[0][n][1], dq[0][n][2], dq[0][n][3]);
    }
    fence_async_shared();
    if constexpr (Config::kDeterministic) {
      release(smem_.dq_full[writer_.index]);
      writer_.advance();
    } else {
      announce_part(dq_tile_, next);
    }
  }

  __device__ __forceinline__ void store_dv() {
    if (arguments_.params.dv.data != nullptr) {
      store<typename Config::VTile>(dv_, smem_.v, &arguments_.dv, 1.f);
    }
  }

  // This consumer's rows of both gradients of a part to the workspace.
  __device__ __forceinline__ void store_part() {
    using Workspace = ColumnWorkspace<Config>;
    const BlockPlace& place = smem_.place;
    float* columns = arguments_.columns + Workspace::offset(arguments_.params.shape, arguments_.column_tiles,
                                                            arguments_.parts, place.batch, place.head_k,
                                                            place.column_tile, place.part);
    store_fragments(dk_, columns);
    store_fragments(dv_, columns + Workspace::kDkFloats);
  }

  template <int kCount>
  __device__ __forceinline__ void store_fragments(const float (&gradient)[1][kCount][4], float* columns) {
    using Workspace = ColumnWorkspace<Config>;
    float* fragments = columns + Workspace::template fragment_offset<kCount>(group_ * 4 + thread_ / 32, 0) +
                       thread_ % 32 * 4;
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      *reinterpret_cast<float4*>(fragments + Workspace::template fragment_offset<kCount>(0, n)) =
          make_float4(gradient[0][n][0], gradient[0][n][1], gradient[0][n][2], gradient[0][n][3]);
    }
  }

  // This consumer's rows of a gradient, through shared memory, to the tensor.
  template <class Tile, int kCount>
  __device__ __forceinline__ void store(const float (&gradient)[1][kCount][4], char* shared,
                                        const CUtensorMap* map, float factor) {
    const int lane = thread_ % 32;
    const int key = group_ * 64 + thread_ / 32 * 16 + lane % 16;
#pragma unroll
    for (int n = 0; n < kCount; n += 2) {
      uint32_t packed[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = gradient[0][n + i / 2] + i % 2 * 2;
        packed[i] = pack<Element>(pair[0] * factor, pair[1] * factor);
      }
      store_matrices(shared + Tile::offset(key, n + lane / 16), packed);
    }
    fence_async_shared();
    named_barrier_sync(kGroupBarrier + group_, 128);
    if (thread_ == 0) {
      for (int panel = 0; panel < Tile::kPanels; ++panel) {
        tma_store(map, shared + panel * Tile::kPanelBytes + group_ * 64 * 128, panel * 64,
                  place_.column_tile * Config::kBlockN + group_ * 64, place_.head_k, place_.batch);
      }
      bulk_commit();
    }
  }

  const BackwardArguments& arguments_;
  typename Config::Smem& smem_;
  int group_;
  int thread_;
  float scale_;
  Stage<Config::kQStages> q_;    // of Q, lse and the entry of the ring
  Stage<Config::kStages> rows_;  // of dO, delta, slots and dS
  Stage<Config::kWriters> writer_;
  BlockPlace place_;  // of the column tile at hand, when its row tiles are done
  int taken_ = 0;     // column tiles before it, modulo 2
  int dq_tile_ = -1;  // the row tile whose dQ is due
  float dk_[1][kDk8][4], dv_[1][kDv8][4];
};

// Grid: as many blocks as there are column tiles or, persistent, as run at once. Warp 0 fetches, those after
// it help, two warpgroups compute.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardArguments arguments) {
  extern __shared__ __align__(1024) char smem_raw[];
  auto& smem = *reinterpret_cast<typename Config::Smem*>(smem_raw);
  const int warp = uniform(threadIdx.x / 32);
  if (threadIdx.x == 0) {
    smem.init_barriers();
    fence_barrier_init();
  } else if (threadIdx.x == 32) {
    prefetch_descriptor(&arguments.k);
    prefetch_descriptor(&arguments.v);
    prefetch_descriptor(&arguments.q);
    prefetch_descriptor(&arguments.dout);
  }
  if (arguments.parts > 1 || arguments.params.dq.data != nullptr) let_next_kernel_start();
  wait_for_kernels_before();
  fence_async_global();  // bulk copies too see what they wrote
  if constexpr (Config::kTickets) {
    if (threadIdx.x == 0) smem.first = atomicAdd(arguments.ticket, 1);
  }
  __syncthreads();
  if constexpr (Config::kPersistent) {
    if (smem.first >= arguments.work_count) return;
  }
  if (warp < 4) {
    shrink_registers<24>();
    if (warp == 0) {
      RowProducer<Config>(arguments, smem, threadIdx.x).run();
    } else if (warp <= Config::kHelpers) {
      typename Config::Helper(arguments, smem, warp - 1, threadIdx.x % 32).run();
    }
  } else {
    grow_registers<240>();
    // Through a shuffle, or ptxas reads threadIdx anew in every step, behind all that shared memory has to
    // do.
    const int thread = __shfl_sync(~0u, static_cast<int>(threadIdx.x % 128), threadIdx.x % 32);
    typename Config::Consumer(arguments, smem, warp / 4 - 1, thread).run();
  }
}

}  // namespace flashmask::sm90
