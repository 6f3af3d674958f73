// Tiles of 16-bit elements in shared memory as TMA writes them and wgmma reads them.
#pragma once

#include <cstdint>

namespace flashmask::sm90 {

// A [kRows, kColumns] tile as panels of 64 columns: panel p is [kRows, 64] row-major, 128 bytes a row, its
// 16-byte chunks XORed with the row's number modulo 8 (TMA's and wgmma's 128-byte swizzle). A tile starts on
// a 1024-byte boundary. A last panel that kColumns does not fill is there in full, and nobody multiplies its
// rest.
template <int kRows_, int kColumns_>
struct Operand {
  static constexpr int kRows = kRows_;
  static constexpr int kColumns = kColumns_;
  static constexpr int kPanels = (kColumns + 63) / 64;
  static constexpr int kPanelBytes = kRows * 128;
  static constexpr int kBytes = kPanels * kPanelBytes;
  static_assert(kColumns % 16 == 0, "wgmma takes 16 columns of depth");
  static_assert(kRows % 8 == 0, "the swizzle repeats every 8 rows");

  // Byte offset of the 16-byte chunk `chunk` of row `row`.
  static __device__ __forceinline__ int offset(int row, int chunk) {
    return chunk / 8 * kPanelBytes + row * 128 + (chunk % 8 ^ row % 8) * 16;
  }

  // The low word of the descriptor that makes the tile wgmma's A or B with the columns as depth.
  static __device__ __forceinline__ uint32_t columns_base(uint32_t tile) { return base(tile, 1); }

  // The descriptor itself, from row `row` (a multiple of 8) on; k counts 16 columns.
  static __device__ __forceinline__ uint64_t depth_columns(uint32_t columns_base, int row, int k) {
    return descriptor(columns_base + (k / 4 * kPanelBytes + row * 128 + k % 4 * 32) / 16);
  }

  // The same with the rows as depth, for a transposed B (or A).
  static __device__ __forceinline__ uint32_t rows_base(uint32_t tile) { return base(tile, kPanelBytes / 16); }

  // From column `column` on (the columns read lie in one panel or start where one does); k counts 16 rows.
  static __device__ __forceinline__ uint64_t depth_rows(uint32_t rows_base, int k, int column = 0) {
    return descriptor(rows_base + (column / 64 * kPanelBytes + column % 64 * 2 + k * 16 * 128) / 16);
  }

 private:
  static_assert(kPanelBytes / 16 < 1 << 14, "the descriptor has 14 bits for the distance of panels");

  // The address and, between panels (unused along the depth), the leading offset, both in units of 16 bytes.
  // Shared memory ends where 14 bits do, so that what is added to an address carries nowhere.
  static __device__ __forceinline__ uint32_t base(uint32_t tile, int leading) {
    return uint32_t(leading) << 16 | tile >> 4;
  }

  // The high word: 128-byte swizzle, 1024 bytes between groups of 8 rows.
  static __device__ __forceinline__ uint64_t descriptor(uint32_t low) {
    constexpr uint64_t kHigh = 1u << 30 | 1024 / 16;
    return kHigh << 32 | low;
  }
};

}  // namespace flashmask::sm90
