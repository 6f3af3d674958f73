// Algorithm 2 of the paper on wgmma for head dims above 128: one block per column tile of 64 keys of one key
// head. Two consumer warpgroups divide the head dims of dK, dV and dQ by panels of 64. One of them computes
// all of S^T and from it P^T, the other all of dP^T and from P^T dS^T; both pass through shared memory to all
// products that need them. dQ is added to the workspace from registers: there is no shared memory left to
// stage it.
#pragma once

#include "sm90/backward_kernel.cuh"
#include "sm90/column_fragments.cuh"

namespace flashmask::sm90 {

template <class Config>
class WideConsumers;
template <class Config>
class TurnScout;

template <typename Element_, int kHeadDim_, int kHeadDimV_, int kBlockM_, int kStages_, bool kDeterministic_,
          bool kDense_>
struct WideBackwardConfig {
  using Element = Element_;
  using Consumer = WideConsumers<WideBackwardConfig>;
  using Helper = TurnScout<WideBackwardConfig>;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kHeadDimV = kHeadDimV_;
  static constexpr int kConsumers = 2;
  static constexpr int kBlockM = kBlockM_;
  static constexpr int kBlockN = 64;
  static constexpr int kStages = kStages_, kQStages = kStages;  // of dO, Q and P
  static constexpr bool kDeterministic = kDeterministic_;
  static constexpr bool kDense = kDense_;
  static constexpr bool kDropout = false;
  static constexpr int kWriters = 0;  // the consumers add dQ
  static constexpr int kHelpers = kDeterministic ? 1 : 0;
  static constexpr int kTurns = kConsumers;  // counters of a row tile
  static constexpr bool kFirstStores = false, kPersistent = false;
  static constexpr bool kParts = false;
  // A block that waits for another's turn must know that the other runs, whichever order blocks start in.
  static constexpr bool kTickets = kDeterministic;
  static constexpr int kThreads = 128 * (1 + kConsumers);
  // Of the first consumer. Where there is an odd panel, it takes the fewer of dQ and dK, as it has the
  // exponentials and the longer S, and the more of dV.
  static constexpr int kFirstDqColumns = kHeadDim / 128 * 64;
  static constexpr int kFirstDvColumns = (kHeadDimV + 64) / 128 * 64;
  static_assert(kBlockM == 64, "a row tile of dQ has a warpgroup's 64 rows");
  static_assert(kStages == 2, "P is overwritten two steps later, when the step before is known to be over");
  static_assert(kHeadDim % 64 == 0 && kHeadDimV % 64 == 0, "head dims are whole panels");
  static_assert(
      kHeadDim <= 256 && kHeadDimV <= 256,
      "half of a consumer's columns of K lie in one panel, and it has the registers for its dK and dV");
  static_assert(kBlockM * kHeadDimV / 8 % 256 == 0, "the consumers clear rows of dO, all threads as often");

  using QTile = Operand<kBlockM, kHeadDim>;
  using DoTile = Operand<kBlockM, kHeadDimV>;
  using KTile = Operand<kBlockN, kHeadDim>;
  using VTile = Operand<kBlockN, kHeadDimV>;
  using WeightTile = Operand<kBlockN, kBlockM>;  // P or dS, transposed

  // As in BackwardConfig.
  struct Step {
    int tile;
    int row;
    uint32_t work;
  };
  static constexpr uint32_t kEmptyRows = 1u << 31;

  struct alignas(1024) Smem {
    char k[KTile::kBytes];  // dK passes through here at the end
    char v[VTile::kBytes];  // and dV here
    char q[kStages][QTile::kBytes];
    char dout[kStages][DoTile::kBytes];
    char p[kStages][WeightTile::kBytes];
    char ds[WeightTile::kBytes];
    alignas(128) float lse[kStages][kBlockM];
    alignas(128) float delta[kStages][kBlockM];
    alignas(128) Slot slots[kStages][kMaxSlots][kBlockN];
    Step steps[kStages];
    int turns[kStages];      // what the counters of a step's row tile hold when it is this block's turn
    BlockPlace place, next;  // these two and the runs as in BackwardConfig
    RowRuns runs;
    NearTiles near;
    Barrier kv_full;
    Barrier q_full[kStages], q_empty[kStages], dout_full[kStages], dout_empty[kStages], turns_full[kStages];
    int first;  // the number of the block's column tile, where blocks draw them; further up it costs spills

