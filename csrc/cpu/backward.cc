// Algorithm 2 of the paper, with its parallel loop over key columns made to yield one result whatever the
// number of threads.
//
// Tokens are cut into chunks, by shape alone; a block is a chunk of query rows times a chunk of key columns
// of one key head. In phase p the blocks (row chunk (c + p) mod n, column chunk c) of all c and heads are
// computed in parallel: no two of a phase share a row chunk or a column chunk, so each adds to its gradients
// without locks, and every gradient is summed in the order of the phases.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cpu/blocks.h"
#include "cpu/column_tiles.h"
#include "cpu/dropout.h"
#include "cpu/gradient.h"
#include "cpu/kernel.h"
#include "cpu/team.h"

namespace flashmask::cpu {

namespace {

// Tokens per chunk: k, v, dk and dv of a chunk stay in half of a 1 MiB second-level cache, and there are
// blocks enough to share where there are few heads. A function of the shape and the type, never of the
// threads: the order of summation follows from it.
template <typename T>
int64_t chunk_tokens(const Shape& shape) {
  constexpr int64_t kCachedBytes = 512 * 1024;
  constexpr int64_t kBlocksPerPhase = 32;
  const int64_t cached =
      kCachedBytes / (2 * std::max(1, shape.head_dim + shape.head_dim_v) * static_cast<int64_t>(sizeof(T)));
  const int64_t shared =
      std::max(shape.seqlen_q, shape.seqlen_k) * shape.batch * shape.heads_k / kBlocksPerPhase;
  return std::max<int64_t>(std::min(cached, shared) / kBlockN, 1) * kBlockN;
}
static_assert(kBlockN % kBlockM == 0, "a chunk of whole column tiles is one of whole row blocks");

// What one thread needs for a block.
template <typename T>
struct Scratch {
  Scratch(const Shape& shape, int64_t chunk, int32_t dim, int32_t dim_v)
      : k(chunk * dim),
        v(chunk * dim_v),
        q(int64_t{kBlockM} * dim),
        dout(int64_t{kBlockM} * dim_v),
        o(int64_t{kBlockM} * dim_v),
        q_t(int64_t{shape.head_dim} * kBlockM),
        dout_t(int64_t{shape.head_dim_v} * kBlockM),
        scores(kBlockN * kBlockM),
        dp(kBlockN * kBlockM),
        keep(kBlockN * kBlockM) {}

  Buffer<T> k, v;              // [chunk][padded D], [chunk][padded Dv]: copied
  Buffer<T> q, dout, o;        // [kBlockM][padded D or Dv]: copied
  Buffer<T> q_t;               // [D][kBlockM]
  Buffer<T> dout_t;            // [Dv][kBlockM]
  Buffer<T> scores, dp, keep;  // [kBlockN][kBlockM]
};

template <typename T>
class Backward {
 public:
  explicit Backward(const BackwardParams& params)
      : p_(params),
        shape_(params.shape),
        ops_(tile_ops<T>()),
        q_(ops_, params.q, params.dtype, shape_.head_dim),
        k_(ops_, params.k, params.dtype, shape_.head_dim),
        v_(ops_, params.v, params.dtype, shape_.head_dim_v),
        o_(ops_, params.o, params.dtype, shape_.head_dim_v),
        dout_(ops_, params.dout, params.dtype, shape_.head_dim_v),
        dq_(ops_, params.dq, params.dtype, shape_.batch, shape_.heads_q, shape_.seqlen_q, shape_.head_dim),
        dk_(ops_, params.dk, params.dtype, shape_.batch, shape_.heads_k, shape_.seqlen_k, shape_.head_dim),
        dv_(ops_, params.dv, params.dtype, shape_.batch, shape_.heads_k, shape_.seqlen_k, shape_.head_dim_v),
        dropout_(params.dropout, shape_),
        tiles_(params.mask, shape_, params.visit),
        chunk_(chunk_tokens<T>(shape_)),
        chunks_(ceil_div(std::max(shape_.seqlen_q, shape_.seqlen_k), chunk_)),
        delta_(shape_.batch * shape_.heads_q * shape_.seqlen_q) {}

