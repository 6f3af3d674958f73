// The pre-pass: startend_row_indices -> MaskTiles. One thread block per group of 32 column tiles of one mask
// plane.
#pragma once

#include "common/mask_tiles.cuh"

namespace flashmask {

inline constexpr int kPrepassThreads = 256;

__device__ __forceinline__ ColumnIntervals column_intervals(const Mask& mask, const int32_t* indices,
                                                            const Shape& shape, int64_t column) {
  const int32_t seqlen_q = static_cast<int32_t>(shape.seqlen_q);
  if (column >= shape.seqlen_k) return {{0, kInt32Max}, empty_interval()};
  ColumnIntervals intervals{empty_interval(), empty_interval()};
  if (indices != nullptr) {
    intervals = load_column(indices + column * mask.bounds, mask.bounds, mask.causal != 0, seqlen_q);
  }
  if (mask.causal != 0) {
    // Row i sees column j iff j <= i + diagonal: rows [0, j - diagonal) are masked.
    int64_t end = column - (shape.seqlen_k - shape.seqlen_q);
    end = end < seqlen_q ? end : seqlen_q;
    intervals.upper = end > 0 ? Interval{0, static_cast<int32_t>(end)} : empty_interval();
  }
  return intervals;
}

__device__ __forceinline__ SlotExtremes warp_combine(SlotExtremes s) {
  return {__reduce_min_sync(~0u, s.start_min), __reduce_max_sync(~0u, s.start_max),
          __reduce_min_sync(~0u, s.end_min), __reduce_max_sync(~0u, s.end_max)};
}

// Grid: groups * Hm * Bm blocks of kPrepassThreads.
template <int kBlockN>
__global__ void mask_prepass_kernel(Mask mask, Shape shape, MaskTiles out) {
  static_assert(kBlockN % 32 == 0 || kBlockN == 16, "a warp walks a tile 32 columns at a time");
  __shared__ TileExtremes shared[kTilesPerGroup];
  const int group = blockIdx.x % out.group_count;
  const int64_t plane = blockIdx.x / out.group_count;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int32_t* indices =
      mask.indices == nullptr ? nullptr : mask.indices + plane * shape.seqlen_k * mask.bounds;
  const int64_t plane_columns = plane * out.tile_count * kBlockN;

  for (int t = warp; t < kTilesPerGroup; t += kPrepassThreads / 32) {
    const int tile = group * kTilesPerGroup + t;
    TileExtremes extremes{no_columns(), no_columns()};
    if (tile < out.tile_count) {
      for (int c = lane; c < kBlockN; c += 32) {
        const int64_t column = int64_t{tile} * kBlockN + c;
        const ColumnIntervals intervals = column_intervals(mask, indices, shape, column);
        out.lower[plane_columns + column] = {intervals.lower.start, intervals.lower.end};
        out.upper[plane_columns + column] = {intervals.upper.start, intervals.upper.end};
        if (column < shape.seqlen_k) {
          extremes.lower = combine(extremes.lower, extremes_of(intervals.lower));
          extremes.upper = combine(extremes.upper, extremes_of(intervals.upper));
        }
      }
      extremes = {warp_combine(extremes.lower), warp_combine(extremes.upper)};
      if (lane == 0) out.tiles[plane * out.tile_count + tile] = extremes;
    }
    if (lane == 0) shared[t] = extremes;
  }
  __syncthreads();
  if (warp == 0) {
    const TileExtremes extremes = shared[lane];
    const TileExtremes combined{warp_combine(extremes.lower), warp_combine(extremes.upper)};
    if (lane == 0) out.groups[plane * out.group_count + group] = combined;
  }
}

template <int kBlockN>
cudaError_t launch_mask_prepass(const Mask& mask, const Shape& shape, const MaskTiles& out,
                                cudaStream_t stream) {
  const int64_t blocks = int64_t{out.group_count} * out.heads * out.batch;
  if (blocks == 0) return cudaSuccess;
  mask_prepass_kernel<kBlockN>
      <<<static_cast<unsigned>(blocks), kPrepassThreads, 0, stream>>>(mask, shape, out);
  return cudaGetLastError();
}

}  // namespace flashmask
