// The pre-pass: startend_row_indices -> MaskTiles. One thread block per group of 32 column tiles of one mask
// plane. And what else is known from the mask before a main kernel starts: the order in which it takes its
// tiles, how many heads take turns, and where column tiles begin to walk.
#include <algorithm>

#include "common/device.h"
#include "common/mask_prepass.h"
#include "common/row_runs.cuh"

namespace flashmask {
namespace {

constexpr int kPrepassThreads = 32 * kTilesPerGroup;  // a warp for each tile

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

// Grid: group_count * Hm * Bm blocks of kPrepassThreads. `ticket` is put to 0, if there is one.
__global__ void __launch_bounds__(kPrepassThreads)
    mask_prepass_kernel(Mask mask, Shape shape, MaskTiles out, unsigned* ticket) {
  let_next_kernel_start();
  wait_for_kernels_before();
  if (ticket != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *ticket = 0;
  __shared__ SlotExtremes shared[kMaxSlots][kTilesPerGroup];
  const int group = blockIdx.x % out.group_count;
  const int64_t plane = blockIdx.x / out.group_count;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int32_t* indices =
      mask.indices == nullptr ? nullptr : mask.indices + plane * shape.seqlen_k * mask.bounds;
  const int64_t first_slot = plane * out.slot_count;
  const int64_t padded_columns = int64_t{out.tile_count} * out.block_n;

  const int tile = group * kTilesPerGroup + warp;
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
      shared[s][warp] = extremes[s];
      if (tile < out.tile_count) out.tiles[(first_slot + s) * out.tile_count + tile] = extremes[s];
    }
  }
  __syncthreads();
  if (warp < out.slot_count) {
    const SlotExtremes combined = warp_combine(shared[warp][lane]);
    if (lane == 0) out.groups[(first_slot + warp) * out.group_count + group] = combined;
  }
}

constexpr int kChoiceThreads = 1024;

// As many heads as are held, at least 1 and at most 32, and as many in every round. `planes` is how many
// heads all samples have.
__host__ __device__ int32_t choose_heads_in_turns(int64_t planes, int64_t held) {
  constexpr int64_t kMost = 32;
  const int64_t most = held < 1 ? 1 : held < kMost ? held : kMost;
  const int64_t rounds = ceil_div(planes, most);
  return static_cast<int32_t>(rounds > 1 ? ceil_div(planes, rounds) : planes > 1 ? planes : 1);
}

// What a head's tiles share. Blocks that run together soon stand anywhere in a head's rows, so all that they
// visit must stay in L2 until the last of them has passed, or every step comes from memory
// (docs/kernel-notes.md has the measurements). When `walks` of them visit `visited` tiles of `block` of the
// other operand's `seqlen` tokens in all, neighbours visit nearly the same tokens; together twice as many as
// one does on average, since under causality the longest walk is twice the average one.
__host__ __device__ int64_t shared_bytes_of_head(int64_t seqlen, int64_t visited, int64_t walks, int block,
                                                 int64_t token_bytes) {
  const int64_t average = visited * block / (walks > 1 ? walks : 1);
  return (2 * average < seqlen ? 2 * average : seqlen) * token_bytes;
}

// How many row tiles of block_m the column tiles of all mask planes visit, in constant time for each. Called
// by a whole block of kChoiceThreads.
__device__ int64_t count_visits(const MaskTiles& mask, const Shape& shape, int block_m) {
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
  return static_cast<int64_t>(visited);
}

// Where column tiles of the first mask plane meet, that is at its first and its last row tile.
struct Meeting {
  // By how many steps the chain of hand-overs through one of the two outlasts the longest walk, if a
  // hand-over takes a step and all column tiles start together: all of them come to the first row tile at
  // once, and to the last one when they have walked. Under causality they come one by one as it is, and
  // nothing is outlasted.
  int queue;
  int last_to_add;  // the lowest column tile that visits the last row tile; none: their number
};

// Called by a whole block of kChoiceThreads.
__device__ Meeting find_meeting(const MaskTiles& mask, const Shape& shape, int block_m) {
  __shared__ int at_first, last_to_add, longest, latest;
  if (threadIdx.x == 0) at_first = longest = latest = 0, last_to_add = mask.tile_count;
  __syncthreads();
  const int row_tiles = static_cast<int>(ceil_div(shape.seqlen_q, block_m));
  const int column_tiles = mask.batch > 0 ? mask.tile_count : 0;
  for (int tile = threadIdx.x; tile < column_tiles; tile += kChoiceThreads) {
    RowRuns runs;
    runs.build(mask, plane_at(mask, 0), tile, static_cast<int>(shape.seqlen_q), block_m, row_tiles);
    if (runs.next(0) == 0) atomicAdd(&at_first, 1);
    if (runs.next(row_tiles - 1) == row_tiles - 1) {
      const int walk = runs.count(row_tiles);
      atomicMin(&last_to_add, tile);  // as column tiles descend
      atomicMax(&longest, walk);
      atomicMax(&latest, walk + tile);
    }
  }
  __syncthreads();
  return {max(at_first, latest - last_to_add - longest), last_to_add};
}

// DeterministicOrder::first_row_tile: where the last rows begin that `last_to_add` visits. 0, as if there
// were no such thing, where it has one run from row 0 on: under causality, with global tokens, without a
// mask.
__device__ int row_tile_to_begin_at(const MaskTiles& mask, const Shape& shape, int block_m, int last_to_add) {
  if (mask.batch == 0 || last_to_add == mask.tile_count) return 0;
  const int row_tiles = static_cast<int>(ceil_div(shape.seqlen_q, block_m));
  RowRuns runs;
  runs.build(mask, plane_at(mask, 0), last_to_add, static_cast<int>(shape.seqlen_q), block_m, row_tiles);
  return runs.last_begin(row_tiles);
}

// How many heads' steps, divided among the blocks that run, take twice as long as a chain of hand-overs
// through all column tiles; 1 where there is no such chain. `visited` as count_visits() says.
__device__ int64_t heads_that_hide_hand_overs(const MaskTiles& mask, const Shape& shape, int block_m,
                                              int parts, int64_t visited, int queue) {
  constexpr int64_t kTimes = 2;
  const int64_t planes = int64_t{mask.batch} * mask.heads;
  if (planes == 0 || queue < mask.tile_count / 4) return 1;
  const int64_t steps_of_head = max(shape.heads_q / shape.heads_k / parts * visited / planes, int64_t{1});
  return ceil_div(kTimes * mask.tile_count * kWave, steps_of_head);
}

// One block.
__global__ void deterministic_order_kernel(const __grid_constant__ MaskTiles mask,
                                           const __grid_constant__ Shape shape, int block_m,
                                           int64_t row_bytes, int parts, int64_t l2_bytes,
                                           DeterministicOrder* order) {
  let_next_kernel_start();
  wait_for_kernels_before();
  const int64_t visited = count_visits(mask, shape, block_m);
  const Meeting meeting = find_meeting(mask, shape, block_m);
  if (threadIdx.x == 0) {
    const int64_t hiding = heads_that_hide_hand_overs(mask, shape, block_m, parts, visited, meeting.queue);
    const int64_t column_tiles = int64_t{mask.batch} * mask.heads * mask.tile_count;
    const int64_t bytes =
        max(shape.heads_q / shape.heads_k / parts *
                shared_bytes_of_head(shape.seqlen_q, visited, column_tiles, block_m, row_bytes),
            int64_t{1});
    // Nothing is lost while five eighths of L2 hold them; little while it does, and a chain costs more.
    const int64_t held = max(l2_bytes * 5 / 8 / bytes, min(hiding, l2_bytes * 7 / 8 / bytes));
    order->heads_in_turns = choose_heads_in_turns(shape.batch * shape.heads_k * parts, held);
    order->first_row_tile = row_tile_to_begin_at(mask, shape, block_m, meeting.last_to_add);
  }
}

// One block.
__global__ void visits_choice_kernel(const __grid_constant__ MaskTiles mask,
                                     const __grid_constant__ Shape shape, int block_m, int most,
                                     int32_t* more) {
  let_next_kernel_start();
  wait_for_kernels_before();
  const int64_t visited = count_visits(mask, shape, block_m);
  const int64_t row_tiles = int64_t{mask.batch} * mask.heads * ceil_div(shape.seqlen_q, block_m);
  if (threadIdx.x == 0) *more = visited > most * row_tiles;
}

// How many heads' `tiles` are handed out in turns, longest first. What blocks share of a head is
// shared_bytes_of_head(); `planes` as choose_heads_in_turns() says.
__host__ __device__ int32_t choose_ordered_heads(int64_t planes, int64_t tiles, int64_t bytes_of_head,
                                                 int64_t l2_bytes) {
  constexpr int64_t kBalancedWaves = 2;  // under causality their sums are even
  // Two thirds of 50 MB hold 32 MB: heads of two to a power of bytes, of which 5/8 would cut one off.
  const int64_t held = l2_bytes * 2 / 3 / (bytes_of_head > 1 ? bytes_of_head : 1);
  // But the longest tiles of those that are in turns must find short ones to end beside.
  const int64_t balanced = (kBalancedWaves * kWave + tiles / 2) / tiles;
  return choose_heads_in_turns(planes, held > balanced ? held : balanced);
}

constexpr int kOrderThreads = 256;

// How many column tiles visit each row tile: each adds 1 where a run that it visits begins and takes it away
// where the run ends. `counts` has row_tiles + 1 elements, for the row tiles in descending order.
__device__ void count_row_tiles(const MaskTiles& mask, const MaskPlane& plane, int seqlen_q, int block_m,
                                int row_tiles, int* counts) {
  for (int i = threadIdx.x; i <= row_tiles; i += kOrderThreads) counts[i] = 0;
  __syncthreads();
  for (int tile = threadIdx.x; tile < mask.tile_count; tile += kOrderThreads) {
    RowRuns runs;
    runs.build(mask, plane, tile, seqlen_q, block_m, row_tiles);
    runs.for_each_visited_run(row_tiles, [&](int begin, int end) {
      atomicAdd(&counts[row_tiles - end], 1);
      atomicAdd(&counts[row_tiles - begin], -1);
    });
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    const int lane = static_cast<int>(threadIdx.x);
    int before = 0;
    for (int base = 0; base < row_tiles; base += 32) {
      int sum = base + lane < row_tiles ? counts[base + lane] : 0;
      for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(~0u, sum, distance);
        if (lane >= distance) sum += other;
      }
      sum += before;
      if (base + lane < row_tiles) counts[base + lane] = sum;
      before = __shfl_sync(~0u, sum, 31);
    }
  }
}

