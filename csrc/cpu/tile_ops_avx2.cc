// Tile arithmetic for AVX2 and FMA; an empty file elsewhere than x86-64.
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif
#define FLASHMASK_ISA avx2
#define FLASHMASK_VECTOR_BYTES 32
#define FLASHMASK_MICRO_ROWS 6
#include "cpu/tile_ops_impl.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
