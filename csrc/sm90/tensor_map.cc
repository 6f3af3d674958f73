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

}  // namespace

cudaError_t encode_tensor_map(CUtensorMap* map, const Tensor& tensor, DType dtype, int64_t batch,
                              int64_t rows, int heads, int columns, int box_rows) {
  static const Encode encode = find_encode();
  if (encode == nullptr) return cudaErrorNotSupported;
  constexpr cuuint64_t kElementBytes = 2;
  const cuuint64_t sizes[4] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows),
                               static_cast<cuuint64_t>(heads), static_cast<cuuint64_t>(batch)};
  const cuuint64_t strides[3] = {static_cast<cuuint64_t>(tensor.stride_seq) * kElementBytes,
                                 static_cast<cuuint64_t>(tensor.stride_head) * kElementBytes,
                                 static_cast<cuuint64_t>(tensor.stride_batch) * kElementBytes};
  const cuuint32_t box[4] = {64, static_cast<cuuint32_t>(box_rows), 1, 1};
  const cuuint32_t element_strides[4] = {1, 1, 1, 1};
  const CUtensorMapDataType type =
      dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const CUresult result = encode(map, type, 4, tensor.data, sizes, strides, box, element_strides,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace flashmask::sm90
