// The pre-pass: startend_row_indices -> MaskTiles. One thread block per group of 32 column tiles of one mask
// plane. And how many heads of deterministic backward take turns.
#include "common/mask_prepass.h"
#include "common/row_runs.cuh"

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

constexpr int kChoiceThreads = 1024;

// As many heads as L2 holds, at most 32, and as many in every round. More heads only shorten what blocks wait
// for turns; but blocks that run together soon stand anywhere in a head's rows, so all that they visit must
// stay in L2 until the last of them has passed, or every step comes from memory (docs/kernel-notes.md has
// the measurements). `head_bytes` is that share of a key head, `planes` how many key heads of all samples.
__device__ int32_t choose_heads_in_turns(int64_t planes, int64_t head_bytes, int64_t l2_bytes) {
  constexpr int64_t kMost = 32;
  const int64_t held = l2_bytes * 5 / 8 / max(head_bytes, int64_t{1});
  const int64_t most = min(max(held, int64_t{1}), kMost);
  const int64_t rounds = max(ceil_div(planes, most), int64_t{1});
  return static_cast<int32_t>(max(ceil_div(planes, rounds), int64_t{1}));
}

// What a key head's blocks share, when its mask planes' `column_tiles` column tiles visit `visited` row tiles
// in all. Neighbouring column tiles visit nearly the same rows; together twice as many as one does on
// average, since under causality the longest walk is twice the average one.
__device__ int64_t shared_bytes_of_head(const Shape& shape, int64_t visited, int64_t column_tiles,
                                        int block_m, int64_t row_bytes) {
  const int64_t average_rows = visited * block_m / max(column_tiles, int64_t{1});
  const int64_t rows = min(2 * average_rows, int64_t{shape.seqlen_q});
  return shape.heads_q / shape.heads_k * rows * row_bytes;
}

// One block.
__global__ void heads_choice_kernel(const __grid_constant__ MaskTiles mask,
                                    const __grid_constant__ Shape shape, int block_m, int64_t row_bytes,
                                    int64_t l2_bytes, int32_t* heads_in_turns) {
  __shared__ unsigned long long visited;
  if (threadIdx.x == 0) visited = 0;
  __syncthreads();
  const int row_tiles = static_cast<int>(ceil_div(shape.seqlen_q, block_m));
  const int64_t column_tiles = int64_t{mask.batch} * mask.heads * mask.tile_count;
  unsigned long long own = 0;
  for (int64_t i = threadIdx.x; i < column_tiles; i += kChoiceThreads) {
    RowRuns runs;
    runs.build(mask, plane_at(mask, i / mask.tile_count), static_cast<int>(i % mask.tile_count),
               static_cast<int>(shape.seqlen_q), block_m, row_tiles);
    own += static_cast<unsigned>(runs.count(row_tiles));
  }
  atomicAdd(&visited, own);
  __syncthreads();
  if (threadIdx.x == 0) {
    const int64_t bytes =
        shared_bytes_of_head(shape, static_cast<int64_t>(visited), column_tiles, block_m, row_bytes);
    *heads_in_turns = choose_heads_in_turns(shape.batch * shape.heads_k, bytes, l2_bytes);
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

cudaError_t launch_heads_choice(const MaskTiles& mask, const Shape& shape, int block_m, int64_t row_bytes,
                                int32_t* heads_in_turns, cudaStream_t stream) {
  int device = 0, l2_bytes = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&l2_bytes, cudaDevAttrL2CacheSize, device);
  if (error != cudaSuccess) return error;
  heads_choice_kernel<<<1, kChoiceThreads, 0, stream>>>(mask, shape, block_m, row_bytes, l2_bytes,
                                                        heads_in_turns);
  return cudaGetLastError();
}

}  // namespace flashmask
