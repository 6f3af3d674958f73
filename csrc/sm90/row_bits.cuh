// Masks by element in forward, for any number of slots at once: a warp finds which of its sixteen rows are
// masked in each column while it waits for S, and masking a score is then to look at one bit.
#pragma once

#include "common/mask_tiles.cuh"

namespace flashmask::sm90 {

inline constexpr int kWarpRows = 16;  // of the accumulator, of one consumer warp

// The masked scores of one lane in an accumulator of kN8 m16n8 fragments.
template <int kN8>
struct LaneBits {
  // Bit 16 h + 2 (n % 8) + c of word n / 8: the lane's row h of two, column c of its two in fragment n.
  uint32_t words[(kN8 + 7) / 8];

  __device__ __forceinline__ bool masked(int n, int h, int c) const {
    return (words[n / 8] & 1u << (16 * h + 2 * (n % 8) + c)) != 0;
  }
};

// All bits from bit 2 * row on, none for row 16.
__device__ __forceinline__ uint32_t bits_from(int row) { return __funnelshift_lc(0u, ~0u, 2 * row); }

// `rows_of(row)` is the first of the warp's rows that is query row `row` or later, in [0, 16], for the rows
// that lie in slots: from 0 on, and of an empty one INT_MAX, whatever its end, or its end itself. The rows
// that a slot masks in two neighbouring columns, as bits 2 r (left) and 2 r + 1 (right).
template <class RowsOf>
__device__ __forceinline__ uint32_t masked_rows(const int4& pair, RowsOf rows_of) {
  const uint32_t left = bits_from(rows_of(pair.x)) & ~bits_from(rows_of(pair.y));
  const uint32_t right = bits_from(rows_of(pair.z)) & ~bits_from(rows_of(pair.w));
  return (left & 0x55555555u) | (right & 0xAAAAAAAAu);
}

// Lane 4 i + quad has the rows of fragment i in the two columns of its quad, and gets those of its own two
// rows in all eight fragments: in either half of `rows`, an 8x8 transposition of pairs of bits among the
// lanes of a quad.
__device__ __forceinline__ uint32_t rows_to_fragments(uint32_t rows, int lane) {
  rows = __byte_perm(rows, __shfl_xor_sync(~0u, rows, 16), (lane & 16) != 0 ? 0x3715 : 0x6240);
  // Of neighbours in the next bit of i, the lower gets the lower half of each group of bits, the upper the
  // upper.
  const auto exchange = [&](int lanes, int bits, uint32_t lower_halves) {
    const bool upper = (lane & lanes) != 0;
    const uint32_t other = __shfl_xor_sync(~0u, rows, lanes);
    uint32_t kept = upper ? ~lower_halves : lower_halves;
    asm("" : "+r"(kept));  // or the compiler takes the selection below apart
    rows = (rows & kept) | (__funnelshift_l(other, other, upper ? 32 - bits : bits) & ~kept);
  };
  exchange(8, 4, 0x0F0F0F0Fu);
  exchange(4, 2, 0x33333333u);
  return rows;
}

// Which scores of a lane the slots of the set `slots` mask in the column tile whose slots `tile` are. All
// lanes of the warp call.
template <int kN8, int kBlockN, class RowsOf>
__device__ __forceinline__ LaneBits<kN8> find_masked(const Slot (*tile)[kBlockN], uint32_t slots,
                                                     RowsOf rows_of) {
  static_assert(kBlockN == 8 * kN8, "a fragment has eight columns");
  constexpr int kPairs = kBlockN / 2;
  int lane = threadIdx.x % 32;
  asm volatile("" : "+r"(lane));  // or the compiler keeps all that follows from it in registers, and spills
  LaneBits<kN8> bits{};
#pragma unroll 1
  for (; slots != 0; slots &= slots - 1) {
    const Slot* slot = tile[__ffs(static_cast<int>(slots)) - 1] + 2 * lane;
#pragma unroll
    for (int i = 0; i < (kPairs + 31) / 32; ++i) {
      if (32 * i + 32 <= kPairs || 32 * i + lane < kPairs)
        bits.words[i] |= masked_rows(*reinterpret_cast<const int4*>(slot + 64 * i), rows_of);
    }
  }
#pragma unroll
  for (uint32_t& word : bits.words) word = rows_to_fragments(word, lane);
  return bits;
}

}  // namespace flashmask::sm90
