// The kernel for few query rows among Hopper's: the portable one, which what such a call takes leaves nothing
// to gain on.
#pragma once

#include "sm80/few_rows_forward_launch.cuh"

namespace flashmask::sm90 {

using sm80::describe_few_rows_forward;
using sm80::FewRowsForwardConfig;

}  // namespace flashmask::sm90
