// Which column tile of which key head a block of backward takes, by its number: that of the block or, where
// blocks take one after another or wait for each other, that of its ticket.
#pragma once

#include "common/tile_order.cuh"

namespace flashmask {

// In free order a head's column tiles ascend, so under causality the longest come first, or come as
// `order.tiles` says. In deterministic order a head's column tiles descend, so that a column tile waits only
// for lower numbers, and heads take turns for a reason of their own: where all column tiles visit the same
// few rows (global tokens, the last of causal blocks) the chain of hand-overs through one head is longer than
// its share of the work, so it has to pass under the work of other heads. How many are in turns is what L2
// holds of what the blocks that run share, more of it where there is such a chain (deterministic_order_kernel
// in mask_prepass.cu).
//
// Any number of heads from 1 on is safe: a head's column tiles descend with the number whatever it
// is. Nor do results depend on it: a row tile's column tiles add in descending order, however many heads run
// beside.
//
// Where the query heads of a key head are divided into parts, each part has its column tiles like a head.
struct BlockPlace {
  int column_tile;
  int head_k;
  int batch;
  int part;
  int first_head, end_head;  // the query heads

  BlockPlace() = default;

  // `in_turns` heads take turns; 0: none do, and column tiles ascend.
  __device__ __forceinline__ BlockPlace(const Shape& shape, int column_tiles, int in_turns, int number,
                                        int parts = 1) {
    const int heads = shape.heads_k * parts;
    int plane = number / column_tiles;
    column_tile = number % column_tiles;
    if (in_turns > 0) {
      const RankInPlane at(number, column_tiles, static_cast<int>(shape.batch) * heads, in_turns);
      plane = at.plane;
      column_tile = column_tiles - 1 - at.rank;
    }
    head_k = plane % heads / parts;
    part = plane % parts;
    batch = plane / heads;
    const int members = shape.heads_q / heads;
    first_head = plane % heads * members;
    end_head = first_head + members;
  }

  __device__ __forceinline__ BlockPlace(const Shape& shape, int column_tiles, const TileOrder& order,
                                        int number, int parts = 1)
      : BlockPlace(shape, column_tiles, order.turns(), number, parts) {
    const int rank = column_tiles - 1 - column_tile;
    if (order.tiles != nullptr) {
      column_tile = order.tile(batch, head_k, rank);
    } else if (order.heads_in_turns == nullptr && order.known_in_turns > 0) {
      column_tile = rank;
    }
  }
};

}  // namespace flashmask
