// Written by scripts/generate_instantiations.py from configs/kernels.toml; edit that.
#include "sm90/forward_launch.cuh"

namespace flashmask::sm90 {

extern const ForwardKernel forward_d96_bf16[4];
const ForwardKernel forward_d96_bf16[4] = {
    describe_forward<ForwardConfig<__nv_bfloat16, 96, 96, 2, 128, 2, false, true, false>>(DType::kBFloat16),
    describe_forward<ForwardConfig<__nv_bfloat16, 96, 96, 2, 128, 2, true, true, false>>(DType::kBFloat16),
    describe_forward<ForwardConfig<__nv_bfloat16, 96, 96, 2, 128, 2, false, false, false>>(DType::kBFloat16),
    describe_forward<ForwardConfig<__nv_bfloat16, 96, 96, 2, 128, 2, true, false, false>>(DType::kBFloat16),
};

}  // namespace flashmask::sm90
