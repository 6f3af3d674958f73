// Host side of the forward kernel: workspace plan, pre-pass, launch.
#pragma once

#include "common/kernel_table.h"
#include "common/mask_prepass.h"
#include "sm80/forward_kernel.cuh"

namespace flashmask::sm80 {

template <class Config>
int64_t forward_workspace_bytes(const ForwardParams& params) {
  return mask_tiles_bytes(effective_mask(params.mask), params.shape.seqlen_k, Config::kBlockN);
}

template <class Config>
cudaError_t launch_forward(const ForwardParams& params) {
  const Mask mask = effective_mask(params.mask);
  ForwardArguments arguments{params, {}, static_cast<int>(ceil_div(params.shape.seqlen_q, Config::kBlockM))};
  arguments.mask = carve_mask_tiles(mask, params.visit, params.shape.seqlen_k, Config::kBlockN,
                                    static_cast<char*>(params.workspace));
  KernelChain chain(static_cast<cudaStream_t>(params.stream), false);
  const cudaError_t error = launch_mask_prepass(mask, params.shape, arguments.mask, chain);
  if (error != cudaSuccess) return error;

  const int64_t blocks = int64_t{arguments.row_tiles} * params.shape.heads_q * params.shape.batch;
  return chain.launch(forward_kernel<Config>, blocks, Config::kThreads, sizeof(typename Config::Smem),
                      arguments);
}

template <class Config>
constexpr ForwardKernel describe_forward(DType dtype) {
  return describe_kernel<Config, ForwardParams>(dtype, forward_workspace_bytes<Config>,
                                                launch_forward<Config>);
}

}  // namespace flashmask::sm80
