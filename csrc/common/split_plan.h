// How a call with few query rows is divided so that it fills the card: query heads that share K and V share a
// row tile (packing), and the key columns are split, each split leaving its part of O and lse to be merged
// (merge_splits.cu). A function of shapes alone: every visit mode has the same plan, and so have all Hopper
// cards, whose number of multiprocessors is taken to be the largest of them.
#pragma once

#include <cstdint>

#include "common/host_device.h"
#include "common/wave.h"
#include "flashmask/params.h"

namespace flashmask {

inline constexpr int kWarpgroupRows = 64;

// Row r of a warpgroup's 64 is query row r / pack of the group's first, head r % pack of the packed ones;
// rows from group_rows * pack on are nobody's.
struct SplitPlan {
  int32_t pack;        // query heads in one row tile; all of a K head's, or 1
  int32_t reciprocal;  // r * reciprocal >> 16 == r / pack
  int32_t group_rows;  // query rows of a warpgroup: 64 / pack
  int32_t row_tiles;
  int32_t splits;   // of the key columns: column tiles [s * tiles / splits, (s + 1) * tiles / splits)
  bool ends_first;  // whether such row tiles are worthwhile even where nothing is packed or split
};

// Whether the plan differs from that of a kernel that neither packs nor splits.
constexpr bool is_worthwhile(const SplitPlan& plan) {
  return plan.pack > 1 || plan.splits > 1 || plan.ends_first;
}

// Whether row tiles of `warpgroups` times 64 rows let a call of equal row tiles end first, and not those of
// `others` times 64: what is left for the last wave may be more than what tiles of more rows gain. Of a few
// waves, and of rows that fill tiles: a warpgroup without rows costs a tile next to nothing.
inline bool ends_first(const Shape& shape, int warpgroups, int others) {
  constexpr double kSlower = 1.4;  // a row in a lower tile: 1.24 at D=128 and 1.39 at D=64, measured
  constexpr int64_t kMostWaves = 4, kFewestRows = 512;
  const auto waves = [&](int groups) {
    const int64_t tiles = ceil_div(shape.seqlen_q, groups * kWarpgroupRows) * shape.heads_q * shape.batch;
    return ceil_div(tiles, kWave);
  };
  if (shape.seqlen_q < kFewestRows || waves(warpgroups) > kMostWaves) return false;
  return kSlower * static_cast<double>(warpgroups * waves(warpgroups)) <
         static_cast<double>(others * waves(others));
}

// How many splits let `items` row tiles of `tiles` column tiles each end first. Times in units of a column
// tile: an item costs two to begin and, if split, two for its part of O; to merge costs three.
inline int32_t split_count(int64_t items, int64_t tiles) {
  constexpr int64_t kFewestTiles = 2;
  const auto time = [&](int64_t splits) {
    const int64_t waves = ceil_div(items * splits, kWave);
    return splits == 1 ? waves * (tiles + 2) : waves * (ceil_div(tiles, splits) + 4) + 3;
  };
  if (items >= 4 * kWave) return 1;  // the last wave costs little
  int64_t best = 1;
  for (int64_t splits = 2; splits * kFewestTiles <= tiles && items * splits <= 16 * kWave; ++splits) {
    if (time(splits) < time(best)) best = splits;
  }
  return static_cast<int32_t>(best);
}

// `mask_heads` is Hm; row tiles of `warpgroups` times 64 rows, column tiles of block_n. The kernel that
// neither packs nor splits has row tiles of `others` times 64.
inline SplitPlan plan_splits(const Shape& shape, int32_t mask_heads, int warpgroups, int others,
                             int block_n) {
  const auto tiles_of = [&](int32_t pack) {
    return ceil_div(shape.seqlen_q, warpgroups * (kWarpgroupRows / pack));
  };
  const int32_t group = shape.heads_q / shape.heads_k;
  const bool one_mask = mask_heads == 1 || mask_heads == shape.heads_k;
  int32_t pack = 1;
  // Three quarters of the row tiles or fewer: packed rows cost their masks divisions.
  if (one_mask && group > 1 && group <= kWarpgroupRows && 4 * tiles_of(group) <= 3 * group * tiles_of(1)) {
    pack = group;
  }

  const int64_t row_tiles = tiles_of(pack);
  const int64_t items = row_tiles * (shape.heads_q / pack) * shape.batch;
  // Where queries are many, causality makes row tiles differ too much for whole waves of equal splits.
  const bool few_rows = 4 * shape.seqlen_q <= shape.seqlen_k;
  return {pack,
          65536 / pack + 1,
          kWarpgroupRows / pack,
          static_cast<int32_t>(row_tiles),
          few_rows ? split_count(items, ceil_div(shape.seqlen_k, block_n)) : 1,
          few_rows && ends_first(shape, warpgroups, others)};
}

}  // namespace flashmask
