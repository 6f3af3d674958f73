// Written by scripts/generate_instantiations.py from configs/kernels.toml; edit that.
#include "sm80/few_rows_forward_launch.cuh"

namespace flashmask::sm80 {

extern const ForwardKernel few_rows_forward_d64_bf16[6];
const ForwardKernel few_rows_forward_d64_bf16[6] = {
    describe_few_rows_forward<FewRowsForwardConfig<80, __nv_bfloat16, 64, 64, 8, 1, false>>(DType::kBFloat16),
    describe_few_rows_forward<FewRowsForwardConfig<80, __nv_bfloat16, 64, 64, 8, 1, true>>(DType::kBFloat16),
    describe_few_rows_forward<FewRowsForwardConfig<80, __nv_bfloat16, 64, 64, 8, 2, false>>(DType::kBFloat16),
    describe_few_rows_forward<FewRowsForwardConfig<80, __nv_bfloat16, 64, 64, 8, 2, true>>(DType::kBFloat16),
    describe_few_rows_forward<FewRowsForwardConfig<80, __nv_bfloat16, 64, 64, 8, 4, false>>(DType::kBFloat16),
    describe_few_rows_forward<FewRowsForwardConfig<80, __nv_bfloat16, 64, 64, 8, 4, true>>(DType::kBFloat16),
};

}  // namespace flashmask::sm80
