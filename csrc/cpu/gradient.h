// A gradient being accumulated: in the output tensor itself where it is stored as the type computed in and
// its rows are whole vectors, else in a buffer that is converted at the end.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/blocks.h"

namespace flashmask::cpu {

template <typename T>
class Gradient {
 public:
  Gradient(const TileOps<T>& ops, const Tensor& tensor, DType dtype, int64_t batch, int64_t heads,
           int64_t seqlen, int32_t dim)
      : ops_(&ops),
        output_(ops, tensor, dtype, dim),
        heads_(heads),
        seqlen_(seqlen),
        dim_(dim),
        padded_dim_(static_cast<int32_t>(round_up(dim, ops.lanes))),
        wanted_(tensor.data != nullptr),
        in_place_(TensorRows<T>::is_stored_as_t(dtype) && padded_dim_ == dim) {
    if (wanted_ && !in_place_) buffer_ = Buffer<T>(batch * heads * seqlen * padded_dim_);
  }

  bool wanted() const { return wanted_; }
  int32_t padded_dim() const { return padded_dim_; }

  // Rows of padded_dim() elements from `row` on.
  Rows<T> at(int64_t b, int64_t h, int64_t row) const {
    if (in_place_) {
      const StoredRows rows = output_.stored(b, h, row);
      return {static_cast<T*>(rows.data), rows.stride};
    }
    return {buffer_.data() + ((b * heads_ + h) * seqlen_ + row) * padded_dim_, padded_dim_};
  }

  void clear(int64_t b, int64_t h, int64_t row, int64_t count) const {
    if (!wanted_) return;
    const Rows<T> rows = at(b, h, row);
    for (int64_t i = 0; i < count; ++i) std::fill_n(rows.data + i * rows.stride, padded_dim_, T{0});
  }

  // To be called once for every row when all is added.
  void finish(int64_t b, int64_t h, int64_t row, int64_t count) const {
    if (!wanted_ || in_place_) return;
    ops_->store(at(b, h, row).data, padded_dim_, static_cast<int32_t>(count), dim_,
                output_.stored(b, h, row));
  }

 private:
  const TileOps<T>* ops_;
  TensorRows<T> output_;
  int64_t heads_, seqlen_;
  int32_t dim_, padded_dim_;
  bool wanted_, in_place_;
  Buffer<T> buffer_;  // [batch][heads][seqlen][padded_dim]
};

}  // namespace flashmask::cpu
