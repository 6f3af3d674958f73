// Algorithm 1 of the paper on mma.sync: FlashAttention-2's forward, one block per row tile of one head,
// walking the column tiles that the mask does not hide.
#pragma once

#include "common/mask_fragment.cuh"
#include "common/row_tile_scan.cuh"
#include "common/softmax.cuh"
#include "sm80/gemm.cuh"
#include "sm80/load_slots.cuh"

namespace flashmask::sm80 {

template <typename Element_, int kHeadDim_, int kHeadDimV_, int kBlockM_, int kBlockN_, int kWarps_,
          bool kDropout_, bool kDense_>
struct ForwardConfig {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kHeadDimV = kHeadDimV_;
  static constexpr int kBlockM = kBlockM_;
  static constexpr int kBlockN = kBlockN_;
  static constexpr int kWarps = kWarps_;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr bool kDropout = kDropout_;
  static constexpr bool kDeterministic = false;  // it always is, and has no other way to be asked for
  static constexpr bool kDense = kDense_;        // test mode: the mask is read from a dense matrix
  static_assert(kBlockM % (16 * kWarps) == 0, "every warp owns whole 16-row fragments");
  static_assert(kBlockN % 16 == 0, "P is used 16 columns at a time, slots are copied two at a time");

  using QTile = SmemTile<kBlockM, kHeadDim>;
  using KTile = SmemTile<kBlockN, kHeadDim>;
  using VTile = SmemTile<kBlockN, kHeadDimV>;
  using OTile = SmemTile<kBlockM, kHeadDimV>;  // takes Q's place at the end

