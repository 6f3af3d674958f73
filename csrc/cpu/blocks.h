// Blocks of rows of [batch, seqlen, heads, dim] tensors, read and written as the type computed in.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

#include "cpu/tile_ops.h"
#include "flashmask/params.h"

namespace flashmask::cpu {

inline int64_t element_size(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return 8;
    case DType::kFloat32:
      return 4;
    default:
      return 2;
  }
}

inline int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Uninitialised elements on a cache line boundary.
template <typename T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t count) {
    if (count == 0) return;
    data_.reset(static_cast<T*>(std::aligned_alloc(64, round_up(count * sizeof(T), 64))));
    if (!data_) throw std::bad_alloc();
  }
  T* data() const { return data_.get(); }

 private:
  struct Free {
    void operator()(T* p) const { std::free(p); }
  };
  std::unique_ptr<T[], Free> data_;
};

template <typename T>
struct Rows {
  T* data;
  int64_t stride;
};

// A tensor of heads x dim per token, of which blocks of rows of one head are read as T.
template <typename T>
class TensorRows {
 public:
  TensorRows(const TileOps<T>& ops, const Tensor& tensor, DType dtype, int32_t dim)
      : ops_(&ops), tensor_(tensor), dtype_(dtype), dim_(dim) {}

  static bool is_stored_as_t(DType dtype) {
    return dtype == (sizeof(T) == sizeof(double) ? DType::kFloat64 : DType::kFloat32);
  }

  StoredRows stored(int64_t b, int64_t h, int64_t row) const {
    const int64_t offset = b * tensor_.stride_batch + row * tensor_.stride_seq + h * tensor_.stride_head;
    return {static_cast<char*>(tensor_.data) + offset * element_size(dtype_), tensor_.stride_seq, dtype_};
  }

  // Rows in place where they are stored as T, else converted into scratch [count][dim].
  Rows<const T> read(int64_t b, int64_t h, int64_t row, int32_t count, T* scratch) const {
    const StoredRows rows = stored(b, h, row);
    if (is_stored_as_t(dtype_)) return {static_cast<const T*>(rows.data), rows.stride};
    ops_->load(rows, count, dim_, scratch, dim_);
    return {scratch, dim_};
  }

  // Rows copied into scratch, each followed by zeros up to a multiple of the lanes. Rows that lie side by
  // side are worth a copy where they are read often: at strides of whole pages they would share cache sets.
  Rows<const T> copy(int64_t b, int64_t h, int64_t row, int32_t count, T* scratch) const {
    const int32_t ld = static_cast<int32_t>(round_up(dim_, ops_->lanes));
    ops_->load(stored(b, h, row), count, dim_, scratch, ld);
    return {scratch, ld};
  }

 private:
  const TileOps<T>* ops_;
  Tensor tensor_;
  DType dtype_;
  int32_t dim_;
};

}  // namespace flashmask::cpu