    __device__ __forceinline__ void init_barriers() {
      kv_full.init(1);
      for (int stage = 0; stage < kStages; ++stage) {
        q_full[stage].init(1);
        q_empty[stage].init(4 * kConsumers);
        dout_full[stage].init(1);
        dout_empty[stage].init(4 * kConsumers);
        turns_full[stage].init(1);
      }
    }
  };
  static_assert(sizeof(Smem) <= kMaxSmemBytes, "Hopper offers a block 227 KB of shared memory");
};

// A warp that finds out, step by step and ahead of the consumers, whose turn it is to add before this
// block's.
template <class Config>
class TurnScout {
 public:
  __device__ __forceinline__ TurnScout(const BackwardArguments& arguments, typename Config::Smem& smem, int,
                                       int lane)
      : smem_(smem), lane_(lane), turns_(arguments, smem.near, lane) {}

  __device__ __forceinline__ void run() {
    for (Stage<Config::kStages> stage;; stage.advance()) {
      smem_.q_full[stage.index].wait(stage.parity);
      const typename Config::Step step = smem_.steps[stage.index];
      if (step.tile < 0) break;
      const int turn = turns_.turn(step.tile, step.row, smem_.place.column_tile);
      if (lane_ == 0) {
        smem_.turns[stage.index] = turn;
        smem_.turns_full[stage.index].arrive();
      }
      __syncwarp();
    }
  }

 private:
  typename Config::Smem& smem_;
  int lane_;
  TurnFinder<Config> turns_;
};

// One consumer warpgroup. Those of P (group 0) and of dS (group 1) go their own ways: a product of one lies
// under the arithmetic of the other.
template <class Config, int kGroup>
class WideConsumer {
 public:
  using Element = typename Config::Element;
  using Step = typename Config::Step;
  using WeightTile = typename Config::WeightTile;
  static constexpr int kM8 = Config::kBlockM / 8;    // query columns of S^T, in eights
  static constexpr int kM16 = Config::kBlockM / 16;  // depth of dV += P^T dO and dK += dS^T Q
  // This consumer's columns of dQ and dK, and of dV.
  static constexpr int kDqColumn = kGroup == 0 ? 0 : Config::kFirstDqColumns;
  static constexpr int kDvColumn = kGroup == 0 ? 0 : Config::kFirstDvColumns;
  static constexpr int kDk8 = (kGroup == 0 ? Config::kFirstDqColumns : Config::kHeadDim - kDqColumn) / 8;
  static constexpr int kDv8 = (kGroup == 0 ? Config::kFirstDvColumns : Config::kHeadDimV - kDvColumn) / 8;
  static constexpr int kHalf8 = kDk8 / 2;  // of dQ
  using ScoreProduct = Wgmma<Element, Config::kBlockM, false>;
  using DqProduct = Wgmma<Element, 8 * kHalf8, true, true>;
  using Scores = float[1][kM8][4];
  using Fragments = uint32_t[kM16][4];
  using DqHalf = float[1][kHalf8][4];

  __device__ __forceinline__ WideConsumer(const BackwardArguments& arguments, typename Config::Smem& smem,
                                          int thread)
      : arguments_(arguments), smem_(smem), thread_(thread) {}

  __device__ __forceinline__ void run() {
    const BackwardParams& params = arguments_.params;
    set_zero(dk_);
    set_zero(dv_);
    smem_.kv_full.wait(0);
    const Step first = next_step();
    if (first.tile >= 0) {
      if constexpr (kGroup == 0) {
        weigh_steps(first);
      } else {
        differentiate_steps(first);
      }
    }
    meet();  // nobody reads K or V any more
    if (params.dk.data != nullptr) {
      store<typename Config::KTile, kDqColumn>(dk_, smem_.k, &arguments_.dk,
                                               static_cast<float>(params.softmax_scale));
    }
    if (params.dv.data != nullptr)
      store<typename Config::VTile, kDvColumn>(dv_, smem_.v, &arguments_.dv, 1.f);
    if (thread_ == 0) bulk_wait_read();  // the block's shared memory must outlive its copies
  }

