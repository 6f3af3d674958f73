// Deterministic dQ: the column tiles that visit a row tile add to it in descending order.
//
// One counter a row tile holds 1 + the column tile that added last (0: none yet). A block waits for the one
// before it among the *visiting* column tiles, which it finds from the mask, so that skipped tiles neither
// wait nor are waited for. Blocks draw tickets for a head's column tiles in descending order, so the one
// waited for is running or done, whichever order blocks start in. (Where a block takes one column tile after
// another, DqWriter says why nobody waits for ever.) Under causality the diagonal's block then adds first and
// every other reaches that row later by itself: in ascending order all blocks would march through the rows in
// step, and the triangle would take as long as the square.
//
// Where all column tiles visit the last rows and each has others of its own before them (causal blocks), who
// has many of its own would come late to the last ones, and all who add after it wait. So all begin to walk
// where the last rows begin, DeterministicOrder::first_row_tile, and come to their own when the chain has
// passed. The sums of dK and dV are in that order too.
//
// A step need not wait when the turn has come before it asks. So it looks up who comes before it, and what
// the counter holds, long before it adds: in the step, finding out must not take longer than not finding out.
#pragma once

#include "common/mask_tiles.cuh"

namespace flashmask {

// The extremes of the 32 column tiles of a block's own group, where its predecessor nearly always is.
struct NearTiles {
  SlotExtremes extremes[kMaxSlots][kTilesPerGroup];

  // Called by one whole warp.
  __device__ void load(const MaskTiles& mask, const MaskPlane& plane, int column_tile, int lane) {
    const int tile = column_tile / kTilesPerGroup * kTilesPerGroup + lane;
    if (tile >= mask.tile_count) return;
    for (int s = 0; s < mask.slot_count; ++s) {
      extremes[s][lane] = load_extremes(plane.tiles + s * mask.tile_count + tile);
    }
  }
};

// The first column tile after `column_tile` that visits rows [row_begin, row_end), or -1. Called by one whole
// warp.
inline __device__ int next_visitor(const MaskTiles& mask, const MaskPlane& plane, const NearTiles& near,
                                   int column_tile, int row_begin, int row_end, int lane) {
  if (mask.visit_all) return column_tile + 1 < mask.tile_count ? column_tile + 1 : -1;
  const auto first_of_group = [&](int group, bool visited) {
    const uint32_t bits = __ballot_sync(~0u, visited);
    return bits == 0 ? -1 : group * kTilesPerGroup + __ffs(static_cast<int>(bits)) - 1;
  };
  const int own_group = column_tile / kTilesPerGroup;
  const int own_tile = own_group * kTilesPerGroup + lane;
  const bool near_visited =
      own_tile > column_tile && own_tile < mask.tile_count &&
      visit_rows(mask, [&](int s) { return near.extremes[s][lane]; }, row_begin, row_end).visited;
  const int found = first_of_group(own_group, near_visited);
  if (found >= 0) return found;
  for (int first = own_group + 1; first < mask.group_count; first += 32) {
    const int group = first + lane;
    const bool live = group < mask.group_count && visits_group(mask, plane, group, row_begin, row_end);
    for (uint32_t left = __ballot_sync(~0u, live); left != 0; left &= left - 1) {
      const int far_group = first + __ffs(static_cast<int>(left)) - 1;
      const int tile = far_group * kTilesPerGroup + lane;
      const int far = first_of_group(
          far_group, tile < mask.tile_count && visit_tile(mask, plane, tile, row_begin, row_end).visited);
      if (far >= 0) return far;
    }
  }
  return -1;
}

// What a row tile's counter holds. Relaxed, so that nothing waits for it until it is used. That is enough:
// all that must come after it are additions, which the memory's one home, L2, makes in the order in which
// they arrive, and none is sent before a branch has seen the counter.
inline __device__ int32_t load_turn(const int32_t* turn) {
  int32_t seen;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(turn) : "memory");
  return seen;
}

// Called by a whole warp, before it adds. `seen` is what load_turn gave a while ago, `expected` what the
// counter holds when it is this block's turn.
inline __device__ void wait_for_turn(const int32_t* turn, int32_t seen, int32_t expected) {
  while (seen != expected) seen = load_turn(turn);
  __syncwarp();
}

inline __device__ int32_t load_acquire(const int32_t* counter) {
  int32_t seen;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
  return seen;
}

// Returns when it is this block's turn to add. Called by one thread that will add by asynchronous copies:
// they go another way than additions from registers, so the counter is acquired, for a fence to carry over.
inline __device__ void acquire_turn(const int32_t* turn, int32_t expected) {
  while (load_acquire(turn) != expected) {
  }
}

// Called by one thread, once a barrier has ordered all threads' additions before it, or its own copies are
// complete: the release carries them along.
inline __device__ void pass_turn(int32_t* turn, int column_tile) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(turn), "r"(column_tile + 1) : "memory");
}

}  // namespace flashmask
