// Host side of the Hopper forward kernel: workspace plan, descriptors, pre-pass, launch.
#pragma once

#include <algorithm>

#include "common/device.h"
#include "common/kernel_table.h"
#include "common/mask_prepass.h"
#include "common/merge_splits.h"
#include "common/split_plan.h"
#include "sm90/forward_kernel.cuh"
#include "sm90/tensor_map.h"

namespace flashmask::sm90 {

template <class Config>
SplitPlan split_plan_of(const ForwardParams& params) {
  // Consumers of the kernels beside this (configs/kernels.toml).
  constexpr int kOthers = Config::kHeadDim == 64 || Config::kHeadDim == 128 ? 3 : 2;
  return plan_splits(params.shape, effective_mask(params.mask).heads, Config::kConsumers, kOthers,
                     Config::kBlockN);
}

// Whether the pre-pass has to run: Producer::has_tables().
template <class Config>
bool needs_tables(const Mask& mask) {
  return !Config::kKnowsMasks || mask.indices != nullptr;
}

// Where things lie in the workspace; the ticket comes first.
struct ForwardWorkspace {
  int64_t mask_tiles, order;
  int64_t split_lse, split_o;  // SplitArguments
  int64_t bytes;
};

template <class Config>
ForwardWorkspace plan_workspace(const ForwardParams& params) {
  const Shape& shape = params.shape;
  const Mask mask = effective_mask(params.mask);
  const int splits = Config::kSplit ? split_plan_of<Config>(params).splits : 1;
  const int64_t parts = splits > 1 ? splits * shape.batch * shape.heads_q * shape.seqlen_q : 0;
  WorkspacePlan plan;
  ForwardWorkspace at{};
  plan.reserve(sizeof(*ForwardArguments::ticket));
  at.mask_tiles =
      plan.reserve(needs_tables<Config>(mask) ? mask_tiles_bytes(mask, shape.seqlen_k, Config::kBlockN) : 0);
  at.order = plan.reserve(Config::kSplit ? 0
                                         : tile_order_bytes(mask, shape, shape.heads_q,
                                                            ceil_div(shape.seqlen_q, Config::kBlockM)));
  at.split_lse = plan.reserve(parts * sizeof(float));
  at.split_o = plan.reserve(parts * shape.head_dim_v * sizeof(float));
  at.bytes = plan.end();
  return at;
}

template <class Config>
int64_t forward_workspace_bytes(const ForwardParams& params) {
  return plan_workspace<Config>(params).bytes;
}

template <class Config>
cudaError_t encode_queries(CUtensorMap* map, const ForwardParams& params, const SplitPlan& plan) {
  const Shape& shape = params.shape;
  if constexpr (Config::kSplit) {
    return encode_packed_tensor_map(map, params.q, params.dtype, shape.batch, shape.seqlen_q, shape.heads_q,
                                    shape.head_dim, plan.pack, plan.group_rows);
  }
  return encode_tensor_map(map, params.q, params.dtype, shape.batch, shape.seqlen_q, shape.heads_q,
                           shape.head_dim, 64);
}

template <class Config>
cudaError_t launch_forward(const ForwardParams& params) {
  KernelChain chain(static_cast<cudaStream_t>(params.stream), true);
  const Shape& shape = params.shape;
  const Mask mask = effective_mask(params.mask);
  const ForwardWorkspace at = plan_workspace<Config>(params);
  char* const workspace = static_cast<char*>(params.workspace);
  ForwardArguments arguments{};
  arguments.params = params;
  arguments.row_tiles = static_cast<int>(ceil_div(shape.seqlen_q, Config::kBlockM));
  arguments.work_count = static_cast<int>(arguments.row_tiles * shape.heads_q * shape.batch);
  const bool tables = needs_tables<Config>(mask);
  arguments.mask =
      carve_mask_tiles(mask, params.visit, shape.seqlen_k, Config::kBlockN, workspace + at.mask_tiles);
  if (!tables) arguments.mask.tiles = nullptr;
  if constexpr (!Config::kSplit) {
    arguments.order = carve_tile_order(mask, shape, shape.heads_q, arguments.row_tiles, workspace + at.order);
  }
  arguments.exponent_scale = exponent_scale(params.softmax_scale);
  arguments.negated = params.softmax_scale < 0;
  if constexpr (Config::kSplit) {
    const SplitPlan plan = split_plan_of<Config>(params);
    arguments.split.plan = plan;
    if (plan.splits > 1) {
      arguments.split.lse = reinterpret_cast<float*>(workspace + at.split_lse);
      arguments.split.o = reinterpret_cast<float*>(workspace + at.split_o);
    }
    arguments.work_count =
        static_cast<int>(int64_t{plan.row_tiles} * (shape.heads_q / plan.pack) * shape.batch * plan.splits);
  }

  if (arguments.work_count == 0) return cudaSuccess;

  cudaError_t error = encode_queries<Config>(&arguments.q, params, arguments.split.plan);
  if (error != cudaSuccess) return error;
  error = encode_tensor_map(&arguments.k, params.k, params.dtype, shape.batch, shape.seqlen_k, shape.heads_k,
                            shape.head_dim, Config::kBlockN);
  if (error != cudaSuccess) return error;
  error = encode_tensor_map(&arguments.v, params.v, params.dtype, shape.batch, shape.seqlen_k, shape.heads_k,
                            shape.head_dim_v, Config::kBlockN);
  if (error != cudaSuccess) return error;
  if constexpr (!Config::kSplit) {
    error = encode_tensor_map(&arguments.o, params.o, params.dtype, shape.batch, shape.seqlen_q,
                              shape.heads_q, shape.head_dim_v, 64);
    if (error != cudaSuccess) return error;
  }

  int multiprocessors = 0;
  error = current_device_attribute(cudaDevAttrMultiProcessorCount, &multiprocessors);
  if (error != cudaSuccess) return error;
  const int blocks = std::min(multiprocessors, arguments.work_count);
  if (!Config::kFirstByBlock || blocks < arguments.work_count) {
    arguments.ticket = reinterpret_cast<unsigned*>(workspace);
  }
  if (tables) {
    error = launch_mask_prepass(mask, shape, arguments.mask, chain, arguments.ticket);
  } else if (arguments.ticket != nullptr) {
    error = cudaMemsetAsync(arguments.ticket, 0, sizeof(*arguments.ticket), chain.stream());
  }
  if (error != cudaSuccess) return error;
  if constexpr (!Config::kSplit) {
    const int64_t key_bytes = 2 * (shape.head_dim + shape.head_dim_v) * shape.heads_k / shape.heads_q;
    error = set_row_order(mask, arguments.mask, shape, Config::kBlockM, key_bytes, &arguments.order, chain);
    if (error != cudaSuccess) return error;
  }
  error = chain.launch(forward_kernel<Config>, blocks, Config::kThreads, sizeof(typename Config::Smem),
                       arguments);
  if (error != cudaSuccess || arguments.split.o == nullptr) return error;
  return launch_merge_splits(params, arguments.split.plan.splits, arguments.split.lse, arguments.split.o,
                             chain);
}

template <class Config>
constexpr ForwardKernel describe_forward(DType dtype) {
  return describe_kernel<Config, ForwardParams>(
      dtype, forward_workspace_bytes<Config>, launch_forward<Config>,
      Config::kSplit ? split_plan_of<Config> : nullptr, Config::kBare);
}

}  // namespace flashmask::sm90
