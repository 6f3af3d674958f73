// The pre-pass: startend_row_indices -> MaskTiles, on the device; and what deterministic backward derives
// from them before it starts.
#pragma once

#include "common/mask_tiles.cuh"

namespace flashmask {

// Fills what `out` points at. `mask` is an effective_mask().
cudaError_t launch_mask_prepass(const Mask& mask, const Shape& shape, const MaskTiles& out,
                                cudaStream_t stream);

// Writes how many heads of deterministic backward take turns (BlockPlace), at least 1, from what `mask`,
// which the pre-pass has filled, visits in row tiles of block_m. `row_bytes` is what blocks share of a query
// row.
cudaError_t launch_heads_choice(const MaskTiles& mask, const Shape& shape, int block_m, int64_t row_bytes,
                                int32_t* heads_in_turns, cudaStream_t stream);

}  // namespace flashmask
