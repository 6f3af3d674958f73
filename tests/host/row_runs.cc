// csrc/common/row_runs.cuh on the host, for tests/ops/test_row_runs.py.
#include "common/row_runs.cuh"

using flashmask::MaskPlane;
using flashmask::MaskTiles;
using flashmask::RowRuns;
using flashmask::SlotExtremes;

// Of the only column tile of a mask of `slot_count` slots: by the runs, which row tiles are visited, what
// touches them, how many are visited and in how many runs; and the same by forward's question, tile by tile.
extern "C" void walk_rows(const SlotExtremes* extremes, int slot_count, int seqlen_q, int block_m,
                          uint8_t* visited, uint32_t* touched, uint8_t* visited_by_tile,
                          uint32_t* touched_by_tile, int* count, int* runs_count) {
  MaskTiles mask{};
  mask.slot_count = slot_count;
  mask.tile_count = 1;
  const MaskPlane plane{nullptr, extremes, nullptr};
  const int row_tiles = (seqlen_q + block_m - 1) / block_m;
  RowRuns runs;
  runs.build(mask, plane, 0, seqlen_q, block_m, row_tiles);
  for (int tile = 0; tile < row_tiles; ++tile) {
    const int row_begin = tile * block_m, row_end = min(seqlen_q, row_begin + block_m);
    visited[tile] = 0;
    touched[tile] = runs.touched(tile, row_begin, row_end);
    const flashmask::TileVisit visit = visit_tile(mask, plane, 0, row_begin, row_end);
    visited_by_tile[tile] = visit.visited;
    touched_by_tile[tile] = visit.touched;
  }
  for (int tile = runs.next(0); tile < row_tiles; tile = runs.next(tile + 1)) visited[tile] = 1;
  *count = runs.count(row_tiles);
  *runs_count = 0;
  runs.for_each_visited_run(row_tiles, [&](int, int) { ++*runs_count; });
}
