// Algorithm 1 of the paper on wgmma: warp-specialised and persistent. One producer warp finds the column
// tiles that a row tile visits and has TMA fetch them; each consumer warpgroup owns 64 query rows; a storer
// warp for each of them has TMA take O away.
#pragma once

#include "common/mask_fragment.cuh"
#include "common/softmax.cuh"
#include "sm90/forward_config.cuh"
#include "sm90/forward_producer.cuh"
#include "sm90/operand.cuh"
#include "sm90/ptx.cuh"
#include "sm90/row_bits.cuh"
#include "sm90/split_rows.cuh"
#include "sm90/wgmma.cuh"

namespace flashmask::sm90 {

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
  using Bits = LaneBits<kN8>;
  using Probabilities = uint32_t[Config::kBlockN / 16][4];

  __device__ __forceinline__ Consumer(const ForwardArguments& arguments, typename Config::Smem& smem,
                                      int group, int thread)
      : arguments_(arguments), smem_(smem), group_(group), thread_(thread) {}

  __device__ __forceinline__ void run() {
    Step step = next_step();
    for (;;) {
      smem_.q_full[q_.index].wait(q_.parity);
      if (smem_.works[q_.index].row_tile < 0) break;
      step = step.tile < 0 ? store_nothing() : consume(step);
      q_.advance();
    }
  }

 private:
  static constexpr int kVoteBarrier = 1;  // named barriers, one a consumer; 0 is __syncthreads

