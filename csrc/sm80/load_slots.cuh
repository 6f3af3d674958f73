// The slots of a column tile, from the workspace to shared memory.
#pragma once

#include "common/mask_tiles.cuh"
#include "sm80/ptx.cuh"

namespace flashmask::sm80 {

// Fetches the slots of the tile that starts at `column`. kThreads threads copy 16 bytes, two columns, at a
// time.
template <int kBlockN, int kThreads>
__device__ __forceinline__ void load_slots(Slot (&shared)[kMaxSlots][kBlockN], const MaskPlane& plane,
                                           const MaskTiles& mask, int64_t column, int thread) {
  for (int i = thread; i < mask.slot_count * (kBlockN / 2); i += kThreads) {
    const int slot = i / (kBlockN / 2), pair = 2 * (i % (kBlockN / 2));
    cp_async_16(shared_address(&shared[slot][pair]),
                plane.slots + int64_t{slot} * mask.tile_count * kBlockN + column + pair, true);
  }
}

}  // namespace flashmask::sm80
