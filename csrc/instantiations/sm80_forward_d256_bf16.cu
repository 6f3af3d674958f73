// Written by scripts/generate_instantiations.py from configs/kernels.toml; edit that.
#include "sm80/forward_launch.cuh"

namespace flashmask::sm80 {

extern const ForwardKernel forward_d256_bf16[6];
const ForwardKernel forward_d256_bf16[6] = {
    describe_forward<ForwardConfig<__nv_bfloat16, 256, 256, 128, 64, 8, false, false>>(DType::kBFloat16),
    describe_forward<ForwardConfig<__nv_bfloat16, 256, 256, 128, 64, 8, true, false>>(DType::kBFloat16),
    describe_forward<ForwardConfig<__nv_bfloat16, 256, 256, 128, 64, 8, false, true>>(DType::kBFloat16),
    describe_forward<ForwardConfig<__nv_bfloat16, 256, 256, 64, 64, 4, false, false>>(DType::kBFloat16),
    describe_forward<ForwardConfig<__nv_bfloat16, 256, 256, 64, 64, 4, true, false>>(DType::kBFloat16),
    describe_forward<ForwardConfig<__nv_bfloat16, 256, 256, 64, 64, 4, false, true>>(DType::kBFloat16),
};

}  // namespace flashmask::sm80
