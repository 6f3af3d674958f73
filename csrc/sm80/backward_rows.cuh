// What backward needs per query row, before (lse in exponents of 2, delta) and after (dQ out of the
// workspace).
#pragma once

#include "common/kernel_chain.h"
#include "common/mask_tiles.cuh"
#include "common/softmax.cuh"
#include "sm80/smem_tile.cuh"

namespace flashmask::sm80 {

// Rows are padded to whole row tiles.
struct RowStatistics {
  float*
      lse;  // [B, Hq, tiles * block_m]: lse * log2(e); +inf where no key is visible, so that exp2 gives P = 0
  float* delta;  // [B, Hq, tiles * block_m]: rowsum(dO * O) - dlse
  int* empty;    // [B, Hq, tiles]: whether some row of the tile sees no key
  int tiles;     // ceil(Sq / block_m)
};

// The fp32 dQ workspace holds accumulators as the warps hold them: a tile is [warp, fragment, lane] of four
// floats, so that an addition is one coalesced 16-byte request a lane. Only this struct knows it.
template <class Config>
struct DqWorkspace {
  static constexpr int kM = Config::kBlockM / (16 * Config::kQueryRows);
  static constexpr int kN8 = Config::kHeadDim / (8 * Config::kQueryColumns);
  static constexpr int kTileFloats = Config::kBlockM * Config::kHeadDim;

  static __device__ __forceinline__ int fragment_offset(int warp, int m, int n) {
    return ((warp * kM + m) * kN8 + n) * 128;
  }

  static __device__ __forceinline__ void add(float* tile, const float (&dq)[kM][kN8][4], int warp, int lane) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN8; ++n) reduce_add_fragment(tile + fragment_offset(warp, m, n), dq[m][n], lane);
  }

  // Row and column of the first of a lane's elements of a fragment, as warp_gemm placed them.
  static __device__ __forceinline__ int row(int warp, int m, int lane) {
    return (warp % Config::kQueryRows) * 16 * kM + 16 * m + lane / 4;
  }
  static __device__ __forceinline__ int chunk(int warp, int n) {
    return 2 * (warp / Config::kQueryRows + n / 2 * Config::kQueryColumns) + n % 2;
  }
};

// What of the dQ workspace is cleared, if anything: that is done beside the reading of O and dO.
struct DqClearing {
  float* dq;              // null: nothing
  const int32_t* wanted;  // whether; null: yes
  int32_t* visits;        // set to `visited` for every row tile that is cleared, if not null
  int32_t visited;
};

// Which row tile a block of the kernels before and after takes: the heads of the same rows come together, as
// they lie together in memory.
struct RowTilePlace {
  int head, tile;
  int64_t batch, plane, index;  // plane: batch and head; index: all three

  __device__ __forceinline__ RowTilePlace(const Shape& shape, int tiles) {
    head = static_cast<int>(blockIdx.x % shape.heads_q);
    const int tile_and_batch = static_cast<int>(blockIdx.x / shape.heads_q);
    tile = tile_and_batch % tiles;
    batch = tile_and_batch / tiles;
    plane = batch * shape.heads_q + head;
    index = plane * tiles + tile;
  }
};

