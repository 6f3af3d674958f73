// Written by scripts/generate_instantiations.py from configs/kernels.toml; edit that.
#include "sm90/forward_launch.cuh"

namespace flashmask::sm90 {

extern const ForwardKernel forward_d64_bf16[4];
const ForwardKernel forward_d64_bf16[4] = {
    describe_forward<ForwardConfig<__nv_bfloat16, 64, 64, 2, 128, 4, false, true, false>>(DType::kBFloat16),
    describe_forward<ForwardConfig<__nv_bfloat16, 64, 64, 2, 128, 4, true, true, false>>(DType::kBFloat16),
    describe_forward<ForwardConfig<__nv_bfloat16, 64, 64, 3, 128, 4, false, false, false>>(DType::kBFloat16),
    describe_forward<ForwardConfig<__nv_bfloat16, 64, 64, 3, 128, 4, true, false, false>>(DType::kBFloat16),
};

}  // namespace flashmask::sm90
