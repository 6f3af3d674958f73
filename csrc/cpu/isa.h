// What tests and `info` ask of the CPU kernel beyond c_api.h.
#pragma once

#include "flashmask/c_api.h"

// "baseline", "avx2" or "avx512": the tile arithmetic this process uses.
FLASHMASK_API const char* flashmask_cpu_isa();

// values[i] = exp(values[i]) by the kernel's own exponential; dtype is kFloat32 or kFloat64.
FLASHMASK_API void flashmask_cpu_exp(int32_t dtype, void* values, int64_t count);
