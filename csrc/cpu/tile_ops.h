// The arithmetic of one tile, as a table of functions that exists once per instruction set and element type.
//
// Score tiles are kept transposed, [block_n keys][kBlockM query rows]: the vector lanes are query rows. Row
// maxima and sums are then lane-wise, column bounds are compared as scalars, and k, v, q and dO enter the
// products in their natural layout (as scalars or as rows of lanes), so nothing is packed but q^T and dO^T.
//
// Every element of a product is one chain of multiply-adds over the inner index in ascending order, whatever
// the sizes. A masked element adds an exact zero to such a chain: that is why leaving it out changes no bit.
#pragma once

#include <cstdint>

#include "flashmask/params.h"

namespace flashmask::cpu {

// Chosen by measurement (docs/cpu-kernel.md).
inline constexpr int kBlockM = 64;
inline constexpr int kBlockN = 64;
inline constexpr int kDropoutBlock = 16;  // bits are drawn for 16x16 elements at a time (common/philox.h)
static_assert(kBlockM % kDropoutBlock == 0 && kBlockN % kDropoutBlock == 0, "a tile is whole dropout blocks");
static_assert(kBlockM % 16 == 0, "a tile's rows are whole vectors of at most 16 lanes");

// What a product finds in c: c = scale * a b, or c += a b, or c[m][n] = c[m][n] * column_scale[n] + a b.
enum class Into : int32_t { kOverwrite, kAdd, kRescaled };

// c [m, n] from a [m, k] (a_transposed: stored [k, m]) and b [k, n], all row-major with leading dimensions in
// elements; n is a multiple of the lanes.
template <typename T>
struct Product {
  bool a_transposed;
  Into into;
  int32_t m, n, k;
  const T* a;
  int64_t lda;
  const T* b;
  int64_t ldb;
  T* c;
  int64_t ldc;
  T scale;
  const T* column_scale;
};

// Query rows that do not see one key column: [lower_begin, lower_end), [upper_begin, upper_end), [0, first).
struct HiddenRows {
  int32_t lower_begin, lower_end;
  int32_t upper_begin, upper_end;
  int32_t first;
};

// Where a tile lies in the dropout pattern, and what a kept element is multiplied by.
struct DropoutTile {
  uint64_t seed, offset;
  uint32_t head;  // b * Hq + h
  uint32_t row_begin, column_begin;
  uint32_t threshold;
  double keep_scale;  // 1 / (1 - p)
};

// A block of a tensor in its storage type; the stride between rows counts elements.
struct StoredRows {
  void* data;
  int64_t stride;
  DType dtype;
};

// Score tiles are [columns][kBlockM]; `rows` is the used part of kBlockM, rounded up to the lanes by the
// callee where it only costs unused lanes.
template <typename T>
struct TileOps {
  const char* isa;
  int32_t lanes;

  void (*multiply)(const Product<T>& product);

  // Scores of elements that are not visible become -inf.
  void (*hide)(T* scores, int32_t columns, int32_t rows, int32_t row_begin, const HiddenRows* hidden);
  // The same from a boolean [rows, columns] block whose rows are dense_stride bytes apart.
  void (*hide_dense)(T* scores, int32_t columns, int32_t rows, const uint8_t* dense, int64_t dense_stride);

  // One step of the online softmax: scores become exp(score - new maximum), row_max and row_sum are updated,
  // rescale is what everything accumulated before is to be multiplied by.
  void (*softmax_step)(T* scores, int32_t columns, int32_t rows, T* row_max, T* row_sum, T* rescale);

  // scores -> p * keep and dp -> ds, with p = exp(score - lse) and ds = scale * p * (dp * keep - delta).
  // keep is null without dropout.
  void (*softmax_backward)(T* scores, T* dp, const T* keep, int32_t columns, int32_t rows, const T* lse,
                           const T* delta, T scale);

  // keep[column][row] = 0 where dropped, else keep_scale.
  void (*draw_keep)(T* keep, int32_t columns, int32_t rows, const DropoutTile& tile);
  // p *= keep.
  void (*drop)(T* p, const T* keep, int32_t columns, int32_t rows);

  // dst [rows][ld] from storage, columns [columns, ld) zero.
  void (*load)(const StoredRows& src, int32_t rows, int32_t columns, T* dst, int32_t ld);
  void (*store)(const T* src, int32_t ld, int32_t rows, int32_t columns, const StoredRows& dst);
  // dst [columns][dst_stride] = transpose of src [rows][src_stride].
  void (*transpose)(const T* src, int64_t src_stride, int32_t rows, int32_t columns, T* dst,
                    int64_t dst_stride);

  // out[r] = sum over columns of a[r][c] * b[r][c].
  void (*row_dots)(const T* a, int64_t lda, const T* b, int64_t ldb, int32_t rows, int32_t columns, T* out);

  // values[i] = exp(values[i]), the exponential used by everything above.
  void (*exponential)(T* values, int64_t count);
};

// The table for the machine the process runs on, chosen once; FLASHMASK_CPU_ISA=baseline|avx2|avx512 in the
// environment asks for a lesser one (tests do).
template <typename T>
const TileOps<T>& tile_ops();

}  // namespace flashmask::cpu
