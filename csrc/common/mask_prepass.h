// The pre-pass: startend_row_indices -> MaskTiles, on the device.
#pragma once

#include "common/mask_tiles.cuh"

namespace flashmask {

// Fills what `out` points at. `mask` is an effective_mask().
cudaError_t launch_mask_prepass(const Mask& mask, const Shape& shape, const MaskTiles& out,
                                cudaStream_t stream);

}  // namespace flashmask
