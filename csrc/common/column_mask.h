// The mask policy's arithmetic, shared by every back end: intervals of masked rows per key column, their
// minimum and maximum over a column tile, and the classification of a tile by them.
//
// A column has up to two slots by role: lower [LTS, LTE) and upper [UTS, UTE), both of masked query rows.
// Causality is the third source of masked rows, known in closed form. ColumnMask.block_map(rule="minmax") is
// the oracle of classify().
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace flashmask {

inline constexpr int32_t kInt32Max = 2147483647;
inline constexpr int32_t kInt32Min = -kInt32Max - 1;

enum class TileKind : int32_t { kMasked = 0, kPartial = 1, kUnmasked = 2 };

// Masked rows [start, end) of one slot of one column. An empty one is always {kInt32Max, kInt32Min}, so that
// it touches no tile and keeps every tile it belongs to from being called masked.
struct Interval {
  int32_t start;
  int32_t end;
};

FLASHMASK_HOST_DEVICE Interval empty_interval() { return {kInt32Max, kInt32Min}; }

// Clamps to the rows that exist; whatever the user wrote, the result is a subset of [0, seqlen_q) or empty.
FLASHMASK_HOST_DEVICE Interval make_interval(int32_t start, int32_t end, int32_t seqlen_q) {
  start = start > 0 ? start : 0;
  end = end < seqlen_q ? end : seqlen_q;
  return start < end ? Interval{start, end} : empty_interval();
}

struct ColumnIntervals {
  Interval lower;
  Interval upper;
};

// `column` points at the `bounds` values of one column: startend_row_indices[b, h, j, :].
FLASHMASK_HOST_DEVICE ColumnIntervals load_column(const int32_t* column, int32_t bounds, bool causal,
                                                  int32_t seqlen_q) {
  ColumnIntervals intervals{empty_interval(), empty_interval()};
  if (bounds == 1) {
    intervals.lower = make_interval(column[0], seqlen_q, seqlen_q);
  } else if (bounds == 2 && causal) {
    intervals.lower = make_interval(column[0], column[1], seqlen_q);
  } else if (bounds == 2) {
    intervals.lower = make_interval(column[0], seqlen_q, seqlen_q);
    intervals.upper = make_interval(0, column[1], seqlen_q);
  } else if (bounds == 4) {
    intervals.lower = make_interval(column[0], column[1], seqlen_q);
    intervals.upper = make_interval(column[2], column[3], seqlen_q);
  }
  return intervals;
}

// Extremes of one slot over the in-range columns of a tile (or of several tiles: they combine).
struct SlotExtremes {
  int32_t start_min;
  int32_t start_max;
  int32_t end_min;
  int32_t end_max;
};

// The identity of combine(). No tile has no in-range column, so it never reaches covers() by itself.
FLASHMASK_HOST_DEVICE SlotExtremes no_columns() { return {kInt32Max, kInt32Min, kInt32Max, kInt32Min}; }

FLASHMASK_HOST_DEVICE SlotExtremes extremes_of(Interval interval) {
  return {interval.start, interval.start, interval.end, interval.end};
}

FLASHMASK_HOST_DEVICE SlotExtremes combine(SlotExtremes a, SlotExtremes b) {
  return {a.start_min < b.start_min ? a.start_min : b.start_min,
          a.start_max > b.start_max ? a.start_max : b.start_max,
          a.end_min < b.end_min ? a.end_min : b.end_min, a.end_max > b.end_max ? a.end_max : b.end_max};
}

// Rows [row_begin, row_end), columns [column_begin, column_end) of a tile, in-range ones only.
struct TileRange {
  int32_t row_begin;
  int32_t row_end;
  int32_t column_begin;
  int32_t column_end;
};

// Whether every column's interval contains every row of the tile (sufficient: what extremes can tell).
FLASHMASK_HOST_DEVICE bool covers(SlotExtremes slot, TileRange tile) {
  return slot.start_max <= tile.row_begin && slot.end_min >= tile.row_end;
}

// Whether some column's interval may contain some row of the tile (necessary: what extremes can tell).
FLASHMASK_HOST_DEVICE bool touches(SlotExtremes slot, TileRange tile) {
  return slot.start_min < tile.row_end && slot.end_max > tile.row_begin;
}

// diagonal = Sk - Sq: row i sees column j iff j <= i + diagonal. 64-bit: it may be any difference of lengths.
FLASHMASK_HOST_DEVICE bool causal_covers(TileRange tile, int64_t diagonal) {
  return tile.column_begin > tile.row_end - 1 + diagonal;
}

FLASHMASK_HOST_DEVICE bool causal_touches(TileRange tile, int64_t diagonal) {
  return tile.column_end - 1 > tile.row_begin + diagonal;
}

FLASHMASK_HOST_DEVICE TileKind classify(SlotExtremes lower, SlotExtremes upper, bool causal, int64_t diagonal,
                                        TileRange tile) {
  if (covers(lower, tile) || covers(upper, tile) || (causal && causal_covers(tile, diagonal))) {
    return TileKind::kMasked;
  }
  if (touches(lower, tile) || touches(upper, tile) || (causal && causal_touches(tile, diagonal))) {
    return TileKind::kPartial;
  }
  return TileKind::kUnmasked;
}

}  // namespace flashmask
