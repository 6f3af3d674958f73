// Merging the parts of O and lse that splits of the key columns leave.
#pragma once

#include "common/kernel_chain.h"
#include "flashmask/params.h"

namespace flashmask {

// Writes params.o and params.lse from `lse` [splits, B, Hq, Sq] and `o` [splits, B, Hq, Sq, Dv]: with weights
// exp(lse_s) / sum of all exp(lse_s). A row without a key in any split gets 0 and -inf. There are less
// than 2^31 rows: only few are worth splitting.
cudaError_t launch_merge_splits(const ForwardParams& params, int splits, const float* lse, const float* o,
                                KernelChain& chain);

}  // namespace flashmask
