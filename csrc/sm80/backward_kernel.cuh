// Algorithm 2 of the paper on mma.sync: one block per column tile of one key head. It keeps dK and dV in
// registers, walks the row tiles that the mask does not hide (at most three runs of them) for every query
// head of the group, and adds each dQ tile to an fp32 workspace.
#pragma once

#include "common/block_place.cuh"
#include "common/mask_fragment.cuh"
#include "common/ordered_add.cuh"
#include "common/row_runs.cuh"
#include "common/softmax.cuh"
#include "sm80/backward_rows.cuh"
#include "sm80/gemm.cuh"
#include "sm80/load_slots.cuh"

namespace flashmask::sm80 {

// kScoreRows, kGradRows, kQueryRows: how many of the warps divide the rows of S and dP [block_m, block_n], of
// dK and dV [block_n, D], of dQ [block_m, D]; the others divide the columns.
template <typename Element_, int kHeadDim_, int kHeadDimV_, int kBlockM_, int kBlockN_, int kWarps_,
          int kScoreRows_, int kGradRows_, int kQueryRows_, int kStages_, bool kDropout_,
          bool kDeterministic_, bool kDense_>
struct BackwardConfig {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kHeadDimV = kHeadDimV_;
  static constexpr int kBlockM = kBlockM_;
  static constexpr int kBlockN = kBlockN_;
  static constexpr int kWarps = kWarps_;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kScoreRows = kScoreRows_;
  static constexpr int kScoreColumns = kWarps / kScoreRows;
  static constexpr int kGradRows = kGradRows_;
  static constexpr int kGradColumns = kWarps / kGradRows;
  static constexpr int kQueryRows = kQueryRows_;
  static constexpr int kQueryColumns = kWarps / kQueryRows;
  static constexpr int kStages = kStages_;  // of Q and dO
  static constexpr bool kDropout = kDropout_;
  static constexpr bool kDense = kDense_;  // test mode: the mask is read from a dense matrix
  static constexpr bool kDeterministic = kDeterministic_;
  static_assert(kStages == 1 || kStages == 2, "Q and dO are single or double buffered");
  static_assert(kBlockM % (16 * kScoreRows) == 0 && kBlockN % (16 * kScoreColumns) == 0,
                "S splits into 16x16 blocks");
  static_assert(kBlockN % (16 * kGradRows) == 0 && kHeadDim % (16 * kGradColumns) == 0 &&
                    kHeadDimV % (16 * kGradColumns) == 0,
                "dK and dV split into 16x16 blocks");
  static_assert(kBlockM % (16 * kQueryRows) == 0 && kHeadDim % (16 * kQueryColumns) == 0,
                "dQ splits into 16x16 blocks");
  static_assert(kBlockM / 2 <= kThreads, "one pass copies lse and delta, four rows a thread");

  using QTile = SmemTile<kBlockM, kHeadDim>;
  using DoTile = SmemTile<kBlockM, kHeadDimV>;
  using KTile = SmemTile<kBlockN, kHeadDim>;
  using VTile = SmemTile<kBlockN, kHeadDimV>;
  using PTile = SmemTile<kBlockM, kBlockN>;

  struct alignas(1024) Smem {
    char k[KTile::kBytes];  // dK passes through here at the end
    char v[VTile::kBytes];  // and dV here
    char q[kStages][QTile::kBytes];
    char dout[kStages][DoTile::kBytes];
    char p[PTile::kBytes];
    char ds[PTile::kBytes];
    alignas(16) float lse[kStages][kBlockM];
    alignas(16) float delta[kStages][kBlockM];
    alignas(16) Slot slots[kMaxSlots][kBlockN];
    RowRuns runs;
    NearTiles near;
    struct {
      int tile;          // the row tile after the next one
      uint32_t touched;  // TileVisit's
      int empty;         // whether some row of it sees no key
      RowWalk walk;      // in deterministic mode
    } ahead;
    int first_empty;  // that of the first row tile
    int32_t turn;     // what the row tile's counter holds when it is this block's turn to add
    int number;       // the block's ticket
  };
};

// Where a thread's warp stands in the three divisions. The main loop derives it anew from the thread number
// in every step, see varying_zero: kept in registers it would push accumulators out.
template <class Config>
struct WarpPlace {
  int warp, lane;
  int score_row, score_column;
  int grad_row, grad_column;
  int query_row, query_column;