 private:
  // Named barriers: 0 is __syncthreads; one for each consumer's own threads, those at which the one waits
  // until the other has stored P or dS, and one for each that the other has come to a place.
  static constexpr int kGroupBarrier = 1;
  static constexpr int kWeightsBarrier = 3;
  static constexpr int kDerivativesBarrier = 4;
  static constexpr int kMeetingBarrier = 5;

  // The consumer of P. P of a step is computed in the step before, under its dQ and the other's dP. When it
  // is stored, all of this consumer's products of the step before are done, so the other may overwrite dS.
  //
  // Here as there ptxas lets no product be in flight from one turn to the next, nor where the loop is left:
  // it is left after a look at the step that ends the list, of which S (or dP) is computed and of no use.
  __device__ __forceinline__ void weigh_steps(Step step) {
    const float scale = static_cast<float>(arguments_.params.softmax_scale * 1.4426950408889634);
    Scores s;
    multiply_scores<typename Config::KTile, typename Config::QTile>(s, smem_.k, smem_.q[rows_.index]);
    wgmma_wait<0>();
    Fragments p;
    weigh(s, scale, step, p);
    multiply_p(p, step);
    wgmma_wait<0>();
    while (true) {
      const Stage<Config::kStages> stage = rows_;
      const int tile = step.tile;
      pin(flat(dv_));
      named_barrier_sync(kDerivativesBarrier, 256);
      DqHalf first, second;
      multiply_rows<typename Config::QTile, kDqColumn>(dk_, smem_.ds, smem_.q[stage.index]);
      multiply_dq(first, 0);
      look_for_turn(tile, stage);
      rows_.advance();
      step = next_step();
      multiply_scores<typename Config::KTile, typename Config::QTile>(s, smem_.k, smem_.q[rows_.index]);
      wgmma_wait<1>();
      settle(first);
      release_rows(stage.index);
      add_dq(first, 0, tile);
      multiply_dq(second, 1);
      wgmma_wait<1>();
      weigh(s, scale, step, p);
      wgmma_wait_behind<0>(settled(p));
      pin(flat(second));
      if (step.tile < 0) {
        add_dq(second, 1, tile);
        return;
      }
      multiply_p(p, step);
      add_dq(second, 1, tile);
      wgmma_wait<0>();
    }
  }

  // The consumer of dS. Of dP only the difference to delta is kept.
  __device__ __forceinline__ void differentiate_steps(Step step) {
    Scores dp, differences;
    start_dp(dp, step);
    wgmma_wait<0>();
    subtract_delta(dp, differences);
    multiply_p_and_differentiate(differences);
    wgmma_wait<0>();
    while (true) {
      const Stage<Config::kStages> stage = rows_;
      const int tile = step.tile;
      pin(flat(dv_));
      DqHalf first, second;
      multiply_rows<typename Config::QTile, kDqColumn>(dk_, smem_.ds, smem_.q[stage.index]);
      multiply_dq(first, 0);
      look_for_turn(tile, stage);
      rows_.advance();
      step = next_step();
      start_dp(dp, step);
      wgmma_wait<1>();
      settle(first);
      release_rows(stage.index);
      add_dq(first, 0, tile);
      multiply_dq(second, 1);
      wgmma_wait<0>();
      subtract_delta(dp, differences);
      pin(flat(second));
      if (step.tile < 0) {
        add_dq(second, 1, tile);
        return;
      }
      multiply_p_and_differentiate(differences);
      add_dq(second, 1, tile);
      wgmma_wait<0>();
    }
  }