  void run() {
    const double work = static_cast<double>(shape_.batch) * shape_.heads_q * shape_.seqlen_q *
                        shape_.seqlen_k * (shape_.head_dim + shape_.head_dim_v) * 2.5;
    const int threads = team_size(p_.num_threads, work);
    std::vector<Scratch<T>> scratch;
    for (int i = 0; i < threads; ++i) {
      scratch.emplace_back(shape_, chunk_, dq_.padded_dim(), dv_.padded_dim());
    }
    const int64_t query_heads = shape_.batch * shape_.heads_q, key_heads = shape_.batch * shape_.heads_k;
    const int64_t row_blocks = ceil_div(shape_.seqlen_q, kBlockM);
    const int64_t column_tiles = ceil_div(shape_.seqlen_k, kBlockN);

    Team team(threads);
    team.run([&](int worker) {
      team.for_each(tiles_.groups(), [&](int64_t group) { tiles_.scan_group(group); });
      team.for_each(query_heads * row_blocks, [&](int64_t item) {
        prepare_rows(item / row_blocks, item % row_blocks * kBlockM, scratch[worker]);
      });
      team.for_each(key_heads * column_tiles,
                    [&](int64_t item) { each_column_tile(item, column_tiles, &Gradient<T>::clear); });
      for (int64_t phase = 0; phase < chunks_; ++phase) {
        team.for_each(key_heads * chunks_, [&](int64_t item) {
          const int64_t column_chunk = item % chunks_;
          compute_block(item / chunks_, (column_chunk + phase) % chunks_, column_chunk, scratch[worker]);
        });
      }
      team.for_each(query_heads * row_blocks,
                    [&](int64_t item) { finish_rows(item / row_blocks, item % row_blocks * kBlockM); });
      team.for_each(key_heads * column_tiles,
                    [&](int64_t item) { each_column_tile(item, column_tiles, &Gradient<T>::finish); });
    });
  }

 private:
  using GradientStep = void (Gradient<T>::*)(int64_t b, int64_t h, int64_t row, int64_t count) const;

  void each_column_tile(int64_t item, int64_t column_tiles, GradientStep step) const {
    const int64_t head = item / column_tiles, column = item % column_tiles * kBlockN;
    const int64_t b = head / shape_.heads_k, h = head % shape_.heads_k;
    const int64_t count = std::min<int64_t>(kBlockN, shape_.seqlen_k - column);
    (dk_.*step)(b, h, column, count);
    (dv_.*step)(b, h, column, count);
  }

  // delta = rowsum(dO * O) - dlse of a block of rows, and zeros in dq.
  void prepare_rows(int64_t head, int64_t row, const Scratch<T>& scratch) {
    const int64_t b = head / shape_.heads_q, h = head % shape_.heads_q;
    const int32_t rows = static_cast<int32_t>(std::min<int64_t>(kBlockM, shape_.seqlen_q - row));
    const Rows<const T> o = o_.read(b, h, row, rows, scratch.o.data());
    const Rows<const T> dout = dout_.read(b, h, row, rows, scratch.dout.data());
    T* delta = delta_.data() + head * shape_.seqlen_q + row;
    ops_.row_dots(dout.data, dout.stride, o.data, o.stride, rows, shape_.head_dim_v, delta);
    const T* lse = static_cast<const T*>(p_.lse) + head * shape_.seqlen_q + row;
    const T* dlse = p_.dlse ? static_cast<const T*>(p_.dlse) + head * shape_.seqlen_q + row : nullptr;
    for (int32_t i = 0; i < rows; ++i) {
      if (dlse) delta[i] -= dlse[i];
      if (sees_nothing(lse[i])) delta[i] = 0;  // whatever the incoming gradients of an empty row are
    }
    dq_.clear(b, h, row, rows);
  }

