// What the CUDA kernels see of a mask: per key column two intervals of masked rows, per column tile their
// extremes, per group of 32 column tiles the extremes again. Written once per call by the pre-pass
// (mask_prepass.cuh), O(Sk).
#pragma once

#include <cuda_runtime.h>

#include "common/column_mask.h"
#include "flashmask/params.h"

namespace flashmask {

// Masked rows [start, end) of one slot of one column. Causality is folded into the upper slot, which the
// accepted forms of startend_row_indices leave free under `causal`: so two slots say everything.
struct alignas(8) Slot {
  int32_t start;
  int32_t end;
};

struct alignas(16) TileExtremes {
  SlotExtremes lower;
  SlotExtremes upper;
};
static_assert(sizeof(Slot) == 8 && sizeof(TileExtremes) == 32, "loaded as one word of 8 and two of 16 bytes");

inline constexpr int kTilesPerGroup = 32;

__host__ __device__ constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Where the pre-pass puts its results in the workspace.
struct MaskTiles {
  Slot* lower;           // [Bm, Hm, tiles * block_n]; columns >= Sk are masked in every row
  Slot* upper;           // [Bm, Hm, tiles * block_n]
  TileExtremes* tiles;   // [Bm, Hm, tiles]
  TileExtremes* groups;  // [Bm, Hm, groups]
  const uint8_t* dense;  // [Bm, Hm, Sq, Sk] or null
  int32_t batch;         // Bm
  int32_t heads;         // Hm
  int32_t tile_count;    // ceil(Sk / block_n)
  int32_t group_count;   // ceil(tile_count / kTilesPerGroup)
  int32_t visit_all;     // test modes: classify every tile as partial
};

// Without indices or a dense mask one plane serves every sample and head.
inline Mask effective_mask(Mask mask) {
  if (mask.indices == nullptr && mask.dense == nullptr) mask.batch = mask.heads = 1;
  return mask;
}

inline int64_t mask_tiles_bytes(const Mask& mask, int64_t seqlen_k, int block_n) {
  const int64_t planes = int64_t{mask.batch} * mask.heads;
  const int64_t tiles = ceil_div(seqlen_k, block_n);
  return planes * (tiles * block_n * 2 * int64_t{sizeof(Slot)} +
                   (tiles + ceil_div(tiles, kTilesPerGroup)) * int64_t{sizeof(TileExtremes)});
}

inline MaskTiles carve_mask_tiles(const Mask& mask, Visit visit, int64_t seqlen_k, int block_n,
                                  char* workspace) {
  MaskTiles out{};
  const int64_t planes = int64_t{mask.batch} * mask.heads;
  const int64_t tiles = ceil_div(seqlen_k, block_n);
  out.batch = mask.batch;
  out.heads = mask.heads;
  out.tile_count = static_cast<int32_t>(tiles);
  out.group_count = static_cast<int32_t>(ceil_div(tiles, kTilesPerGroup));
  out.visit_all = visit != Visit::kSkip;
  out.dense = visit == Visit::kDense ? mask.dense : nullptr;
  out.tiles = reinterpret_cast<TileExtremes*>(workspace);
  out.groups = out.tiles + planes * tiles;
  out.lower = reinterpret_cast<Slot*>(out.groups + planes * out.group_count);
  out.upper = out.lower + planes * tiles * block_n;
  return out;
}

// The mask of one (sample, query head): pointers moved to its plane.
struct MaskPlane {
  const Slot* lower;
  const Slot* upper;
  const TileExtremes* tiles;
  const TileExtremes* groups;
};

__device__ __forceinline__ int64_t plane_index(const MaskTiles& mask, const Shape& shape, int batch,
                                               int head_q) {
  const int mask_batch = mask.batch == 1 ? 0 : batch;
  const int mask_head = mask.heads == 1               ? 0
                        : mask.heads == shape.heads_q ? head_q
                                                      : head_q / (shape.heads_q / shape.heads_k);
  return int64_t{mask_batch} * mask.heads + mask_head;
}

__device__ __forceinline__ MaskPlane select_plane(const MaskTiles& mask, const Shape& shape, int block_n,
                                                  int batch, int head_q) {
  const int64_t plane = plane_index(mask, shape, batch, head_q);
  const int64_t columns = plane * mask.tile_count * block_n;
  return {mask.lower + columns, mask.upper + columns, mask.tiles + plane * mask.tile_count,
          mask.groups + plane * mask.group_count};
}

// The dense test mask [Sq, Sk] of one (sample, query head).
__device__ __forceinline__ const uint8_t* dense_plane(const MaskTiles& mask, const Shape& shape, int batch,
                                                      int head_q) {
  return mask.dense + plane_index(mask, shape, batch, head_q) * shape.seqlen_q * shape.seqlen_k;
}

__device__ __forceinline__ TileExtremes load_extremes(const TileExtremes* pointer) {
  const int4 lower = __ldg(reinterpret_cast<const int4*>(pointer));
  const int4 upper = __ldg(reinterpret_cast<const int4*>(pointer) + 1);
  return {{lower.x, lower.y, lower.z, lower.w}, {upper.x, upper.y, upper.z, upper.w}};
}

// From shared memory, anew at every call: a copy in registers for the length of a main loop costs more.
__device__ __forceinline__ TileExtremes smem_extremes(const TileExtremes& shared) {
  const volatile TileExtremes& v = shared;
  return {{v.lower.start_min, v.lower.start_max, v.lower.end_min, v.lower.end_max},
          {v.upper.start_min, v.upper.start_max, v.upper.end_min, v.upper.end_max}};
}

// classify() for the rows of a tile, causality being inside the upper slot already, and which slots mask its
// elements.
struct TileVisit {
  bool visited;
  bool lower;
  bool upper;
};

__device__ __forceinline__ TileVisit visit_rows(const TileExtremes& extremes, int row_begin, int row_end) {
  const TileRange tile{row_begin, row_end, 0, 0};
  return {!covers(extremes.lower, tile) && !covers(extremes.upper, tile), touches(extremes.lower, tile),
          touches(extremes.upper, tile)};
}

}  // namespace flashmask
