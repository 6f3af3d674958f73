// The C interface of the kernels. Callers check shapes and dtypes; a kernel checks only what it alone knows
// (whether it was built for these) and reports it instead of launching.
#pragma once

#include <cstddef>
#include <cstdint>

#include "flashmask/params.h"

#if defined(_WIN32)
#define FLASHMASK_API extern "C" __declspec(dllexport)
#else
#define FLASHMASK_API extern "C" __attribute__((visibility("default")))
#endif

// Every entry returns 0, or a nonzero code after writing a NUL-terminated reason of at most `capacity` bytes
// to `message` (which may be null).

FLASHMASK_API int flashmask_cpu_forward(const flashmask::ForwardParams* params, char* message,
                                        size_t capacity);
FLASHMASK_API int flashmask_cpu_backward(const flashmask::BackwardParams* params, char* message,
                                         size_t capacity);

// How many threads a call with num_threads = 0 would take at most: FLASHMASK_NUM_THREADS, else
// OMP_NUM_THREADS where the user set it, else the processors of the process. 0 if FLASHMASK_NUM_THREADS is no
// number of threads; such calls then fail, saying so.
FLASHMASK_API int32_t flashmask_cpu_threads();

// Device kernels, of a family: 0 the best of those that the current device can run, 80 the portable ones, 90
// those for Hopper. Tensors start at, and (but for dimensions of size 1) have strides of, multiples of 16
// bytes. *_workspace says how many bytes of device memory params->workspace must offer (256-byte aligned).
// The passes launch to params->stream on the current device and do not synchronise.
FLASHMASK_API int flashmask_cuda_forward_workspace(int32_t family, const flashmask::ForwardParams* params,
                                                   int64_t* bytes, char* message, size_t capacity);
FLASHMASK_API int flashmask_cuda_forward(int32_t family, const flashmask::ForwardParams* params,
                                         char* message, size_t capacity);
FLASHMASK_API int flashmask_cuda_backward_workspace(int32_t family, const flashmask::BackwardParams* params,
                                                    int64_t* bytes, char* message, size_t capacity);
FLASHMASK_API int flashmask_cuda_backward(int32_t family, const flashmask::BackwardParams* params,
                                          char* message, size_t capacity);

// Says in `message` which kernel flashmask_cuda_forward would launch, and how it would divide the work.
// Returns nonzero, and why, if there is none.
FLASHMASK_API int flashmask_cuda_forward_describe(int32_t family, const flashmask::ForwardParams* params,
                                                  char* message, size_t capacity);

// Says which of the built kernels the current device would run for a shape, and why that family, in
// `message`; `bounds` is C, 0 without index vectors, and what is not said is as in production, with one mask
// for all heads. Returns nonzero, and why, if there is none.
FLASHMASK_API int flashmask_cuda_describe(int32_t family, int32_t backward, flashmask::DType dtype,
                                          const flashmask::Shape* shape, int32_t bounds, int32_t dropout,
                                          int32_t deterministic, char* message, size_t capacity);

// For tests: kinds [Bm, Hm, ceil(Sq / block_m), ceil(Sk / block_n)] receives each tile's TileKind (0 masked,
// 1 partial, 2 unmasked) as forward's scan or backward's row runs see it. Returns a cudaError_t.
FLASHMASK_API int64_t flashmask_cuda_classify_workspace(const flashmask::ForwardParams* params,
                                                        int32_t block_n);
FLASHMASK_API int flashmask_cuda_classify(const flashmask::ForwardParams* params, int32_t block_m,
                                          int32_t block_n, int32_t backward, int8_t* kinds);
