// Algorithm 1 of the paper: blocks of query rows in parallel, key tiles in ascending order within each.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cpu/blocks.h"
#include "cpu/column_tiles.h"
#include "cpu/dropout.h"
#include "cpu/kernel.h"
#include "cpu/team.h"

namespace flashmask::cpu {

namespace {

// What one thread needs for a block of query rows.
template <typename T>
struct Scratch {
  explicit Scratch(const Shape& shape)
      : rows(int64_t{kBlockM} * std::max(shape.head_dim, shape.head_dim_v)),
        q_t(int64_t{shape.head_dim} * kBlockM),
        o_t(int64_t{shape.head_dim_v} * kBlockM),
        keys(int64_t{kBlockN} * std::max(shape.head_dim, shape.head_dim_v)),
        scores(kBlockN * kBlockM),
        keep(kBlockN * kBlockM) {}

  Buffer<T> rows;    // [kBlockM][D or Dv]: q converted on the way in, o on the way out
  Buffer<T> q_t;     // [D][kBlockM]
  Buffer<T> o_t;     // [Dv][kBlockM]
  Buffer<T> keys;    // [kBlockN][D or Dv]: k, then v converted
  Buffer<T> scores;  // [kBlockN][kBlockM]
  Buffer<T> keep;    // [kBlockN][kBlockM]
};

template <typename T>
class Forward {
 public:
  explicit Forward(const ForwardParams& params)
      : p_(params),
        ops_(tile_ops<T>()),
        q_(ops_, params.q, params.dtype, params.shape.head_dim),
        k_(ops_, params.k, params.dtype, params.shape.head_dim),
        v_(ops_, params.v, params.dtype, params.shape.head_dim_v),
        o_(ops_, params.o, params.dtype, params.shape.head_dim_v),
        dropout_(params.dropout, params.shape),
        tiles_(params.mask, params.shape, params.visit) {}

  void run() {
    const Shape& shape = p_.shape;
    const int64_t row_blocks = ceil_div(shape.seqlen_q, kBlockM);
    const double work = static_cast<double>(shape.batch) * shape.heads_q * shape.seqlen_q * shape.seqlen_k *
                        (shape.head_dim + shape.head_dim_v);
    const int threads = team_size(p_.num_threads, work);
    std::vector<Scratch<T>> scratch;
    for (int i = 0; i < threads; ++i) scratch.emplace_back(shape);

    Team team(threads);
    team.run([&](int worker) {
      team.for_each(tiles_.groups(), [&](int64_t group) { tiles_.scan_group(group); });
      team.for_each(shape.batch * shape.heads_q * row_blocks, [&](int64_t item) {
        // Later rows first: under a causal mask they are the longest.
        const int64_t row_block = row_blocks - 1 - item % row_blocks;
        const int64_t head = item / row_blocks;
        compute_rows(head / shape.heads_q, head % shape.heads_q, row_block * kBlockM, scratch[worker]);
      });
    });
  }

 private:
  void compute_rows(int64_t b, int64_t h, int64_t row_begin, const Scratch<T>& scratch) {
    const Shape& shape = p_.shape;
    const int64_t h_k = h / (shape.heads_q / shape.heads_k);
    const int64_t row_end = std::min(row_begin + kBlockM, shape.seqlen_q);
    const int32_t rows = static_cast<int32_t>(row_end - row_begin);
    const int32_t lanes = static_cast<int32_t>(round_up(rows, ops_.lanes));

    T* q_t = scratch.q_t.data();
    // Lanes beyond the last row compute with zeros, and nobody reads what.
    if (rows < kBlockM) std::fill_n(q_t, shape.head_dim * kBlockM, T{0});
    const Rows<const T> q = q_.read(b, h, row_begin, rows, scratch.rows.data());
    ops_.transpose(q.data, q.stride, rows, shape.head_dim, q_t, kBlockM);

    T* o_t = scratch.o_t.data();
    std::fill_n(o_t, shape.head_dim_v * kBlockM, T{0});
    alignas(64) T row_max[kBlockM], row_sum[kBlockM], rescale[kBlockM];
    std::fill_n(row_max, kBlockM, -std::numeric_limits<T>::infinity());
    std::fill_n(row_sum, kBlockM, T{0});

    T* scores = scratch.scores.data();
    tiles_.for_each_visited(
        b, h, row_begin, row_end, 0, shape.seqlen_k, [&](ColumnSpan span, const HiddenRows* hidden) {
          const int32_t columns = static_cast<int32_t>(span.end - span.begin);
          const Rows<const T> k = k_.read(b, h_k, span.begin, columns, scratch.keys.data());
          ops_.multiply({false, Into::kOverwrite, columns, lanes, shape.head_dim, k.data, k.stride, q_t,
                         kBlockM, scores, kBlockM, static_cast<T>(p_.softmax_scale), nullptr});
          if (p_.visit == Visit::kDense) {
            ops_.hide_dense(scores, columns, rows, tiles_.dense_at(b, h, row_begin, span.begin),
                            shape.seqlen_k);
          } else if (span.partial) {
            ops_.hide(scores, columns, lanes, static_cast<int32_t>(row_begin), hidden);
          }
          ops_.softmax_step(scores, columns, lanes, row_max, row_sum, rescale);
          if (dropout_.enabled()) {
            ops_.draw_keep(scratch.keep.data(), columns, lanes, dropout_.tile(b, h, row_begin, span.begin));
            ops_.drop(scores, scratch.keep.data(), columns, lanes);
          }
          const Rows<const T> v = v_.read(b, h_k, span.begin, columns, scratch.keys.data());
          ops_.multiply({true, Into::kRescaled, shape.head_dim_v, lanes, columns, v.data, v.stride, scores,
                         kBlockM, o_t, kBlockM, T{1}, rescale});
        });

    T* o = scratch.rows.data();
    ops_.transpose(o_t, kBlockM, shape.head_dim_v, rows, o, shape.head_dim_v);
    T* lse = static_cast<T*>(p_.lse) + (b * shape.heads_q + h) * shape.seqlen_q + row_begin;
    for (int32_t i = 0; i < rows; ++i) {
      T* row = o + int64_t{i} * shape.head_dim_v;
      if (row_sum[i] == 0) {
        std::fill_n(row, shape.head_dim_v, T{0});  // no product: 0 times what is not finite is not 0
      } else {
        const T factor = 1 / row_sum[i];
        for (int32_t c = 0; c < shape.head_dim_v; ++c) row[c] *= factor;
      }
      lse[i] = row_max[i] + std::log(row_sum[i]);  // -inf for a row that sees nothing
    }
    ops_.store(o, shape.head_dim_v, rows, shape.head_dim_v, o_.stored(b, h, row_begin));
  }

  const ForwardParams& p_;
  const TileOps<T>& ops_;
  TensorRows<T> q_, k_, v_, o_;
  DropoutPattern dropout_;
  ColumnTiles tiles_;
};

}  // namespace

template <typename T>
void forward(const ForwardParams& params) {
  Forward<T>(params).run();
}

template void forward<float>(const ForwardParams& params);
template void forward<double>(const ForwardParams& params);

}  // namespace flashmask::cpu
