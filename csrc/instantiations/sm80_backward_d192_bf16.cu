// Written by scripts/generate_instantiations.py from configs/kernels.toml; edit that.
#include "sm80/backward_launch.cuh"

namespace flashmask::sm80 {

extern const BackwardKernel backward_d192_bf16[15];
const BackwardKernel backward_d192_bf16[15] = {
    describe_backward<BackwardConfig<__nv_bfloat16, 192, 192, 64, 64, 8, 4, 2, 4, 2, false, false, false>>(DType::kBFloat16),
    describe_backward<BackwardConfig<__nv_bfloat16, 192, 192, 64, 64, 8, 4, 2, 4, 2, true, false, false>>(DType::kBFloat16),
    describe_backward<BackwardConfig<__nv_bfloat16, 192, 192, 64, 64, 8, 4, 2, 4, 2, false, true, false>>(DType::kBFloat16),
    describe_backward<BackwardConfig<__nv_bfloat16, 192, 192, 64, 64, 8, 4, 2, 4, 2, true, true, false>>(DType::kBFloat16),
    describe_backward<BackwardConfig<__nv_bfloat16, 192, 192, 64, 64, 8, 4, 2, 4, 2, false, true, true>>(DType::kBFloat16),
    describe_backward<BackwardConfig<__nv_bfloat16, 192, 192, 64, 64, 8, 4, 2, 4, 1, false, false, false>>(DType::kBFloat16),
    describe_backward<BackwardConfig<__nv_bfloat16, 192, 192, 64, 64, 8, 4, 2, 4, 1, true, false, false>>(DType::kBFloat16),
    describe_backward<BackwardConfig<__nv_bfloat16, 192, 192, 64, 64, 8, 4, 2, 4, 1, false, true, false>>(DType::kBFloat16),
    describe_backward<BackwardConfig<__nv_bfloat16, 192, 192, 64, 64, 8, 4, 2, 4, 1, true, true, false>>(DType::kBFloat16),
    describe_backward<BackwardConfig<__nv_bfloat16, 192, 192, 64, 64, 8, 4, 2, 4, 1, false, true, true>>(DType::kBFloat16),
    describe_backward<BackwardConfig<__nv_bfloat16, 192, 192, 32, 64, 8, 2, 4, 2, 1, false, false, false>>(DType::kBFloat16),
    describe_backward<BackwardConfig<__nv_bfloat16, 192, 192, 32, 64, 8, 2, 4, 2, 1, true, false, false>>(DType::kBFloat16),
    describe_backward<BackwardConfig<__nv_bfloat16, 192, 192, 32, 64, 8, 2, 4, 2, 1, false, true, false>>(DType::kBFloat16),
    describe_backward<BackwardConfig<__nv_bfloat16, 192, 192, 32, 64, 8, 2, 4, 2, 1, true, true, false>>(DType::kBFloat16),
    describe_backward<BackwardConfig<__nv_bfloat16, 192, 192, 32, 64, 8, 2, 4, 2, 1, false, true, true>>(DType::kBFloat16),
};

}  // namespace flashmask::sm80