  struct alignas(1024) Smem {
    char q[QTile::kBytes > OTile::kBytes ? QTile::kBytes : OTile::kBytes];
    char k[KTile::kBytes];
    char v[VTile::kBytes];
    alignas(16) Slot slots[kMaxSlots][kBlockN];
    TileBits tiles;
    TileWalk walk;
  };
  // Compute capability 8.6 and 8.9 offer a block 99 KB, and have no other forward of these head dims.
  static_assert((kHeadDim > 192 && kBlockM > 64) || sizeof(Smem) <= 99 * 1024,
                "a forward for every head dim fits into the shared memory of the smallest cards");
};

struct ForwardArguments {
  ForwardParams params;
  MaskTiles mask;
  int row_tiles;
};

// Grid: row_tiles * Hq * B blocks, a head's row tiles together and its last (under causality longest) first.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads)
    forward_kernel(const __grid_constant__ ForwardArguments arguments) {
  using Element = typename Config::Element;
  using QTile = typename Config::QTile;
  using KTile = typename Config::KTile;
  using VTile = typename Config::VTile;
  using OTile = typename Config::OTile;
  constexpr int kThreads = Config::kThreads;
  constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  constexpr int kM = kBlockM / (16 * Config::kWarps), kN8 = kBlockN / 8, kO8 = Config::kHeadDimV / 8;
  extern __shared__ __align__(1024) char smem_raw[];
  auto& smem = *reinterpret_cast<typename Config::Smem*>(smem_raw);

  const ForwardParams& params = arguments.params;
  const Shape& shape = params.shape;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int row_tile = arguments.row_tiles - 1 - static_cast<int>(blockIdx.x % arguments.row_tiles);
  const int head_and_batch = blockIdx.x / arguments.row_tiles;
  const int head = head_and_batch % shape.heads_q, batch = head_and_batch / shape.heads_q;
  const int head_k = head / (shape.heads_q / shape.heads_k);
  const int row_begin = row_tile * kBlockM;
  const int row_end = static_cast<int>(min(shape.seqlen_q, int64_t{row_begin} + kBlockM));
  const MaskPlane plane = plane_at(arguments.mask, plane_index(arguments.mask, shape, batch, head));

  const Element* q = static_cast<const Element*>(params.q.data) + batch * params.q.stride_batch +
                     row_begin * params.q.stride_seq + head * params.q.stride_head;
  const Element* k = static_cast<const Element*>(params.k.data) + batch * params.k.stride_batch +
                     head_k * params.k.stride_head;
  const Element* v = static_cast<const Element*>(params.v.data) + batch * params.v.stride_batch +
                     head_k * params.v.stride_head;

  const uint32_t q_tile = shared_address(smem.q), k_tile = shared_address(smem.k),
                 v_tile = shared_address(smem.v);
  const auto load_k = [&](int tile, int thread) {
    const int64_t first = int64_t{tile} * kBlockN;
    const int valid = static_cast<int>(min(int64_t{kBlockN}, shape.seqlen_k - first));
    load_tile<KTile, kThreads>(k_tile, k + first * params.k.stride_seq, params.k.stride_seq, valid,
                               shape.head_dim, thread);
    load_slots<kBlockN, kThreads>(smem.slots, plane, arguments.mask, first, thread);
  };
  const auto load_v = [&](int tile, int thread) {
    const int64_t first = int64_t{tile} * kBlockN;
    const int valid = static_cast<int>(min(int64_t{kBlockN}, shape.seqlen_k - first));
    load_tile<VTile, kThreads>(v_tile, v + first * params.v.stride_seq, params.v.stride_seq, valid,
                               shape.head_dim_v, thread);
  };

  const int warp_row = warp * 16 * kM;
  const int lane_row = row_begin + warp_row + lane / 4, lane_column = 2 * (lane % 4);
  const auto row_of = [](int m) { return 16 * m; };
  const auto column_of = [](int n) { return 8 * n; };

  const bool negated = params.softmax_scale < 0;
  const float scale = exponent_scale(params.softmax_scale);

  DropoutState dropout;
  if constexpr (Config::kDropout) {
    dropout.seed = static_cast<uint64_t>(params.dropout.seed_offset[0]);
    dropout.offset = static_cast<uint64_t>(params.dropout.seed_offset[1]);
    dropout.threshold = dropout_threshold(params.dropout.probability);
    dropout.head = static_cast<uint32_t>(head_and_batch);
  }

  OnlineSoftmax<kM> softmax;
  float output[kM][kO8][4];
  clear(output);
  load_tile<QTile, kThreads>(q_tile, q, params.q.stride_seq, row_end - row_begin, shape.head_dim, thread);
  // Without index vectors a row tile that visits any column tile visits the first one: no need to ask.
  bool loaded = params.mask.indices == nullptr && arguments.mask.tile_count > 0;
  if (loaded) load_k(0, thread);
  cp_async_commit();  // here too: without any key no more is loaded, and Q must not arrive on top of O

  for (int chunk = 0; chunk < arguments.mask.group_count; chunk += kGroupsPerChunk) {
    __syncthreads();
    scan_row_tile<Config::kWarps>(smem.tiles, arguments.mask, plane, chunk, row_begin, row_end, warp, lane);
    __syncthreads();
    if (thread == 0) smem.walk.start(smem.tiles, chunk, arguments.mask);
    __syncthreads();
    int tile = smem.walk.next;
    uint32_t touched = smem.walk.touched;
    if (tile >= 0 && !loaded) load_k(tile, thread);
    loaded = false;
    cp_async_commit();

    while (tile >= 0) {
      const uint32_t zero = varying_zero(tile);
      cp_async_wait<0>();
      __syncthreads();  // K and its columns have arrived; everyone is done with V
      load_v(tile, thread + zero);
      cp_async_commit();
      if (thread == 0) smem.walk.advance(smem.tiles, arguments.mask);

      float scores[kM][kN8][4];
      clear(scores);
      const BlockReader<QTile, Walk::kRows16> q_blocks(q_tile + zero, warp_row, 0, lane);
      const BlockReader<KTile, Walk::kColumns16> k_blocks(k_tile + zero, 0, 0, lane);
      const BlockReader<VTile, Walk::kRows16> v_blocks(v_tile + zero, 0, 0, lane);
      warp_gemm<Element, kM, kN8, Config::kHeadDim / 16>(
          scores, [&](uint32_t (&a)[4], int m, int d) { ldmatrix_x4(a, q_blocks(m, d)); },
          [&](uint32_t (&b)[4], int n, int d) { ldmatrix_x4(b, k_blocks(n, d)); });
      if (negated) negate(scores);

      const int column_begin = tile * kBlockN;
      if constexpr (Config::kDense) {
        mask_by_dense(scores, dense_plane(arguments.mask, shape, batch, head), shape.seqlen_q, shape.seqlen_k,
                      lane_row, column_begin + lane_column, row_of, column_of);
      } else {
        if (column_begin + kBlockN > shape.seqlen_k) touched |= 1;
#pragma unroll
        for (int s = 0; s < kMaxSlots; ++s) {
          if (touched >> s & 1) {
            mask_by_slot(scores, smem.slots[s], lane_row, lane_column, row_of, column_of);
          }
        }
      }

      cp_async_wait<0>();
      __syncthreads();  // V has arrived; everyone is done with K and its columns
      tile = smem.walk.next;
      touched = smem.walk.touched;
      if (tile >= 0) load_k(tile, thread + zero);
      cp_async_commit();

      float rescale[kM][2];
      softmax.advance(scores, scale, rescale);
      softmax.rescale_rows(output, rescale);
      if constexpr (Config::kDropout) {
#pragma unroll
        for (int m = 0; m < kM; ++m) {
#pragma unroll
          for (int n = 0; n < kN8; n += 2) {
            const PhiloxWords words =
                dropout.words(row_begin + warp_row + 16 * m, column_begin + 8 * n, lane);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              if (!dropout.keeps(words, 0, e)) scores[m][n][e] = 0.f;
              if (!dropout.keeps(words, 1, e)) scores[m][n + 1][e] = 0.f;
            }
          }
        }
      }

      uint32_t p[kM][kN8 / 2][4];
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int n = 0; n < kN8; ++n) {
          p[m][n / 2][n % 2 * 2] = pack<Element>(scores[m][n][0], scores[m][n][1]);
          p[m][n / 2][n % 2 * 2 + 1] = pack<Element>(scores[m][n][2], scores[m][n][3]);
        }
      }
      warp_gemm<Element, kM, kO8, kN8 / 2>(
          output,
          [&](uint32_t (&a)[4], int m, int n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) a[e] = p[m][n][e];
          },
          [&](uint32_t (&b)[4], int d, int n) { ldmatrix_x4_trans(b, v_blocks(n, d)); });
    }
  }

  // Epilogue: normalise, round, and pass through shared memory so that rows are written 16 bytes at a time.
  const float kept = Config::kDropout ? static_cast<float>(1.0 / (1.0 - params.dropout.probability)) : 1.f;
  float* lse = static_cast<float*>(params.lse) + int64_t{head_and_batch} * shape.seqlen_q;
  cp_async_wait<0>();
  __syncthreads();  // Q is no longer read
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float sum = softmax.total(m, h);
      const float inverse = sum == 0.f ? 0.f : kept / sum;
      if (sum == 0.f) clear_row(output[m], h);
      const int row = warp_row + 16 * m + 8 * h + lane / 4;
      if (lane % 4 == 0 && row_begin + row < row_end) {
        lse[row_begin + row] = softmax.lse(m, h, sum, scale);
      }
#pragma unroll
      for (int n = 0; n < kO8; ++n) {
        *reinterpret_cast<uint32_t*>(smem.q + OTile::offset(row, n) + lane_column * 2) =
            pack<Element>(output[m][n][2 * h] * inverse, output[m][n][2 * h + 1] * inverse);
      }
    }
  }
  __syncthreads();
  Element* o = static_cast<Element*>(params.o.data) + batch * params.o.stride_batch +
               row_begin * params.o.stride_seq + head * params.o.stride_head;
  store_tile<OTile, kThreads>(smem.q, o, params.o.stride_seq, row_end - row_begin, shape.head_dim_v, thread);
}

}  // namespace flashmask::sm80
