// Algorithm 2 of the paper on wgmma: one block per column tile of one key head. Each consumer warpgroup owns
// 64 key columns, keeps their dK and dV in registers and computes S and dP transposed, so that P and dS are A
// operands where they lie; dS alone passes through shared memory, for dQ, whose head dims the warpgroups
// divide. dQ leaves by bulk reduce-adds.
#pragma once

#include "common/mask_fragment.cuh"
#include "common/row_runs.cuh"
#include "common/softmax.cuh"
#include "sm80/backward_rows.cuh"
#include "sm90/forward_kernel.cuh"
#include "sm90/operand.cuh"
#include "sm90/ptx.cuh"
#include "sm90/wgmma.cuh"

namespace flashmask::sm90 {

template <typename Element_, int kHeadDim_, int kHeadDimV_, int kBlockM_, int kStages_, bool kDense_>
struct BackwardConfig {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kHeadDimV = kHeadDimV_;
  static constexpr int kConsumers = 2;
  static constexpr int kBlockM = kBlockM_;
  static constexpr int kBlockN = 64 * kConsumers;
  static constexpr int kStages = kStages_;  // of Q and dO
  static constexpr bool kDense = kDense_;
  static constexpr bool kDropout = false;
  static constexpr bool kDeterministic = false;
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kDqColumns = kHeadDim / kConsumers;  // of a consumer
  static_assert(kStages == 2, "dS has as many buffers, and needs two");
  static_assert(kBlockM == 64, "dQ of a tile is one warpgroup's 64 rows; dS^T is one panel wide");
  static_assert(kDqColumns == 32 || kDqColumns % 64 == 0,
                "a consumer's columns of K lie in one panel or are whole panels");

  using QTile = Operand<kBlockM, kHeadDim>;
  using DoTile = Operand<kBlockM, kHeadDimV>;
  using KTile = Operand<kBlockN, kHeadDim>;
  using VTile = Operand<kBlockN, kHeadDimV>;
  using DsTile = Operand<kBlockN, kBlockM>;  // dS transposed

  // One entry of the ring of row tiles; tile -1 ends the list of the last query head of the group.
  struct Step {
    int tile;
    uint32_t work;  // slots that touch the tile, and kEmptyRows
  };
  static constexpr uint32_t kEmptyRows = 1u << 31;  // some row of the tile sees no key

  struct alignas(1024) Smem {
    char k[KTile::kBytes];  // dK passes through here at the end
    char v[VTile::kBytes];  // and dV here
    char q[kStages][QTile::kBytes];
    char dout[kStages][DoTile::kBytes];
    char ds[kStages]
           [DsTile::kBytes];  // one more than it seems to need: the other consumer may still read the last
    alignas(128) float dq[kConsumers][64 * kDqColumns];  // as DqWorkspace lays it out
    alignas(128) float lse[kStages][kBlockM];
    alignas(128) float delta[kStages][kBlockM];
    alignas(128) Slot slots[kMaxSlots][kBlockN];
    Step steps[kStages];
    Barrier kv_full;
    Barrier rows_full[kStages], rows_empty[kStages];
  };
  static_assert(sizeof(Smem) <= kMaxSmemBytes, "Hopper offers a block 227 KB of shared memory");
};

// The fp32 dQ workspace: a row tile is one consumer's columns after the other's, each [warp, fragment, lane]
// of four floats.
template <class Config>
struct DqWorkspace {
  static constexpr int kM = 1;
  static constexpr int kN8 = Config::kDqColumns / 8;
  static constexpr int kTileFloats = Config::kBlockM * Config::kHeadDim;

  // `warp` counts the consumers' eight.
  static __device__ __forceinline__ int fragment_offset(int warp, int, int n) {
    return (warp * kN8 + n) * 128;
  }
  static __device__ __forceinline__ int row(int warp, int, int lane) { return warp % 4 * 16 + lane / 4; }
  static __device__ __forceinline__ int chunk(int warp, int n) { return warp / 4 * kN8 + n; }
};

struct BackwardArguments {
  CUtensorMap q, dout;  // boxes: 64 rows of one panel
  CUtensorMap k, v;     // boxes: block_n rows of one panel
  CUtensorMap dk, dv;   // boxes: 64 rows of one panel
  BackwardParams params;
  MaskTiles mask;
  sm80::RowStatistics rows;
  float* dq;  // fp32 workspace, see DqWorkspace
  int column_tiles;
};

// The column tile, key head and sample of a block: a head's column tiles together in ascending order.
struct ColumnWork {
  int column_tile;
  int head_k;
  int batch;