// How many row tiles each column tile visits, of `members` query heads that begin with `head_q`.
__device__ void count_column_tiles(const MaskTiles& mask, const Shape& shape, int batch, int head_q,
                                   int members, int block_m, int row_tiles, int* counts) {
  for (int tile = threadIdx.x; tile < mask.tile_count; tile += kOrderThreads) {
    int visited = 0;
    for (int member = 0; member < members; ++member) {
      RowRuns runs;
      runs.build(mask, plane_at(mask, plane_index(mask, shape, batch, head_q + member)), tile,
                 static_cast<int>(shape.seqlen_q), block_m, row_tiles);
      visited += runs.count(row_tiles);
    }
    counts[tile] = visited;
  }
}

// Grid: as many blocks of kOrderThreads for each plane of `order` as it has kOrderThreads tiles. All of them
// count all of the plane, which is cheap, and each ranks its own. The first plane speaks for all when it
// comes to how many heads take turns.
template <bool kRows>
__global__ void tile_order_kernel(const __grid_constant__ MaskTiles mask, const __grid_constant__ Shape shape,
                                  int block_m, int64_t token_bytes, int parts, int64_t l2_bytes,
                                  const __grid_constant__ TileOrder order) {
  __shared__ int counts[kMostOrdered + 1];  // in the order that holds between equals
  __shared__ unsigned long long visited;
  if (threadIdx.x == 0) visited = 0;
  let_next_kernel_start();
  wait_for_kernels_before();
  const int row_tiles = static_cast<int>(ceil_div(shape.seqlen_q, block_m));
  const int tiles = kRows ? row_tiles : mask.tile_count;
  const int heads = kRows ? shape.heads_q : shape.heads_k;
  const int group = shape.heads_q / shape.heads_k;
  const int chunks = (tiles + kOrderThreads - 1) / kOrderThreads;
  const int order_heads = mask.heads == 1 ? 1 : heads;
  const int batch = blockIdx.x / chunks / order_heads, head = blockIdx.x / chunks % order_heads;
  const int members = !kRows && mask.heads == shape.heads_q ? group : 1;  // whose masks differ
  if constexpr (kRows) {
    count_row_tiles(mask, plane_at(mask, plane_index(mask, shape, batch, head)),
                    static_cast<int>(shape.seqlen_q), block_m, row_tiles, counts);
  } else {
    count_column_tiles(mask, shape, batch, head * group, members, block_m, row_tiles, counts);
  }
  __syncthreads();

  const int own = blockIdx.x % chunks * kOrderThreads + threadIdx.x;
  if (own < tiles) {
    const int count = counts[own];
    int rank = 0;
    for (int other = 0; other < own; ++other) rank += counts[other] >= count;
    for (int other = own + 1; other < tiles; ++other) rank += counts[other] > count;
    order.tiles[int64_t{blockIdx.x / chunks} * tiles + rank] = kRows ? tiles - 1 - own : own;
  }
  if (blockIdx.x > 0) return;
  unsigned long long sum = 0;
  for (int tile = threadIdx.x; tile < tiles; tile += kOrderThreads)
    sum += static_cast<unsigned>(counts[tile]);
  atomicAdd(&visited, sum);
  __syncthreads();
  if (threadIdx.x == 0) {
    const int64_t bytes =
        shared_bytes_of_head(kRows ? shape.seqlen_k : shape.seqlen_q, static_cast<int64_t>(visited) / members,
                             tiles, kRows ? mask.block_n : block_m, token_bytes);
    *order.heads_in_turns = choose_ordered_heads(shape.batch * heads * parts, tiles, bytes, l2_bytes);
  }
}

