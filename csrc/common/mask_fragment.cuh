// Applying the mask, or dropout, to a score accumulator held as m16n8 fragments.
#pragma once

#include <type_traits>

#include "common/mask_tiles.cuh"
#include "common/philox.h"

namespace flashmask {

// Whether a slot masks a row; an end that lies outside the tile for all of its columns is not asked for.
template <bool kStarts, bool kEnds>
__device__ __forceinline__ bool masks_row(int start, int end, int row) {
  static_assert(kStarts || kEnds, "a slot that ends nowhere in the tile masks all of it");
  return (!kStarts || row >= start) & (!kEnds || row < end);
}

// Bit s: intervals of slot s start in the tile, and some end in it.
__device__ __forceinline__ uint32_t with_both_ends(uint32_t touched) {
  return touched >> kStartShift & touched >> kEndShift & kSlotBits;
}

// Calls `mask(starts, ends)` with std::true_type or std::false_type each, as the slot's bits of `touched`
// say.
template <class Mask>
__device__ __forceinline__ void with_ends(uint32_t touched, int slot, Mask mask) {
  const bool starts = touched >> (kStartShift + slot) & 1, ends = touched >> (kEndShift + slot) & 1;
  if (starts && ends) {
    mask(std::true_type{}, std::true_type{});
  } else if (starts) {
    mask(std::true_type{}, std::false_type{});
  } else {
    mask(std::false_type{}, std::true_type{});
  }
}

// Sets the scores of two columns, whose slots `pair` are, to -inf in rows row0 and row0 + row_step.
template <bool kStarts, bool kEnds>
__device__ __forceinline__ void mask_pair(float (&scores)[4], const int4& pair, int row0, int row_step) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = row0 + row_step * h;
    scores[2 * h] = masks_row<kStarts, kEnds>(pair.x, pair.y, row) ? -INFINITY : scores[2 * h];
    scores[2 * h + 1] = masks_row<kStarts, kEnds>(pair.z, pair.w, row) ? -INFINITY : scores[2 * h + 1];
  }
}

// Sets the scores that one slot masks to -inf. `scores[m][n][e]` is row row0 + row_of(m) + 8 * (e / 2),
// column column0 + column_of(n) + e % 2 of the tile, row0 and column0 being this lane's own first
// element. `slots` is the tile's columns in shared memory.
template <bool kStarts = true, bool kEnds = true, int kM, int kN8, class RowOf, class ColumnOf>
__device__ __forceinline__ void mask_by_slot(float (&scores)[kM][kN8][4], const Slot* slots, int row0,
                                             int column0, RowOf row_of, ColumnOf column_of) {
#pragma unroll
  for (int n = 0; n < kN8; ++n) {
    __syncwarp();  // or the compiler fetches every column first, and spills
    const int4 pair = *reinterpret_cast<const int4*>(slots + column0 + column_of(n));
#pragma unroll
    for (int m = 0; m < kM; ++m) mask_pair<kStarts, kEnds>(scores[m][n], pair, row0 + row_of(m), 8);
  }
}

// The test mode's mask: visible iff the dense matrix [Sq, Sk] says so. Here row0, column0 count from the
// matrix's origin.
template <int kM, int kN8, class RowOf, class ColumnOf>
__device__ __forceinline__ void mask_by_dense(float (&scores)[kM][kN8][4], const uint8_t* dense,
                                              int64_t seqlen_q, int64_t seqlen_k, int row0, int column0,
                                              RowOf row_of, ColumnOf column_of, int row_step = 8) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = row0 + row_of(m) + row_step * h;
      const uint8_t* visible = dense + row * seqlen_k + column0;
      const int columns = row < seqlen_q ? static_cast<int>(min(int64_t{1} << 30, seqlen_k - column0)) : 0;
#pragma unroll
      for (int n = 0; n < kN8; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int column = column_of(n) + c;
          if (column >= columns || visible[column] == 0) scores[m][n][2 * h + c] = -INFINITY;
        }
      }
    }
  }
}

// Which elements of a 16x16 block survive dropout: two n8 accumulators side by side take one Philox call.
struct DropoutState {
  uint64_t seed;
  uint64_t offset;
  uint32_t threshold;
  uint32_t head;  // b * Hq + h

  __device__ __forceinline__ PhiloxWords words(int row, int column, int lane) const {
    return dropout_words(seed, offset, head, row / 16, column / 16, lane);
  }

  // Element e of the left (n = 0) or right (n = 1) accumulator.
  __device__ __forceinline__ bool keeps(const PhiloxWords& w, int n, int e) const {
    const uint32_t word = w.word[2 * n + e / 2];
    return (e % 2 == 0 ? word & 0xFFFFu : word >> 16) >= threshold;
  }
};

}  // namespace flashmask
