// dK and dV where the query heads of a key head were divided into parts: the parts' sums, always in the same
// order, rounded once.
#pragma once

#include "common/softmax.cuh"
#include "sm80/ptx.cuh"
#include "sm80/smem_tile.cuh"
#include "sm90/backward_arguments.cuh"

namespace flashmask::sm90 {

template <int kColumns>
using GradientTile = sm80::SmemTile<128, kColumns>;

// One of the two gradients, which begins at `first` of a column tile's part and has up to kColumns head dims.
// Grid: Hk * column_tiles * B blocks of 256 threads, each a column tile, the heads of the same rows together.
template <class Config, int kColumns>
__global__ void sum_parts_kernel(const __grid_constant__ Shape shape, const __grid_constant__ Tensor gradient,
                                 const float* columns, int first, int column_tiles, int parts, int head_dim,
                                 float factor) {
  using Element = typename Config::Element;
  using Workspace = ColumnWorkspace<Config>;
  using Tile = GradientTile<kColumns>;
  static_assert(Config::kBlockN == 128, "eight warps of 16 keys");
  extern __shared__ __align__(1024) char smem[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int head = static_cast<int>(blockIdx.x) % shape.heads_k;
  const int tile = static_cast<int>(blockIdx.x) / shape.heads_k % column_tiles;
  const int batch = static_cast<int>(blockIdx.x) / shape.heads_k / column_tiles;
  const float* source = columns + first + Workspace::offset(shape, column_tiles, parts, batch, head, tile, 0);
#pragma unroll 4
  for (int n = 0; n < kColumns / 8; ++n) {
    float sum[4] = {};
    for (int part = 0; part < parts; ++part) {
      float x[4];
      sm80::load_fragment(
          x, source + part * Workspace::kFloats + Workspace::template fragment_offset<kColumns / 8>(warp, n),
          lane);
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[e] += x[e];
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int offset = Tile::offset(warp * 16 + lane / 4 + 8 * h, n) + lane % 4 * 4;
      *reinterpret_cast<uint32_t*>(smem + offset) =
          pack<Element>(sum[2 * h] * factor, sum[2 * h + 1] * factor);
    }
  }
  __syncthreads();
  const int64_t row = int64_t{tile} * Config::kBlockN;
  auto* out = static_cast<Element*>(gradient.data) + batch * gradient.stride_batch +
              row * gradient.stride_seq + head * gradient.stride_head;
  sm80::store_tile<Tile, 256>(smem, out, gradient.stride_seq,
                              static_cast<int>(min(int64_t{Config::kBlockN}, shape.seqlen_k - row)), head_dim,
                              threadIdx.x);
}

template <class Config, int kColumns>
cudaError_t launch_sum_parts(const BackwardArguments& arguments, const Tensor& gradient, int first,
                             int head_dim, float factor, cudaStream_t stream) {
  if (gradient.data == nullptr) return cudaSuccess;
  constexpr int kSmemBytes = GradientTile<kColumns>::kBytes;
  const auto kernel = sum_parts_kernel<Config, kColumns>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes);
  if (error != cudaSuccess) return error;
  const int blocks = arguments.work_count / arguments.parts;
  kernel<<<static_cast<unsigned>(blocks), 256, kSmemBytes, stream>>>(
      arguments.params.shape, gradient, arguments.columns, first, arguments.column_tiles, arguments.parts,
      head_dim, factor);
  return cudaSuccess;
}

// Rounds and stores dK and dV of calls whose query heads were divided into parts.
template <class Config>
cudaError_t sum_parts(const BackwardArguments& arguments, cudaStream_t stream) {
  const BackwardParams& params = arguments.params;
  const cudaError_t error = launch_sum_parts<Config, Config::kHeadDim>(
      arguments, params.dk, 0, params.shape.head_dim, static_cast<float>(params.softmax_scale), stream);
  if (error != cudaSuccess) return error;
  return launch_sum_parts<Config, Config::kHeadDimV>(arguments, params.dv, ColumnWorkspace<Config>::kDkFloats,
                                                     params.shape.head_dim_v, 1.f, stream);
}

}  // namespace flashmask::sm90
