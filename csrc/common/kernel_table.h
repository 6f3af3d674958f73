// What a built kernel says of itself, so that dispatch can choose among those that were built.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "common/split_plan.h"
#include "flashmask/params.h"

namespace flashmask {

template <class Params>
struct Kernel {
  DType dtype;
  int head_dim;    // serves D <= head_dim
  int head_dim_v;  // serves Dv <= head_dim_v
  bool dropout;
  bool deterministic;  // forward always is, and says false: it has no other way
  bool dense;          // serves Visit::kDense, and nothing else
  bool bare;           // serves calls without index vectors, and nothing else
  int block_m;
  int block_n;
  size_t smem_bytes;  // a device with less per block cannot run it
  int64_t (*workspace_bytes)(const Params& params);
  cudaError_t (*launch)(const Params& params);
  SplitPlan (*split_plan)(const Params& params);  // null, or: serves only what this finds worthwhile
};

// What a Config says of the kernel that is made from it.
template <class Config, class Params>
constexpr Kernel<Params> describe_kernel(DType dtype, int64_t (*workspace_bytes)(const Params&),
                                         cudaError_t (*launch)(const Params&),
                                         SplitPlan (*split_plan)(const Params&) = nullptr,
                                         bool bare = false) {
  return {dtype,
          Config::kHeadDim,
          Config::kHeadDimV,
          Config::kDropout,
          Config::kDeterministic,
          Config::kDense,
          bare,
          Config::kBlockM,
          Config::kBlockN,
          sizeof(typename Config::Smem),
          workspace_bytes,
          launch,
          split_plan};
}

// Divides a workspace: each part starts on a 256-byte boundary.
class WorkspacePlan {
 public:
  constexpr int64_t reserve(int64_t bytes) {
    const int64_t begin = end_;
    end_ += (bytes + 255) / 256 * 256;
    return begin;
  }
  constexpr int64_t end() const { return end_; }

 private:
  int64_t end_ = 0;
};

using ForwardKernel = Kernel<ForwardParams>;
using BackwardKernel = Kernel<BackwardParams>;

// Every kernel of an architecture that was built, the preferred one of equals first (instantiations/,
// generated).
struct KernelTable {
  const ForwardKernel* forward;
  int forward_count;
  const BackwardKernel* backward;
  int backward_count;
};

namespace sm80 {
KernelTable kernel_table();
}
namespace sm90 {
KernelTable kernel_table();
}

}  // namespace flashmask
