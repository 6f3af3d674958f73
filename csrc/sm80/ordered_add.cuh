// Deterministic dQ: the column tiles that visit a row tile add to it in descending order.
//
// One counter a row tile holds 1 + the column tile that added last (0: none yet). A block waits for the one
// before it among the *visiting* column tiles, which it finds from the mask, so that skipped tiles neither
// wait nor are waited for. Blocks start in descending order of column tiles within a head, so the one waited
// for is always running. Under causality the diagonal's block then adds first and every other reaches that
// row later by itself: in ascending order all blocks would march through the rows in step, and the triangle
// would take as long as the square.
#pragma once

#include "common/mask_tiles.cuh"

namespace flashmask::sm80 {

// The first column tile after `column_tile` that visits rows [row_begin, row_end), or -1. Called by one whole
// warp.
inline __device__ int next_visitor(const MaskTiles& mask, const MaskPlane& plane, int column_tile,
                                   int row_begin, int row_end, int lane) {
  if (mask.visit_all) return column_tile + 1 < mask.tile_count ? column_tile + 1 : -1;
  const auto search_group = [&](int group) {
    const int tile = group * kTilesPerGroup + lane;
    const bool visited = tile > column_tile && tile < mask.tile_count &&
                         visit_rows(load_extremes(plane.tiles + tile), row_begin, row_end).visited;
    const uint32_t bits = __ballot_sync(~0u, visited);
    return bits == 0 ? -1 : group * kTilesPerGroup + __ffs(static_cast<int>(bits)) - 1;
  };
  const int own_group = column_tile / kTilesPerGroup;
  const int near = search_group(own_group);
  if (near >= 0) return near;
  for (int first = own_group + 1; first < mask.group_count; first += 32) {
    const int group = first + lane;
    const bool live = group < mask.group_count &&
                      visit_rows(load_extremes(plane.groups + group), row_begin, row_end).visited;
    for (uint32_t left = __ballot_sync(~0u, live); left != 0; left &= left - 1) {
      const int found = search_group(first + __ffs(static_cast<int>(left)) - 1);
      if (found >= 0) return found;
    }
  }
  return -1;
}

// Called by the whole block, before its threads add. `turn` is the row tile's counter.
inline __device__ void wait_for_turn(const int32_t* turn, const MaskTiles& mask, const MaskPlane& plane,
                                     int column_tile, int row_begin, int row_end, int thread) {
  if (thread < 32) {
    const int expected = next_visitor(mask, plane, column_tile, row_begin, row_end, thread) + 1;
    if (thread == 0) {
      int32_t seen;
      do {
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(turn) : "memory");
      } while (seen != expected);
    }
  }
  __syncthreads();
}

// Called by the whole block, after its threads have added.
inline __device__ void pass_turn(int32_t* turn, int column_tile, int thread) {
  __threadfence();
  __syncthreads();
  if (thread == 0) {
    asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(turn), "r"(column_tile + 1) : "memory");
  }
}

}  // namespace flashmask::sm80
