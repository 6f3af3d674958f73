// The C interface of the sm_80 kernels: chooses one of those that were built.
#include "flashmask/c_api.h"

#include <cuda_runtime.h>

#include <cstdarg>
#include <cstdio>

#include "sm80/kernel_table.h"

namespace flashmask::sm80 {
namespace {

void write(char* message, size_t capacity, const char* format, ...) {
  if (message == nullptr || capacity == 0) return;
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(message, capacity, format, arguments);
  va_end(arguments);
}

int fail_cuda(char* message, size_t capacity, const char* what, cudaError_t error) {
  write(message, capacity, "%s: %s (%s)", what, cudaGetErrorString(error), cudaGetErrorName(error));
  return 1;
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
    write(message, capacity,
          "no sm_80 kernel was built for dtype %d, head_dim %d, head_dim_v %d, dropout %d, visit mode "
          "%d, deterministic %d within %d bytes of shared memory",
          static_cast<int>(params.dtype), params.shape.head_dim, params.shape.head_dim_v,
          params.dropout.seed_offset != nullptr, static_cast<int>(params.visit), wants_deterministic(params),
          smem_limit);
    return 1;
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

// What flashmask_sm80_describe says of the kernel that params would run.
template <class Params>
int describe(const Kernel<Params>* table, int count, const Params& params, char* message, size_t capacity) {
  const Kernel<Params>* kernel = nullptr;
  if (const int code = find(table, count, params, &kernel, message, capacity)) return code;
  write(message, capacity,
        "%d query rows x %d key columns a tile, head dims up to %d and %d, %zu bytes of shared memory",
        kernel->block_m, kernel->block_n, kernel->head_dim, kernel->head_dim_v, kernel->smem_bytes);
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

int flashmask_sm80_describe(int32_t backward, flashmask::DType dtype, int32_t head_dim, int32_t head_dim_v,
                            int32_t dropout, int32_t deterministic, char* message, size_t capacity) {
  const auto table = kernel_table();
  const int64_t seed_offset[2] = {0, 0};
  const auto fill = [&](auto params) {
    params.dtype = dtype;
    params.shape.head_dim = head_dim;
    params.shape.head_dim_v = head_dim_v;
    params.dropout.seed_offset = dropout != 0 ? seed_offset : nullptr;
    return params;
  };
  if (backward == 0) {
    return flashmask::sm80::describe(table.forward, table.forward_count, fill(flashmask::ForwardParams{}),
                                     message, capacity);
  }
  auto params = fill(flashmask::BackwardParams{});
  params.deterministic = deterministic;
  return flashmask::sm80::describe(table.backward, table.backward_count, params, message, capacity);
}
