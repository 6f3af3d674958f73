// Written by scripts/generate_instantiations.py from configs/kernels.toml; edit that.
#include "sm90/forward_launch.cuh"

namespace flashmask::sm90 {

extern const ForwardKernel forward_d256_fp16[4];
const ForwardKernel forward_d256_fp16[4] = {
    describe_forward<ForwardConfig<__half, 256, 256, 2, 64, 2, false, true, false>>(DType::kFloat16),
    describe_forward<ForwardConfig<__half, 256, 256, 2, 64, 2, true, true, false>>(DType::kFloat16),
    describe_forward<ForwardConfig<__half, 256, 256, 2, 64, 2, false, false, false>>(DType::kFloat16),
    describe_forward<ForwardConfig<__half, 256, 256, 2, 64, 2, true, false, false>>(DType::kFloat16),
};

}  // namespace flashmask::sm90
