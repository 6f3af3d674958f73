// Lets one inline function serve the CPU kernel and the CUDA kernels.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define FLASHMASK_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FLASHMASK_HOST_DEVICE inline __attribute__((always_inline))
#endif

namespace flashmask {

FLASHMASK_HOST_DEVICE constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace flashmask
