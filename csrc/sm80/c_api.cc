// The C interface of the sm_80 kernels: chooses one of those that were built.
#include "flashmask/c_api.h"

#include <cuda_runtime.h>

#include <cstdarg>
#include <cstdio>

#include "sm80/kernel_table.h"

namespace flashmask::sm80 {
namespace {

int fail(char* message, size_t capacity, const char* format, ...) {
  if (message != nullptr && capacity > 0) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, capacity, format, arguments);
    va_end(arguments);
  }
  return 1;
}

int fail_cuda(char* message, size_t capacity, const char* what, cudaError_t error) {
  return fail(message, capacity, "%s: %s (%s)", what, cudaGetErrorString(error), cudaGetErrorName(error));
}

bool wants_deterministic(const ForwardParams&) { return false; }
bool wants_deterministic(const BackwardParams& params) { return params.deterministic != 0; }

// The kernel whose head dims fit most tightly; the table's order decides between equals.
template <class Params>
const Kernel<Params>* choose(const Kernel<Params>* table, int count, const Params& params,
                             size_t smem_limit) {
  const Kernel<Params>* best = nullptr;
  const bool dropout = params.dropout.seed_offset != nullptr;
  for (int i = 0; i < count; ++i) {
    const Kernel<Params>& kernel = table[i];
    if (kernel.dtype != params.dtype || kernel.smem_bytes > smem_limit) continue;
    if (kernel.dropout != dropout || kernel.deterministic != wants_deterministic(params)) continue;
    if (kernel.dense != (params.visit == Visit::kDense)) continue;
    if (kernel.head_dim < params.shape.head_dim || kernel.head_dim_v < params.shape.head_dim_v) continue;
    if (best == nullptr || kernel.head_dim + kernel.head_dim_v < best->head_dim + best->head_dim_v)
      best = &kernel;
  }
  return best;
}

template <class Params>
int find(const Kernel<Params>* table, int count, const Params& params, const Kernel<Params>** kernel,
         char* message, size_t capacity) {
  int device = 0, smem_limit = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&smem_limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  }
  if (error != cudaSuccess) return fail_cuda(message, capacity, "reading the device's limits", error);
  *kernel = choose(table, count, params, static_cast<size_t>(smem_limit));
  if (*kernel == nullptr) {
    return fail(message, capacity,
                "no sm_80 kernel was built for dtype %d, head_dim %d, head_dim_v %d, dropout %d, visit mode "
                "%d within %d bytes of "
                "shared memory",
                static_cast<int>(params.dtype), params.shape.head_dim, params.shape.head_dim_v,
                params.dropout.seed_offset != nullptr, smem_limit);
  }
  return 0;
}

template <class Params>
int workspace(const Kernel<Params>* table, int count, const Params* params, int64_t* bytes, char* message,
              size_t capacity) {
  const Kernel<Params>* kernel = nullptr;
  if (const int code = find(table, count, *params, &kernel, message, capacity)) return code;
  *bytes = kernel->workspace_bytes(*params);
  return 0;
}

template <class Params>
int launch(const Kernel<Params>* table, int count, const Params* params, char* message, size_t capacity) {
  const Kernel<Params>* kernel = nullptr;
  if (const int code = find(table, count, *params, &kernel, message, capacity)) return code;
  const cudaError_t error = kernel->launch(*params);
  return error == cudaSuccess ? 0 : fail_cuda(message, capacity, "launching the kernel", error);
}

}  // namespace
}  // namespace flashmask::sm80

using flashmask::sm80::kernel_table;

int flashmask_sm80_forward_workspace(const flashmask::ForwardParams* params, int64_t* bytes, char* message,
                                     size_t capacity) {
  const auto table = kernel_table();
  return flashmask::sm80::workspace(table.forward, table.forward_count, params, bytes, message, capacity);
}

int flashmask_sm80_forward(const flashmask::ForwardParams* params, char* message, size_t capacity) {
  const auto table = kernel_table();
  return flashmask::sm80::launch(table.forward, table.forward_count, params, message, capacity);
}

int flashmask_sm80_backward_workspace(const flashmask::BackwardParams* params, int64_t* bytes, char* message,
                                      size_t capacity) {
  const auto table = kernel_table();
  return flashmask::sm80::workspace(table.backward, table.backward_count, params, bytes, message, capacity);
}

int flashmask_sm80_backward(const flashmask::BackwardParams* params, char* message, size_t capacity) {
  const auto table = kernel_table();
  return flashmask::sm80::launch(table.backward, table.backward_count, params, message, capacity);
}
