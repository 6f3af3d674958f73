// Tile arithmetic for AVX-512 (Skylake-X, Zen 4 and later); an empty file elsewhere than x86-64.
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")
#endif
#define FLASHMASK_ISA avx512
#define FLASHMASK_VECTOR_BYTES 64
#define FLASHMASK_MICRO_ROWS 8
#include "cpu/tile_ops_impl.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
