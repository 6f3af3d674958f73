// Which column tile of which key head a block of backward takes.
#pragma once

#include "common/mask_tiles.cuh"

namespace flashmask {

// In free order (heads_in_turns is null) a head's column tiles come together and ascend, so under causality
// the longest come first. In deterministic order a head's column tiles descend, so that every block waits
// only for blocks before it, and `*heads_in_turns` heads take turns. Where all column tiles visit the same
// few rows (global tokens, the last of causal blocks) the chain of hand-overs through one head is longer than
// its share of the work, so it has to pass under the work of other heads; but L2 has to hold what the blocks
// that run share. choose_heads_in_turns (mask_prepass.cu) weighs the two.
//
// The number is written by a kernel before this one, so all threads of all blocks read the same. Any number
// from 1 on is safe: a head's column tiles descend with the block's number whatever it is. Nor do results
// depend on it: a row tile's column tiles add in descending order, however many heads run beside.
struct BlockPlace {
  int column_tile;
  int head_k;
  int batch;

  BlockPlace() = default;

  __device__ __forceinline__ BlockPlace(const Shape& shape, int column_tiles, const int32_t* heads_in_turns,
                                        int block) {
    const int heads_k = shape.heads_k;
    int plane = block / column_tiles;
    column_tile = block % column_tiles;
    if (heads_in_turns != nullptr) {
      const int in_turns = __ldg(heads_in_turns);
      const int planes = static_cast<int>(shape.batch) * heads_k;
      const int first = plane / in_turns * in_turns;
      const int heads = min(in_turns, planes - first);
      const int place = block - first * column_tiles;
      plane = first + place % heads;
      column_tile = column_tiles - 1 - place / heads;
    }
    head_k = plane % heads_k;
    batch = plane / heads_k;
  }
};

}  // namespace flashmask
