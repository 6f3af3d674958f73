// Written by scripts/generate_instantiations.py from configs/kernels.toml; edit that.
#include "sm80/forward_launch.cuh"

namespace flashmask::sm80 {

extern const ForwardKernel forward_d128_fp16[3];
const ForwardKernel forward_d128_fp16[3] = {
    describe_forward<ForwardConfig<__half, 128, 128, 128, 64, 4, false, false>>(DType::kFloat16),
    describe_forward<ForwardConfig<__half, 128, 128, 128, 64, 4, false, true>>(DType::kFloat16),
    describe_forward<ForwardConfig<__half, 128, 128, 128, 32, 4, true, false>>(DType::kFloat16),
};

}  // namespace flashmask::sm80