// How many row tiles of block_m the column tiles of one mask plane without indices visit.
int64_t known_visits(const Shape& shape, bool causal, int block_m, int block_n) {
  const int64_t row_tiles = ceil_div(shape.seqlen_q, block_m);
  const int64_t column_tiles = ceil_div(shape.seqlen_k, block_n);
  if (!causal) return row_tiles * column_tiles;
  int64_t visited = 0;
  for (int64_t tile = 0; tile < column_tiles; ++tile) {
    const int64_t hidden = tile * block_n - (shape.seqlen_k - shape.seqlen_q);  // rows before it
    if (hidden < shape.seqlen_q) visited += row_tiles - std::max<int64_t>(hidden, 0) / block_m;
  }
  return visited;
}

template <bool kRows>
cudaError_t set_tile_order(const Mask& mask, MaskTiles tiles, const Shape& shape, int block_m,
                           int64_t token_bytes, int parts, TileOrder* order, KernelChain& chain) {
  const int heads = kRows ? shape.heads_q : shape.heads_k;
  const int64_t count = kRows ? ceil_div(shape.seqlen_q, block_m) : tiles.tile_count;
  if (!is_ordered(mask, shape, heads, count, parts)) return cudaSuccess;
  int l2_bytes = 0;
  const cudaError_t error = current_device_attribute(cudaDevAttrL2CacheSize, &l2_bytes);
  if (error != cudaSuccess) return error;
  if (is_order_known(mask)) {
    const int64_t visited = known_visits(shape, mask.causal != 0, block_m, tiles.block_n);
    const int64_t bytes = shared_bytes_of_head(kRows ? shape.seqlen_k : shape.seqlen_q, visited, count,
                                               kRows ? tiles.block_n : block_m, token_bytes);
    order->known_in_turns = choose_ordered_heads(shape.batch * heads * parts, count, bytes, l2_bytes);
    return cudaSuccess;
  }
  tiles.visit_all = 0;
  const int64_t order_heads = tiles.heads == 1 ? 1 : heads;
  return chain.launch(tile_order_kernel<kRows>, tiles.batch * order_heads * ceil_div(count, kOrderThreads),
                      kOrderThreads, 0, tiles, shape, block_m, token_bytes, parts, int64_t{l2_bytes}, *order);
}

}  // namespace

