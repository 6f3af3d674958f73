// Written by scripts/generate_instantiations.py from configs/kernels.toml; edit that.
#include <vector>

#include "common/kernel_table.h"

namespace flashmask::sm80 {

extern const ForwardKernel few_rows_forward_d64_bf16[6];
extern const ForwardKernel few_rows_forward_d64_fp16[6];
extern const ForwardKernel few_rows_forward_d96_bf16[6];
extern const ForwardKernel few_rows_forward_d96_fp16[6];
extern const ForwardKernel few_rows_forward_d128_bf16[6];
extern const ForwardKernel few_rows_forward_d128_fp16[6];
extern const ForwardKernel forward_d32_bf16[3];
extern const ForwardKernel forward_d32_fp16[3];
extern const ForwardKernel forward_d64_bf16[3];
extern const ForwardKernel forward_d64_fp16[3];
extern const ForwardKernel forward_d96_bf16[3];
extern const ForwardKernel forward_d96_fp16[3];
extern const ForwardKernel forward_d128_bf16[3];
extern const ForwardKernel forward_d128_fp16[3];
extern const ForwardKernel forward_d192_128_bf16[3];
extern const ForwardKernel forward_d192_128_fp16[3];
extern const ForwardKernel forward_d192_bf16[3];
extern const ForwardKernel forward_d192_fp16[3];
extern const ForwardKernel forward_d256_bf16[6];
extern const ForwardKernel forward_d256_fp16[6];
extern const BackwardKernel backward_d32_bf16[10];
extern const BackwardKernel backward_d32_fp16[10];
extern const BackwardKernel backward_d64_bf16[15];
extern const BackwardKernel backward_d64_fp16[15];
extern const BackwardKernel backward_d96_bf16[10];
extern const BackwardKernel backward_d96_fp16[10];
extern const BackwardKernel backward_d128_bf16[15];
extern const BackwardKernel backward_d128_fp16[15];
extern const BackwardKernel backward_d192_128_bf16[10];
extern const BackwardKernel backward_d192_128_fp16[10];
extern const BackwardKernel backward_d192_bf16[15];
extern const BackwardKernel backward_d192_fp16[15];
extern const BackwardKernel backward_d256_bf16[15];
extern const BackwardKernel backward_d256_fp16[15];

namespace {

template <class Kernel, int kCount>
void append(std::vector<Kernel>& all, const Kernel (&some)[kCount]) {
  all.insert(all.end(), some, some + kCount);
}

}  // namespace

KernelTable kernel_table() {
  static const auto forward = [] {
    std::vector<ForwardKernel> all;
    append(all, few_rows_forward_d64_bf16);
    append(all, few_rows_forward_d64_fp16);
    append(all, few_rows_forward_d96_bf16);
    append(all, few_rows_forward_d96_fp16);
    append(all, few_rows_forward_d128_bf16);
    append(all, few_rows_forward_d128_fp16);
    append(all, forward_d32_bf16);
    append(all, forward_d32_fp16);
    append(all, forward_d64_bf16);
    append(all, forward_d64_fp16);
    append(all, forward_d96_bf16);
    append(all, forward_d96_fp16);
    append(all, forward_d128_bf16);
    append(all, forward_d128_fp16);
    append(all, forward_d192_128_bf16);
    append(all, forward_d192_128_fp16);
    append(all, forward_d192_bf16);
    append(all, forward_d192_fp16);
    append(all, forward_d256_bf16);
    append(all, forward_d256_fp16);
    return all;
  }();
  static const auto backward = [] {
    std::vector<BackwardKernel> all;
    append(all, backward_d32_bf16);
    append(all, backward_d32_fp16);
    append(all, backward_d64_bf16);
    append(all, backward_d64_fp16);
    append(all, backward_d96_bf16);
    append(all, backward_d96_fp16);
    append(all, backward_d128_bf16);
    append(all, backward_d128_fp16);
    append(all, backward_d192_128_bf16);
    append(all, backward_d192_128_fp16);
    append(all, backward_d192_bf16);
    append(all, backward_d192_fp16);
    append(all, backward_d256_bf16);
    append(all, backward_d256_fp16);
    return all;
  }();
  return {forward.data(), static_cast<int>(forward.size()), backward.data(), static_cast<int>(backward.size())};
}

}  // namespace flashmask::sm80
