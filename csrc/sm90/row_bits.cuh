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

// What a warp's lanes tell each other: of the two columns of fragment n that lanes 4 i + quad hold, which of
// the sixteen rows are masked, as pair_place() lays it out.
template <int kN8>
struct WarpBits {
  alignas(16) uint32_t pairs[(kN8 + 3) / 4 * 16];
};

// Asked for anew each time: the compiler would keep all that follows from it in registers, and spill.
__device__ __forceinline__ int own_lane() {
  int lane = threadIdx.x % 32;
  asm volatile("" : "+r"(lane));
  return lane;
}

// A lane reads the words of its four fragments n at once, four such lanes beside each other.
__device__ __forceinline__ int pair_place(int n, int quad) { return n / 4 * 16 + quad * 4 + n % 4; }

// All bits from bit 2 * row on, none for row 16.
__device__ __forceinline__ uint32_t bits_from(int row) { return __funnelshift_lc(0u, ~0u, 2 * row); }

// Calls with `rows_of(row)`: which of the warp's rows is the first of query row `row` or later, in [0, 16].
// The rows that the slots masks in two neighbouring columns, as bits 2 r (left) and 2 r + 1 (right).
template <class RowsOf>
__device__ __forceinline__ uint32_t masked_rows(const int4& pair, RowsOf rows_of) {
  const uint32_t left = bits_from(rows_of(pair.x)) & ~bits_from(rows_of(pair.y));
  const uint32_t right = bits_from(rows_of(pair.z)) & ~bits_from(rows_of(pair.w));
  return (left & 0x55555555u) | (right & 0xAAAAAAAAu);
}

// Finds which rows the slots of the set `slots` mask in the column tile whose slots `tile` are. All lanes of
// the warp call, `shared` being theirs alone.
template <int kN8, int kBlockN, class RowsOf>
__device__ __forceinline__ void find_masked(const Slot (*tile)[kBlockN], uint32_t slots,
                                            WarpBits<kN8>& shared, RowsOf rows_of) {
  static_assert(kBlockN == 8 * kN8, "a fragment has eight columns");
  const int lane = own_lane();
  constexpr int kPairs = kBlockN / 2, kOfLane = (kPairs + 31) / 32;
  uint32_t rows[kOfLane] = {};
#pragma unroll 1
  for (; slots != 0; slots &= slots - 1) {
    const Slot* slot = tile[__ffs(static_cast<int>(slots)) - 1] + 2 * lane;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      if (32 * i + 32 <= kPairs || 32 * i + lane < kPairs)
        rows[i] |= masked_rows(*reinterpret_cast<const int4*>(slot + 64 * i), rows_of);
    }
  }
  __syncwarp();  // all have read the bits of the tile before
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) {
    const int n = 8 * i + lane / 4;
    if (32 * i + 32 <= kPairs || 32 * i + lane < kPairs)
      shared.pairs[pair_place(n, lane % 4)] = __funnelshift_l(rows[i], rows[i], lane / 4 * 2);
  }
  __syncwarp();
}

// Those of a lane's scores that are masked, as the warp has found.
template <int kN8>
__device__ __forceinline__ LaneBits<kN8> bits_of_lane(const WarpBits<kN8>& shared) {
  const int lane = own_lane();
  LaneBits<kN8> bits{};
#pragma unroll
  for (int n = 0; n < kN8; n += 4) {
    const uint4 four = *reinterpret_cast<const uint4*>(shared.pairs + pair_place(n, lane % 4));
    const uint32_t words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int i = 0; i < 4 && n + i < kN8; ++i) {
      // Rows lane / 4 and lane / 4 + 8 come to where LaneBits has fragment n + i.
      bits.words[(n + i) / 8] |= __funnelshift_r(words[i], words[i], lane / 4 * 2) & 0x00030003u
                                                                                         << 2 * ((n + i) % 8);
    }
  }
  return bits;
}

}  // namespace flashmask::sm90
