// Written by scripts/generate_instantiations.py from configs/kernels.toml; edit that.
#include "sm90/forward_launch.cuh"

namespace flashmask::sm90 {

extern const ForwardKernel forward_d128_fp16[4];
const ForwardKernel forward_d128_fp16[4] = {
    describe_forward<ForwardConfig<__half, 128, 128, 2, 128, 2, false, true>>(DType::kFloat16),
    describe_forward<ForwardConfig<__half, 128, 128, 2, 128, 2, true, true>>(DType::kFloat16),
    describe_forward<ForwardConfig<__half, 128, 128, 2, 128, 2, false, false>>(DType::kFloat16),
    describe_forward<ForwardConfig<__half, 128, 128, 2, 128, 2, true, false>>(DType::kFloat16),
};

}  // namespace flashmask::sm90
