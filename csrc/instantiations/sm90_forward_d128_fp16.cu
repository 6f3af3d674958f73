// Written by scripts/generate_instantiations.py from configs/kernels.toml; edit that.
#include "sm90/forward_launch.cuh"

namespace flashmask::sm90 {

extern const ForwardKernel forward_d128_fp16[6];
const ForwardKernel forward_d128_fp16[6] = {
    describe_forward<ForwardConfig<__half, 128, 128, 2, 128, 2, false, true, false>>(DType::kFloat16),
    describe_forward<ForwardConfig<__half, 128, 128, 2, 128, 2, true, true, false>>(DType::kFloat16),
    describe_forward<ForwardConfig<__half, 128, 128, 3, 80, 3, false, false, true>>(DType::kFloat16),
    describe_forward<ForwardConfig<__half, 128, 128, 3, 80, 3, true, false, true>>(DType::kFloat16),
    describe_forward<ForwardConfig<__half, 128, 128, 3, 64, 3, false, false, false>>(DType::kFloat16),
    describe_forward<ForwardConfig<__half, 128, 128, 3, 64, 3, true, false, false>>(DType::kFloat16),
};

}  // namespace flashmask::sm90