  // The entry of the K ring that comes next, once its K is there.
  __device__ __forceinline__ Step next_step() {
    smem_.k_full[k_.index].wait(k_.parity);
    const typename Config::Step& step = smem_.steps[k_.index];
    return {step.tile, step.touched[Config::kByGroup ? group_ : 0]};
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
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // Rows that do not exist have no say in whether weights must be taken again: a test mode shows them
      // other tiles.
      if (!exists(lane_row() + 8 * h, work)) softmax.leave_out(0, h);
    }
    Output output;
    bool fresh = true;                   // nothing is in O yet
    const bool idle = !exists(0, work);  // all 64 rows are behind the last query
    do {
      step = idle || step.hidden() ? pass_over() : consume_run(step, work, softmax, output, fresh);
    } while (!step.opens());
    if constexpr (Config::kSplit) release(smem_.q_empty[q_.index]);
    if (fresh) set_zero(output);
    store(work, softmax, output);
    return step;
  }

  // A column tile of which this consumer's rows see nothing.
  __device__ __forceinline__ Step pass_over() {
    release(smem_.k_empty[k_.index]);
    k_.advance();
    smem_.v_full[v_.index].wait(v_.parity);
    release(smem_.v_empty[v_.index]);
    v_.advance();
    return next_step();
  }

  // Column tiles up to one that is hidden or another row tile's. Returns the entry after them. Weights are
  // taken by the maximum so far. The next one's is not looked for, nor is O rescaled, unless the weights say
  // that they must: a maximum is no more than a reference that keeps them from overflowing.
  __device__ __forceinline__ Step consume_run(Step step, const typename Config::Work& work,
                                              OnlineSoftmax<1>& softmax, Output& output, bool& fresh) {
    Probabilities p;
    start_run(step, work, softmax, output, p, fresh);
    while (!step.opens() && !step.hidden()) {
      Scores scores;
      multiply_scores(scores);
      smem_.v_full[v_.index].wait(v_.parity);
      multiply_output(output, p, fresh);
      const Bits bits = prepare_mask(step, work);
      wgmma_wait<1>();
      pin(flat(scores));
      float sums[1][2];
      weigh(scores, sums, step, bits, work, softmax);
      wgmma_wait_behind<0>(__float_as_uint(scores[0][kN8 - 1][1]) | __float_as_uint(scores[0][kN8 - 1][3]));
      pin(flat(output));
      release(smem_.v_empty[v_.index]);
      v_.advance();
      settle(scores, sums, step, bits, work, softmax, output);
      release(smem_.k_empty[k_.index]);
      k_.advance();
      step = next_step();
      round(scores, p);
    }
    finish_run(output, p, fresh);
    return step;
  }

  // The first column tile of a run: no O += P V is there to run beside its S.
  __device__ __forceinline__ void start_run(Step& step, const typename Config::Work& work,
                                            OnlineSoftmax<1>& softmax, Output& output, Probabilities& p,
                                            bool fresh) {
    Scores scores;
    multiply_scores(scores);
    const Bits bits = prepare_mask(step, work);
    wgmma_wait<0>();
    pin(flat(scores));
    if (fresh) {
      mask(scores, step, bits, work);
      float rescale[1][2];
      softmax.advance(scores, arguments_.exponent_scale, rescale);
    } else {  // as if no tile had been passed over
      float sums[1][2];
      weigh(scores, sums, step, bits, work, softmax);
      settle(scores, sums, step, bits, work, softmax, output);
    }
    release(smem_.k_empty[k_.index]);
    k_.advance();
    round(scores, p);
    step = next_step();
  }

  // Takes the weights by the maximum so far as they are or, rarely, once more, from S on, by their tile's own
  // maximum: all four warps then, as in every product. K is still there.
  __device__ __forceinline__ void settle(Scores& scores, const float (&sums)[1][2], const Step& step,
                                         const Bits& bits, const typename Config::Work& work,
                                         OnlineSoftmax<1>& softmax, Output& output) {
    if (!named_barrier_any(kVoteBarrier + group_, 128, !softmax.serve(sums))) {
      softmax.add(sums);
      return;
    }
    multiply_scores(scores);
    wgmma_wait<0>();
    pin(flat(scores));
    mask(scores, step, bits, work);
    float rescale[1][2];
    softmax.advance(scores, arguments_.exponent_scale, rescale);
    rescale_output(output, rescale);
  }

  // The last O += P V of a run.
  __device__ __forceinline__ void finish_run(Output& output, const Probabilities& p, bool& fresh) {
    smem_.v_full[v_.index].wait(v_.parity);
    multiply_output(output, p, fresh);
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

  // Starts O += P V, or O = P V, and then O is no longer fresh.
  __device__ __forceinline__ void multiply_output(Output& output, const Probabilities& p, bool& fresh) {
    const uint32_t v = Config::VTile::rows_base(shared_address(smem_.v[v_.index]));
    pin(flat(output));
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < Config::kBlockN / 16; ++n) {
      OutputProduct::rs(flat(output), p[n], Config::VTile::depth_rows(v, n), n > 0 || !fresh);
    }
    wgmma_commit();
    fresh = false;
  }

  // The first query row of this consumer's.
  __device__ __forceinline__ int first_row(const typename Config::Work& work) const {
    if constexpr (Config::kSplit) {
      return (work.row_tile * Config::kConsumers + group_) * arguments_.split.plan.group_rows;
    }
    return work.row_tile * Config::kBlockM + group_ * 64;
  }

  // The first of a lane's two rows of this consumer's 64.
  __device__ __forceinline__ int lane_row() const { return thread_ / 32 * 16 + thread_ % 32 / 4; }

  // Whether row `row` of this consumer's is a query's.
  __device__ __forceinline__ bool exists(int row, const typename Config::Work& work) const {
    if constexpr (Config::kSplit) {
      const SplitPlan& plan = arguments_.split.plan;
      row = packed_row(plan, row).row;
      if (row >= plan.group_rows) return false;
    }
    return first_row(work) + row < arguments_.params.shape.seqlen_q;
  }

  // Whether a tile's masked scores are found out beforehand, as bits: where one slot's intervals all start
  // before the tile or all end behind it, comparing is as fast without.
  static __device__ __forceinline__ bool by_bits(uint32_t touched) {
    const uint32_t slots = touched & kSlotBits;
    return (slots & (slots - 1)) != 0 || with_both_ends(touched) != 0;
  }

  // While S is computed: the masked scores, if by_bits().
  __device__ __forceinline__ Bits prepare_mask(const Step& step, const typename Config::Work& work) {
    if (Config::kDense || !by_bits(step.touched)) return {};
    const int warp = thread_ / 32, first = first_row(work);
    return find_masked<kN8>(smem_.slots[k_.index], step.touched & kSlotBits,
                            [&](int row) { return first_own_row(row, first, warp); });
  }

  // The first of a warp's rows that belongs to query row `row` or a later one, in [0, 16], if this consumer's
  // rows start with query row `first`.
  __device__ __forceinline__ int first_own_row(int row, int first, int warp) const {
    if constexpr (Config::kSplit) {
      const int own = __viaddmin_s32_relu(row, -first, kWarpgroupRows) * arguments_.split.plan.pack;
      return __viaddmin_s32_relu(own, -warp * kWarpRows, kWarpRows);
    }
    return __viaddmin_s32_relu(row, -first - warp * kWarpRows, kWarpRows);
  }

  // Masks S and takes the weights by the maximum so far, in paths of their own, so that masking lies under
  // the exponentials and costs nothing where there is nothing to mask.
  __device__ __forceinline__ void weigh(Scores& scores, float (&sums)[1][2], const Step& step,
                                        const Bits& bits, const typename Config::Work& work,
                                        const OnlineSoftmax<1>& softmax) const {
    const auto take = [&](auto mask) {
      softmax.weigh_by_past(scores, arguments_.exponent_scale, sums, mask);
    };
    const auto nothing = [](int) {};
    if (Config::kDense || arguments_.negated) {
      mask(scores, step, bits, work);
      take(nothing);
    } else if ((step.touched & kSlotBits) == 0) {
      take(nothing);
    } else {
      with_mask(step, bits, work, [&](auto mask) { take([&](int n) { mask(scores[0][n], n); }); });
    }
  }

  // Puts the masked scores of a step to -inf.
  __device__ __forceinline__ void mask(Scores& scores, const Step& step, const Bits& bits,
                                       const typename Config::Work& work) const {
    if (arguments_.negated) negate(scores);
    if constexpr (Config::kDense) {
      const Rows rows = own_rows();
      const Shape& shape = arguments_.params.shape;
      mask_by_dense(
          scores, dense_plane(arguments_.mask, shape, work.batch, work.head), shape.seqlen_q, shape.seqlen_k,
          first_row(work) + rows.first, step.tile * Config::kBlockN + lane_column(), [](int) { return 0; },
          [](int n) { return 8 * n; }, rows.step);
    } else if ((step.touched & kSlotBits) != 0) {
      with_mask(step, bits, work, [&](auto mask) {
#pragma unroll
        for (int n = 0; n < kN8; ++n) mask(scores[0][n], n);
      });
    }
  }

  // Calls use(mask), mask(fragment, n) being what puts the masked scores of a tile that slots touch to -inf.
  template <class Use>
  __device__ __forceinline__ void with_mask(const Step& step, const Bits& bits,
                                            const typename Config::Work& work, Use use) const {
    if (by_bits(step.touched)) {
      use([&](float (&fragment)[4], int n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) fragment[e] = bits.masked(n, e / 2, e % 2) ? -INFINITY : fragment[e];
      });
    } else {
      const Rows rows = own_rows();
      const int row = first_row(work) + rows.first;
      const int slot = __ffs(static_cast<int>(step.touched & kSlotBits)) - 1;
      const Slot* slots = smem_.slots[k_.index][slot] + lane_column();
      const auto compare = [&](auto starts) {
        constexpr bool kStarts = decltype(starts)::value;
        use([&](float (&fragment)[4], int n) {
          mask_pair<kStarts, !kStarts>(fragment, *reinterpret_cast<const int4*>(slots + 8 * n), row,
                                       rows.step);
        });
      };
      if ((step.touched >> (kStartShift + slot) & 1) != 0) {
        compare(std::true_type{});
      } else {
        compare(std::false_type{});
      }
    }
  }

  // A lane's first row, of this consumer's query rows, and how far its second is from it.
  struct Rows {
    int first, step;
  };

  __device__ __forceinline__ Rows own_rows() const {
    const int row = lane_row();
    if constexpr (Config::kSplit) {
      const SplitPlan& plan = arguments_.split.plan;
      const int first = packed_row(plan, row).row;
      return {first, packed_row(plan, row + 8).row - first};
    }
    return {row, 8};
  }

  __device__ __forceinline__ int lane_column() const { return 2 * (thread_ % 4); }

  // O to the new maximum.
  static __device__ __forceinline__ void rescale_output(Output& output, const float (&rescale)[1][2]) {
#pragma unroll
    for (int n = 0; n < kO8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) output[0][n][e] *= rescale[0][e / 2];
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
                                        Output& output) {
    if constexpr (Config::kSplit) {
      store_split<Config>(arguments_.split, arguments_.params, work, group_, thread_, softmax, output,
                          arguments_.exponent_scale);
    } else {
      store_tile(work, softmax, output);
    }
  }

  // lse to memory, O to the place of its Q, from where the storer takes it.
  __device__ __forceinline__ void store_tile(const RowTileWork& work, const OnlineSoftmax<1>& softmax,
                                             Output& output) {
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
      if (sum == 0.f) clear_row(output[0], h);
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
  if constexpr (Config::kSplit) {
    if (arguments.split.o != nullptr) let_next_kernel_start();  // the merge
    clear_unused_q<Config>(smem.q[0], arguments.split.plan);
  }
  __syncthreads();
  wait_for_kernels_before();
  fence_async_global();  // bulk copies too see what they wrote
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