cudaError_t launch_mask_prepass(const Mask& mask, const Shape& shape, const MaskTiles& out,
                                KernelChain& chain, unsigned* ticket) {
  const int64_t blocks = int64_t{out.group_count} * out.heads * out.batch;
  return chain.launch(mask_prepass_kernel, blocks, kPrepassThreads, 0, mask, shape, out, ticket);
}

cudaError_t set_deterministic_order(MaskTiles mask, const Shape& shape, int block_m, int64_t row_bytes,
                                    int parts, DeterministicOrder* order, KernelChain& chain) {
  int l2_bytes = 0;
  const cudaError_t error = current_device_attribute(cudaDevAttrL2CacheSize, &l2_bytes);
  if (error != cudaSuccess) return error;
  mask.visit_all = 0;
  return chain.launch(deterministic_order_kernel, 1, kChoiceThreads, 0, mask, shape, block_m, row_bytes,
                      parts, int64_t{l2_bytes}, order);
}

cudaError_t choose_by_visits(const Mask& mask, MaskTiles tiles, const Shape& shape, int block_m, int most,
                             int32_t* more, bool* known, KernelChain& chain) {
  if (mask.indices == nullptr) {
    *known = known_visits(shape, mask.causal != 0, block_m, tiles.block_n) >
             most * ceil_div(shape.seqlen_q, block_m);
    return cudaSuccess;
  }
  tiles.visit_all = 0;
  return chain.launch(visits_choice_kernel, 1, kChoiceThreads, 0, tiles, shape, block_m, most, more);
}

cudaError_t set_row_order(const Mask& mask, const MaskTiles& tiles, const Shape& shape, int block_m,
                          int64_t key_bytes, TileOrder* order, KernelChain& chain) {
  return set_tile_order<true>(mask, tiles, shape, block_m, key_bytes, 1, order, chain);
}

cudaError_t set_column_order(const Mask& mask, const MaskTiles& tiles, const Shape& shape, int block_m,
                             int64_t row_bytes, int parts, TileOrder* order, KernelChain& chain) {
  return set_tile_order<false>(mask, tiles, shape, block_m, row_bytes, parts, order, chain);
}

}  // namespace flashmask
