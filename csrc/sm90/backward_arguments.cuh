// What the Hopper backward kernels are given, and how their dQ workspace lies.
#pragma once

#include <cuda.h>

#include "common/tile_order.cuh"
#include "sm80/backward_rows.cuh"

namespace flashmask::sm90 {

// The fp32 dQ workspace: a row tile is panels of 64 head dims, each [16 rows, fragment, lane] of four floats,
// so that 64 rows of a panel lie together. A last panel that the head dims do not fill is there in full.
template <class Config>
struct DqWorkspace {
  static constexpr int kRows16 = Config::kBlockM / 16;
  static constexpr int kTileFloats = (Config::kHeadDim + 63) / 64 * 64 * Config::kBlockM;

  // Of rows 16 * rows16 on and head dims 8 * chunk on.
  static __device__ __forceinline__ int offset(int rows16, int chunk) {
    return ((chunk / 8 * kRows16 + rows16) * 8 + chunk % 8) * 128;
  }

  // How the eight warps of the conversion (backward_after_kernel) divide it.
  static constexpr int kM = 1;
  static constexpr int kN8 = Config::kHeadDim * kRows16 / 64;
  static_assert(Config::kHeadDim * kRows16 % 64 == 0 && 8 % kRows16 == 0, "the warps have equally much");

  static __device__ __forceinline__ int chunk(int warp, int n) { return warp / kRows16 * kN8 + n; }
  static __device__ __forceinline__ int row(int warp, int, int lane) {
    return warp % kRows16 * 16 + lane / 4;
  }
  static __device__ __forceinline__ int fragment_offset(int warp, int, int n) {
    return offset(warp % kRows16, chunk(warp, n));
  }
};

// Where the query heads of a key head are divided into parts: fp32 [B, Hk, column_tiles, parts] of dK (not
// scaled yet) and dV of a column tile as the consumers hold them, each [warp, fragment, lane] of four floats.
template <class Config>
struct ColumnWorkspace {
  static constexpr int kDkFloats = Config::kBlockN * Config::kHeadDim;
  static constexpr int kFloats = kDkFloats + Config::kBlockN * Config::kHeadDimV;

  static __device__ __forceinline__ int64_t offset(const Shape& shape, int column_tiles, int parts, int batch,
                                                   int head_k, int column_tile, int part) {
    const int64_t tile = (int64_t{batch} * shape.heads_k + head_k) * column_tiles + column_tile;
    return (tile * parts + part) * kFloats;
  }
  // `warp` counts the consumers' eight, each with 16 keys.
  template <int kFragments>
  static __device__ __forceinline__ int fragment_offset(int warp, int n) {
    return (warp * kFragments + n) * 128;
  }
};

struct BackwardArguments {
  CUtensorMap q, dout;  // boxes: block_m rows of one panel
  CUtensorMap k, v;     // boxes: block_n rows of one panel
  CUtensorMap dk, dv;   // boxes: 64 rows of one panel
  BackwardParams params;
  MaskTiles mask;
  sm80::RowStatistics rows;
  float* dq;            // fp32 workspace, see DqWorkspace
  int32_t* dq_turn;     // zeroed. [B, Hq, row_tiles], in the wide kernel [B, Hq, row_tiles, consumers]: in
                        // deterministic mode who has added last. Else [consumers, B, Hq, row_tiles]: see
                        // PartWriter
  int32_t* dq_cleared;  // whether dQ is; null: the host knows it
  bool known_cleared;   // then
  int column_tiles;
  int work_count;   // column_tiles * Hk * B * parts
  int* ticket;      // zeroed; the number of the column tile that is taken next, where blocks draw them
  TileOrder order;  // in free order
  const DeterministicOrder* deterministic_order;  // else
  int parts;                                      // into which the query heads of a key head are divided
  float* columns;                                 // of several parts, dK and dV of each; see ColumnWorkspace
};

}  // namespace flashmask::sm90
