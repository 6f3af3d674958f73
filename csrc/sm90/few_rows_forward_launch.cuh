// The kernel for few query rows among Hopper's: the portable one, since such a call waits for memory and not
// for what Hopper computes faster.
#pragma once

#include "sm80/few_rows_forward_launch.cuh"

namespace flashmask::sm90 {

using sm80::describe_few_rows_forward;
using sm80::FewRowsForwardConfig;

}  // namespace flashmask::sm90
