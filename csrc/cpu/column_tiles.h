// The mask as the CPU kernel walks it: the extremes of every tile of kBlockN key columns, and of every group
// of tiles, so that a long masked run costs one comparison.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/column_mask.h"
#include "cpu/tile_ops.h"
#include "flashmask/params.h"

namespace flashmask::cpu {

inline constexpr int kTilesPerGroup = 32;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Columns of a tile to compute, and whether elements are to be hidden among them.
struct ColumnSpan {
  int64_t begin, end;
  bool partial;
};

class ColumnTiles {
 public:
  ColumnTiles(const Mask& mask, const Shape& shape, Visit visit);

  int64_t groups() const { return mask_heads_ * groups_per_head_; }
  // Reads the columns of one group; every group must have been scanned before anything below is called.
  void scan_group(int64_t group);

  // Calls compute(ColumnSpan, const HiddenRows*) for the tiles that rows [row_begin, row_end) of head h of
  // sample b visit among columns [begin, end), in ascending order; begin is a multiple of kBlockN. The hidden
  // rows are per column of the span, given for partial spans not read from Mask::dense.
  template <typename Compute>
  void for_each_visited(int64_t b, int64_t h, int64_t row_begin, int64_t row_end, int64_t begin, int64_t end,
                        const Compute& compute) const {
    const int64_t head = mask_head(b, h);
    HiddenRows hidden[kBlockN];
    for (int64_t column = begin; column < end;) {
      const int64_t tile = column / kBlockN;
      const int64_t group_end = (tile / kTilesPerGroup + 1) * kTilesPerGroup * kBlockN;
      if (tile % kTilesPerGroup == 0 && group_end <= end &&
          kind_of(group_extremes_[head * groups_per_head_ + tile / kTilesPerGroup], row_begin, row_end,
                  column, group_end) == TileKind::kMasked) {
        column = group_end;
        continue;
      }
      const int64_t tile_end = std::min(column + kBlockN, end);
      const TileKind kind =
          kind_of(tile_extremes_[head * tiles_per_head_ + tile], row_begin, row_end, column, tile_end);
      if (kind != TileKind::kMasked) {
        ColumnSpan span{column, tile_end, kind == TileKind::kPartial};
        if (span.partial && visit_ != Visit::kDense) load_hidden(head, row_begin, row_end, span, hidden);
        if (span.begin < span.end) compute(span, hidden);
      }
      column = tile_end;
    }
  }

  // Mask::dense at (row, column) for head h of sample b.
  const uint8_t* dense_at(int64_t b, int64_t h, int64_t row, int64_t column) const {
    return mask_.dense + (mask_head(b, h) * shape_.seqlen_q + row) * shape_.seqlen_k + column;
  }

 private:
  struct Extremes {
    SlotExtremes lower, upper;
  };

  int64_t mask_head(int64_t b, int64_t h) const {
    const int64_t head = mask_.heads == 1 ? 0 : h / (shape_.heads_q / mask_.heads);
    return (mask_.batch == 1 ? 0 : b) * mask_.heads + head;
  }
  TileKind kind_of(const Extremes& extremes, int64_t row_begin, int64_t row_end, int64_t column_begin,
                   int64_t column_end) const;
  void load_hidden(int64_t head, int64_t row_begin, int64_t row_end, ColumnSpan& span,
                   HiddenRows* hidden) const;

  Mask mask_;
  Shape shape_;
  Visit visit_;
  int64_t diagonal_;
  int64_t mask_heads_;  // Bm * Hm
  int64_t tiles_per_head_;
  int64_t groups_per_head_;
  std::vector<Extremes> tile_extremes_;
  std::vector<Extremes> group_extremes_;
};

}  // namespace flashmask::cpu
