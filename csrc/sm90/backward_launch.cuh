// Host side of the Hopper backward, of tensors that are not empty: workspace plan; pre-pass and what is
// chosen from it (order, heads in turns, whether dQ is cleared); row statistics; main kernel; dQ conversion.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "common/device.h"
#include "common/kernel_table.h"
#include "common/mask_prepass.h"
#include "sm90/backward_kernel.cuh"
#include "sm90/backward_wide_kernel.cuh"
#include "sm90/sum_parts.cuh"
#include "sm90/tensor_map.h"

namespace flashmask::sm90 {

// Into how many parts the query heads of a key head are divided. A call of few column tiles, each the work of
// many query heads, leaves multiprocessors idle at its end; but a part's dK and dV go to memory and back.
// Time is in steps, each a row tile of one query head. Without a mask all column tiles take as long. Else, as
// under causality, from none to all rows are theirs, longest first.
template <class Config>
int parts_of_group(const BackwardParams& params) {
  constexpr double kMemorySteps = 7. / 256 * (Config::kHeadDim + Config::kHeadDimV);  // of a part, measured
  constexpr double kTail = 0.25;      // of the longest, in which the others have ended, measured
  constexpr double kWorthIt = 0.985;  // of the time, or the memory is not
  const Shape& shape = params.shape;
  const auto columns =
      static_cast<double>(ceil_div(shape.seqlen_k, Config::kBlockN) * shape.heads_k * shape.batch);
  const auto rows = static_cast<double>(ceil_div(shape.seqlen_q, Config::kBlockM));
  const bool even = params.mask.bounds == 0 && params.mask.causal == 0;
  const int group = shape.heads_q / shape.heads_k;
  int best = 1;
  double best_time = std::numeric_limits<double>::infinity();
  for (int parts = 1; parts <= (Config::kParts ? group : 1); ++parts) {
    if (group % parts != 0) continue;
    const double steps = group / parts * rows, memory = parts > 1 ? kMemorySteps : 0;
    const double waves = columns * parts / kWave;
    const double time =
        even ? std::ceil(waves) * (steps + memory)
             : std::max(steps + memory, waves * (steps / 2 + memory) + kTail * (steps + memory));
    if (time < kWorthIt * best_time) {
      best = parts;
      best_time = time;
    }
  }
  return best;
}

// Offsets into the workspace, in bytes.
struct BackwardPlan {
  int64_t mask, lse, delta, empty, order, cleared, columns, dq, turns, ticket, total;
  int parts;
};

template <class Config>
BackwardPlan plan_backward(const BackwardParams& params) {
  const Shape& shape = params.shape;
  const Mask mask = effective_mask(params.mask);
  const int64_t row_tiles = ceil_div(shape.seqlen_q, Config::kBlockM);
  const int64_t tiles = shape.batch * shape.heads_q * row_tiles;
  const int64_t column_tiles = ceil_div(shape.seqlen_k, Config::kBlockN);
  BackwardPlan plan{};
  WorkspacePlan space;
  plan.parts = parts_of_group<Config>(params);
  plan.mask = space.reserve(mask_tiles_bytes(mask, shape.seqlen_k, Config::kBlockN));
  plan.lse = space.reserve(tiles * Config::kBlockM * 4);
  plan.delta = space.reserve(tiles * Config::kBlockM * 4);
  plan.empty = space.reserve(tiles * 4);
  plan.order = space.reserve(Config::kDeterministic
                                 ? int64_t{sizeof(DeterministicOrder)}
                                 : tile_order_bytes(mask, shape, shape.heads_k, column_tiles, plan.parts));
  const bool wants_dq = params.dq.data != nullptr;
  plan.cleared = space.reserve(4);
  if (plan.parts > 1) {
    plan.columns = space.reserve(shape.batch * shape.heads_k * column_tiles * plan.parts *
                                 ColumnWorkspace<Config>::kFloats * 4);
  }
  plan.dq = space.reserve(wants_dq ? tiles * DqWorkspace<Config>::kTileFloats * 4 : 0);
  plan.turns = space.reserve(
      wants_dq && (Config::kDeterministic || Config::kFirstStores) ? tiles * Config::kTurns * 4 : 0);
  plan.ticket = space.reserve(Config::kTickets ? 4 : 0);
  plan.total = space.end();
  return plan;
}

template <class Config>
int64_t backward_workspace_bytes(const BackwardParams& params) {
  return plan_backward<Config>(params).total;
}

// What the portable dQ conversion asks of a configuration.
template <class Config>
struct DqConversion {
  using Element = typename Config::Element;
  static constexpr int kBlockM = Config::kBlockM;
  static constexpr int kThreads = 128 * Config::kConsumers;
  using QTile = sm80::SmemTile<Config::kBlockM, Config::kHeadDim>;
};

template <class Config>
cudaError_t encode_tensor_maps(const BackwardParams& params, BackwardArguments* arguments) {
  const Shape& shape = params.shape;
  const auto encode = [&](CUtensorMap* map, const Tensor& tensor, bool of_keys, int columns, int box_rows) {
    if (tensor.data == nullptr) return cudaSuccess;  // a gradient that nobody asked for
    return encode_tensor_map(map, tensor, params.dtype, shape.batch,
                             of_keys ? shape.seqlen_k : shape.seqlen_q,
                             of_keys ? shape.heads_k : shape.heads_q, columns, box_rows);
  };
  cudaError_t error = encode(&arguments->q, params.q, false, shape.head_dim, Config::kBlockM);
  if (error == cudaSuccess)
    error = encode(&arguments->dout, params.dout, false, shape.head_dim_v, Config::kBlockM);
  if (error == cudaSuccess) error = encode(&arguments->k, params.k, true, shape.head_dim, Config::kBlockN);
  if (error == cudaSuccess) error = encode(&arguments->v, params.v, true, shape.head_dim_v, Config::kBlockN);
  if (error == cudaSuccess) error = encode(&arguments->dk, params.dk, true, shape.head_dim, 64);
  if (error == cudaSuccess) error = encode(&arguments->dv, params.dv, true, shape.head_dim_v, 64);
  return error;
}

template <class Config>
cudaError_t launch_backward(const BackwardParams& params) {
  KernelChain chain(static_cast<cudaStream_t>(params.stream), true);
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
  arguments.column_tiles = arguments.mask.tile_count;

  const int64_t row_blocks = shape.batch * shape.heads_q * arguments.rows.tiles;
  arguments.ticket = reinterpret_cast<int*>(workspace + plan.ticket);
  arguments.parts = plan.parts;
  if (plan.parts > 1) arguments.columns = reinterpret_cast<float*>(workspace + plan.columns);
  arguments.work_count = static_cast<int>(arguments.column_tiles * shape.heads_k * shape.batch * plan.parts);
  int blocks = arguments.work_count;
  cudaError_t error = cudaSuccess;
  if constexpr (Config::kPersistent) {
    int multiprocessors = 0;
    error = current_device_attribute(cudaDevAttrMultiProcessorCount, &multiprocessors);
    if (error != cudaSuccess) return error;
    blocks = std::min(blocks, multiprocessors);
  }
  if (plan.total > plan.turns) {
    error = cudaMemsetAsync(workspace + plan.turns, 0, plan.total - plan.turns, chain.stream());
    if (error != cudaSuccess) return error;
  }
  error = launch_mask_prepass(mask, shape, arguments.mask, chain);
  if (error != cudaSuccess) return error;
  const int64_t row_bytes = 2 * (shape.head_dim + shape.head_dim_v) + 4 * Config::kHeadDim;  // Q, dO; dQ
  if constexpr (Config::kDeterministic) {
    auto* order = reinterpret_cast<DeterministicOrder*>(workspace + plan.order);
    error =
        set_deterministic_order(arguments.mask, shape, Config::kBlockM, row_bytes, plan.parts, order, chain);
    arguments.deterministic_order = order;
  } else {
    arguments.order = carve_tile_order(mask, shape, shape.heads_k, arguments.column_tiles,
                                       workspace + plan.order, plan.parts);
    error = set_column_order(mask, arguments.mask, shape, Config::kBlockM,
                             shape.heads_q / shape.heads_k / plan.parts * row_bytes, plan.parts,
                             &arguments.order, chain);
  }
  if (error != cudaSuccess) return error;
  sm80::DqClearing clearing{};
  if (!Config::kFirstStores) clearing.dq = wants_dq ? arguments.dq : nullptr;
  if constexpr (Config::kFirstStores && !Config::kDeterministic) {
    if (mask.indices != nullptr) {
      arguments.dq_cleared = reinterpret_cast<int32_t*>(workspace + plan.cleared);
    }
    if (wants_dq) {
      error = choose_by_visits(mask, arguments.mask, shape, Config::kBlockM, kFewVisits, arguments.dq_cleared,
                               &arguments.known_cleared, chain);
      if (error != cudaSuccess) return error;
      if (mask.indices != nullptr || arguments.known_cleared) {
        clearing = {arguments.dq, arguments.dq_cleared, arguments.dq_turn, PartWriter<Config>::kStored};
      }
    }
  }
  error = chain.launch(sm80::backward_before_kernel<Config, DqWorkspace<Config>>, row_blocks, 128, 0, params,
                       arguments.rows, clearing);
  if (error != cudaSuccess) return error;
  error = encode_tensor_maps<Config>(params, &arguments);
  if (error != cudaSuccess) return error;
  error = chain.launch(backward_kernel<Config>, blocks, Config::kThreads, sizeof(typename Config::Smem),
                       arguments);
  if (error != cudaSuccess) return error;
  if constexpr (Config::kParts) {
    if (plan.parts > 1) error = sum_parts<Config>(arguments, chain);
    if (error != cudaSuccess) return error;
  }
  if (!wants_dq) return cudaSuccess;
  using Conversion = DqConversion<Config>;
  const int32_t* visits = Config::kFirstStores ? arguments.dq_turn : nullptr;
  return chain.launch(sm80::backward_after_kernel<Conversion, DqWorkspace<Config>>, row_blocks,
                      Conversion::kThreads, Conversion::QTile::kBytes, params, arguments.dq, visits,
                      arguments.rows.lse, arguments.rows.tiles);
}

template <class Config>
constexpr BackwardKernel describe_backward(DType dtype) {
  return describe_kernel<Config, BackwardParams>(dtype, backward_workspace_bytes<Config>,
                                                 launch_backward<Config>);
}

}  // namespace flashmask::sm90
