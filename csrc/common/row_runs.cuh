// Backward's question: which row tiles does this column tile visit? Each slot hides one run of rows from
// every column of the tile, so the visited tiles are at most three runs, known in constant time from the
// tile's extremes.
#pragma once

#include "common/mask_tiles.cuh"

namespace flashmask {

class RowRuns {
 public:
  __device__ __forceinline__ RowRuns(const TileExtremes& extremes, bool visit_all, int seqlen_q, int block_m,
                                     int row_tiles)
      : lower_(hidden(extremes.lower, visit_all, seqlen_q, block_m, row_tiles)),
        upper_(hidden(extremes.upper, visit_all, seqlen_q, block_m, row_tiles)) {}

  // The first visited row tile >= tile; past the last one, row_tiles or more.
  __device__ __forceinline__ int next(int tile) const {
    tile = skip(tile, lower_);
    tile = skip(tile, upper_);
    return skip(tile, lower_);  // the upper slot's run may end inside the lower slot's
  }

 private:
  struct Run {
    int begin;
    int end;
  };

  static __device__ __forceinline__ int skip(int tile, Run run) {
    return tile >= run.begin && tile < run.end ? run.end : tile;
  }

  // Row tiles that lie inside every column's interval: exactly those for which covers() holds.
  static __device__ __forceinline__ Run hidden(const SlotExtremes& slot, bool visit_all, int seqlen_q,
                                               int block_m, int row_tiles) {
    if (visit_all || slot.start_max >= slot.end_min) return {0, 0};
    const int begin = slot.start_max / block_m + (slot.start_max % block_m != 0);
    const int end = slot.end_min >= seqlen_q ? row_tiles : slot.end_min / block_m;
    return {begin, end};
  }

  Run lower_;
  Run upper_;
};

}  // namespace flashmask
