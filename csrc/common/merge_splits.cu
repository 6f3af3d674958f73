#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/host_device.h"
#include "common/merge_splits.h"
#include "common/softmax.cuh"

namespace flashmask {
namespace {

constexpr int kMergeThreads = 128;

__device__ __forceinline__ float warp_max(float x) {
  for (int distance = 16; distance > 0; distance /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, distance));
  return x;
}

__device__ __forceinline__ float warp_sum(float x) {
  for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(~0u, x, distance);
  return x;
}

// One warp a row of [B, Hq, Sq]; four columns a lane at a time.
template <typename Element>
__global__ void __launch_bounds__(kMergeThreads)
    merge_splits_kernel(const ForwardParams params, int splits, const float* __restrict__ lse,
                        const float* __restrict__ o) {
  const Shape& shape = params.shape;
  const int64_t rows = shape.batch * shape.heads_q * shape.seqlen_q;
  const int64_t row = (int64_t{blockIdx.x} * kMergeThreads + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32;
  if (row >= rows) return;

  float largest = -INFINITY;
  for (int s = lane; s < splits; s += 32) largest = fmaxf(largest, lse[s * rows + row]);
  largest = warp_max(largest);
  const float shift = OnlineSoftmax<1>::finite(largest);
  float total = 0.f;
  for (int s = lane; s < splits; s += 32) total += expf(lse[s * rows + row] - shift);
  total = warp_sum(total);
  const float inverse = total == 0.f ? 0.f : 1.f / total;
  if (lane == 0) static_cast<float*>(params.lse)[row] = total == 0.f ? -INFINITY : shift + logf(total);

  const int64_t head_row = row / shape.seqlen_q;
  Element* out = static_cast<Element*>(params.o.data) + head_row / shape.heads_q * params.o.stride_batch +
                 row % shape.seqlen_q * params.o.stride_seq + head_row % shape.heads_q * params.o.stride_head;
  for (int column = 4 * lane; column < shape.head_dim_v; column += 4 * 32) {
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 8
    for (int s = 0; s < splits; ++s) {
      const float weight = expf(lse[s * rows + row] - shift);
      const float4 part = *reinterpret_cast<const float4*>(o + (s * rows + row) * shape.head_dim_v + column);
      sum.x += weight * part.x;
      sum.y += weight * part.y;
      sum.z += weight * part.z;
      sum.w += weight * part.w;
    }
    *reinterpret_cast<uint2*>(out + column) = make_uint2(pack<Element>(sum.x * inverse, sum.y * inverse),
                                                         pack<Element>(sum.z * inverse, sum.w * inverse));
  }
}

}  // namespace

cudaError_t launch_merge_splits(const ForwardParams& params, int splits, const float* lse, const float* o,
                                cudaStream_t stream) {
  const Shape& shape = params.shape;
  const int64_t rows = shape.batch * shape.heads_q * shape.seqlen_q;
  const auto blocks = static_cast<unsigned>(ceil_div(rows, kMergeThreads / 32));
  if (params.dtype == DType::kFloat16) {
    merge_splits_kernel<__half><<<blocks, kMergeThreads, 0, stream>>>(params, splits, lse, o);
  } else {
    merge_splits_kernel<__nv_bfloat16><<<blocks, kMergeThreads, 0, stream>>>(params, splits, lse, o);
  }
  return cudaGetLastError();
}

}  // namespace flashmask
