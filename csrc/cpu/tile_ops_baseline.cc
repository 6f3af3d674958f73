// Tile arithmetic for any machine: 128-bit vectors (SSE2, NEON).
#define FLASHMASK_ISA baseline
#define FLASHMASK_VECTOR_BYTES 16
#define FLASHMASK_MICRO_ROWS 6
#include "cpu/tile_ops_impl.h"
