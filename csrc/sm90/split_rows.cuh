// Row tiles that hold several query heads' rows, and that only visit a part of the key columns.
#pragma once

#include <cuda.h>

#include "common/softmax.cuh"
#include "common/split_plan.h"
#include "sm90/ptx.cuh"

namespace flashmask::sm90 {

struct SplitArguments {
  SplitPlan plan;
  float* lse;  // [splits, B, Hq, Sq]; null if there is one split, which then writes the results themselves
  float* o;    // [splits, B, Hq, Sq, Dv]; likewise
};

struct TileSpan {
  int begin, end;
};

__device__ __forceinline__ TileSpan tiles_of_split(const SplitPlan& plan, int split, int tile_count) {
  return {static_cast<int>(int64_t{split} * tile_count / plan.splits),
          static_cast<int>(int64_t{split + 1} * tile_count / plan.splits)};
}

// Of a row of a warpgroup's 64: the query row, counted from the warpgroup's first, and the head, counted from
// the first one that is packed.
struct PackedRow {
  int row;
  int head;
};

__device__ __forceinline__ PackedRow packed_row(const SplitPlan& plan, int row) {
  const int quotient = row * plan.reciprocal >> 16;
  return {quotient, row - quotient * plan.pack};
}

// All threads of a block clear the rows of Q that nothing will ever be loaded into, so that what is computed
// of them, and not stored, is finite. They synchronise afterwards. `shared` is all stages of Q.
template <class Config>
__device__ __forceinline__ void clear_unused_q(char* shared, const SplitPlan& plan) {
  const int used = plan.group_rows * plan.pack;
  if (used == kWarpgroupRows) return;
  for (int chunk = threadIdx.x; chunk < Config::kQStages * Config::QTile::kBytes / 16;
       chunk += Config::kThreads) {
    if (chunk / 8 % kWarpgroupRows >= used) reinterpret_cast<int4*>(shared)[chunk] = {0, 0, 0, 0};
  }
  fence_async_shared();
}

// One thread fetches Q of a row tile. `map` sees [batch, head / pack, row, head % pack, column]; its boxes
// are a warpgroup's rows of one panel, which lie in shared memory in the order of packed_row().
template <class Config>
__device__ __forceinline__ void load_packed_q(char* shared, const CUtensorMap* map, Barrier& barrier,
                                              const SplitPlan& plan, int row_begin, int head, int batch) {
  using QTile = typename Config::QTile;
  barrier.arrive_expect(QTile::kPanels * Config::kConsumers * plan.group_rows * plan.pack * 128);
#pragma unroll 1
  for (int panel = 0; panel < QTile::kPanels; ++panel) {
#pragma unroll
    for (int group = 0; group < Config::kConsumers; ++group) {
      tma_load(shared + panel * QTile::kPanelBytes + group * kWarpgroupRows * 128, map, barrier, panel * 64,
               0, row_begin + group * plan.group_rows, head / plan.pack, batch);
    }
  }
}

// A warpgroup's rows of O and lse, or of one split's part of them, from registers to memory.
template <class Config, class Work, int kO8>
__device__ __forceinline__ void store_split(const SplitArguments& split, const ForwardParams& params,
                                            const Work& work, int group, int thread,
                                            const OnlineSoftmax<1>& softmax, float (&output)[1][kO8][4],
                                            float scale) {
  using Element = typename Config::Element;
  const Shape& shape = params.shape;
  const int lane = thread % 32;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float sum = softmax.total(0, h);
    const float inverse = sum == 0.f ? 0.f : 1.f / sum;
    if (sum == 0.f) clear_row(output[0], h);
    const PackedRow at = packed_row(split.plan, thread / 32 * 16 + 8 * h + lane / 4);
    const int row = (work.row_tile * Config::kConsumers + group) * split.plan.group_rows + at.row;
    if (at.row >= split.plan.group_rows || row >= shape.seqlen_q) continue;
    const int head = work.head + at.head;
    const int64_t lse_rows = shape.batch * shape.heads_q * shape.seqlen_q;
    const int64_t lse_row = (int64_t{work.batch} * shape.heads_q + head) * shape.seqlen_q + row;
    const float lse = softmax.lse(0, h, sum, scale);
    if (split.o != nullptr) {
      const int64_t part_row = work.split * lse_rows + lse_row;
      if (lane % 4 == 0) split.lse[part_row] = lse;
      float* o = split.o + part_row * shape.head_dim_v + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < kO8; ++n) {
        if (8 * n < shape.head_dim_v) {
          *reinterpret_cast<float2*>(o + 8 * n) =
              make_float2(output[0][n][2 * h] * inverse, output[0][n][2 * h + 1] * inverse);
        }
      }
    } else {
      if (lane % 4 == 0) static_cast<float*>(params.lse)[lse_row] = lse;
      Element* o = static_cast<Element*>(params.o.data) + work.batch * params.o.stride_batch +
                   row * params.o.stride_seq + head * params.o.stride_head + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < kO8; ++n) {
        if (8 * n < shape.head_dim_v) {
          *reinterpret_cast<uint32_t*>(o + 8 * n) =
              pack<Element>(output[0][n][2 * h] * inverse, output[0][n][2 * h + 1] * inverse);
        }
      }
    }
  }
}

}  // namespace flashmask::sm90
