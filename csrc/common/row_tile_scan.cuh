// Forward's question: which column tiles does this row tile visit? Answered for a chunk of tiles at a time by
// all warps of the block, as bit sets in shared memory: one test per group of 32 tiles, then 32 tests at once
// (one a lane) for each group that is not masked whole.
#pragma once

#include "common/mask_tiles.cuh"

namespace flashmask {

inline constexpr int kGroupsPerChunk = 64;  // 1 KB of bits: forward at head dim 256 just fits into 99 KB

struct TileBits {
  uint32_t visited[kGroupsPerChunk];             // bit t: column tile 32 * group + t is not masked whole
  uint32_t touched[kMaxSlots][kGroupsPerChunk];  // bit t: the slot masks elements of it
};

// Fills `bits` for groups [first_group, first_group + kGroupsPerChunk). Called by kWarps whole warps; the
// caller synchronises before and after.
template <int kWarps>
__device__ __forceinline__ void scan_row_tile(TileBits& bits, const MaskTiles& mask, const MaskPlane& plane,
                                              int first_group, int row_begin, int row_end, int warp,
                                              int lane) {
  const int groups = min(kGroupsPerChunk, mask.group_count - first_group);
  const bool few = groups <= kWarps;  // all tiles at once then, as the groups' answers would come no sooner
  // Extremes of groups are asked for at once, those of tiles would take registers that accumulators need.
  for (int base = 0; base < groups; base += 32) {
    const bool live = base + lane < groups &&
                      (few || visits_group<true>(mask, plane, first_group + base + lane, row_begin, row_end));
    const uint32_t live_groups = __ballot_sync(~0u, live);
#pragma unroll 1
    for (int g = warp; g < 32 && base + g < groups; g += kWarps) {
      if ((live_groups >> g & 1) == 0) {
        if (lane == 0) bits.visited[base + g] = 0;
        continue;
      }
      TileVisit visit{false, 0};
      const int tile = (first_group + base + g) * kTilesPerGroup + lane;
      if (tile < mask.tile_count) visit = visit_tile(mask, plane, tile, row_begin, row_end);
      const uint32_t visited = __ballot_sync(~0u, visit.visited);
      if (lane == 0) bits.visited[base + g] = visited;
      for (int s = 0; s < mask.slot_count; ++s) {
        const uint32_t touched = __ballot_sync(~0u, visit.touched >> s & 1);
        if (lane == 0) bits.touched[s][base + g] = touched;
      }
    }
  }
}

// The walk over the visited tiles, in ascending order. It lives in shared memory, advanced by one thread and
// read by all after a barrier, because what is the same for every thread is better kept there than in
// everyone's registers.
struct TileWalk {
  int first_group;   // of the chunk
  int group;         // relative to first_group: where `left` comes from
  uint32_t left;     // visited tiles of the group that are still to come
  int next;          // the next visited tile, or -1 at the end of the chunk
  uint32_t touched;  // its TileVisit::touched

  __device__ __forceinline__ void start(const TileBits& bits, int chunk_first_group, const MaskTiles& mask) {
    first_group = chunk_first_group;
    group = 0;
    left = bits.visited[0];
    advance(bits, mask);
  }

  __device__ __forceinline__ void advance(const TileBits& bits, const MaskTiles& mask) {
    const int groups = min(kGroupsPerChunk, mask.group_count - first_group);
    while (left == 0) {
      if (++group >= groups) {
        next = -1;
        return;
      }
      left = bits.visited[group];
    }
    const int bit = __ffs(static_cast<int>(left)) - 1;
    left &= left - 1;
    next = (first_group + group) * kTilesPerGroup + bit;
    touched = 0;
    for (int s = 0; s < mask.slot_count; ++s) touched |= (bits.touched[s][group] >> bit & 1) << s;
  }
};

}  // namespace flashmask
