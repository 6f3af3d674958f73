// What a built kernel says of itself, so that dispatch can choose among those that were built.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

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
  int block_m;
  int block_n;
  size_t smem_bytes;  // a device with less per block cannot run it
  int64_t (*workspace_bytes)(const Params& params);
  cudaError_t (*launch)(const Params& params);
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
