// Tiles of 16-bit elements in shared memory as TMA writes them and wgmma reads them.
#pragma once

#include <cstdint>

namespace flashmask::sm90 {

// A [kRows, kColumns] tile as panels of 64 columns: panel p is [kRows, 64] row-major, 128 bytes a row, its
// 16-byte chunks XORed with the row's number modulo 8 (TMA's and wgmma's 128-byte swizzle). A tile starts on
// a 1024-byte boundary.
template <int kRows_, int kColumns_>
struct Operand {
  static constexpr int kRows = kRows_;
  static constexpr int kColumns = kColumns_;
  static constexpr int kPanels = kColumns / 64;
  static constexpr int kPanelBytes = kRows * 128;
  static constexpr int kBytes = kPanels * kPanelBytes;
  static_assert(kColumns % 64 == 0, "a panel is one 128-byte swizzle span");
  static_assert(kRows % 8 == 0, "the swizzle repeats every 8 rows");

  // Byte offset of the 16-byte chunk `chunk` of row `row`.
  static __device__ __forceinline__ int offset(int row, int chunk) {
    return chunk / 8 * kPanelBytes + row * 128 + (chunk % 8 ^ row % 8) * 16;
  }

  // The tile as wgmma's A or B with the columns as depth, from row `row` (a multiple of 8) on; k counts 16
  // columns.
  static __device__ __forceinline__ uint64_t depth_columns(uint32_t tile, int row, int k) {
    return descriptor(tile + k / 4 * kPanelBytes + row * 128 + k % 4 * 32, 1, 1024 / 16);
  }

  // The tile as wgmma's transposed B (or A) with the rows as depth, from column `column` on (the columns read
  // lie in one panel or start where one does); k counts 16 rows.
  static __device__ __forceinline__ uint64_t depth_rows(uint32_t tile, int k, int column = 0) {
    return descriptor(tile + column / 64 * kPanelBytes + column % 64 * 2 + k * 16 * 128, kPanelBytes / 16,
                      1024 / 16);
  }

 private:
  // Offsets in units of 16 bytes. leading: between panels (unused along the depth); stride: between groups of
  // 8 rows.
  static __device__ __forceinline__ uint64_t descriptor(uint32_t address, int leading, int stride) {
    constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
    return kSwizzle128 | uint64_t(stride) << 32 | uint64_t(leading) << 16 | (address & 0x3FFFF) >> 4;
  }
};

}  // namespace flashmask::sm90