  // P of the step at hand to all who need it; starts dV += P^T dO.
  __device__ __forceinline__ void multiply_p(const Fragments& p, const Step& step) {
    if (step.work & Config::kEmptyRows) clear_empty_rows();
    share(p, smem_.p[rows_.index], kWeightsBarrier);
    multiply_rows<typename Config::DoTile, kDvColumn>(dv_, smem_.p[rows_.index], smem_.dout[rows_.index]);
  }

  // Starts dV += P^T dO once the other consumer has stored P; dS under it.
  __device__ __forceinline__ void multiply_p_and_differentiate(const Scores& differences) {
    named_barrier_sync(kWeightsBarrier, 256);
    multiply_rows<typename Config::DoTile, kDvColumn>(dv_, smem_.p[rows_.index], smem_.dout[rows_.index]);
    Fragments ds;
    multiply_weights(differences, smem_.p[rows_.index], ds);
    share(ds, smem_.ds, kDerivativesBarrier);
  }

  // Starts dP^T = V dO^T of the step at hand.
  __device__ __forceinline__ void start_dp(Scores& dp, const Step& step) {
    if (step.work & Config::kEmptyRows) clear_empty_rows();
    multiply_scores<typename Config::VTile, typename Config::DoTile>(dp, smem_.v, smem_.dout[rows_.index]);
  }

  __device__ __forceinline__ void release_rows(int stage) {
    __syncwarp();
    if (thread_ % 32 == 0) {
      smem_.q_empty[stage].arrive();
      smem_.dout_empty[stage].arrive();
    }
  }

  __device__ __forceinline__ Step next_step() {
    smem_.q_full[rows_.index].wait(rows_.parity);
    smem_.dout_full[rows_.index].wait(rows_.parity);
    return smem_.steps[rows_.index];
  }

  // After the wait for all products that accumulate, and for a half of dQ.
  __device__ __forceinline__ void settle(DqHalf& dq) {
    pin(flat(dq));
    pin(flat(dk_));
    pin(flat(dv_));
  }

  // Starts S^T = K Q^T or dP^T = V dO^T.
  template <class KeyTile, class RowTile>
  __device__ __forceinline__ void multiply_scores(Scores& scores, const char* keys, const char* rows) {
    // Or the compiler keeps the descriptors of K or V, 16 of them, in registers.
    const uint32_t a = KeyTile::columns_base(shared_address(keys) + sm80::varying_zero(rows_.index));
    const uint32_t b = RowTile::columns_base(shared_address(rows));
    pin(flat(scores));
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < KeyTile::kColumns / 16; ++d) {
      ScoreProduct::ss(flat(scores), KeyTile::depth_columns(a, 0, d), RowTile::depth_columns(b, 0, d), d > 0);
    }
    wgmma_commit();
  }

