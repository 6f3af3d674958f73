// Written by scripts/generate_instantiations.py from configs/kernels.toml; edit that.
#include "sm90/backward_launch.cuh"

namespace flashmask::sm90 {

extern const BackwardKernel backward_d192_128_fp16[4];
const BackwardKernel backward_d192_128_fp16[4] = {
    describe_backward<WideBackwardConfig<__half, 192, 128, 64, 2, false, false>>(DType::kFloat16),
    describe_backward<WideBackwardConfig<__half, 192, 128, 64, 2, false, true>>(DType::kFloat16),
    describe_backward<WideBackwardConfig<__half, 192, 128, 64, 2, true, false>>(DType::kFloat16),
    describe_backward<WideBackwardConfig<__half, 192, 128, 64, 2, true, true>>(DType::kFloat16),
};

}  // namespace flashmask::sm90
