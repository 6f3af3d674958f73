#include "cpu/column_tiles.h"

namespace flashmask::cpu {

ColumnTiles::ColumnTiles(const Mask& mask, const Shape& shape, Visit visit)
    : mask_(mask),
      shape_(shape),
      visit_(visit),
      diagonal_(shape.seqlen_k - shape.seqlen_q),
      mask_heads_(int64_t{mask.batch} * mask.heads),
      tiles_per_head_(ceil_div(shape.seqlen_k, kBlockN)),
      groups_per_head_(ceil_div(tiles_per_head_, kTilesPerGroup)),
      tile_extremes_(mask_heads_ * tiles_per_head_),
      group_extremes_(mask_heads_ * groups_per_head_) {}

void ColumnTiles::scan_group(int64_t group) {
  const int64_t head = group / groups_per_head_;
  const int64_t first_tile = group % groups_per_head_ * kTilesPerGroup;
  const int64_t end_tile = std::min(first_tile + kTilesPerGroup, tiles_per_head_);
  const int32_t seqlen_q = static_cast<int32_t>(shape_.seqlen_q);
  Extremes of_group{no_columns(), no_columns()};
  for (int64_t tile = first_tile; tile < end_tile; ++tile) {
    Extremes of_tile{no_columns(), no_columns()};
    const int64_t end = std::min((tile + 1) * kBlockN, shape_.seqlen_k);
    for (int64_t column = tile * kBlockN; column < end; ++column) {
      const ColumnIntervals intervals =
          load_column(mask_.indices + (head * shape_.seqlen_k + column) * mask_.bounds, mask_.bounds,
                      mask_.causal != 0, seqlen_q);
      of_tile.lower = combine(of_tile.lower, extremes_of(intervals.lower));
      of_tile.upper = combine(of_tile.upper, extremes_of(intervals.upper));
    }
    tile_extremes_[head * tiles_per_head_ + tile] = of_tile;
    of_group.lower = combine(of_group.lower, of_tile.lower);
    of_group.upper = combine(of_group.upper, of_tile.upper);
  }
  group_extremes_[group] = of_group;
}

TileKind ColumnTiles::kind_of(const Extremes& extremes, int64_t row_begin, int64_t row_end,
                              int64_t column_begin, int64_t column_end) const {
  if (visit_ != Visit::kSkip) return TileKind::kPartial;
  const TileRange tile{static_cast<int32_t>(row_begin), static_cast<int32_t>(row_end),
                       static_cast<int32_t>(column_begin), static_cast<int32_t>(column_end)};
  return classify(extremes.lower, extremes.upper, mask_.causal != 0, diagonal_, tile);
}

void ColumnTiles::load_hidden(int64_t head, int64_t row_begin, int64_t row_end, ColumnSpan& span,
                              HiddenRows* hidden) const {
  const int32_t seqlen_q = static_cast<int32_t>(shape_.seqlen_q);
  int64_t first_used = span.end, last_used = span.begin - 1;
  for (int64_t column = span.begin; column < span.end; ++column) {
    const ColumnIntervals intervals =
        load_column(mask_.indices + (head * shape_.seqlen_k + column) * mask_.bounds, mask_.bounds,
                    mask_.causal != 0, seqlen_q);
    const int64_t first = mask_.causal ? std::clamp<int64_t>(column - diagonal_, 0, kInt32Max) : 0;
    hidden[column - span.begin] = {intervals.lower.start, intervals.lower.end, intervals.upper.start,
                                   intervals.upper.end, static_cast<int32_t>(first)};
    const bool sees_none = (intervals.lower.start <= row_begin && intervals.lower.end >= row_end) ||
                           (intervals.upper.start <= row_begin && intervals.upper.end >= row_end) ||
                           first >= row_end;
    if (!sees_none) {
      first_used = std::min(first_used, column);
      last_used = column;
    }
  }
  if (visit_ != Visit::kSkip) return;
  // Columns at either end that no row of the tile sees need no arithmetic; dropout draws 16 at a time.
  first_used -= (first_used - span.begin) % kDropoutBlock;
  std::copy(hidden + (first_used - span.begin), hidden + (span.end - span.begin), hidden);
  span.begin = first_used;
  span.end = last_used + 1;
}

}  // namespace flashmask::cpu
