// The dropout pattern of a call, tile by tile.
#pragma once

#include <cstdint>

#include "common/philox.h"
#include "cpu/tile_ops.h"
#include "flashmask/params.h"

namespace flashmask::cpu {

class DropoutPattern {
 public:
  DropoutPattern(const Dropout& dropout, const Shape& shape)
      : enabled_(dropout.seed_offset != nullptr), heads_(shape.heads_q) {
    if (!enabled_) return;
    tile_.seed = static_cast<uint64_t>(dropout.seed_offset[0]);
    tile_.offset = static_cast<uint64_t>(dropout.seed_offset[1]);
    tile_.threshold = dropout_threshold(dropout.probability);
    tile_.keep_scale = 1 / (1 - dropout.probability);
  }

  bool enabled() const { return enabled_; }

  // row and column are multiples of 16.
  DropoutTile tile(int64_t b, int64_t h, int64_t row, int64_t column) const {
    DropoutTile tile = tile_;
    tile.head = static_cast<uint32_t>(b * heads_ + h);
    tile.row_begin = static_cast<uint32_t>(row);
    tile.column_begin = static_cast<uint32_t>(column);
    return tile;
  }

 private:
  bool enabled_;
  int64_t heads_;
  DropoutTile tile_{};
};

}  // namespace flashmask::cpu
