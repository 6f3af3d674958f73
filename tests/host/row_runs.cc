// csrc/common/row_runs.cuh on the host, for tests/ops/test_row_runs.py.
#include "common/row_runs.cuh"

using flashmask::MaskPlane;
using flashmask::MaskTiles;
using flashmask::RowRuns;
using flashmask::RowWalk;
using flashmask::SlotExtremes;

// Of the only column tile of a mask of `slot_count` slots: by the runs, which row tiles are visited, what
// touches them, how many are visited and in how many runs; and the same by forward's question, tile by tile.
// `walked`: the visited ones as a walk that begins at `begin` comes to them, two tiles looked at from each
// place; returns how many. `last_begin`: where the last run begins.
extern "C" int walk_rows(const SlotExtremes* extremes, int slot_count, int seqlen_q, int block_m, int begin,
                         uint8_t* visited, uint32_t* touched, uint8_t* visited_by_tile,
                         uint32_t* touched_by_tile, int* walked, int* count, int* runs_count,
                         int* last_begin) {
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
  *last_begin = runs.last_begin(row_tiles);
  RowWalk walk{begin, row_tiles};
  int walked_count = 0;
  for (int first = walk.next(runs, begin, row_tiles); first < row_tiles;
       first = walk.next(runs, first + 2, row_tiles)) {
    for (int tile = first; tile < first + 2; ++tile) {
      if (tile < walk.end && runs.next(tile) == tile) walked[walked_count++] = tile;
    }
  }
  return walked_count;
}
