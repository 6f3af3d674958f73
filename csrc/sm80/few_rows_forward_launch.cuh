// Host side of the kernel for few query rows: plan, workspace, launch.
#pragma once

#include <algorithm>

#include "common/kernel_table.h"
#include "sm80/few_rows_forward_kernel.cuh"

namespace flashmask::sm80 {

// Not worthwhile, see is_worthwhile(), where there are more rows.
template <class Config>
SplitPlan plan_few_rows(const ForwardParams& params) {
  // A cluster clears no tickets and merges without going through memory; of more tiles twice its blocks
  // without it make up for that (measured: eight tiles in its favour, 128 not).
  constexpr int64_t kClusterTiles = 32;
  const Shape& shape = params.shape;
  const int32_t pack = shape.heads_q / shape.heads_k;
  const int64_t rows = pack * shape.seqlen_q, planes = shape.batch * shape.heads_k;
  SplitPlan plan{1, 65537, Config::kBlockM, 1, 1, false};
  if (rows > Config::kBlockM) return plan;
  plan.pack = pack;
  const int64_t tiles = ceil_div(shape.seqlen_k, Config::kBlockN);
  // Counted in halves: split_count() gives a split two tiles at least, and here one, of all warps, is enough.
  plan.splits = split_count(planes, 2 * tiles);
  // Splits that are long gain by all the blocks that a multiprocessor holds (but in dense mode, which has the
  // same splits for the same sums); others, and those of many rows, would merge more for nothing.
  constexpr int64_t kLongSplit = 32;
  constexpr int kPlaces = Config::kHeadDimV <= 64 && Config::kRowGroups == 1 ? 2 : 1;
  static_assert(Config::kDense || Config::kBlocks == kPlaces, "as many blocks as registers are for");
  if (plan.splits > 1 && tiles >= kLongSplit * plan.splits) plan.splits *= kPlaces;
  plan.splits = std::min(plan.splits, kMostSplits);
  if (Config::kHopper && plan.splits > kMostInCluster && tiles <= kClusterTiles) plan.splits = kMostInCluster;
  // Groups read the same keys one after the other; where nothing is packed or split, other kernels do not.
  plan.ends_first = Config::kRowGroups == 1;
  return plan;
}

// Whether the splits of a key head are a cluster's blocks. A cluster runs where its blocks have places at the
// same time, on neighbouring multiprocessors; of clusters for all of the card some would wait for others.
template <class Config>
bool are_clustered(const SplitPlan& plan, int64_t planes) {
  return Config::kHopper && plan.splits > 1 && plan.splits <= kMostInCluster &&
         2 * planes * plan.splits <= kWave;
}

struct FewRowsWorkspace {
  int64_t tickets, o, statistics, bytes;
};

template <class Config>
FewRowsWorkspace few_rows_workspace(const ForwardParams& params) {
  const Shape& shape = params.shape;
  const SplitPlan plan = plan_few_rows<Config>(params);
  const int64_t all = shape.batch * shape.heads_k;
  const int64_t planes = plan.splits > 1 && !are_clustered<Config>(plan, all) ? all : 0;  // with tickets
  const int64_t rows = plan.pack * shape.seqlen_q;
  WorkspacePlan space;
  FewRowsWorkspace at{};
  at.tickets = space.reserve(planes * int64_t{sizeof(unsigned)});
  at.o = space.reserve(planes * plan.splits * rows * Config::kColumns * int64_t{sizeof(float)});
  at.statistics = space.reserve(planes * plan.splits * rows * int64_t{sizeof(float2)});
  at.bytes = space.end();
  return at;
}

template <class Config>
int64_t few_rows_workspace_bytes(const ForwardParams& params) {
  return few_rows_workspace<Config>(params).bytes;
}

// `splits` blocks each run at the same time and read each other's shared memory.
template <class Config>
cudaError_t launch_clusters(const FewRowsForwardArguments& arguments, int64_t blocks) {
  cudaLaunchAttribute together{};
  together.id = cudaLaunchAttributeClusterDimension;
  together.val.clusterDim = {static_cast<unsigned>(arguments.splits), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(Config::kThreads);
  config.dynamicSmemBytes = sizeof(typename Config::Smem);
  config.stream = static_cast<cudaStream_t>(arguments.params.stream);
  config.attrs = &together;
  config.numAttrs = 1;
  const auto kernel = few_rows_forward_kernel<Config>;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           static_cast<int>(config.dynamicSmemBytes));
  if (error == cudaSuccess) error = cudaLaunchKernelEx(&config, kernel, arguments);
  if (error != cudaSuccess) cudaGetLastError();  // or whoever asks next takes it for theirs
  return error;
}

template <class Config>
cudaError_t launch_few_rows_forward(const ForwardParams& params) {
  const Shape& shape = params.shape;
  const SplitPlan plan = plan_few_rows<Config>(params);
  const FewRowsWorkspace at = few_rows_workspace<Config>(params);
  char* const workspace = static_cast<char*>(params.workspace);
  const int64_t planes = shape.batch * shape.heads_k;

  FewRowsForwardArguments arguments{};
  arguments.params = params;
  arguments.mask =
      carve_mask_tiles(effective_mask(params.mask), params.visit, shape.seqlen_k, Config::kBlockN, nullptr);
  arguments.splits = plan.splits;
  arguments.exponent_scale = exponent_scale(params.softmax_scale);
  arguments.negated = params.softmax_scale < 0;
  arguments.clustered = are_clustered<Config>(plan, planes);
  if (arguments.clustered) return launch_clusters<Config>(arguments, planes * plan.splits);
  KernelChain chain(static_cast<cudaStream_t>(params.stream), Config::kHopper);
  if (plan.splits > 1) {
    arguments.tickets = reinterpret_cast<unsigned*>(workspace + at.tickets);
    arguments.o = reinterpret_cast<float*>(workspace + at.o);
    arguments.statistics = reinterpret_cast<float2*>(workspace + at.statistics);
    const cudaError_t error = chain.launch(clear_tickets_kernel<Config>, ceil_div(planes, Config::kThreads),
                                           Config::kThreads, 0, arguments.tickets, planes);
    if (error != cudaSuccess) return error;
  }
  return chain.launch(few_rows_forward_kernel<Config>, planes * plan.splits, Config::kThreads,
                      sizeof(typename Config::Smem), arguments);
}

template <class Config>
constexpr ForwardKernel describe_few_rows_forward(DType dtype) {
  constexpr bool kBare = true;  // serves calls without index vectors alone
  return describe_kernel<Config, ForwardParams>(
      dtype, few_rows_workspace_bytes<Config>, launch_few_rows_forward<Config>, plan_few_rows<Config>, kBare);
}

}  // namespace flashmask::sm80