  // A row that sees nothing has added 0 times keys, which is not 0 if they are not finite.
  void finish_rows(int64_t head, int64_t row) const {
    const int64_t b = head / shape_.heads_q, h = head % shape_.heads_q;
    const int64_t rows = std::min<int64_t>(kBlockM, shape_.seqlen_q - row);
    const T* lse = static_cast<const T*>(p_.lse) + head * shape_.seqlen_q + row;
    for (int64_t i = 0; i < rows; ++i) {
      if (sees_nothing(lse[i])) dq_.clear(b, h, row + i, 1);
    }
    dq_.finish(b, h, row, rows);
  }

  static bool sees_nothing(T lse) { return lse == -std::numeric_limits<T>::infinity(); }

  void compute_block(int64_t key_head, int64_t row_chunk, int64_t column_chunk, const Scratch<T>& scratch) {
    const int64_t row_begin = row_chunk * chunk_, row_end = std::min(row_begin + chunk_, shape_.seqlen_q);
    const int64_t column_begin = column_chunk * chunk_;
    const int64_t column_end = std::min(column_begin + chunk_, shape_.seqlen_k);
    if (row_begin >= row_end || column_begin >= column_end) return;
    const int64_t b = key_head / shape_.heads_k, h_k = key_head % shape_.heads_k;
    const int64_t group = shape_.heads_q / shape_.heads_k;
    Keys keys{b, h_k, column_begin, column_end, {}, {}, false};
    for (int64_t h = h_k * group; h < (h_k + 1) * group; ++h) {
      for (int64_t row = row_begin; row < row_end; row += kBlockM) {
        compute_rows(keys, h, row, std::min(row + kBlockM, row_end), scratch);
      }
    }
  }

  // The chunk of columns of a block; its rows of k and v are read when a first tile needs them.
  struct Keys {
    int64_t b, h_k, begin, end;
    Rows<const T> k, v;
    bool read;
  };

  void read_keys(Keys& keys, const Scratch<T>& scratch) const {
    if (keys.read) return;
    const int32_t count = static_cast<int32_t>(keys.end - keys.begin);
    keys.k = k_.copy(keys.b, keys.h_k, keys.begin, count, scratch.k.data());
    keys.v = v_.copy(keys.b, keys.h_k, keys.begin, count, scratch.v.data());
    keys.read = true;
  }

  void compute_rows(Keys& keys, int64_t h, int64_t row_begin, int64_t row_end, const Scratch<T>& scratch) {
    const int32_t rows = static_cast<int32_t>(row_end - row_begin);
    const int32_t lanes = static_cast<int32_t>(round_up(rows, ops_.lanes));
    QueryRows query{};
    tiles_.for_each_visited(keys.b, h, row_begin, row_end, keys.begin, keys.end,
                            [&](ColumnSpan span, const HiddenRows* hidden) {
                              read_keys(keys, scratch);
                              if (!query.q.data) query = read_rows(keys.b, h, row_begin, rows, scratch);
                              compute_tile(keys, h, row_begin, rows, lanes, query, span, hidden, scratch);
                            });
  }

  // A block of query rows, read when a first tile needs it.
  struct QueryRows {
    Rows<const T> q, dout;
    T lse[kBlockM], delta[kBlockM];
  };

  QueryRows read_rows(int64_t b, int64_t h, int64_t row, int32_t rows, const Scratch<T>& scratch) const {
    QueryRows query;
    query.q = q_.copy(b, h, row, rows, scratch.q.data());
    query.dout = dout_.copy(b, h, row, rows, scratch.dout.data());
    const int64_t at = (b * shape_.heads_q + h) * shape_.seqlen_q + row;
    const T* lse = static_cast<const T*>(p_.lse) + at;
    for (int32_t i = 0; i < kBlockM; ++i) {
      // exp(score - inf) is 0: rows that see nothing, and rows beyond the last, contribute nothing.
      const bool empty = i >= rows || sees_nothing(lse[i]);
      query.lse[i] = empty ? std::numeric_limits<T>::infinity() : lse[i];
      query.delta[i] = empty ? T{0} : delta_.data()[at + i];
      // Nor does what arrives for them, which 0 times NaN would let through: the gradient of a norm is NaN
      // where all is zero.
      if (empty && i < rows) {
        std::fill_n(scratch.dout.data() + i * query.dout.stride, shape_.head_dim_v, T{0});
      }
    }
    transpose_rows(query.q, rows, shape_.head_dim, scratch.q_t.data());
    transpose_rows(query.dout, rows, shape_.head_dim_v, scratch.dout_t.data());
    return query;
  }