// delta, the scaled lse and what rows are empty; a lane takes 16 bytes of a row of O and dO. Grid: tiles * Hq
// * B blocks of 128 threads, each a row tile.
template <class Config, class Workspace = DqWorkspace<Config>>
__global__ void backward_before_kernel(const __grid_constant__ BackwardParams params, RowStatistics rows,
                                       DqClearing clearing) {
  using Element = typename Config::Element;
  let_next_kernel_start();
  wait_for_kernels_before();
  const Shape& shape = params.shape;
  const RowTilePlace place(shape, rows.tiles);
  if (clearing.dq != nullptr && (clearing.wanted == nullptr || *clearing.wanted)) {
    constexpr int kChunks = Workspace::kTileFloats / 4;
    auto* chunks = reinterpret_cast<float4*>(clearing.dq) + place.index * kChunks;
    for (int i = threadIdx.x; i < kChunks; i += blockDim.x) chunks[i] = make_float4(0.f, 0.f, 0.f, 0.f);
    if (clearing.visits != nullptr && threadIdx.x == 0) clearing.visits[place.index] = clearing.visited;
  }
  constexpr int kLanes = Config::kHeadDimV <= 32    ? 4
                         : Config::kHeadDimV <= 64  ? 8
                         : Config::kHeadDimV <= 128 ? 16
                                                    : 32;
  static_assert(8 * kLanes >= Config::kHeadDimV, "the lanes of a row cover it");
  const int chunk = threadIdx.x % kLanes;
  const auto* o = static_cast<const Element*>(params.o.data) + place.batch * params.o.stride_batch +
                  place.head * params.o.stride_head + chunk * 8;
  const auto* dout = static_cast<const Element*>(params.dout.data) + place.batch * params.dout.stride_batch +
                     place.head * params.dout.stride_head + chunk * 8;
  const auto* lse = static_cast<const float*>(params.lse) + place.plane * shape.seqlen_q;
  const auto* dlse = static_cast<const float*>(params.dlse) + place.plane * shape.seqlen_q;
  bool empty = false;
  for (int r = threadIdx.x / kLanes; r < Config::kBlockM; r += blockDim.x / kLanes) {
    const int64_t row = int64_t{place.tile} * Config::kBlockM + r;
    const bool in_range = row < shape.seqlen_q;
    // With the rows, or its latency would come after theirs.
    const float given_lse = in_range ? lse[row] : -INFINITY;
    const float given_dlse = in_range && params.dlse != nullptr ? dlse[row] : 0.f;
    float sum = 0.f, row_lse = INFINITY;
    if (in_range && chunk * 8 < shape.head_dim_v) {
      const int4 x = *reinterpret_cast<const int4*>(o + row * params.o.stride_seq);
      const int4 y = *reinterpret_cast<const int4*>(dout + row * params.dout.stride_seq);
      const auto* xs = reinterpret_cast<const Element*>(&x);
      const auto* ys = reinterpret_cast<const Element*>(&y);
#pragma unroll
      for (int e = 0; e < 8; ++e) sum += static_cast<float>(xs[e]) * static_cast<float>(ys[e]);
    }
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (chunk != 0) continue;
    if (given_lse != -INFINITY) {
      sum -= given_dlse;
      row_lse = given_lse * 1.4426950408889634f;
    } else if (in_range) {
      empty = true;
    }
    const int64_t out = place.index * Config::kBlockM + r;
    rows.lse[out] = row_lse;
    rows.delta[out] = row_lse == INFINITY ? 0.f : sum;
  }
  const int any_empty = __syncthreads_or(empty);
  if (threadIdx.x == 0) rows.empty[place.index] = any_empty;
}

// dq = softmax_scale * workspace, and 0 for rows that see no key, whatever was added. Grid: tiles * Hq * B
// blocks of Config::kThreads, each a row tile. Workspace says how the accumulators lie, as DqWorkspace does.
// `visits`, if there is one, is 0 where nobody has written a row tile's part of the workspace.
template <class Config, class Workspace = DqWorkspace<Config>>
__global__ void backward_after_kernel(const __grid_constant__ BackwardParams params, const float* workspace,
                                      const int32_t* visits, const float* lse, int tiles) {
  using Element = typename Config::Element;
  using Tile = typename Config::QTile;
  extern __shared__ __align__(1024) char smem[];
  wait_for_kernels_before();
  const Shape& shape = params.shape;
  const RowTilePlace place(shape, tiles);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const float scale = static_cast<float>(params.softmax_scale);
  const float* source = workspace + place.index * Workspace::kTileFloats;
  const bool visited = visits == nullptr || visits[place.index] != 0;
#pragma unroll
  for (int m = 0; m < Workspace::kM; ++m) {
    const float* row_lse = lse + place.index * Config::kBlockM + Workspace::row(warp, m, lane);
    const bool empty[2] = {row_lse[0] == INFINITY, row_lse[8] == INFINITY};
#pragma unroll
    for (int n = 0; n < Workspace::kN8; ++n) {
      float x[4] = {};
      if (visited) load_fragment(x, source + Workspace::fragment_offset(warp, m, n), lane);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int offset =
            Tile::offset(Workspace::row(warp, m, lane) + 8 * h, Workspace::chunk(warp, n)) + (lane % 4) * 4;
        *reinterpret_cast<uint32_t*>(smem + offset) =
            empty[h] ? 0 : pack<Element>(x[2 * h] * scale, x[2 * h + 1] * scale);
      }
    }
  }
  __syncthreads();
  const int64_t first = int64_t{place.tile} * Config::kBlockM;
  const Tensor& dq = params.dq;
  Element* out = static_cast<Element*>(dq.data) + place.batch * dq.stride_batch + first * dq.stride_seq +
                 place.head * dq.stride_head;
  store_tile<Tile, Config::kThreads>(smem, out, dq.stride_seq,
                                     static_cast<int>(min(int64_t{Config::kBlockM}, shape.seqlen_q - first)),
                                     shape.head_dim, threadIdx.x);
}

}  // namespace flashmask::sm80
