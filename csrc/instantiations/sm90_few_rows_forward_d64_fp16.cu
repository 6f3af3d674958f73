// Written by scripts/generate_instantiations.py from configs/kernels.toml; edit that.
#include "sm90/few_rows_forward_launch.cuh"

namespace flashmask::sm90 {

extern const ForwardKernel few_rows_forward_d64_fp16[2];
const ForwardKernel few_rows_forward_d64_fp16[2] = {
    describe_few_rows_forward<FewRowsForwardConfig<90, __half, 64, 64, 8, 1, false>>(DType::kFloat16),
    describe_few_rows_forward<FewRowsForwardConfig<90, __half, 64, 64, 8, 1, true>>(DType::kFloat16),
};

}  // namespace flashmask::sm90
