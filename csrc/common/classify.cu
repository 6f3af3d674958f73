// A test entry: what forward's scan and backward's row runs say of every tile, so that it can be compared
// with ColumnMask.block_map(rule="minmax").
#include "common/mask_prepass.h"
#include "common/row_runs.cuh"
#include "common/row_tile_scan.cuh"
#include "flashmask/c_api.h"

namespace flashmask {
namespace {

constexpr int kWarps = 4;

struct ClassifyArguments {
  Shape shape;
  MaskTiles mask;
  int block_m;
  int row_tiles;
  int8_t* kinds;  // [Bm, Hm, row_tiles, tiles], values of TileKind
};

__device__ uint32_t test(const uint32_t* words, int bit) { return words[bit / 32] >> (bit % 32) & 1; }

__device__ int8_t kind_of(bool visited, uint32_t touched) {
  if (!visited) return static_cast<int8_t>(TileKind::kMasked);
  return static_cast<int8_t>(touched ? TileKind::kPartial : TileKind::kUnmasked);
}

// Grid: row_tiles * Hm * Bm blocks of kWarps warps.
__global__ void classify_forward_kernel(const __grid_constant__ ClassifyArguments arguments) {
  __shared__ TileBits bits;
  const int row_tile = blockIdx.x % arguments.row_tiles;
  const MaskPlane plane = plane_at(arguments.mask, blockIdx.x / arguments.row_tiles);
  const int row_begin = row_tile * arguments.block_m;
  const int row_end = min(static_cast<int>(arguments.shape.seqlen_q), row_begin + arguments.block_m);
  const int tiles = arguments.mask.tile_count;
  for (int chunk = 0; chunk < arguments.mask.group_count; chunk += kGroupsPerChunk) {
    __syncthreads();
    scan_row_tile<kWarps>(bits, arguments.mask, plane, chunk, row_begin, row_end, threadIdx.x / 32,
                          threadIdx.x % 32);
    __syncthreads();
    const int first = chunk * kTilesPerGroup;
    const int last = min(tiles, first + kGroupsPerChunk * kTilesPerGroup);
    for (int tile = first + threadIdx.x; tile < last; tile += blockDim.x) {
      uint32_t touched = 0;
      for (int slot = 0; slot < arguments.mask.slot_count; ++slot) {
        touched |= test(bits.touched[slot], tile - first) << slot;
      }
      arguments.kinds[int64_t{blockIdx.x} * tiles + tile] =
          kind_of(test(bits.visited, tile - first), touched);
    }
  }
}

// Grid: tiles * Hm * Bm threads, one a column tile.
__global__ void classify_backward_kernel(const __grid_constant__ ClassifyArguments arguments) {
  const int tiles = arguments.mask.tile_count;
  const int64_t index = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int64_t plane_number = index / tiles;
  if (plane_number >= int64_t{arguments.mask.batch} * arguments.mask.heads) return;
  const int tile = static_cast<int>(index % tiles);
  const MaskPlane plane = plane_at(arguments.mask, plane_number);
  const int seqlen_q = static_cast<int>(arguments.shape.seqlen_q);
  RowRuns runs;
  runs.build(arguments.mask, plane, tile, seqlen_q, arguments.block_m, arguments.row_tiles);
  int8_t* kinds = arguments.kinds + plane_number * arguments.row_tiles * tiles + tile;
  int next = runs.next(0);
  for (int row_tile = 0; row_tile < arguments.row_tiles; ++row_tile) {
    const bool visited = row_tile == next;
    if (visited) next = runs.next(row_tile + 1);
    const int row_begin = row_tile * arguments.block_m;
    const int row_end = min(seqlen_q, row_begin + arguments.block_m);
    kinds[int64_t{row_tile} * tiles] = kind_of(visited, runs.touched(row_tile, row_begin, row_end));
  }
}

}  // namespace
}  // namespace flashmask

using namespace flashmask;

int64_t flashmask_cuda_classify_workspace(const ForwardParams* params, int32_t block_n) {
  return mask_tiles_bytes(effective_mask(params->mask), params->shape.seqlen_k, block_n);
}

int flashmask_cuda_classify(const ForwardParams* params, int32_t block_m, int32_t block_n, int32_t backward,
                            int8_t* kinds) {
  const auto stream = static_cast<cudaStream_t>(params->stream);
  const Mask mask = effective_mask(params->mask);
  ClassifyArguments arguments{
      params->shape, {}, block_m, static_cast<int>(ceil_div(params->shape.seqlen_q, block_m)), kinds};
  arguments.mask = carve_mask_tiles(mask, params->visit, params->shape.seqlen_k, block_n,
                                    static_cast<char*>(params->workspace));
  KernelChain chain(stream, false);
  const cudaError_t error = launch_mask_prepass(mask, params->shape, arguments.mask, chain);
  if (error != cudaSuccess) return error;
  const int64_t planes = int64_t{mask.batch} * mask.heads;
  if (backward) {
    const auto blocks = static_cast<unsigned>(ceil_div(planes * arguments.mask.tile_count, 128));
    classify_backward_kernel<<<blocks, 128, 0, stream>>>(arguments);
  } else {
    const auto blocks = static_cast<unsigned>(planes * arguments.row_tiles);
    classify_forward_kernel<<<blocks, 32 * kWarps, 0, stream>>>(arguments);
  }
  return cudaGetLastError();
}
