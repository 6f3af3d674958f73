// The pre-pass: startend_row_indices -> MaskTiles. One thread block per group of 32 column tiles of one mask
// plane.
#include "common/mask_prepass.h"

namespace flashmask {
namespace {

constexpr int kPrepassThreads = 256;

// The slots of one column, in the order of slot_count(): lower, upper, causality, each if the mask has it.
__device__ __forceinline__ void column_slots(const Mask& mask, const int32_t* indices, const Shape& shape,
                                             int64_t column, Interval (&slots)[kMaxSlots]) {
  const int32_t seqlen_q = static_cast<int32_t>(shape.seqlen_q);
  slots[0] = slots[1] = slots[2] = empty_interval();
  if (column >= shape.seqlen_k) {
    slots[0] = {0, kInt32Max};
    return;
  }
  int next = 0;
  if (indices != nullptr) {
    const ColumnIntervals given =
        load_column(indices + column * mask.bounds, mask.bounds, mask.causal != 0, seqlen_q);
    slots[next++] = given.lower;
    if (mask.bounds == 4 || !mask.causal) slots[next++] = given.upper;
  }
  if (mask.causal != 0) {
    const int64_t end = column - (shape.seqlen_k - shape.seqlen_q);
    const Interval above =
        end > 0 ? Interval{0, static_cast<int32_t>(end < seqlen_q ? end : seqlen_q)} : empty_interval();
    if (next == 0) slots[0] = above;
    if (next == 1) slots[1] = above;
    if (next == 2) slots[2] = above;
  }
}

__device__ __forceinline__ SlotExtremes warp_combine(SlotExtremes s) {
  return {__reduce_min_sync(~0u, s.start_min), __reduce_max_sync(~0u, s.start_max),
          __reduce_min_sync(~0u, s.end_min), __reduce_max_sync(~0u, s.end_max)};
}

// Grid: group_count * Hm * Bm blocks of kPrepassThreads.
__global__ void mask_prepass_kernel(Mask mask, Shape shape, MaskTiles out) {
  __shared__ SlotExtremes shared[kMaxSlots][kTilesPerGroup];
  const int group = blockIdx.x % out.group_count;
  const int64_t plane = blockIdx.x / out.group_count;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int32_t* indices =
      mask.indices == nullptr ? nullptr : mask.indices + plane * shape.seqlen_k * mask.bounds;
  const int64_t first_slot = plane * out.slot_count;
  const int64_t padded_columns = int64_t{out.tile_count} * out.block_n;

  for (int t = warp; t < kTilesPerGroup; t += kPrepassThreads / 32) {
    const int tile = group * kTilesPerGroup + t;
    SlotExtremes extremes[kMaxSlots] = {no_columns(), no_columns(), no_columns()};
    if (tile < out.tile_count) {
      for (int c = lane; c < out.block_n; c += 32) {
        const int64_t column = int64_t{tile} * out.block_n + c;
        Interval slots[kMaxSlots];
        column_slots(mask, indices, shape, column, slots);
#pragma unroll
        for (int s = 0; s < kMaxSlots; ++s) {
          if (s >= out.slot_count) break;
          out.slots[(first_slot + s) * padded_columns + column] = {slots[s].start, slots[s].end};
          if (column < shape.seqlen_k) extremes[s] = combine(extremes[s], extremes_of(slots[s]));
        }
      }
    }
#pragma unroll
    for (int s = 0; s < kMaxSlots; ++s) {
      if (s >= out.slot_count) break;
      extremes[s] = warp_combine(extremes[s]);
      if (lane == 0) {
        shared[s][t] = extremes[s];
        if (tile < out.tile_count) out.tiles[(first_slot + s) * out.tile_count + tile] = extremes[s];
      }
    }
  }
  __syncthreads();
  if (warp < out.slot_count) {
    const SlotExtremes combined = warp_combine(shared[warp][lane]);
    if (lane == 0) out.groups[(first_slot + warp) * out.group_count + group] = combined;
  }
}

}  // namespace

cudaError_t launch_mask_prepass(const Mask& mask, const Shape& shape, const MaskTiles& out,
                                cudaStream_t stream) {
  const int64_t blocks = int64_t{out.group_count} * out.heads * out.batch;
  if (blocks == 0) return cudaSuccess;
  mask_prepass_kernel<<<static_cast<unsigned>(blocks), kPrepassThreads, 0, stream>>>(mask, shape, out);
  return cudaGetLastError();
}

}  // namespace flashmask
