// Backward's question: which row tiles does this column tile visit, and which of them need masking? Each slot
// hides one run of row tiles whole, and causality's run begins at row 0, so what it and two more leave are at
// most three runs; and each slot touches one run of row tiles. All of it is known in constant time from the
// extremes.
#pragma once

#include "common/mask_tiles.cuh"

namespace flashmask {

class RowRuns {
 public:
  // `tile` is the column tile's number.
  __device__ void build(const MaskTiles& mask, const MaskPlane& plane, int tile, int seqlen_q, int block_m,
                        int row_tiles) {
#pragma unroll
    for (int s = 0; s < kMaxSlots; ++s) {
      if (s < mask.slot_count) extremes_[s] = load_extremes(plane.tiles + s * mask.tile_count + tile);
      hidden_[s] = touched_[s] = {0, 0};
    }
    int hidden = 0;  // slots that have a hidden run
#pragma unroll 1
    for (int s = 0; s < mask.slot_count; ++s) {
      if (mask.visit_all) {
        touched_[s] = {0, row_tiles};
        extremes_[s].start_max = kInt32Max;
        extremes_[s].end_min = kInt32Min;
        continue;
      }
      const SlotExtremes e = extremes_[s];
      // Row tiles inside every column's interval: exactly those for which covers() holds.
      if (e.start_max < e.end_min) {
        insert({e.start_max / block_m + (e.start_max % block_m != 0),
                e.end_min >= seqlen_q ? row_tiles : e.end_min / block_m},
               hidden++);
      }
      // Row tiles from the first masked row to the last: exactly those for which touches() holds.
      if (e.start_min < e.end_max) {
        touched_[s] = {e.start_min / block_m, (e.end_max - 1) / block_m + 1};
      }
    }
  }

  // The first visited row tile >= tile; past the last one, row_tiles or more. One pass does, as the runs are
  // sorted by their begin: a run that holds the end of a later one holds its begin too and has been skipped
  // before.
  __device__ __forceinline__ int next(int tile) const {
#pragma unroll
    for (int s = 0; s < kMaxSlots; ++s) {
      if (tile >= hidden_[s].begin && tile < hidden_[s].end) tile = hidden_[s].end;
    }
    return tile;
  }

  // How many of `row_tiles` are visited.
  __device__ __forceinline__ int count(int row_tiles) const {
    int visited = 0;
    for_each_visited_run(row_tiles, [&](int begin, int end) { visited += end - begin; });
    return visited;
  }

  // Where the last visited run begins; 0 where nothing is visited.
  __device__ int last_begin(int row_tiles) const {
    int last = 0;
    for_each_visited_run(row_tiles, [&](int begin, int) { last = begin; });
    return last;
  }

  // Calls use(begin, end) for each run of visited row tiles, ascending.
  template <class Use>
  __device__ __forceinline__ void for_each_visited_run(int row_tiles, Use use) const {
    int behind = 0;  // all before it are seen to
#pragma unroll
    for (int s = 0; s < kMaxSlots; ++s) {
      if (hidden_[s].begin >= hidden_[s].end) continue;
      if (hidden_[s].begin > behind) use(behind, hidden_[s].begin);
      behind = max(behind, hidden_[s].end);
    }
    if (row_tiles > behind) use(behind, row_tiles);
  }

  // Bit s: slot s may mask elements of this row tile; with the further bits of TileVisit.
  __device__ __forceinline__ uint32_t touched(int tile, int row_begin, int row_end) const {
    uint32_t slots = 0;
#pragma unroll
    for (int s = 0; s < kMaxSlots; ++s) {
      if (tile >= touched_[s].begin && tile < touched_[s].end)
        slots |= touch_bits(s, extremes_[s].start_max, extremes_[s].end_min, row_begin, row_end);
    }
    return slots;
  }

 private:
  struct Run {
    int begin;
    int end;
  };

  // Puts a run among the first `count`, which are sorted; those behind them are empty.
  __device__ void insert(Run run, int count) {
    int at = count;
    for (; at > 0 && hidden_[at - 1].begin > run.begin; --at) hidden_[at] = hidden_[at - 1];
    hidden_[at] = run;
  }

  Run hidden_[kMaxSlots];
  Run touched_[kMaxSlots];
  SlotExtremes extremes_[kMaxSlots];  // loaded before any is looked at: one latency
};

// A walk over visited row tiles that begins somewhere, and comes last to those before it.
struct RowWalk {
  int begin;  // 0 once there is nothing before the part that is walked
  int end;    // of that part; at first the number of row tiles

  // The first visited row tile of the part that is not before `from`; none: the first of what was left; none:
  // `row_tiles`.
  __device__ __forceinline__ int next(const RowRuns& runs, int from, int row_tiles) {
    int tile = runs.next(from);
    if (tile >= end && begin > 0) {
      end = begin;
      begin = 0;
      tile = runs.next(0);
    }
    return tile < end ? tile : row_tiles;
  }
};

}  // namespace flashmask
