// The pre-pass: startend_row_indices -> MaskTiles, on the device; and what is derived from them before a main
// kernel starts.
#pragma once

#include "common/tile_order.cuh"

namespace flashmask {

// Fills what `out` points at. `mask` is an effective_mask().
cudaError_t launch_mask_prepass(const Mask& mask, const Shape& shape, const MaskTiles& out,
                                cudaStream_t stream);

// These choices are those of production in the test modes too: what they visit beyond it does not count.
//
// Writes how many heads of deterministic backward take turns (BlockPlace), at least 1, from what `mask`,
// which the pre-pass has filled, visits in row tiles of block_m. `row_bytes` is what blocks share of a query
// row. The query heads of a key head may be divided into parts, each of which counts as a head.
cudaError_t launch_heads_choice(MaskTiles mask, const Shape& shape, int block_m, int64_t row_bytes, int parts,
                                int32_t* heads_in_turns, cudaStream_t stream);

// Writes whether a row tile of block_m is visited by more than `most` column tiles on average.
cudaError_t launch_visits_choice(MaskTiles mask, const Shape& shape, int block_m, int most, int32_t* more,
                                 cudaStream_t stream);

// Write what `order` points at, if anything: of every mask plane the row (column) tiles, those that visit
// most column (row) tiles first, equals as they come without an order; and how many heads take turns. `mask`
// is filled by the pre-pass; in the test modes too what production would visit counts. `key_bytes` is what
// the row tiles of a query head share of a key, `row_bytes` what the column tiles of a key head share of a
// query row (of all query heads of the part).
cudaError_t launch_row_order(const MaskTiles& mask, const Shape& shape, int block_m, int64_t key_bytes,
                             const TileOrder& order, cudaStream_t stream);
cudaError_t launch_column_order(const MaskTiles& mask, const Shape& shape, int block_m, int64_t row_bytes,
                                int parts, const TileOrder& order, cudaStream_t stream);

}  // namespace flashmask
