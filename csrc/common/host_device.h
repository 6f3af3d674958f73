// Lets one inline function serve the CPU kernel and the CUDA kernels.
#pragma once

#if defined(__CUDACC__)
#define FLASHMASK_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FLASHMASK_HOST_DEVICE inline __attribute__((always_inline))
#endif
