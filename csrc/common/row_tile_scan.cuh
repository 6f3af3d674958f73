// Forward's question: which column tiles does this row tile visit? Answered for a chunk of tiles at a time by
// all warps of the block, as bit sets in shared memory: one test per group of 32 tiles, then 32 tests at once
// (one a lane) for each group that is not masked whole.
#pragma once

#include "common/mask_tiles.cuh"

namespace flashmask {

inline constexpr int kGroupsPerChunk = 128;

struct TileBits {
  uint32_t visited[kGroupsPerChunk];  // bit t: column tile 32 * group + t is not masked whole
  uint32_t lower[kGroupsPerChunk];    // bit t: its lower slots mask elements of it
  uint32_t upper[kGroupsPerChunk];    // bit t: its upper slots do
};

// Fills `bits` for groups [first_group, first_group + kGroupsPerChunk). Called by kWarps whole warps; the
// caller synchronises before and after.
template <int kWarps>
__device__ __forceinline__ void scan_row_tile(TileBits& bits, const MaskTiles& mask, const MaskPlane& plane,
                                              int first_group, int row_begin, int row_end, int warp,
                                              int lane) {
  const int groups = min(kGroupsPerChunk, mask.group_count - first_group);
  for (int base = 0; base < groups; base += 32) {
    const bool live =
        base + lane < groups &&
        (mask.visit_all ||
         visit_rows(load_extremes(plane.groups + first_group + base + lane), row_begin, row_end).visited);
    const uint32_t live_groups = __ballot_sync(~0u, live);
#pragma unroll 1
    for (int g = warp; g < 32 && base + g < groups; g += kWarps) {
      TileVisit visit{false, false, false};
      if (live_groups >> g & 1) {
        const int tile = (first_group + base + g) * kTilesPerGroup + lane;
        if (tile < mask.tile_count) {
          visit = mask.visit_all ? TileVisit{true, true, true}
                                 : visit_rows(load_extremes(plane.tiles + tile), row_begin, row_end);
        }
      }
      const uint32_t visited = __ballot_sync(~0u, visit.visited);
      const uint32_t lower = __ballot_sync(~0u, visit.lower);
      const uint32_t upper = __ballot_sync(~0u, visit.upper);
      if (lane == 0) {
        bits.visited[base + g] = visited;
        bits.lower[base + g] = lower;
        bits.upper[base + g] = upper;
      }
    }
  }
}

// Walks the set bits in ascending order.
class TileCursor {
 public:
  __device__ __forceinline__ TileCursor(const TileBits& bits, int groups)
      : bits_(bits), group_(0), groups_(groups), left_(groups > 0 ? bits.visited[0] : 0) {}

  // The next visited tile relative to the chunk, or -1.
  __device__ __forceinline__ int next() {
    while (left_ == 0) {
      if (++group_ >= groups_) return -1;
      left_ = bits_.visited[group_];
    }
    const int tile = __ffs(static_cast<int>(left_)) - 1;
    left_ &= left_ - 1;
    return group_ * kTilesPerGroup + tile;
  }

  __device__ __forceinline__ bool lower(int tile) const { return test(bits_.lower, tile); }
  __device__ __forceinline__ bool upper(int tile) const { return test(bits_.upper, tile); }

 private:
  static __device__ __forceinline__ bool test(const uint32_t* words, int tile) {
    return words[tile / kTilesPerGroup] >> (tile % kTilesPerGroup) & 1;
  }

  const TileBits& bits_;
  int group_;
  int groups_;
  uint32_t left_;
};

}  // namespace flashmask
