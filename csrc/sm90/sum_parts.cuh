// dK and dV where the query heads of a key head were divided into parts: the parts' sums, always in the same
// order, rounded once.
#pragma once

#include "common/kernel_chain.h"
#include "common/softmax.cuh"
#include "sm80/ptx.cuh"
#include "sm80/smem_tile.cuh"
#include "sm90/backward_arguments.cuh"

namespace flashmask::sm90 {

// A piece of a column tile's gradient, a block's work: as small as lines of memory allow, since short calls
// have few column tiles.
using GradientPiece = sm80::SmemTile<128, 32>;

// Piece `piece` of a gradient of kHeadDim head dims, whose column tile begins at `source` in the first part,
// to `out`.
template <class Config, int kHeadDim>
__device__ __forceinline__ void sum_piece(char* shared, const Tensor& gradient, typename Config::Element* out,
                                          const float* source, int piece, int parts, int rows, int head_dim,
                                          float factor) {
  using Element = typename Config::Element;
  using Workspace = ColumnWorkspace<Config>;
  constexpr int kColumns = GradientPiece::kColumns;
  static_assert(kHeadDim % kColumns == 0, "a gradient is whole pieces");
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < kColumns / 8; ++n) {
    const float* fragment =
        source + Workspace::template fragment_offset<kHeadDim / 8>(warp, piece * (kColumns / 8) + n);
    float sum[4] = {};
#pragma unroll 2
    for (int part = 0; part < parts; ++part) {
      float x[4];
      sm80::load_fragment(x, fragment + part * Workspace::kFloats, lane);
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[e] += x[e];
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int offset = GradientPiece::offset(warp * 16 + lane / 4 + 8 * h, n) + lane % 4 * 4;
      *reinterpret_cast<uint32_t*>(shared + offset) =
          pack<Element>(sum[2 * h] * factor, sum[2 * h + 1] * factor);
    }
  }
  __syncthreads();
  sm80::store_tile<GradientPiece, 256>(shared, out + piece * kColumns, gradient.stride_seq, rows,
                                       head_dim - piece * kColumns, threadIdx.x);
}

// Grid: all pieces of both gradients * Hk * column_tiles * B blocks of 256 threads: what lies together in
// memory comes together.
template <class Config>
__global__ void sum_parts_kernel(const __grid_constant__ BackwardArguments arguments) {
  using Element = typename Config::Element;
  using Workspace = ColumnWorkspace<Config>;
  constexpr int kDkPieces = Config::kHeadDim / GradientPiece::kColumns;
  constexpr int kPieces = kDkPieces + Config::kHeadDimV / GradientPiece::kColumns;
  static_assert(Config::kBlockN == GradientPiece::kRows, "eight warps of 16 keys");
  __shared__ __align__(1024) char shared[GradientPiece::kBytes];
  const BackwardParams& params = arguments.params;
  if (params.dq.data != nullptr) let_next_kernel_start();  // its conversion
  wait_for_kernels_before();
  const Shape& shape = params.shape;
  int number = static_cast<int>(blockIdx.x);
  const int piece = number % kPieces;
  number /= kPieces;
  const int head = number % shape.heads_k;
  number /= shape.heads_k;
  const int tile = number % arguments.column_tiles, batch = number / arguments.column_tiles;
  const bool is_dk = piece < kDkPieces;
  const Tensor& gradient = is_dk ? params.dk : params.dv;
  if (gradient.data == nullptr) return;
  const int64_t row = int64_t{tile} * Config::kBlockN;
  const auto rows = static_cast<int>(min(int64_t{Config::kBlockN}, shape.seqlen_k - row));
  const float* source = arguments.columns + Workspace::offset(shape, arguments.column_tiles, arguments.parts,
                                                              batch, head, tile, 0);
  auto* out = static_cast<Element*>(gradient.data) + batch * gradient.stride_batch +
              row * gradient.stride_seq + head * gradient.stride_head;
  if (is_dk) {
    sum_piece<Config, Config::kHeadDim>(shared, gradient, out, source, piece, arguments.parts, rows,
                                        shape.head_dim, static_cast<float>(params.softmax_scale));
  } else {
    sum_piece<Config, Config::kHeadDimV>(shared, gradient, out, source + Workspace::kDkFloats,
                                         piece - kDkPieces, arguments.parts, rows, shape.head_dim_v, 1.f);
  }
}

// Rounds and stores dK and dV of calls whose query heads were divided into parts.
template <class Config>
cudaError_t sum_parts(const BackwardArguments& arguments, KernelChain& chain) {
  constexpr int kPieces = (Config::kHeadDim + Config::kHeadDimV) / GradientPiece::kColumns;
  const int64_t column_tiles = arguments.work_count / arguments.parts;
  return chain.launch(sum_parts_kernel<Config>, column_tiles * kPieces, 256, 0, arguments);
}

}  // namespace flashmask::sm90