  // Starts gradient += weights times this consumer's columns of a tile of rows: dV += P^T dO, dK += dS^T Q.
  template <class Tile, int kColumn, int kCount>
  __device__ __forceinline__ void multiply_rows(float (&gradient)[1][kCount][4], const char* weights,
                                                const char* rows) {
    const uint32_t a = WeightTile::columns_base(shared_address(weights));
    const uint32_t b = Tile::rows_base(shared_address(rows));
    pin(flat(gradient));
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kM16; ++i) {
      Wgmma<Element, 8 * kCount, true>::ss(flat(gradient), WeightTile::depth_columns(a, 0, i),
                                           Tile::depth_rows(b, i, kColumn), true);
    }
    wgmma_commit();
  }

  // Starts a half of this consumer's columns of dQ = dS K. A whole one would not leave the registers for what
  // is to run beside it.
  __device__ __forceinline__ void multiply_dq(DqHalf& dq, int half) {
    const uint32_t a = WeightTile::rows_base(shared_address(smem_.ds));
    const uint32_t b = Config::KTile::rows_base(shared_address(smem_.k));
    const int column = kDqColumn + half * 8 * kHalf8;
    pin(flat(dq));
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < Config::kBlockN / 16; ++j) {
      DqProduct::ss(flat(dq), WeightTile::depth_rows(a, j), Config::KTile::depth_rows(b, j, column), j > 0);
    }
    wgmma_commit();
  }

  // S^T, which is complete, to P^T. Masked elements are put to 0 last: before, which infinity stands for them
  // would hang on the sign of the scale.
  __device__ __forceinline__ void weigh(Scores& s, float scale, const Step& step, Fragments& p) {
    pin(flat(s));
#pragma unroll
    for (int n = 0; n < kM8; ++n) {
      const float2 lse = load_statistic(smem_.lse[rows_.index], n, thread_);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        s[0][n][2 * h] = exp2_approx(s[0][n][2 * h] * scale - lse.x);
        s[0][n][2 * h + 1] = exp2_approx(s[0][n][2 * h + 1] * scale - lse.y);
      }
    }
    // Of the entry that ends the list nothing is used.
    if (!Config::kDense || step.tile >= 0) {
      clear_masked<Config>(s, arguments_, smem_, rows_.index, step, lane_key(), thread_);
    }
    round_fragments<Element>(s, p);
  }

  // dS^T = P^T (dP^T - delta) in two parts: what needs no P comes early. (It also has to leave dP's
  // registers: ptxas lets no accumulator be read between the start of another product and its own.)
  __device__ __forceinline__ void subtract_delta(Scores& dp, Scores& differences) {
    pin(flat(dp));
#pragma unroll
    for (int n = 0; n < kM8; ++n) {
      const float2 delta = load_statistic(smem_.delta[rows_.index], n, thread_);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        differences[0][n][2 * h] = dp[0][n][2 * h] - delta.x;
        differences[0][n][2 * h + 1] = dp[0][n][2 * h + 1] - delta.y;
      }
    }
  }

  // P is the other consumer's, rounded, in shared memory.
  __device__ __forceinline__ void multiply_weights(const Scores& differences, const char* p, Fragments& ds) {
#pragma unroll
    for (int i = 0; i < kM16; ++i) {
      uint32_t packed[4];
      sm80::ldmatrix_x4(packed, shared_address(p) + matrix_offset(i));
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float2 weights = unpack<Element>(packed[e]);
        const float* difference = &differences[0][2 * i + e / 2][e % 2 * 2];
        ds[i][e] = pack<Element>(weights.x * difference[0], weights.y * difference[1]);
      }
    }
  }

  // This lane's first row of S^T within the column tile: a key.
  __device__ __forceinline__ int lane_key() const { return thread_ / 32 * 16 + thread_ % 32 / 4; }

  // Where a WeightTile has the 16 bytes that this lane names of a warp's 16 keys and queries 16i .. 16i + 15.
  __device__ __forceinline__ int matrix_offset(int i) const {
    const int lane = thread_ % 32;
    return WeightTile::offset(thread_ / 32 * 16 + lane % 16, 2 * i + lane / 16);
  }

  // Stores P^T or dS^T (rows are keys, columns queries) for this consumer's products and, past `barrier`, for
  // the other's.
  __device__ __forceinline__ void share(const Fragments& weights, char* tile, int barrier) {
#pragma unroll
    for (int i = 0; i < kM16; ++i) store_matrices(tile + matrix_offset(i), weights[i]);
    fence_async_shared();
    named_barrier_arrive(barrier, 256);
    named_barrier_sync(kGroupBarrier + kGroup, 128);
  }

  // Waits for the other consumer. One bar.sync will not do for both: it is aligned, and their code is not the
  // same.
  static __device__ __forceinline__ void meet() {
    named_barrier_arrive(kMeetingBarrier + kGroup, 256);
    named_barrier_sync(kMeetingBarrier + 1 - kGroup, 256);
  }

  // What comes in for a row that sees no key must not come out, even if it is not finite (and times P = 0 is
  // NaN). The consumers clear a half each.
  __device__ __forceinline__ void clear_empty_rows() {
    constexpr int kChunks = Config::kHeadDimV / 8;
    const int stage = rows_.index;
#pragma unroll 1
    for (int first = 0; first < Config::kBlockM * kChunks; first += 256) {  // as often for all threads
      const int index = first + kGroup * 128 + thread_;
      const int row = index / kChunks, chunk = index % kChunks;
      if (smem_.lse[stage][row] == INFINITY) {
        *reinterpret_cast<int4*>(smem_.dout[stage] + Config::DoTile::offset(row, chunk)) = {0, 0, 0, 0};
      }
    }
    fence_async_shared();
    meet();
  }

  __device__ __forceinline__ int32_t* turn_of(int tile) const {
    return arguments_.dq_turn + int64_t{tile} * Config::kTurns + kGroup;
  }

  // In deterministic order: finds out, before the step's stage is released, when dQ may be added.
  __device__ __forceinline__ void look_for_turn(int tile, const Stage<Config::kStages>& stage) {
    if constexpr (Config::kDeterministic) {
      smem_.turns_full[stage.index].wait(stage.parity);
      turn_expected_ = smem_.turns[stage.index];
      turn_seen_ = load_turn(turn_of(tile));
    }
  }

  // Adds a half of this consumer's columns of a row tile's dQ to the workspace, the first half first.
  __device__ __forceinline__ void add_dq(const DqHalf& dq, int half, int tile) {
    if (arguments_.params.dq.data == nullptr) return;
    if (Config::kDeterministic && half == 0) wait_for_turn(turn_of(tile), turn_seen_, turn_expected_);
    float* part = arguments_.dq + int64_t{tile} * DqWorkspace<Config>::kTileFloats;
#pragma unroll
    for (int n = 0; n < kHalf8; ++n) {
      const int chunk = kDqColumn / 8 + half * kHalf8 + n;
      sm80::reduce_add_fragment(part + DqWorkspace<Config>::offset(thread_ / 32, chunk), dq[0][n],
                                thread_ % 32);
    }
    if (Config::kDeterministic && half == 1) {
      named_barrier_sync(kGroupBarrier + kGroup, 128);
      if (thread_ == 0) pass_turn(turn_of(tile), smem_.place.column_tile);
    }
  }

  // This consumer's columns of a gradient, through shared memory, to the tensor.
  template <class Tile, int kColumn, int kCount>
  __device__ __forceinline__ void store(const float (&gradient)[1][kCount][4], char* shared,
                                        const CUtensorMap* map, float factor) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int offset = Tile::offset(lane_key() + 8 * h, kColumn / 8 + n) + thread_ % 4 * 4;
        *reinterpret_cast<uint32_t*>(shared + offset) =
            pack<Element>(gradient[0][n][2 * h] * factor, gradient[0][n][2 * h + 1] * factor);
      }
    }
    fence_async_shared();
    named_barrier_sync(kGroupBarrier + kGroup, 128);
    if (thread_ == 0) {
      for (int panel = kColumn / 64; panel < kColumn / 64 + kCount / 8; ++panel) {
        tma_store(map, shared + panel * Tile::kPanelBytes, panel * 64,
                  smem_.place.column_tile * Config::kBlockN, smem_.place.head_k, smem_.place.batch);
      }
      bulk_commit();
    }
  }

  const BackwardArguments& arguments_;
  typename Config::Smem& smem_;
  int thread_;
  Stage<Config::kStages> rows_;
  int32_t turn_expected_ = 0, turn_seen_ = 0;  // of the row tile whose dQ is in registers
  float dk_[1][kDk8][4], dv_[1][kDv8][4];
};

template <class Config>
class WideConsumers {
 public:
  __device__ __forceinline__ WideConsumers(const BackwardArguments& arguments, typename Config::Smem& smem,
                                           int group, int thread)
      : arguments_(arguments), smem_(smem), group_(group), thread_(thread) {}

  __device__ __forceinline__ void run() {
    if (group_ == 0) {
      WideConsumer<Config, 0>(arguments_, smem_, thread_).run();
    } else {
      WideConsumer<Config, 1>(arguments_, smem_, thread_).run();
    }
  }

 private:
  const BackwardArguments& arguments_;
  typename Config::Smem& smem_;
  int group_;
  int thread_;
};

}  // namespace flashmask::sm90
