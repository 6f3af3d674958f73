#include "sm90/tensor_map.h"

namespace flashmask::sm90 {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

// From the driver at run time: nothing links libcuda.
Encode find_encode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
  return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(function)
                                                                      : nullptr;
}

// `sizes` and `strides` (in elements, of all but the innermost dimension) from the inside out.
template <int kRank>
cudaError_t encode_boxes(CUtensorMap* map, void* data, DType dtype, const int64_t (&sizes)[kRank],
                         const int64_t (&strides)[kRank - 1], const int (&box)[kRank]) {
  static const Encode encode = find_encode();
  if (encode == nullptr) return cudaErrorNotSupported;
  constexpr int64_t kElementBytes = 2;
  cuuint64_t extents[kRank], steps[kRank - 1];
  cuuint32_t box_extents[kRank], element_strides[kRank];
  for (int i = 0; i < kRank; ++i) {
    extents[i] = static_cast<cuuint64_t>(sizes[i]);
    // The stride of a single one leads nowhere, but must be a multiple of 16 bytes.
    if (i > 0) steps[i - 1] = static_cast<cuuint64_t>(sizes[i] > 1 ? strides[i - 1] * kElementBytes : 16);
    box_extents[i] = static_cast<cuuint32_t>(box[i]);
    element_strides[i] = 1;
  }
  const CUtensorMapDataType type =
      dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const CUresult result = encode(map, type, kRank, data, extents, steps, box_extents, element_strides,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace

cudaError_t encode_tensor_map(CUtensorMap* map, const Tensor& tensor, DType dtype, int64_t batch,
                              int64_t rows, int heads, int columns, int box_rows) {
  return encode_boxes<4>(map, tensor.data, dtype, {columns, rows, heads, batch},
                         {tensor.stride_seq, tensor.stride_head, tensor.stride_batch}, {64, box_rows, 1, 1});
}

cudaError_t encode_packed_tensor_map(CUtensorMap* map, const Tensor& tensor, DType dtype, int64_t batch,
                                     int64_t rows, int heads, int columns, int pack, int box_rows) {
  return encode_boxes<5>(
      map, tensor.data, dtype, {columns, pack, rows, heads / pack, batch},
      {tensor.stride_head, tensor.stride_seq, tensor.stride_head * pack, tensor.stride_batch},
      {64, pack, box_rows, 1, 1});
}

}  // namespace flashmask::sm90
