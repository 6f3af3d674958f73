// Which column tile of which key head a block of backward takes.
#pragma once

#include <algorithm>

#include "common/mask_tiles.cuh"

namespace flashmask {

// In free order (heads_in_turns == 0) a head's column tiles come together and ascend, so under causality the
// longest come first. In deterministic order a head's column tiles descend, so that every block waits only
// for blocks before it, and `heads_in_turns` heads take turns: handing a row tile from one column tile to the
// next takes a microsecond or two, and where all visit the same few rows (global tokens, the last of causal
// blocks) the chain of them through one head is longer than its share of the work. It passes under the work
// of the other heads.
struct BlockPlace {
  int column_tile;
  int head_k;
  int batch;

  __device__ __forceinline__ BlockPlace(const Shape& shape, int column_tiles, int heads_in_turns) {
    const int block = static_cast<int>(blockIdx.x), heads_k = shape.heads_k;
    int plane = block / column_tiles;
    column_tile = block % column_tiles;
    if (heads_in_turns != 0) {
      const int planes = static_cast<int>(shape.batch) * heads_k;
      const int first = plane / heads_in_turns * heads_in_turns;
      const int heads = min(heads_in_turns, planes - first);
      const int place = block - first * column_tiles;
      plane = first + place % heads;
      column_tile = column_tiles - 1 - place / heads;
    }
    head_k = plane % heads_k;
    batch = plane / heads_k;
  }
};

// For deterministic order: at most 32 heads at once, and as many in every round. The few blocks of a head
// that run at a time walk its rows one behind the other, so L2 holds what they share however many heads there
// are.
inline int choose_heads_in_turns(const Shape& shape) {
  const int64_t planes = shape.batch * shape.heads_k;
  const int64_t rounds = std::max<int64_t>(1, ceil_div(planes, 32));
  return static_cast<int>(std::max<int64_t>(1, ceil_div(planes, rounds)));
}

}  // namespace flashmask
