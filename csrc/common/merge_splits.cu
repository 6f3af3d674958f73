#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/host_device.h"
#include "common/merge_splits.h"
#include "common/softmax.cuh"

namespace flashmask {
namespace {

constexpr int kMergeThreads = 128;
constexpr int kMaxHeadDimV = 256;

__device__ __forceinline__ float warp_max(float x) {
  for (int distance = 16; distance > 0; distance /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, distance));
  return x;
}

__device__ __forceinline__ float warp_sum(float x) {
  for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(~0u, x, distance);
  return x;
}

// One warp a row of [B, Hq, Sq]; a lane has four columns of each 128.
template <typename Element>
__global__ void __launch_bounds__(kMergeThreads)
    merge_splits_kernel(const ForwardParams params, int splits, const float* lse, const float* o) {
  constexpr int kParts = 2;
  static_assert(kParts * 128 >= kMaxHeadDimV, "a row's columns are all held at once");
  wait_for_kernels_before();
  const Shape& shape = params.shape;
  const int64_t rows = shape.batch * shape.heads_q * shape.seqlen_q;
  const int row = static_cast<int>(blockIdx.x * (kMergeThreads / 32) + threadIdx.x / 32);
  const int lane = threadIdx.x % 32;
  if (row >= rows) return;

  float largest = -INFINITY;
  for (int s = lane; s < splits; s += 32) largest = fmaxf(largest, lse[s * rows + row]);
  largest = warp_max(largest);
  const float shift = OnlineSoftmax<1>::finite(largest);

  float total = 0.f;
  float4 sums[kParts] = {};
  const float* part = o + int64_t{row} * shape.head_dim_v + 4 * lane;
  for (int first = 0; first < splits; first += 32) {
    const int count = min(32, splits - first);
    const float weight = lane < count ? expf(lse[(first + lane) * rows + row] - shift) : 0.f;
    total += weight;
#pragma unroll 4
    for (int s = 0; s < count; ++s, part += rows * shape.head_dim_v) {
      const float share = __shfl_sync(~0u, weight, s);
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        if (128 * i + 4 * lane >= shape.head_dim_v) continue;
        const float4 values = *reinterpret_cast<const float4*>(part + 128 * i);
        sums[i].x += share * values.x;
        sums[i].y += share * values.y;
        sums[i].z += share * values.z;
        sums[i].w += share * values.w;
      }
    }
  }
  total = warp_sum(total);
  const float inverse = total == 0.f ? 0.f : 1.f / total;
  if (lane == 0) static_cast<float*>(params.lse)[row] = total == 0.f ? -INFINITY : shift + logf(total);

  const int seqlen_q = static_cast<int>(shape.seqlen_q);
  const int head_row = row / seqlen_q;
  Element* out = static_cast<Element*>(params.o.data) + head_row / shape.heads_q * params.o.stride_batch +
                 row % seqlen_q * params.o.stride_seq + head_row % shape.heads_q * params.o.stride_head +
                 4 * lane;
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    if (128 * i + 4 * lane >= shape.head_dim_v) continue;
    *reinterpret_cast<uint2*>(out + 128 * i) =
        make_uint2(pack<Element>(sums[i].x * inverse, sums[i].y * inverse),
                   pack<Element>(sums[i].z * inverse, sums[i].w * inverse));
  }
}

}  // namespace

cudaError_t launch_merge_splits(const ForwardParams& params, int splits, const float* lse, const float* o,
                                KernelChain& chain) {
  const Shape& shape = params.shape;
  const int64_t rows = shape.batch * shape.heads_q * shape.seqlen_q;
  const auto kernel =
      params.dtype == DType::kFloat16 ? merge_splits_kernel<__half> : merge_splits_kernel<__nv_bfloat16>;
  return chain.launch(kernel, ceil_div(rows, kMergeThreads / 32), kMergeThreads, 0, params, splits, lse, o);
}

}  // namespace flashmask
