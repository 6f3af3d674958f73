// Written by scripts/generate_instantiations.py from configs/kernels.toml; edit that.
#include "sm90/backward_launch.cuh"

namespace flashmask::sm90 {

extern const BackwardKernel backward_d192_bf16[4];
const BackwardKernel backward_d192_bf16[4] = {
    describe_backward<WideBackwardConfig<__nv_bfloat16, 192, 192, 64, 2, false, false>>(DType::kBFloat16),
    describe_backward<WideBackwardConfig<__nv_bfloat16, 192, 192, 64, 2, false, true>>(DType::kBFloat16),
    describe_backward<WideBackwardConfig<__nv_bfloat16, 192, 192, 64, 2, true, false>>(DType::kBFloat16),
    describe_backward<WideBackwardConfig<__nv_bfloat16, 192, 192, 64, 2, true, true>>(DType::kBFloat16),
};

}  // namespace flashmask::sm90
