// Forward's question: which column tiles does this row tile visit? Answered for a chunk of tiles at a time by
// all warps of the block, as bit sets in shared memory: one test per group of 32 tiles, then 32 tests at once
// (one a lane) for each group that is not masked whole. A block's first product waits for the answer.
#pragma once

#include "common/mask_tiles.cuh"

namespace flashmask {

inline constexpr int kGroupsPerChunk = 64;  // 1 KB of bits: forward at head dim 256 just fits into 99 KB

struct TileBits {
  uint32_t live[kGroupsPerChunk / 32];  // bit g: column tiles of group g may be visited
  uint32_t visited[kGroupsPerChunk];    // bit t, of live groups: column tile 32 * group + t is visited
  uint32_t touched[kMaxSlots][kGroupsPerChunk];  // bit t, of live groups: the slot masks elements of it
};
static_assert(kGroupsPerChunk % 32 == 0, "live groups are whole words");

// Fills `bits` for groups [first_group, first_group + kGroupsPerChunk). Called by kWarps whole warps; the
// caller synchronises before and after.
template <int kWarps>
__device__ __forceinline__ void scan_row_tile(TileBits& bits, const MaskTiles& mask, const MaskPlane& plane,
                                              int first_group, int row_begin, int row_end, int warp,
                                              int lane) {
  const int groups = min(kGroupsPerChunk, mask.group_count - first_group);
  const bool few = groups <= kWarps;  // all tiles at once then, as the groups' answers would come no sooner
  // Extremes of groups are asked for at once, those of tiles would take registers that accumulators need.
#pragma unroll 1
  for (int word = 0; word < kGroupsPerChunk / 32; ++word) {
    const int base = 32 * word;
    const bool live = base + lane < groups &&
                      (few || visits_group<true>(mask, plane, first_group + base + lane, row_begin, row_end));
    const uint32_t live_groups = __ballot_sync(~0u, live);
    if (warp == 0 && lane == 0) bits.live[word] = live_groups;
#pragma unroll 1
    for (int g = warp; g < 32; g += kWarps) {
      if ((live_groups >> g & 1) == 0) continue;
      const int tile = (first_group + base + g) * kTilesPerGroup + lane;
      TileVisit visit{false, 0};
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
  uint64_t live;     // live groups of the chunk that are still to come
  int first_group;   // of the chunk
  int group;         // relative to first_group: where `left` comes from
  uint32_t left;     // visited tiles of the group that are still to come
  int next;          // the next visited tile, or -1 at the end of the chunk
  uint32_t touched;  // its TileVisit::touched

  __device__ __forceinline__ void start(const TileBits& bits, int chunk_first_group, const MaskTiles& mask) {
    static_assert(kGroupsPerChunk == 64, "the live groups are two words");
    live = uint64_t{bits.live[1]} << 32 | bits.live[0];
    first_group = chunk_first_group;
    left = 0;
    advance(bits, mask);
  }

  __device__ __forceinline__ void advance(const TileBits& bits, const MaskTiles& mask) {
    while (left == 0) {
      if (live == 0) {
        next = -1;
        return;
      }
      group = __ffsll(static_cast<long long>(live)) - 1;
      live &= live - 1;
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
