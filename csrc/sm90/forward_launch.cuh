// Host side of the Hopper forward kernel: workspace plan, descriptors, pre-pass, launch.
#pragma once

#include <algorithm>

#include "common/kernel_table.h"
#include "common/mask_prepass.h"
#include "sm90/forward_kernel.cuh"
#include "sm90/tensor_map.h"

namespace flashmask::sm90 {

inline constexpr int64_t kTicketBytes = 256;

// The ticket first, then the mask's tiles.
template <class Config>
int64_t forward_workspace_bytes(const ForwardParams& params) {
  return kTicketBytes + mask_tiles_bytes(effective_mask(params.mask), params.shape.seqlen_k, Config::kBlockN);
}

template <class Config>
cudaError_t launch_forward(const ForwardParams& params) {
  const auto stream = static_cast<cudaStream_t>(params.stream);
  const Shape& shape = params.shape;
  const Mask mask = effective_mask(params.mask);
  ForwardArguments arguments{};
  arguments.params = params;
  arguments.row_tiles = static_cast<int>(ceil_div(shape.seqlen_q, Config::kBlockM));
  arguments.work_count = static_cast<int>(arguments.row_tiles * shape.heads_q * shape.batch);
  arguments.ticket = static_cast<int*>(params.workspace);
  arguments.mask = carve_mask_tiles(mask, params.visit, shape.seqlen_k, Config::kBlockN,
                                    static_cast<char*>(params.workspace) + kTicketBytes);
  arguments.exponent_scale = exponent_scale(params.softmax_scale);
  arguments.negated = params.softmax_scale < 0;

  if (arguments.work_count == 0) return cudaSuccess;

  cudaError_t error = encode_tensor_map(&arguments.q, params.q, params.dtype, shape.batch, shape.seqlen_q,
                                        shape.heads_q, shape.head_dim, 64);
  if (error != cudaSuccess) return error;
  error = encode_tensor_map(&arguments.k, params.k, params.dtype, shape.batch, shape.seqlen_k, shape.heads_k,
                            shape.head_dim, Config::kBlockN);
  if (error != cudaSuccess) return error;
  error = encode_tensor_map(&arguments.v, params.v, params.dtype, shape.batch, shape.seqlen_k, shape.heads_k,
                            shape.head_dim_v, Config::kBlockN);
  if (error != cudaSuccess) return error;
  error = encode_tensor_map(&arguments.o, params.o, params.dtype, shape.batch, shape.seqlen_q, shape.heads_q,
                            shape.head_dim_v, 64);
  if (error != cudaSuccess) return error;

  error = cudaMemsetAsync(arguments.ticket, 0, sizeof(int), stream);
  if (error != cudaSuccess) return error;
  error = launch_mask_prepass(mask, shape, arguments.mask, stream);
  if (error != cudaSuccess) return error;

  int device = 0, multiprocessors = 0;
  error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  constexpr int kSmemBytes = sizeof(typename Config::Smem);
  error =
      cudaFuncSetAttribute(forward_kernel<Config>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes);
  if (error != cudaSuccess) return error;
  const int blocks = std::min(multiprocessors, arguments.work_count);
  forward_kernel<Config><<<blocks, Config::kThreads, kSmemBytes, stream>>>(arguments);
  return cudaGetLastError();
}

template <class Config>
constexpr ForwardKernel describe_forward(DType dtype) {
  return describe_kernel<Config, ForwardParams>(dtype, forward_workspace_bytes<Config>,
                                                launch_forward<Config>);
}

}  // namespace flashmask::sm90