  __device__ __forceinline__ explicit WarpPlace(int thread)
      : warp(thread / 32),
        lane(thread % 32),
        score_row(warp % Config::kScoreRows),
        score_column(warp / Config::kScoreRows),
        grad_row(warp % Config::kGradRows),
        grad_column(warp / Config::kGradRows),
        query_row(warp % Config::kQueryRows),
        query_column(warp / Config::kQueryRows) {}
};

struct BackwardArguments {
  BackwardParams params;
  MaskTiles mask;
  RowStatistics rows;
  float* dq;         // fp32 workspace, see DqWorkspace
  int32_t* dq_turn;  // [B, Hq, row_tiles], zeroed; read in deterministic mode only
  int* ticket;       // zeroed; the number of the next block, in deterministic mode only
  int column_tiles;
  const DeterministicOrder* deterministic_order;  // in deterministic mode only
};

// Grid: column_tiles * Hk * B blocks.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads)
    backward_kernel(const __grid_constant__ BackwardArguments arguments) {
  using Element = typename Config::Element;
  using QTile = typename Config::QTile;
  using DoTile = typename Config::DoTile;
  using KTile = typename Config::KTile;
  using VTile = typename Config::VTile;
  using PTile = typename Config::PTile;
  constexpr int kThreads = Config::kThreads;
  constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kStages = Config::kStages;
  // Accumulators a warp holds, in 16-row and 8-column units: scores, dK and dV, dQ.
  constexpr int kS = kBlockM / (16 * Config::kScoreRows), kS8 = kBlockN / (8 * Config::kScoreColumns);
  constexpr int kG = kBlockN / (16 * Config::kGradRows), kDk8 = Config::kHeadDim / (8 * Config::kGradColumns);
  constexpr int kDv8 = Config::kHeadDimV / (8 * Config::kGradColumns);
  constexpr int kQ = kBlockM / (16 * Config::kQueryRows),
                kQ8 = Config::kHeadDim / (8 * Config::kQueryColumns);
  extern __shared__ __align__(1024) char smem_raw[];
  auto& smem = *reinterpret_cast<typename Config::Smem*>(smem_raw);

  const BackwardParams& params = arguments.params;
  const Shape& shape = params.shape;
  const int thread = threadIdx.x;
  int number = static_cast<int>(blockIdx.x);
  if constexpr (Config::kDeterministic) {
    // A block that waits for another's turn must know that the other runs, whichever order blocks start in.
    if (thread == 0) smem.number = atomicAdd(arguments.ticket, 1);
    __syncthreads();
    number = smem.number;
  }
  const int in_turns = Config::kDeterministic ? __ldg(&arguments.deterministic_order->heads_in_turns) : 0;
  const BlockPlace place(shape, arguments.column_tiles, in_turns, number);
  const int column_tile = place.column_tile, head_k = place.head_k, batch = place.batch;
  const int group = shape.heads_q / shape.heads_k;
  const int64_t column_begin = int64_t{column_tile} * kBlockN;
  const int columns = static_cast<int>(min(int64_t{kBlockN}, shape.seqlen_k - column_begin));

  {
    const Element* k = static_cast<const Element*>(params.k.data) + batch * params.k.stride_batch +
                       column_begin * params.k.stride_seq + head_k * params.k.stride_head;
    const Element* v = static_cast<const Element*>(params.v.data) + batch * params.v.stride_batch +
                       column_begin * params.v.stride_seq + head_k * params.v.stride_head;
    load_tile<KTile, kThreads>(shared_address(smem.k), k, params.k.stride_seq, columns, shape.head_dim,
                               thread);
    load_tile<VTile, kThreads>(shared_address(smem.v), v, params.v.stride_seq, columns, shape.head_dim_v,
                               thread);
  }

  // Rows are divided in runs, columns of dK, dV and dQ in turns of 16 (a run need not start where a panel
  // does).
  const auto row_of = [](int m) { return 16 * m; };
  const auto column_of = [](int n) { return 8 * n; };

  const bool negated = params.softmax_scale < 0;
  const float scale = exponent_scale(params.softmax_scale);
  const bool wants_dq = params.dq.data != nullptr, wants_dk = params.dk.data != nullptr,
             wants_dv = params.dv.data != nullptr;

  DropoutState dropout;
  float kept = 1.f;
  if constexpr (Config::kDropout) {
    dropout.seed = static_cast<uint64_t>(params.dropout.seed_offset[0]);
    dropout.offset = static_cast<uint64_t>(params.dropout.seed_offset[1]);
    dropout.threshold = dropout_threshold(params.dropout.probability);
    kept = static_cast<float>(1.0 / (1.0 - params.dropout.probability));
  }

  float dk[kG][kDk8][4], dv[kG][kDv8][4];
  clear(dk);
  clear(dv);

  for (int member = 0; member < group; ++member) {
    const int head = head_k * group + member;
    const int head_plane = batch * shape.heads_q + head;
    const MaskPlane plane = plane_at(arguments.mask, plane_index(arguments.mask, shape, batch, head));
    const Element* q = static_cast<const Element*>(params.q.data) + batch * params.q.stride_batch +
                       head * params.q.stride_head;
    const Element* dout = static_cast<const Element*>(params.dout.data) + batch * params.dout.stride_batch +
                          head * params.dout.stride_head;
    const float* lse = arguments.rows.lse + int64_t{head_plane} * arguments.rows.tiles * kBlockM;
    const float* delta = arguments.rows.delta + int64_t{head_plane} * arguments.rows.tiles * kBlockM;
    if constexpr (Config::kDropout) dropout.head = static_cast<uint32_t>(head_plane);

    const auto load_rows = [&](int row_tile, int stage, int thread) {
      const int64_t first = int64_t{row_tile} * kBlockM;
      const int valid = static_cast<int>(min(int64_t{kBlockM}, shape.seqlen_q - first));
      load_tile<QTile, kThreads>(shared_address(smem.q[stage]), q + first * params.q.stride_seq,
                                 params.q.stride_seq, valid, shape.head_dim, thread);
      load_tile<DoTile, kThreads>(shared_address(smem.dout[stage]), dout + first * params.dout.stride_seq,
                                  params.dout.stride_seq, valid, shape.head_dim_v, thread);
      constexpr int kCopies = kBlockM / 4;
      if (thread < 2 * kCopies) {
        const int row = 4 * (thread % kCopies);
        cp_async_16(shared_address((thread < kCopies ? smem.lse[stage] : smem.delta[stage]) + row),
                    (thread < kCopies ? lse : delta) + first + row, true);
      }
    };

    if (member > 0) {  // else K and V are still on their way, and need not be waited for
      cp_async_wait<0>();
      __syncthreads();  // the extremes, the slots and both stages are no longer read, nor still being written
    }
    // One thread walks the row tiles, two steps ahead, so that nobody else spends registers and time on it.
    const int* empty = arguments.rows.empty + int64_t{head_plane} * arguments.rows.tiles;
    const auto find = [&](int from) {
      const int tile = Config::kDeterministic ? smem.ahead.walk.next(smem.runs, from, arguments.rows.tiles)
                                              : smem.runs.next(from);
      const int row_begin = tile * kBlockM;
      smem.ahead.tile = tile;
      smem.ahead.touched =
          smem.runs.touched(tile, row_begin, min(static_cast<int>(shape.seqlen_q), row_begin + kBlockM));
    };
    const auto look_ahead = [&](int from) {
      find(from);
      // Asynchronously: the loop's next wait and barrier come before anyone reads it.
      if (smem.ahead.tile < arguments.rows.tiles) {
        cp_async_4(shared_address(&smem.ahead.empty), empty + smem.ahead.tile);
      }
      cp_async_commit();
    };
    if (thread == 0) {
      smem.runs.build(arguments.mask, plane, column_tile, static_cast<int>(shape.seqlen_q), kBlockM,
                      arguments.rows.tiles);
      int begin = 0;
      if constexpr (Config::kDeterministic) {
        begin = __ldg(&arguments.deterministic_order->first_row_tile);
        smem.ahead.walk = {begin, arguments.rows.tiles};
      }
      find(begin);
    }
    load_slots<kBlockN, kThreads>(smem.slots, plane, arguments.mask, column_begin, thread);
    if (Config::kDeterministic && thread < 32) smem.near.load(arguments.mask, plane, column_tile, thread);
    __syncthreads();
    int row_tile = smem.ahead.tile;
    uint32_t touched = smem.ahead.touched;
    __syncthreads();
    int stage = 0;
    int32_t* turn_to_pass =
        nullptr;  // of the row tile before: passed on once a barrier has followed its additions
    if (row_tile < arguments.rows.tiles) {
      load_rows(row_tile, 0, thread);
      if (thread == 0) cp_async_4(shared_address(&smem.first_empty), empty + row_tile);
    }
    cp_async_commit();
    if (thread == 0) look_ahead(row_tile + 1);
    cp_async_wait<0>();
    __syncthreads();  // first_empty has arrived, with the rows
    bool has_empty = smem.first_empty != 0;

    while (row_tile < arguments.rows.tiles) {
      const uint32_t zero = varying_zero(row_tile);
      const WarpPlace<Config> at(thread + zero);
      cp_async_wait<0>();
      __syncthreads();  // this stage has arrived; the other one, P and dS are no longer read
      if (Config::kDeterministic && thread == 0 && turn_to_pass != nullptr)
        pass_turn(turn_to_pass, column_tile);
      const int next_tile = smem.ahead.tile;
      const uint32_t next_touched = smem.ahead.touched;
      const bool next_empty = smem.ahead.empty != 0;
      if (kStages == 2) {
        if (next_tile < arguments.rows.tiles) load_rows(next_tile, stage ^ 1, thread + zero);
        cp_async_commit();
      }

      // What comes in for a row that sees no key must not come out, even if it is not finite (and times P = 0
      // is NaN).
      if (has_empty) {
        constexpr int kChunks = Config::kHeadDimV / 8;
        for (int i = thread; i < kBlockM * kChunks; i += kThreads) {
          if (smem.lse[stage][i / kChunks] == INFINITY) {
            *reinterpret_cast<int4*>(smem.dout[stage] + DoTile::offset(i / kChunks, i % kChunks)) = {0, 0, 0,
                                                                                                     0};
          }
        }
        __syncthreads();
      }

      const int row_begin = row_tile * kBlockM;
      const int row_end = min(static_cast<int>(shape.seqlen_q), row_begin + kBlockM);
      const int64_t tile_index = int64_t{head_plane} * arguments.rows.tiles + row_tile;
      if (Config::kDeterministic && wants_dq && at.warp == Config::kWarps - 1) {  // the first passes turns on
        const int before =
            next_visitor(arguments.mask, plane, smem.near, column_tile, row_begin, row_end, at.lane);
        if (at.lane == 0) smem.turn = before + 1;
      }
      const uint32_t k_tile = shared_address(smem.k) + zero, v_tile = shared_address(smem.v) + zero;
      const uint32_t p_tile = shared_address(smem.p) + zero, ds_tile = shared_address(smem.ds) + zero;
      const uint32_t q_tile = shared_address(smem.q[stage]) + zero,
                     do_tile = shared_address(smem.dout[stage]) + zero;
      {
        const int lane_row = at.score_row * 16 * kS + at.lane / 4,
                  lane_column = at.score_column * 8 * kS8 + 2 * (at.lane % 4);
        float scores[kS][kS8][4];  // S, then P
        clear(scores);
        {
          const BlockReader<QTile, Walk::kRows16> a_blocks(q_tile, at.score_row * 16 * kS, 0, at.lane);
          const BlockReader<KTile, Walk::kColumns16> b_blocks(k_tile, at.score_column * 8 * kS8, 0, at.lane);
          warp_gemm<Element, kS, kS8, Config::kHeadDim / 16>(
              scores, [&](uint32_t (&a)[4], int m, int d) { ldmatrix_x4(a, a_blocks(m, d)); },
              [&](uint32_t (&b)[4], int n, int d) { ldmatrix_x4(b, b_blocks(n, d)); });
        }
        float dp[kS][kS8][4];  // dP, then dS
        clear(dp);
        {
          const BlockReader<DoTile, Walk::kRows16> a_blocks(do_tile, at.score_row * 16 * kS, 0, at.lane);
          const BlockReader<VTile, Walk::kColumns16> b_blocks(v_tile, at.score_column * 8 * kS8, 0, at.lane);
          warp_gemm<Element, kS, kS8, Config::kHeadDimV / 16>(
              dp, [&](uint32_t (&a)[4], int m, int d) { ldmatrix_x4(a, a_blocks(m, d)); },
              [&](uint32_t (&b)[4], int n, int d) { ldmatrix_x4(b, b_blocks(n, d)); });
        }

        if (negated) negate(scores);
        if constexpr (Config::kDense) {
          mask_by_dense(scores, dense_plane(arguments.mask, shape, batch, head), shape.seqlen_q,
                        shape.seqlen_k, row_begin + lane_row, static_cast<int>(column_begin) + lane_column,
                        row_of, column_of);
        } else {
          if (columns < kBlockN) touched |= touch_bits_of_any(1);
#pragma unroll 1
          for (uint32_t slots = touched & kSlotBits; slots != 0; slots &= slots - 1) {
            const int slot = __ffs(static_cast<int>(slots)) - 1;
            with_ends(touched, slot, [&](auto starts, auto ends) {
              mask_by_slot<decltype(starts)::value, decltype(ends)::value>(
                  scores, smem.slots[slot], row_begin + lane_row, lane_column, row_of, column_of);
            });
          }
        }

#pragma unroll
        for (int m = 0; m < kS; ++m) {
#pragma unroll
          for (int n = 0; n < kS8; n += 2) {
            PhiloxWords words;
            if constexpr (Config::kDropout) {
              words =
                  dropout.words(row_begin + at.score_row * 16 * kS + 16 * m,
                                static_cast<int>(column_begin) + at.score_column * 8 * kS8 + 8 * n, at.lane);
            }
#pragma unroll
            for (int e = 0; e < 8; ++e) {
              float& s = scores[m][n + e / 4][e % 4];
              float& d = dp[m][n + e / 4][e % 4];
              const int row = lane_row + 16 * m + 8 * (e % 4 / 2);
              const float p = exp2_approx(s * scale - smem.lse[stage][row]);
              if constexpr (Config::kDropout) {
                const float factor = dropout.keeps(words, e / 4, e % 4) ? kept : 0.f;
                s = p * factor;
                d = p * (d * factor - smem.delta[stage][row]);
              } else {
                s = p;
                d = p * (d - smem.delta[stage][row]);
              }
            }
          }
        }
#pragma unroll
        for (int m = 0; m < kS; ++m) {
#pragma unroll
          for (int n = 0; n < kS8; ++n) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              const int offset =
                  PTile::offset(lane_row + 16 * m + 8 * h, at.score_column * kS8 + n) + (at.lane % 4) * 4;
              *reinterpret_cast<uint32_t*>(smem.p + offset) =
                  pack<Element>(scores[m][n][2 * h], scores[m][n][2 * h + 1]);
              *reinterpret_cast<uint32_t*>(smem.ds + offset) =
                  pack<Element>(dp[m][n][2 * h], dp[m][n][2 * h + 1]);
            }
          }
        }
      }
      __syncthreads();  // P and dS are written; everyone has looked ahead
      int32_t turn_seen = 0;
      if (Config::kDeterministic && wants_dq) turn_seen = load_turn(arguments.dq_turn + tile_index);
      if (thread == 0) look_ahead(next_tile + 1);

      if (wants_dv) {  // dV += P^T dO
        const BlockReader<PTile, Walk::kColumns16> a_blocks(p_tile, 0, 0, at.lane);
        const BlockReader<DoTile, Walk::kRows16> b_blocks(do_tile, 0, at.grad_column * 16, at.lane);
        warp_gemm<Element, kG, kDv8, kBlockM / 16>(
            dv,
            [&](uint32_t (&a)[4], int m, int i) { ldmatrix_x4_trans(a, a_blocks(i, at.grad_row * kG + m)); },
            [&](uint32_t (&b)[4], int n, int i) {
              ldmatrix_x4_trans(b, b_blocks(i, n * Config::kGradColumns));
            });
      }
      if (wants_dq) {  // dQ += dS K
        float dq[kQ][kQ8][4];
        clear(dq);
        const BlockReader<PTile, Walk::kRows16> a_blocks(ds_tile, at.query_row * 16 * kQ, 0, at.lane);
        const BlockReader<KTile, Walk::kRows16> b_blocks(k_tile, 0, at.query_column * 16, at.lane);
        warp_gemm<Element, kQ, kQ8, kBlockN / 16>(
            dq, [&](uint32_t (&a)[4], int m, int j) { ldmatrix_x4(a, a_blocks(m, j)); },
            [&](uint32_t (&b)[4], int n, int j) {
              ldmatrix_x4_trans(b, b_blocks(j, n * Config::kQueryColumns));
            });
        if constexpr (Config::kDeterministic) {
          wait_for_turn(arguments.dq_turn + tile_index, turn_seen, smem.turn);
          turn_to_pass = arguments.dq_turn + tile_index;
        }
        DqWorkspace<Config>::add(arguments.dq + tile_index * DqWorkspace<Config>::kTileFloats, dq, at.warp,
                                 at.lane);
      }
      if (wants_dk) {  // dK += dS^T Q
        const BlockReader<PTile, Walk::kColumns16> a_blocks(ds_tile, 0, 0, at.lane);
        const BlockReader<QTile, Walk::kRows16> b_blocks(q_tile, 0, at.grad_column * 16, at.lane);
        warp_gemm<Element, kG, kDk8, kBlockM / 16>(
            dk,
            [&](uint32_t (&a)[4], int m, int i) { ldmatrix_x4_trans(a, a_blocks(i, at.grad_row * kG + m)); },
            [&](uint32_t (&b)[4], int n, int i) {
              ldmatrix_x4_trans(b, b_blocks(i, n * Config::kGradColumns));
            });
      }

      if (kStages == 1) {
        __syncthreads();  // Q and dO are no longer read
        if (next_tile < arguments.rows.tiles) load_rows(next_tile, 0, thread + zero);
        cp_async_commit();
      } else {
        stage ^= 1;
      }
      row_tile = next_tile;
      touched = next_touched;
      has_empty = next_empty;
    }
    if constexpr (Config::kDeterministic) {
      __syncthreads();
      if (thread == 0 && turn_to_pass != nullptr) pass_turn(turn_to_pass, column_tile);
    }
  }

  cp_async_wait<0>();
  __syncthreads();  // K and V are no longer read
  const WarpPlace<Config> at(thread);
  const auto write = [&](auto& gradient, auto tile, char* shared, const Tensor& out, float factor,
                         int head_dim) {
    using Tile = decltype(tile);
    constexpr int kN8 = Tile::kColumns / (8 * Config::kGradColumns);
#pragma unroll
    for (int m = 0; m < kG; ++m) {
#pragma unroll
      for (int n = 0; n < kN8; ++n) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int row = at.grad_row * 16 * kG + 16 * m + 8 * h + at.lane / 4;
          const int chunk = 2 * (at.grad_column + n / 2 * Config::kGradColumns) + n % 2;
          *reinterpret_cast<uint32_t*>(shared + Tile::offset(row, chunk) + (at.lane % 4) * 4) =
              pack<Element>(gradient[m][n][2 * h] * factor, gradient[m][n][2 * h + 1] * factor);
        }
      }
    }
    __syncthreads();
    Element* global = static_cast<Element*>(out.data) + batch * out.stride_batch +
                      column_begin * out.stride_seq + head_k * out.stride_head;
    store_tile<Tile, kThreads>(shared, global, out.stride_seq, columns, head_dim, thread);
  };
  if (wants_dk) {
    write(dk, KTile{}, smem.k, params.dk, static_cast<float>(params.softmax_scale), shape.head_dim);
  }
  if (wants_dv) write(dv, VTile{}, smem.v, params.dv, 1.f, shape.head_dim_v);
}

}  // namespace flashmask::sm80
