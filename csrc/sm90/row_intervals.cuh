// Masks by element in forward where intervals both start and end in a tile: which of a warpgroup's rows are
// masked in a column, as two small halves, and two rows compared at once.
#pragma once

#include <cuda_fp16.h>

#include "common/mask_tiles.cuh"

namespace flashmask::sm90 {

inline constexpr int kGroupRows = 64;  // of a consumer warpgroup
// Row r is masked iff |2r - (begin + end - 1)| <= end - begin - 1: integers that a half holds exactly.
static_assert(2 * kGroupRows <= 2048, "a half holds integers up to 2048");

// The rows [begin, end) that a slot masks among the kGroupRows from `first_row` on, as the pair (begin + end
// - 1, end - begin - 1). The second is negative where it masks none.
__device__ __forceinline__ __half2 row_interval(const Slot& slot, int first_row) {
  const int begin = min(max(slot.start, first_row), first_row + kGroupRows) - first_row;
  const int end = min(max(slot.end, first_row), first_row + kGroupRows) - first_row;
  return __halves2half2(__int2half_rn(begin + end - 1), __int2half_rn(end - begin - 1));
}

// Two rows of a warpgroup, as mask_by_intervals() wants them.
__device__ __forceinline__ uint32_t row_pair(int first, int second) {
  const __half2 pair = __halves2half2(__int2half_rn(2 * first), __int2half_rn(2 * second));
  return reinterpret_cast<const uint32_t&>(pair);
}

// Puts a column's scores in two rows to -inf where its interval masks them.
__device__ __forceinline__ void mask_rows(float& first, float& second, uint32_t rows, uint32_t interval) {
  asm("{\n.reg .pred p, q;\n.reg .b16 c, w;\n.reg .b32 centre, width, distance;\n"
      "mov.b32 {c, w}, %3;\n"
      "mov.b32 centre, {c, c};\n"
      "mov.b32 width, {w, w};\n"
      "sub.f16x2 distance, %2, centre;\n"
      "abs.f16x2 distance, distance;\n"
      "setp.le.f16x2 p|q, distance, width;\n"
      "selp.f32 %0, 0fFF800000, %0, p;\n"
      "selp.f32 %1, 0fFF800000, %1, q;\n}\n"
      : "+f"(first), "+f"(second)
      : "r"(rows), "r"(interval));
}

// Sets the scores that a slot masks to -inf. scores[e] is the row `rows` names e / 2, column e % 2 of
// `intervals`.
__device__ __forceinline__ void mask_by_intervals(float (&scores)[4], const __half2* intervals,
                                                  uint32_t rows) {
  const uint2 pair = *reinterpret_cast<const uint2*>(intervals);
  mask_rows(scores[0], scores[2], rows, pair.x);
  mask_rows(scores[1], scores[3], rows, pair.y);
}

}  // namespace flashmask::sm90
