// Tiles of 16-bit elements in shared memory: layout, asynchronous loads, fragment addresses.
#pragma once

#include "sm80/ptx.cuh"

namespace flashmask::sm80 {

// A [kRows, kColumns] tile as panels of 64 (or 32) columns: panel p holds [kRows, kPanel] row-major, and the
// 16-byte chunks of a row are permuted by XOR so that the eight rows of an 8x8 matrix lie in different banks.
template <int kRows_, int kColumns_>
struct SmemTile {
  static constexpr int kRows = kRows_;
  static constexpr int kColumns = kColumns_;
  static constexpr int kPanel = kColumns % 64 == 0 ? 64 : 32;
  static_assert(kColumns % kPanel == 0, "the columns of a tile are whole panels");
  static_assert(kRows % 16 == 0, "fragments are read 16 rows at a time");
  static constexpr int kChunks = kPanel / 8;
  static constexpr int kPitch = kPanel * 2;
  static constexpr int kPanelBytes = kRows * kPitch;
  static constexpr int kBytes = kRows * kColumns * 2;

  static __device__ __forceinline__ int swizzle(int row) { return kPanel == 64 ? row & 7 : (row >> 1) & 3; }

  // Byte offset of the 16-byte chunk `chunk` of row `row`.
  static __device__ __forceinline__ int offset(int row, int chunk) {
    return (chunk / kChunks) * kPanelBytes + row * kPitch + ((chunk % kChunks) ^ swizzle(row)) * 16;
  }
};

// Copies rows [0, kRows) of a row-major global matrix into a tile, 16 bytes a request; rows >= valid_rows and
// columns
// >= valid_columns become zero. `global` points at the tile's first element.
template <class Tile, int kThreads, typename Element>
__device__ __forceinline__ void load_tile(uint32_t tile, const Element* global, int64_t stride,
                                          int valid_rows, int valid_columns, int thread) {
  constexpr int kRowsAtOnce = kThreads / Tile::kChunks;
  static_assert(Tile::kRows % kRowsAtOnce == 0, "whole passes over the rows");
  static_assert(kRowsAtOnce % 8 == 0, "a thread's swizzle is the same in every pass");
  const int row = thread / Tile::kChunks;
  const int chunk = thread % Tile::kChunks;
  const uint32_t shared = tile + Tile::offset(row, chunk);
  const Element* source = global + row * stride + chunk * 8;
#pragma unroll
  for (int down = 0; down < Tile::kRows; down += kRowsAtOnce) {
#pragma unroll
    for (int panel = 0; panel < Tile::kColumns / Tile::kPanel; ++panel) {
      const int rows_left = panel * Tile::kPanel + chunk * 8 < valid_columns ? valid_rows - row : 0;
      cp_async_16(shared + panel * Tile::kPanelBytes + down * Tile::kPitch, source + panel * Tile::kPanel,
                  down < rows_left);
    }
    source += kRowsAtOnce * stride;
  }
}

// Writes a tile to a row-major global matrix, the mirror of load_tile. Out-of-range elements are not written.
template <class Tile, int kThreads, typename Element>
__device__ __forceinline__ void store_tile(const char* tile, Element* global, int64_t stride, int valid_rows,
                                           int valid_columns, int thread) {
  constexpr int kRowsAtOnce = kThreads / Tile::kChunks;
  const int row = thread / Tile::kChunks;
  const int chunk = thread % Tile::kChunks;
#pragma unroll
  for (int panel = 0; panel < Tile::kColumns / Tile::kPanel; ++panel) {
    if (panel * Tile::kPanel + chunk * 8 >= valid_columns) continue;
    for (int down = row; down < Tile::kRows && down < valid_rows; down += kRowsAtOnce) {
      const int4 data =
          *reinterpret_cast<const int4*>(tile + Tile::offset(down, panel * Tile::kChunks + chunk));
      *reinterpret_cast<int4*>(global + down * stride + panel * Tile::kPanel + chunk * 8) = data;
    }
  }
}

// Zero, for any loop_variable >= 0, in a way that the compiler cannot see. Added to an address it keeps what
// is derived from the address (a block's XOR, mostly) inside the loop: computed early, those values would
// fill the registers.
__device__ __forceinline__ uint32_t varying_zero(int loop_variable) {
  uint32_t zero;
  asm volatile("shr.s32 %0, %1, 31;" : "=r"(zero) : "r"(loop_variable));
  return zero;
}

// How the lanes' row addresses of one ldmatrix.x4 walk a 16x16 block of a tile.
enum class Walk {
  kRows16,    // matrices down the rows first: A as stored, B from a transposed store
  kColumns16  // matrices along the columns first: B as stored, A from a transposed store
};

// Addresses of the 16x16 blocks of a tile. A block's column moves the address by an XOR with a constant,
// because the swizzle only touches the chunk bits; its row moves it by an addition.
template <class Tile, Walk kWalk>
class BlockReader {
 public:
  // The tile's block (0, 0) is taken at row `first_row` and column `first_column`, multiples of 16.
  __device__ __forceinline__ BlockReader(uint32_t tile, int first_row, int first_column, int lane) {
    const int row = kWalk == Walk::kRows16 ? lane % 16 : lane % 8 + (lane / 16) * 8;
    const int chunk = kWalk == Walk::kRows16 ? lane / 16 : (lane / 8) % 2;
    base_ = tile + Tile::offset(first_row + row, first_column / 8 + chunk);
  }

  // `column` is relative to first_column, which is a multiple of a panel unless column stays inside its
  // panel's aligned power of two: XOR then adds.
  __device__ __forceinline__ uint32_t operator()(int row_block, int column_block) const {
    constexpr int kBlocksPerPanel = Tile::kPanel / 16;
    return (base_ ^ ((column_block % kBlocksPerPanel) * 32)) +
           (column_block / kBlocksPerPanel) * Tile::kPanelBytes + row_block * 16 * Tile::kPitch;
  }

 private:
  uint32_t base_;
};

}  // namespace flashmask::sm80
