// The pre-pass: startend_row_indices -> MaskTiles, on the device; and what is derived from them before a main
// kernel starts. Where there are no indices the host knows what is derived.
#pragma once

#include "common/kernel_chain.h"
#include "common/tile_order.cuh"

namespace flashmask {

// Fills what `out` points at, and clears `ticket`, if there is one. `mask` is an effective_mask(), here and
// below.
cudaError_t launch_mask_prepass(const Mask& mask, const Shape& shape, const MaskTiles& out,
                                KernelChain& chain, unsigned* ticket = nullptr);

// These choices are those of production in the test modes too: what they visit beyond it does not count.
//
// Writes `order`, on the device, from what `mask`, which the pre-pass has filled, visits in row tiles of
// block_m. `row_bytes` is what blocks share of a query row. The query heads of a key head may be divided into
// parts, each of which counts as a head.
cudaError_t set_deterministic_order(MaskTiles mask, const Shape& shape, int block_m, int64_t row_bytes,
                                    int parts, DeterministicOrder* order, KernelChain& chain);

// Whether a row tile of block_m is visited by more than `most` column tiles on average: without indices
// `known`, at once, else `more`, on the device.
cudaError_t choose_by_visits(const Mask& mask, MaskTiles tiles, const Shape& shape, int block_m, int most,
                             int32_t* more, bool* known, KernelChain& chain);

// Fill `order`, or what it points at, if anything: of every mask plane the row (column) tiles, those that
// visit most column (row) tiles first, equals as they come without an order; and how many heads take turns.
// `tiles` is filled by the pre-pass, but for its sizes not read without indices; in the test modes too what
// production would visit counts. `key_bytes` is what the row tiles of a query head share of a key,
// `row_bytes` what the column tiles of a key head share of a query row (of all query heads of the part).
cudaError_t set_row_order(const Mask& mask, const MaskTiles& tiles, const Shape& shape, int block_m,
                          int64_t key_bytes, TileOrder* order, KernelChain& chain);
cudaError_t set_column_order(const Mask& mask, const MaskTiles& tiles, const Shape& shape, int block_m,
                             int64_t row_bytes, int parts, TileOrder* order, KernelChain& chain);

}  // namespace flashmask
