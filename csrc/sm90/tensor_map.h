// Descriptors for the tensor memory accelerator.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "flashmask/params.h"

namespace flashmask::sm90 {

// Describes a [batch, rows, heads, columns] tensor of 16-bit elements to TMA, which moves boxes of `box_rows`
// rows of 64 columns of one head, 128-byte swizzled. Strides and address are multiples of 16 bytes.
cudaError_t encode_tensor_map(CUtensorMap* map, const Tensor& tensor, DType dtype, int64_t batch,
                              int64_t rows, int heads, int columns, int box_rows);

// The same of [batch, heads / pack, rows, pack, columns]: a box holds `pack` consecutive heads of each of its
// `box_rows` rows, one below the other.
cudaError_t encode_packed_tensor_map(CUtensorMap* map, const Tensor& tensor, DType dtype, int64_t batch,
                                     int64_t rows, int heads, int columns, int pack, int box_rows);

}  // namespace flashmask::sm90
