// What the CUDA kernels see of a mask: per key column up to kMaxSlots intervals of masked rows, per column
// tile the extremes of each, per group of 32 column tiles the extremes again. The pre-pass (mask_prepass.cu)
// writes them once a call, in O(Sk), but for those of Hopper's forward kernels that know masks without
// indices (kKnowsMasks). How many slots there are is known here and there alone; kernels only loop over them.
#pragma once

#include <cuda_runtime.h>

#include "common/column_mask.h"
#include "flashmask/params.h"

namespace flashmask {

// The user's lower and upper slots, and causality, which masks rows [0, j - (Sk - Sq)) of column j.
inline constexpr int kMaxSlots = 3;
inline constexpr int kTilesPerGroup = 32;

// Masked rows [start, end) of one slot of one column.
struct alignas(8) Slot {
  int32_t start;
  int32_t end;
};
static_assert(sizeof(Slot) == 8 && sizeof(SlotExtremes) == 16, "copied and loaded as whole words");

// The slots that a mask needs; at least one, which hides the columns that pad the last tile.
inline int slot_count(const Mask& mask) {
  const int given = mask.bounds == 0 ? 0 : mask.bounds == 1 || (mask.bounds == 2 && mask.causal) ? 1 : 2;
  const int count = given + (mask.causal ? 1 : 0);
  return count > 0 ? count : 1;
}

// Where the pre-pass puts its results in the workspace.
struct MaskTiles {
  Slot* slots;           // [Bm, Hm, slot_count, tile_count * block_n]
  SlotExtremes* tiles;   // [Bm, Hm, slot_count, tile_count]
  SlotExtremes* groups;  // [Bm, Hm, slot_count, group_count]
  const uint8_t* dense;  // [Bm, Hm, Sq, Sk] or null
  int32_t batch;         // Bm
  int32_t heads;         // Hm
  int32_t slot_count;
  int32_t tile_count;   // ceil(Sk / block_n)
  int32_t group_count;  // ceil(tile_count / kTilesPerGroup)
  int32_t block_n;
  int32_t visit_all;  // test modes: every tile is visited and touched by every slot
};

// Without indices or a dense mask one plane serves every sample and head.
inline Mask effective_mask(Mask mask) {
  if (mask.indices == nullptr && mask.dense == nullptr) mask.batch = mask.heads = 1;
  return mask;
}

inline MaskTiles carve_mask_tiles(const Mask& mask, Visit visit, int64_t seqlen_k, int block_n,
                                  char* workspace) {
  MaskTiles out{};
  const int64_t tiles = ceil_div(seqlen_k, block_n);
  out.batch = mask.batch;
  out.heads = mask.heads;
  out.slot_count = slot_count(mask);
  out.tile_count = static_cast<int32_t>(tiles);
  out.group_count = static_cast<int32_t>(ceil_div(tiles, kTilesPerGroup));
  out.block_n = block_n;
  out.visit_all = visit != Visit::kSkip;
  out.dense = visit == Visit::kDense ? mask.dense : nullptr;
  const int64_t planes = int64_t{mask.batch} * mask.heads * out.slot_count;
  out.tiles = reinterpret_cast<SlotExtremes*>(workspace);
  out.groups = out.tiles + planes * tiles;
  out.slots = reinterpret_cast<Slot*>(out.groups + planes * out.group_count);
  return out;
}

inline int64_t mask_tiles_bytes(const Mask& mask, int64_t seqlen_k, int block_n) {
  const int64_t tiles = ceil_div(seqlen_k, block_n);
  const int64_t extremes = (tiles + ceil_div(tiles, kTilesPerGroup)) * int64_t{sizeof(SlotExtremes)};
  return int64_t{mask.batch} * mask.heads * slot_count(mask) *
         (extremes + tiles * block_n * int64_t{sizeof(Slot)});
}

// The mask of one (sample, query head): pointers moved to its plane.
struct MaskPlane {
  const Slot* slots;
  const SlotExtremes* tiles;
  const SlotExtremes* groups;
};

__device__ __forceinline__ MaskPlane plane_at(const MaskTiles& mask, int64_t plane) {
  const int64_t first = plane * mask.slot_count;
  return {mask.slots + first * mask.tile_count * mask.block_n, mask.tiles + first * mask.tile_count,
          mask.groups + first * mask.group_count};
}

__device__ __forceinline__ int64_t plane_index(const MaskTiles& mask, const Shape& shape, int batch,
                                               int head_q) {
  const int mask_batch = mask.batch == 1 ? 0 : batch;
  const int mask_head = mask.heads == 1               ? 0
                        : mask.heads == shape.heads_q ? head_q
                                                      : head_q / (shape.heads_q / shape.heads_k);
  return int64_t{mask_batch} * mask.heads + mask_head;
}

// The dense test mask [Sq, Sk] of one (sample, query head).
__device__ __forceinline__ const uint8_t* dense_plane(const MaskTiles& mask, const Shape& shape, int batch,
                                                      int head_q) {
  return mask.dense + plane_index(mask, shape, batch, head_q) * shape.seqlen_q * shape.seqlen_k;
}

__device__ __forceinline__ SlotExtremes load_extremes(const SlotExtremes* pointer) {
  const int4 v = __ldg(reinterpret_cast<const int4*>(pointer));
  return {v.x, v.y, v.z, v.w};
}

// What a tile is to a kernel: not visited at all, or masked by element where bit s of `touched` says that
// slot s may mask some element. classify() of column_mask.h for two slots and causality; touched == 0 is
// TileKind::kUnmasked. Of a slot that touches, further bits say which ends of its intervals lie within the
// tile: the others need no compare.
struct TileVisit {
  bool visited;
  uint32_t touched;
};

inline constexpr uint32_t kSlotBits = (1u << kMaxSlots) - 1;
inline constexpr int kStartShift = 8, kEndShift = 16;
static_assert(kMaxSlots <= kStartShift && kStartShift + kMaxSlots <= kEndShift && kEndShift + kMaxSlots <= 30,
              "bits of slots, of their starts and of their ends, and two more that kernels add");

// The bits of a touching slot all of whose intervals start at or before `start_max` and end at or behind
// `end_min`.
__device__ __forceinline__ uint32_t touch_bits(int slot, int start_max, int end_min, int row_begin,
                                               int row_end) {
  uint32_t bits = 1u;
  if (start_max > row_begin) bits |= 1u << kStartShift;
  if (end_min < row_end) bits |= 1u << kEndShift;
  return bits << slot;
}

// Of slots whose intervals may lie anyhow.
__device__ __forceinline__ uint32_t touch_bits_of_any(uint32_t slots) {
  return slots | slots << kStartShift | slots << kEndShift;
}

// `extremes_of_slot(s)` gives those of slot s. kAtOnce asks for all before it looks at any: one latency
// instead of one a slot, for more registers.
template <bool kAtOnce = false, class ExtremesOfSlot>
__device__ __forceinline__ TileVisit visit_rows(const MaskTiles& mask, ExtremesOfSlot extremes_of_slot,
                                                int row_begin, int row_end) {
  if (mask.visit_all) return {true, touch_bits_of_any((1u << mask.slot_count) - 1)};
  const TileRange rows{row_begin, row_end, 0, 0};
  TileVisit visit{true, 0};
  const auto look = [&](int s, const SlotExtremes& e) {
    if (covers(e, rows)) visit.visited = false;
    if (touches(e, rows)) visit.touched |= touch_bits(s, e.start_max, e.end_min, row_begin, row_end);
  };
  if constexpr (kAtOnce) {
    SlotExtremes extremes[kMaxSlots];
#pragma unroll
    for (int s = 0; s < kMaxSlots; ++s) {
      if (s < mask.slot_count) extremes[s] = extremes_of_slot(s);
    }
#pragma unroll
    for (int s = 0; s < kMaxSlots; ++s) {
      if (s < mask.slot_count) look(s, extremes[s]);
    }
  } else {
    for (int s = 0; s < mask.slot_count; ++s) look(s, extremes_of_slot(s));
  }
  return visit;
}

template <bool kAtOnce = false>
__device__ __forceinline__ TileVisit visit_tile(const MaskTiles& mask, const MaskPlane& plane, int tile,
                                                int row_begin, int row_end) {
  return visit_rows<kAtOnce>(
      mask, [&](int s) { return load_extremes(plane.tiles + s * mask.tile_count + tile); }, row_begin,
      row_end);
}

template <bool kAtOnce = false>
__device__ __forceinline__ bool visits_group(const MaskTiles& mask, const MaskPlane& plane, int group,
                                             int row_begin, int row_end) {
  return visit_rows<kAtOnce>(
             mask, [&](int s) { return load_extremes(plane.groups + s * mask.group_count + group); },
             row_begin, row_end)
      .visited;
}

}  // namespace flashmask
