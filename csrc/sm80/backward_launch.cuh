// Host side of backward: workspace plan, row statistics, pre-pass, main kernel, dQ conversion.
#pragma once

#include "common/kernel_table.h"
#include "common/mask_prepass.h"
#include "sm80/backward_kernel.cuh"

namespace flashmask::sm80 {

// Offsets into the workspace, in bytes.
struct BackwardPlan {
  int64_t mask, lse, delta, empty, order, dq, turns, ticket, total;
};

template <class Config>
BackwardPlan plan_backward(const BackwardParams& params) {
  const Shape& shape = params.shape;
  const int64_t tiles = shape.batch * shape.heads_q * ceil_div(shape.seqlen_q, Config::kBlockM);
  const bool wants_dq = params.dq.data != nullptr;
  BackwardPlan plan{};
  WorkspacePlan parts;
  plan.mask = parts.reserve(mask_tiles_bytes(effective_mask(params.mask), shape.seqlen_k, Config::kBlockN));
  plan.lse = parts.reserve(tiles * Config::kBlockM * 4);
  plan.delta = parts.reserve(tiles * Config::kBlockM * 4);
  plan.empty = parts.reserve(tiles * 4);
  plan.order = parts.reserve(Config::kDeterministic ? int64_t{sizeof(DeterministicOrder)} : 0);
  plan.dq = parts.reserve(wants_dq ? tiles * DqWorkspace<Config>::kTileFloats * 4 : 0);
  plan.turns = parts.reserve(wants_dq && Config::kDeterministic ? tiles * 4 : 0);
  plan.ticket = parts.reserve(Config::kDeterministic ? 4 : 0);
  plan.total = parts.end();
  return plan;
}

template <class Config>
int64_t backward_workspace_bytes(const BackwardParams& params) {
  return plan_backward<Config>(params).total;
}

template <class Config>
cudaError_t launch_backward(const BackwardParams& params) {
  const auto stream = static_cast<cudaStream_t>(params.stream);
  const Shape& shape = params.shape;
  const Mask mask = effective_mask(params.mask);
  const BackwardPlan plan = plan_backward<Config>(params);
  char* workspace = static_cast<char*>(params.workspace);
  const bool wants_dq = params.dq.data != nullptr;

  BackwardArguments arguments{};
  arguments.params = params;
  arguments.mask =
      carve_mask_tiles(mask, params.visit, shape.seqlen_k, Config::kBlockN, workspace + plan.mask);
  arguments.rows = {reinterpret_cast<float*>(workspace + plan.lse),
                    reinterpret_cast<float*>(workspace + plan.delta),
                    reinterpret_cast<int*>(workspace + plan.empty),
                    static_cast<int>(ceil_div(shape.seqlen_q, Config::kBlockM))};
  arguments.dq = reinterpret_cast<float*>(workspace + plan.dq);
  arguments.dq_turn = reinterpret_cast<int32_t*>(workspace + plan.turns);
  arguments.ticket = reinterpret_cast<int*>(workspace + plan.ticket);
  arguments.column_tiles = arguments.mask.tile_count;

  const int64_t row_blocks = shape.batch * shape.heads_q * arguments.rows.tiles;
  KernelChain chain(stream, false);
  cudaError_t error = launch_mask_prepass(mask, shape, arguments.mask, chain);
  if (error != cudaSuccess) return error;
  if constexpr (Config::kDeterministic) {
    auto* order = reinterpret_cast<DeterministicOrder*>(workspace + plan.order);
    const int64_t row_bytes = 2 * (shape.head_dim + shape.head_dim_v) + 4 * Config::kHeadDim;  // Q, dO; dQ
    error = set_deterministic_order(arguments.mask, shape, Config::kBlockM, row_bytes, 1, order, chain);
    if (error != cudaSuccess) return error;
    arguments.deterministic_order = order;
  }
  if (plan.total > plan.turns) {
    error = cudaMemsetAsync(workspace + plan.turns, 0, plan.total - plan.turns, stream);
    if (error != cudaSuccess) return error;
  }
  const DqClearing clearing{wants_dq ? arguments.dq : nullptr, nullptr, nullptr, 0};
  error = chain.launch(backward_before_kernel<Config>, row_blocks, 128, 0, params, arguments.rows, clearing);
  if (error != cudaSuccess) return error;
  const int64_t blocks = int64_t{arguments.column_tiles} * shape.heads_k * shape.batch;
  error = chain.launch(backward_kernel<Config>, blocks, Config::kThreads, sizeof(typename Config::Smem),
                       arguments);
  if (error != cudaSuccess || !wants_dq) return error;
  return chain.launch(backward_after_kernel<Config>, row_blocks, Config::kThreads, Config::QTile::kBytes,
                      params, arguments.dq, nullptr, arguments.rows.lse, arguments.rows.tiles);
}

template <class Config>
constexpr BackwardKernel describe_backward(DType dtype) {
  return describe_kernel<Config, BackwardParams>(dtype, backward_workspace_bytes<Config>,
                                                 launch_backward<Config>);
}

}  // namespace flashmask::sm80