  __device__ __forceinline__ explicit ColumnWork(const BackwardArguments& arguments)
      : column_tile(static_cast<int>(blockIdx.x) % arguments.column_tiles),
        head_k(static_cast<int>(blockIdx.x) / arguments.column_tiles % arguments.params.shape.heads_k),
        batch(static_cast<int>(blockIdx.x) / arguments.column_tiles / arguments.params.shape.heads_k) {}
};

// The producer: one thread fetches K and V once, then Q, dO and the row statistics of every visited row tile
// of every query head of the group.
template <class Config>
class RowProducer {
 public:
  __device__ __forceinline__ RowProducer(const BackwardArguments& arguments, typename Config::Smem& smem)
      : arguments_(arguments), smem_(smem), work_(arguments) {}

  __device__ __forceinline__ void run() {
    load_columns();
    const MaskTiles& mask = arguments_.mask;
    const Shape& shape = arguments_.params.shape;
    const int group = shape.heads_q / shape.heads_k;
    const bool per_head = mask.heads == shape.heads_q;
    RowRuns runs;
    for (int member = 0; member < group; ++member) {
      const int head = work_.head_k * group + member;
      bool fetch_slots = member == 0 || per_head;
      const MaskPlane plane = plane_at(mask, plane_index(mask, shape, work_.batch, head));
      if (fetch_slots) {
        runs.build(mask, plane, work_.column_tile, static_cast<int>(shape.seqlen_q), Config::kBlockM,
                   arguments_.rows.tiles);
        if (member > 0) drain();  // the slots of the head before are no longer read
      }
      for (int tile = runs.next(0); tile < arguments_.rows.tiles; tile = runs.next(tile + 1)) {
        load_rows(tile, head, runs.touched(tile), fetch_slots ? &plane : nullptr);
        fetch_slots = false;
      }
    }
    smem_.rows_empty[rows_.index].wait(rows_.parity ^ 1);
    smem_.steps[rows_.index] = {-1, 0};
    smem_.rows_full[rows_.index].arrive();
  }

 private:
  __device__ __forceinline__ void load_columns() {
    smem_.kv_full.arrive_expect(Config::KTile::kBytes + Config::VTile::kBytes);
    const int row = work_.column_tile * Config::kBlockN;
    for (int panel = 0; panel < Config::KTile::kPanels; ++panel) {
      tma_load(smem_.k + panel * Config::KTile::kPanelBytes, &arguments_.k, smem_.kv_full, panel * 64, row,
               work_.head_k, work_.batch);
    }
    for (int panel = 0; panel < Config::VTile::kPanels; ++panel) {
      tma_load(smem_.v + panel * Config::VTile::kPanelBytes, &arguments_.v, smem_.kv_full, panel * 64, row,
               work_.head_k, work_.batch);
    }
  }

  // Waits until the consumers have given every stage back.
  __device__ __forceinline__ void drain() {
    Stage<Config::kStages> stage = rows_;
    for (int i = 0; i < Config::kStages; ++i) {
      smem_.rows_empty[stage.index].wait(stage.parity ^ 1);
      stage.advance();
    }
  }

  __device__ __forceinline__ void load_rows(int tile, int head, uint32_t touched, const MaskPlane* slots_of) {
    const int stage = rows_.index;
    const int64_t row_tile =
        (int64_t{work_.batch} * arguments_.params.shape.heads_q + head) * arguments_.rows.tiles + tile;
    const uint32_t empty = arguments_.rows.empty[row_tile] ? Config::kEmptyRows : 0;
    if (int64_t{work_.column_tile + 1} * Config::kBlockN > arguments_.params.shape.seqlen_k) touched |= 1;
    constexpr int kRowBytes = Config::kBlockM * static_cast<int>(sizeof(float));
    constexpr int kSlotBytes = Config::kBlockN * static_cast<int>(sizeof(Slot));
    Barrier& full = smem_.rows_full[stage];

    smem_.rows_empty[stage].wait(rows_.parity ^ 1);
    smem_.steps[stage] = {static_cast<int>(row_tile), touched | empty};
    full.arrive_expect(Config::QTile::kBytes + Config::DoTile::kBytes + 2 * kRowBytes +
                       (slots_of != nullptr ? arguments_.mask.slot_count * kSlotBytes : 0));
    for (int panel = 0; panel < Config::QTile::kPanels; ++panel) {
      tma_load(smem_.q[stage] + panel * Config::QTile::kPanelBytes, &arguments_.q, full, panel * 64,
               tile * Config::kBlockM, head, work_.batch);
    }
    for (int panel = 0; panel < Config::DoTile::kPanels; ++panel) {
      tma_load(smem_.dout[stage] + panel * Config::DoTile::kPanelBytes, &arguments_.dout, full, panel * 64,
               tile * Config::kBlockM, head, work_.batch);
    }
    bulk_load(smem_.lse[stage], arguments_.rows.lse + row_tile * Config::kBlockM, kRowBytes, full);
    bulk_load(smem_.delta[stage], arguments_.rows.delta + row_tile * Config::kBlockM, kRowBytes, full);
    if (slots_of != nullptr) {
      for (int slot = 0; slot < arguments_.mask.slot_count; ++slot) {
        const int64_t column =
            (int64_t{slot} * arguments_.mask.tile_count + work_.column_tile) * Config::kBlockN;
        bulk_load(smem_.slots[slot], slots_of->slots + column, kSlotBytes, full);
      }
    }
    rows_.advance();
  }

