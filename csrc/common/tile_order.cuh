// In what order the main kernels take their work: a tile of a head, row tiles in forward, column tiles in
// backward.
//
// What is handed out last decides when a call ends, so it should be short; but a call of hundreds of waves
// cannot lose more than a wave. Where there are few (is_soon_over) a kernel behind the pre-pass counts what
// the tiles visit, and those that visit most come first (set_row_order, set_column_order). That alone gains
// next to nothing: the last head's longest tile would still come near the end. So heads take turns, the
// longest tiles of all of them first: as many as L2 holds the shared operands of, or as fill two waves.
// Without indices the host knows all that. Results do not hang on the order, but for the sums of dQ in free
// order. The portable kernels, whose registers are full, keep theirs by position.
#pragma once

#include "common/mask_tiles.cuh"
#include "common/wave.h"

namespace flashmask {

inline constexpr int kMostOrdered = 32 * static_cast<int>(kWave);

struct TileOrder {
  int32_t* tiles;           // [Bm, Hm == 1 ? 1 : heads, count]: the tile of each rank; null: by position
  int32_t* heads_in_turns;  // one number, at least 1; null: the host knows it
  int32_t known_in_turns;   // then; 0: heads come one after the other
  int32_t batch_stride;     // of tiles
  int32_t head_stride;

  // How many heads take turns; 0: none do.
  __device__ __forceinline__ int turns() const {
    return heads_in_turns != nullptr ? __ldg(heads_in_turns) : known_in_turns;
  }

  __device__ __forceinline__ int tile(int batch, int head, int rank) const {
    return __ldg(tiles + batch * batch_stride + head * head_stride + rank);
  }
};

// What deterministic backward goes by instead, found on the device from what the mask visits.
struct DeterministicOrder {
  int32_t heads_in_turns;  // at least 1; see BlockPlace
  int32_t first_row_tile;  // where all column tiles begin to walk, to come to those before it last
};

// Which of the planes (heads of all samples), and which of its tiles, piece `number` of the work is where
// `in_turns` heads take turns.
struct RankInPlane {
  int plane;
  int rank;

  __device__ __forceinline__ RankInPlane(int number, int tiles, int planes, int in_turns) {
    const int first = number / tiles / in_turns * in_turns;
    const int heads = min(in_turns, planes - first);
    const int place = number - first * tiles;
    plane = first + place % heads;
    rank = place / heads;
  }
};

// Whether order matters: more than one wave, but few. `work_count` tiles of all heads and samples.
constexpr bool is_soon_over(int64_t work_count) { return work_count > kWave && work_count <= kMostOrdered; }

// Where nothing masks, all tiles are alike. `heads` are those whose tiles are handed out, `tiles` a head's,
// `parts` how often each is.
inline bool is_ordered(const Mask& mask, const Shape& shape, int heads, int64_t tiles, int parts) {
  return (mask.indices != nullptr || mask.causal) && is_soon_over(tiles * heads * shape.batch * parts);
}

// Whether the host knows the order: causality alone has the longest tiles first as they come.
inline bool is_order_known(const Mask& mask) { return mask.indices == nullptr; }

// `mask` is an effective_mask().
inline int64_t tile_order_bytes(const Mask& mask, const Shape& shape, int heads, int64_t tiles,
                                int parts = 1) {
  if (is_order_known(mask) || !is_ordered(mask, shape, heads, tiles, parts)) return 0;
  return (1 + int64_t{mask.batch} * (mask.heads == 1 ? 1 : heads) * tiles) * int64_t{sizeof(int32_t)};
}

inline TileOrder carve_tile_order(const Mask& mask, const Shape& shape, int heads, int64_t tiles,
                                  char* workspace, int parts = 1) {
  TileOrder order{};
  if (is_order_known(mask) || !is_ordered(mask, shape, heads, tiles, parts)) return order;
  order.heads_in_turns = reinterpret_cast<int32_t*>(workspace);
  order.tiles = order.heads_in_turns + 1;
  order.head_stride = static_cast<int32_t>(mask.heads == 1 ? 0 : tiles);
  order.batch_stride = static_cast<int32_t>(mask.batch == 1 ? 0 : (mask.heads == 1 ? 1 : heads) * tiles);
  return order;
}

}  // namespace flashmask
