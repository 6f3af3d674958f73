// Written by scripts/generate_instantiations.py from configs/kernels.toml; edit that.
#include "sm90/forward_launch.cuh"

namespace flashmask::sm90 {

extern const ForwardKernel forward_d256_bf16[2];
const ForwardKernel forward_d256_bf16[2] = {
    describe_forward<ForwardConfig<__nv_bfloat16, 256, 256, 2, 64, 2, false>>(DType::kBFloat16),
    describe_forward<ForwardConfig<__nv_bfloat16, 256, 256, 2, 64, 2, true>>(DType::kBFloat16),
};

}  // namespace flashmask::sm90