  const BackwardArguments& arguments_;
  typename Config::Smem& smem_;
  ColumnWork work_;
  Stage<Config::kStages> rows_;
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
  using DqProduct = Wgmma<Element, Config::kDqColumns, true, true>;
  using Fragments = uint32_t[kM16][4];

  __device__ __forceinline__ ColumnConsumer(const BackwardArguments& arguments, typename Config::Smem& smem,
                                            int group, int thread)
      : arguments_(arguments), smem_(smem), work_(arguments), group_(group), thread_(thread) {}

  __device__ __forceinline__ void run() {
    const BackwardParams& params = arguments_.params;
    const bool negated = params.softmax_scale < 0;
    const float scale = exponent_scale(params.softmax_scale);
    const bool wants_dq = params.dq.data != nullptr;
    float dk[1][kDk8][4], dv[1][kDv8][4];
    set_zero(dk);
    set_zero(dv);

    smem_.kv_full.wait(0);
    while (true) {
      const int stage = rows_.index;
      smem_.rows_full[stage].wait(rows_.parity);
      const typename Config::Step step = smem_.steps[stage];
      if (step.tile < 0) break;
      if (step.work & Config::kEmptyRows) clear_empty_rows(stage);

      const uint32_t k_tile = shared_address(smem_.k), v_tile = shared_address(smem_.v);
      const uint32_t q_tile = shared_address(smem_.q[stage]), do_tile = shared_address(smem_.dout[stage]);
      float s[1][kM8][4], dp[1][kM8][4];  // S^T then P^T, dP^T then dS^T: rows are keys, columns queries
      pin(flat(s));
      pin(flat(dp));
      wgmma_fence();
#pragma unroll
      for (int d = 0; d < Config::kHeadDim / 16; ++d) {
        ScoreProduct::ss(flat(s), Config::KTile::depth_columns(k_tile, group_ * 64, d),
                         Config::QTile::depth_columns(q_tile, 0, d), d > 0);
      }
      wgmma_commit();
#pragma unroll
      for (int d = 0; d < Config::kHeadDimV / 16; ++d) {
        ScoreProduct::ss(flat(dp), Config::VTile::depth_columns(v_tile, group_ * 64, d),
                         Config::DoTile::depth_columns(do_tile, 0, d), d > 0);
      }
      wgmma_commit();
      wgmma_wait<1>();
      pin(flat(s));
      if (negated) negate(s);
      mask_scores(s, step);
      const int lane_column = 2 * (thread_ % 4);
#pragma unroll
      for (int n = 0; n < kM8; ++n) {
        const float2 lse = *reinterpret_cast<const float2*>(&smem_.lse[stage][8 * n + lane_column]);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          s[0][n][2 * h] = exp2_approx(s[0][n][2 * h] * scale - lse.x);
          s[0][n][2 * h + 1] = exp2_approx(s[0][n][2 * h + 1] * scale - lse.y);
        }
      }
      Fragments p;
      round(s, p);
      wgmma_wait<0>();
      pin(flat(dp));
#pragma unroll
      for (int n = 0; n < kM8; ++n) {
        const float2 delta = *reinterpret_cast<const float2*>(&smem_.delta[stage][8 * n + lane_column]);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          dp[0][n][2 * h] = s[0][n][2 * h] * (dp[0][n][2 * h] - delta.x);
          dp[0][n][2 * h + 1] = s[0][n][2 * h + 1] * (dp[0][n][2 * h + 1] - delta.y);
        }
      }
      Fragments ds;
      round(dp, ds);

      pin(flat(dv));
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kM16; ++i)
        DvProduct::rs(flat(dv), p[i], Config::DoTile::depth_rows(do_tile, i), true);
      wgmma_commit();

