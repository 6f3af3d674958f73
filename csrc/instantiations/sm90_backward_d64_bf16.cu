// Written by scripts/generate_instantiations.py from configs/kernels.toml; edit that.
#include "sm90/backward_launch.cuh"

namespace flashmask::sm90 {

extern const BackwardKernel backward_d64_bf16[4];
const BackwardKernel backward_d64_bf16[4] = {
    describe_backward<BackwardConfig<__nv_bfloat16, 64, 64, 128, 3, false, false>>(DType::kBFloat16),
    describe_backward<BackwardConfig<__nv_bfloat16, 64, 64, 128, 3, false, true>>(DType::kBFloat16),
    describe_backward<BackwardConfig<__nv_bfloat16, 64, 64, 128, 3, true, false>>(DType::kBFloat16),
    describe_backward<BackwardConfig<__nv_bfloat16, 64, 64, 128, 3, true, true>>(DType::kBFloat16),
};

}  // namespace flashmask::sm90
