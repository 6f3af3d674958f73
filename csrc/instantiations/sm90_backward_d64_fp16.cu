// Written by scripts/generate_instantiations.py from configs/kernels.toml; edit that.
#include "sm90/backward_launch.cuh"

namespace flashmask::sm90 {

extern const BackwardKernel backward_d64_fp16[2];
const BackwardKernel backward_d64_fp16[2] = {
    describe_backward<BackwardConfig<__half, 64, 64, 128, 2, false>>(DType::kFloat16),
    describe_backward<BackwardConfig<__half, 64, 64, 128, 2, true>>(DType::kFloat16),
};

}  // namespace flashmask::sm90