      if (wants_dq) {
        store_ds(ds, smem_.ds[stage]);
        fence_async_shared();
        named_barrier_sync(kBothBarrier, 256);
      }
      pin(flat(dk));
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kM16; ++i)
        DkProduct::rs(flat(dk), ds[i], Config::QTile::depth_rows(q_tile, i), true);
      wgmma_commit();
      if (wants_dq) {
        float dq[1][kDq8][4];
        const uint32_t ds_tile = shared_address(smem_.ds[stage]);
        pin(flat(dq));
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < Config::kBlockN / 16; ++j) {
          DqProduct::ss(flat(dq), Config::DsTile::depth_rows(ds_tile, j),
                        Config::KTile::depth_rows(k_tile, j, group_ * Config::kDqColumns), j > 0);
        }
        wgmma_commit();
        wgmma_wait<0>();
        pin(flat(dq));
        pin(flat(dk));
        pin(flat(dv));
        release(smem_.rows_empty[stage]);
        add_dq(dq, step.tile);
      } else {
        wgmma_wait<0>();
        pin(flat(dk));
        pin(flat(dv));
        release(smem_.rows_empty[stage]);
      }
      rows_.advance();
    }

    named_barrier_sync(kBothBarrier, 256);  // nobody reads K or V any more
    if (params.dk.data != nullptr) {
      store<typename Config::KTile>(dk, smem_.k, &arguments_.dk, static_cast<float>(params.softmax_scale));
    }
    if (params.dv.data != nullptr) store<typename Config::VTile>(dv, smem_.v, &arguments_.dv, 1.f);
    if (thread_ == 0) bulk_wait_read();  // the block's shared memory must outlive its copies
  }

 private:
  // Named barriers: 0 is __syncthreads; one for both consumers, one for each one's own threads.
  static constexpr int kBothBarrier = 1;
  static constexpr int kGroupBarrier = 2;

  template <int kCount>
  static __device__ __forceinline__ float (&flat(float (&fragments)[1][kCount][4]))
      [kCount * 4] { return reinterpret_cast<float (&)[kCount * 4]>(fragments); }

  template <int kCount>
  static __device__ __forceinline__ void set_zero(float (&fragments)[1][kCount][4]) {
#pragma unroll
    for (int n = 0; n < kCount; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) fragments[0][n][e] = 0.f;
  }

  __device__ __forceinline__ void release(Barrier& barrier) {
    __syncwarp();
    if (thread_ % 32 == 0) barrier.arrive();
  }

  // This lane's first row of S^T within the column tile: a key.
  __device__ __forceinline__ int lane_key() const {
    return group_ * 64 + thread_ / 32 * 16 + thread_ % 32 / 4;
  }

  static __device__ __forceinline__ void round(const float (&values)[1][kM8][4], Fragments& fragments) {
#pragma unroll
    for (int n = 0; n < kM8; ++n) {
      fragments[n / 2][n % 2 * 2] = pack<Element>(values[0][n][0], values[0][n][1]);
      fragments[n / 2][n % 2 * 2 + 1] = pack<Element>(values[0][n][2], values[0][n][3]);
    }
  }

  // What comes in for a row that sees no key must not come out, even if it is not finite (and times P = 0 is
  // NaN).
  __device__ __forceinline__ void clear_empty_rows(int stage) {
    constexpr int kChunks = Config::kHeadDimV / 8;
    for (int i = group_ * 128 + thread_; i < Config::kBlockM * kChunks; i += 256) {
      if (smem_.lse[stage][i / kChunks] == INFINITY) {
        *reinterpret_cast<int4*>(smem_.dout[stage] + Config::DoTile::offset(i / kChunks, i % kChunks)) = {
            0, 0, 0, 0};
      }
    }
    fence_async_shared();
    named_barrier_sync(kBothBarrier, 256);
  }

  __device__ __forceinline__ void mask_scores(float (&s)[1][kM8][4], const typename Config::Step& step) {
    const int row0 = step.tile % arguments_.rows.tiles * Config::kBlockM + 2 * (thread_ % 4);
    if constexpr (Config::kDense) {
      const Shape& shape = arguments_.params.shape;
      const int head = step.tile / arguments_.rows.tiles % shape.heads_q;
      const uint8_t* dense = dense_plane(arguments_.mask, shape, work_.batch, head);
      const int64_t key0 = int64_t{work_.column_tile} * Config::kBlockN + lane_key();
#pragma unroll
      for (int n = 0; n < kM8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int64_t row = row0 + 8 * n + e % 2, key = key0 + 8 * (e / 2);
          const bool visible =
              row < shape.seqlen_q && key < shape.seqlen_k && dense[row * shape.seqlen_k + key] != 0;
          if (!visible) s[0][n][e] = -INFINITY;
        }
      }
    } else {
#pragma unroll 1
      for (uint32_t touched = step.work & ~Config::kEmptyRows; touched != 0; touched &= touched - 1) {
        const Slot* slots = smem_.slots[__ffs(static_cast<int>(touched)) - 1] + lane_key();
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const Slot slot = slots[8 * h];
#pragma unroll
          for (int n = 0; n < kM8; ++n) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
              const int row = row0 + 8 * n + c;
              s[0][n][2 * h + c] = (row >= slot.start) & (row < slot.end) ? -INFINITY : s[0][n][2 * h + c];
            }
          }
        }
      }
    }
  }

  // dS^T to shared memory: rows are keys, columns queries.
  __device__ __forceinline__ void store_ds(const Fragments& ds, char* shared) {
#pragma unroll
    for (int n = 0; n < kM8; ++n) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        *reinterpret_cast<uint32_t*>(shared + Config::DsTile::offset(lane_key() + 8 * h, n) +
                                     thread_ % 4 * 4) = ds[n / 2][n % 2 * 2 + h];
      }
    }
  }

  // Adds this consumer's columns of a row tile's dQ to the workspace.
  __device__ __forceinline__ void add_dq(const float (&dq)[1][kDq8][4], int64_t row_tile) {
    using Workspace = DqWorkspace<Config>;
    if (thread_ == 0) bulk_wait_read();  // of the step before
    named_barrier_sync(kGroupBarrier + group_, 128);
#pragma unroll
    for (int n = 0; n < kDq8; ++n) {
      *reinterpret_cast<float4*>(smem_.dq[group_] + Workspace::fragment_offset(thread_ / 32, 0, n) +
                                 thread_ % 32 * 4) =
          make_float4(dq[0][n][0], dq[0][n][1], dq[0][n][2], dq[0][n][3]);
    }
    fence_async_shared();
    named_barrier_sync(kGroupBarrier + group_, 128);
    if (thread_ == 0) {
      constexpr int kFloats = Config::kBlockM * Config::kDqColumns;
      bulk_reduce_add(arguments_.dq + row_tile * Workspace::kTileFloats + group_ * kFloats, smem_.dq[group_],
                      kFloats * static_cast<int>(sizeof(float)));
      bulk_commit();
    }
  }

  // This consumer's rows of a gradient, through shared memory, to the tensor.
  template <class Tile, int kCount>
  __device__ __forceinline__ void store(const float (&gradient)[1][kCount][4], char* shared,
                                        const CUtensorMap* map, float factor) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        *reinterpret_cast<uint32_t*>(shared + Tile::offset(lane_key() + 8 * h, n) + thread_ % 4 * 4) =
            pack<Element>(gradient[0][n][2 * h] * factor, gradient[0][n][2 * h + 1] * factor);
      }
    }
    fence_async_shared();
    named_barrier_sync(kGroupBarrier + group_, 128);
    if (thread_ == 0) {
      for (int panel = 0; panel < Tile::kPanels; ++panel) {
        tma_store(map, shared + panel * Tile::kPanelBytes + group_ * 64 * 128, panel * 64,
                  work_.column_tile * Config::kBlockN + group_ * 64, work_.head_k, work_.batch);
      }
      bulk_commit();
    }
  }

  const BackwardArguments& arguments_;
  typename Config::Smem& smem_;
  ColumnWork work_;
  int group_;
  int thread_;
  Stage<Config::kStages> rows_;
};

// Grid: column_tiles * Hk * B blocks.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardArguments arguments) {
  extern __shared__ __align__(1024) char smem_raw[];
  auto& smem = *reinterpret_cast<typename Config::Smem*>(smem_raw);
  const int warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    smem.kv_full.init(1);
    for (int stage = 0; stage < Config::kStages; ++stage) {
      smem.rows_full[stage].init(1);
      smem.rows_empty[stage].init(4 * Config::kConsumers);
    }
    fence_barrier_init();
  }
  __syncthreads();
  if (warp < 4) {
    shrink_registers<24>();
    if (threadIdx.x == 0) RowProducer<Config>(arguments, smem).run();
  } else {
    grow_registers<240>();
    ColumnConsumer<Config>(arguments, smem, warp / 4 - 1, threadIdx.x % 128).run();
  }
}

}  // namespace flashmask::sm90
