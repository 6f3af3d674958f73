// What backward does to S^T, dP^T and their products as a warpgroup's accumulators hold them: a warp has 16
// keys (rows) and all queries (columns) of a row tile; a lane's first element is key `lane / 4` and query
// 2 * (lane % 4), its element e of eight queries lies e / 2 * 8 keys and e % 2 queries further.
#pragma once

#include "common/mask_fragment.cuh"
#include "common/softmax.cuh"
#include "sm90/backward_arguments.cuh"
#include "sm90/ptx.cuh"

namespace flashmask::sm90 {

template <int kCount>
__device__ __forceinline__ float (&flat(float (&fragments)[1][kCount][4]))
    [kCount * 4] { return reinterpret_cast<float (&)[kCount * 4]>(fragments); }

template <int kCount>
__device__ __forceinline__ void set_zero(float (&fragments)[1][kCount][4]) {
#pragma unroll
  for (int n = 0; n < kCount; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) fragments[0][n][e] = 0.f;
}

// Accumulators to A operands of depth 16.
template <typename Element, int kM8>
__device__ __forceinline__ void round_fragments(const float (&values)[1][kM8][4],
                                                uint32_t (&fragments)[kM8 / 2][4]) {
#pragma unroll
  for (int n = 0; n < kM8; ++n) {
    fragments[n / 2][n % 2 * 2] = pack<Element>(values[0][n][0], values[0][n][1]);
    fragments[n / 2][n % 2 * 2 + 1] = pack<Element>(values[0][n][2], values[0][n][3]);
  }
}

// Something of all the fragments, for wgmma_wait_behind.
template <int kM16>
__device__ __forceinline__ uint32_t settled(const uint32_t (&fragments)[kM16][4]) {
  uint32_t any = 0;
#pragma unroll
  for (int i = 0; i < kM16; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e) any |= fragments[i][e];
  return any & 0x7fffffff;
}

// The lse or delta of this lane's two queries among the eight from 8n on.
__device__ __forceinline__ float2 load_statistic(const float* rows, int n, int thread) {
  return *reinterpret_cast<const float2*>(rows + 8 * n + 2 * (thread % 4));
}

// Puts the weights to 0 that slot `slot` masks. `slots` are those of the tile's keys from this lane's first
// on, row0 is this lane's first query.
template <int kM8>
__device__ __forceinline__ void clear_by_slot(float (&weights)[1][kM8][4], uint32_t touched, int slot,
                                              const Slot* slots, int row0) {
  const Slot pair[2] = {slots[0], slots[8]};
  with_ends(touched, slot, [&](auto starts, auto ends) {
#pragma unroll
    for (int n = 0; n < kM8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (masks_row<decltype(starts)::value, decltype(ends)::value>(pair[e / 2].start, pair[e / 2].end,
                                                                      row0 + 8 * n + e % 2))
          weights[0][n][e] = 0.f;
      }
    }
  });
}

// The same of what the dense matrix [Sq, Sk] masks; here row0 and key0 count from its origin.
template <int kM8>
__device__ __forceinline__ void clear_by_dense(float (&weights)[1][kM8][4], const uint8_t* dense,
                                               int64_t seqlen_q, int64_t seqlen_k, int row0, int64_t key0) {
#pragma unroll
  for (int n = 0; n < kM8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int64_t row = row0 + 8 * n + e % 2, key = key0 + 8 * (e / 2);
      const bool visible = row < seqlen_q && key < seqlen_k && dense[row * seqlen_k + key] != 0;
      if (!visible) weights[0][n][e] = 0.f;
    }
  }
}

// Puts the weights of a step to 0 that the mask hides. `stage` holds its slots, `lane_key` is this lane's
// first key within the column tile.
template <class Config, int kM8>
__device__ __forceinline__ void clear_masked(float (&weights)[1][kM8][4], const BackwardArguments& arguments,
                                             const typename Config::Smem& smem, int stage,
                                             const typename Config::Step& step, int lane_key, int thread) {
  const int row0 = step.row + 2 * (thread % 4);
  if constexpr (Config::kDense) {
    const Shape& shape = arguments.params.shape;
    const int head = step.tile / arguments.rows.tiles % shape.heads_q;
    clear_by_dense(weights, dense_plane(arguments.mask, shape, smem.place.batch, head), shape.seqlen_q,
                   shape.seqlen_k, row0, int64_t{smem.place.column_tile} * Config::kBlockN + lane_key);
  } else {
#pragma unroll 1
    for (uint32_t touching = step.work & kSlotBits; touching != 0; touching &= touching - 1) {
      const int slot = __ffs(static_cast<int>(touching)) - 1;
      clear_by_slot(weights, step.work, slot, smem.slots[stage][slot] + lane_key, row0);
    }
  }
}

}  // namespace flashmask::sm90