  void transpose_rows(Rows<const T> src, int32_t rows, int32_t dim, T* dst) const {
    if (rows < kBlockM) std::fill_n(dst, int64_t{dim} * kBlockM, T{0});
    ops_.transpose(src.data, src.stride, rows, dim, dst, kBlockM);
  }

  void compute_tile(const Keys& keys, int64_t h, int64_t row_begin, int32_t rows, int32_t lanes,
                    const QueryRows& query, ColumnSpan span, const HiddenRows* hidden,
                    const Scratch<T>& scratch) const {
    const int32_t columns = static_cast<int32_t>(span.end - span.begin);
    const T* k = keys.k.data + (span.begin - keys.begin) * keys.k.stride;
    const T* v = keys.v.data + (span.begin - keys.begin) * keys.v.stride;
    const T scale = static_cast<T>(p_.softmax_scale);
    T* scores = scratch.scores.data();
    T* dp = scratch.dp.data();

    ops_.multiply({false, Into::kOverwrite, columns, lanes, shape_.head_dim, k, keys.k.stride,
                   scratch.q_t.data(), kBlockM, scores, kBlockM, scale, nullptr});
    if (p_.visit == Visit::kDense) {
      ops_.hide_dense(scores, columns, rows, tiles_.dense_at(keys.b, h, row_begin, span.begin),
                      shape_.seqlen_k);
    } else if (span.partial) {
      ops_.hide(scores, columns, lanes, static_cast<int32_t>(row_begin), hidden);
    }
    ops_.multiply({false, Into::kOverwrite, columns, lanes, shape_.head_dim_v, v, keys.v.stride,
                   scratch.dout_t.data(), kBlockM, dp, kBlockM, T{1}, nullptr});
    T* keep = nullptr;
    if (dropout_.enabled()) {
      keep = scratch.keep.data();
      ops_.draw_keep(keep, columns, lanes, dropout_.tile(keys.b, h, row_begin, span.begin));
    }
    ops_.softmax_backward(scores, dp, keep, columns, lanes, query.lse, query.delta, scale);

    if (dv_.wanted()) {
      const Rows<T> dv = dv_.at(keys.b, keys.h_k, span.begin);
      ops_.multiply({false, Into::kAdd, columns, dv_.padded_dim(), rows, scores, kBlockM, query.dout.data,
                     query.dout.stride, dv.data, dv.stride, T{1}, nullptr});
    }
    if (dk_.wanted()) {
      const Rows<T> dk = dk_.at(keys.b, keys.h_k, span.begin);
      ops_.multiply({false, Into::kAdd, columns, dk_.padded_dim(), rows, dp, kBlockM, query.q.data,
                     query.q.stride, dk.data, dk.stride, T{1}, nullptr});
    }
    if (dq_.wanted()) {
      const Rows<T> dq = dq_.at(keys.b, h, row_begin);
      ops_.multiply({true, Into::kAdd, rows, dq_.padded_dim(), columns, dp, kBlockM, k, keys.k.stride,
                     dq.data, dq.stride, T{1}, nullptr});
    }
  }

  const BackwardParams& p_;
  const Shape& shape_;
  const TileOps<T>& ops_;
  TensorRows<T> q_, k_, v_, o_, dout_;
  Gradient<T> dq_, dk_, dv_;
  DropoutPattern dropout_;
  ColumnTiles tiles_;
  int64_t chunk_;    // tokens
  int64_t chunks_;   // of the longer sequence
  Buffer<T> delta_;  // [B][Hq][Sq]: rowsum(dO * O) - dlse
};

}  // namespace

template <typename T>
void backward(const BackwardParams& params) {
  Backward<T>(params).run();
}

template void backward<float>(const BackwardParams& params);
template void backward<double>(const BackwardParams& params);

}  // namespace flashmask::cpu
