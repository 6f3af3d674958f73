// The warps that take dQ from shared memory to the workspace and, when a row tile is complete, from there to
// the tensor: the first to come to a row tile stores, so nothing is cleared before; the last converts, while
// L2 still holds the row tile, so no kernel reads the workspace again.
#pragma once

#include "common/softmax.cuh"
#include "sm90/dq_writer.cuh"
#include "sm90/forward_kernel.cuh"

namespace flashmask::sm90 {

// How many column tiles visit each row tile; row tiles that none visits get a dQ of 0 here. Grid: row tiles
// times mask planes, blocks of 128 threads.
template <class Config>
__global__ void count_visitors_kernel(const __grid_constant__ BackwardParams params, MaskTiles mask,
                                      int row_tiles, int32_t* visitors) {
  using Element = typename Config::Element;
  const Shape& shape = params.shape;
  const int tile = blockIdx.x % row_tiles;
  const int64_t index = blockIdx.x / row_tiles;
  const MaskPlane plane = plane_at(mask, index);
  const int row_begin = tile * Config::kBlockM;
  const int row_end = min(static_cast<int>(shape.seqlen_q), row_begin + Config::kBlockM);
  int count = 0;
  for (int column = threadIdx.x; column < mask.tile_count; column += blockDim.x) {
    count += visit_tile(mask, plane, column, row_begin, row_end).visited;
  }
  for (int lanes = 16; lanes > 0; lanes /= 2) count += __shfl_xor_sync(~0u, count, lanes);
  __shared__ int total;
  if (threadIdx.x == 0) total = 0;
  __syncthreads();
  if (threadIdx.x % 32 == 0) atomicAdd(&total, count);
  __syncthreads();
  if (threadIdx.x == 0) visitors[blockIdx.x] = total;
  if (total > 0) return;
  for (int batch = 0; batch < shape.batch; ++batch) {
    for (int head = 0; head < shape.heads_q; ++head) {
      if (plane_index(mask, shape, batch, head) != index) continue;
      Element* out = static_cast<Element*>(params.dq.data) + batch * params.dq.stride_batch +
                     head * params.dq.stride_head;
      for (int row = row_begin; row < row_end; ++row) {
        for (int column = threadIdx.x; column < shape.head_dim; column += blockDim.x) {
          out[row * params.dq.stride_seq + column] = static_cast<Element>(0.f);
        }
      }
    }
  }
}

// A warp of those that share the work: whoever is free takes the next step's dQ, in their order, and keeps it
// until it is done, while the others take the next. (As in DqWriter, nobody waits for ever: the one that
// waits for its turn waits for blocks before this one.)
template <class Config>
class DqFinisher {
 public:
  using Workspace = DqWorkspace<Config>;

  __device__ __forceinline__ DqFinisher(const BackwardArguments& arguments, typename Config::Smem& smem,
                                        int helper, int lane)
      : arguments_(arguments), smem_(smem), lane_(lane), turns_(arguments, smem.near[helper], lane) {}

  __device__ __forceinline__ void run() {
    while (true) {
      if (lane_ == 0) {
        while (atomicCAS(&smem_.taking, 0, 1) != 0) __nanosleep(100);
        __threadfence_block();
      }
      __syncwarp();
      Stage<Config::kWriters> stage = smem_.departure;
      smem_.departures_full[stage.index].wait(stage.parity);
      const typename Config::Departure step = smem_.departures[stage.index];
      __syncwarp();
      if (step.tile < 0) {
        if (lane_ == 0) atomicExch(&smem_.taking, 0);
        return;
      }
      if (lane_ == 0) smem_.departures_empty[stage.index].arrive();
      int turn = 0;
      if constexpr (Config::kDeterministic) turn = turns_.turn(step.tile, step.row, step.column_tile);
      int last = 0;
      if (lane_ == 0) last = add(step, turn, stage);
      if (__shfl_sync(~0u, last, 0)) convert(step);
    }
  }

 private:
  // Takes dQ of a step to the workspace; whether that completes the row tile.
  __device__ __forceinline__ bool add(const typename Config::Departure& step, int turn,
                                      Stage<Config::kWriters> stage) {
    const bool wanted = arguments_.params.dq.data != nullptr;
    // The first counts those that have come or, in deterministic order, is the turn; the second those that
    // are done. Whoever is not the first to come waits until that one is done.
    int32_t* counters = arguments_.dq_turn + int64_t{step.tile} * Config::kTurns;
    bool first = false, stored = false;
    if (Config::kDeterministic && wanted) {
      acquire_turn(counters, turn);
      first = turn == 0;
    } else if (wanted) {
      stored = load_acquire(counters + 1) != 0;  // most often so, and known before dQ comes
    }
    smem_.dq_full[stage.index].wait(stage.parity);
    if (wanted) {
      if (!Config::kDeterministic && !stored) {
        first = atomicAdd(counters, 1) == 0;
        while (!first && load_acquire(counters + 1) == 0) {
        }
      }
      fence_async_global();
      take_away_dq<Config>(arguments_, smem_, step.tile, first);
    }
    smem_.dq_empty.arrive();
    stage.advance();
    smem_.departure = stage;
    __threadfence_block();
    atomicExch(&smem_.taking, 0);
    if (!wanted) return false;
    bulk_wait();
    const bool last =
        count_done(counters + 1) + 1 ==
        arguments_.visitors[plane_of(step) * arguments_.rows.tiles + step.row / Config::kBlockM];
    if (Config::kDeterministic && !last) pass_turn(counters, step.column_tile);
    return last;
  }

  __device__ __forceinline__ int64_t plane_of(const typename Config::Departure& step) const {
    const Shape& shape = arguments_.params.shape;
    const int plane = step.tile / arguments_.rows.tiles;
    return plane_index(arguments_.mask, shape, plane / shape.heads_q, plane % shape.heads_q);
  }

  // dQ of a row tile from the workspace to the tensor.
  __device__ __forceinline__ void convert(const typename Config::Departure& step) {
    __syncwarp();  // what lane 0 has acquired is all lanes' from here on
    using Element = typename Config::Element;
    const BackwardParams& params = arguments_.params;
    const Shape& shape = params.shape;
    const int plane = step.tile / arguments_.rows.tiles;
    const float scale = static_cast<float>(params.softmax_scale);
    const float* part = arguments_.dq + int64_t{step.tile} * Workspace::kTileFloats + lane_ * 4;
    Element* out = static_cast<Element*>(params.dq.data) + plane / shape.heads_q * params.dq.stride_batch +
                   plane % shape.heads_q * params.dq.stride_head + lane_ % 4 * 2;
    const int rows = static_cast<int>(shape.seqlen_q) - step.row;
    constexpr int kAtOnce = 2;
    static_assert(Workspace::kN8 % kAtOnce == 0, "fragments come in pairs");
#pragma unroll 1
    for (int warp = 0; warp < 4 * Config::kConsumers; ++warp) {
      const int row = Workspace::row(warp, 0, lane_);
#pragma unroll 1
      for (int n = 0; n < Workspace::kN8; n += kAtOnce) {
        float4 x[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          x[i] = __ldcg(reinterpret_cast<const float4*>(part + Workspace::fragment_offset(warp, 0, n + i)));
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int column = Workspace::chunk(warp, n + i) * 8;
          if (column >= shape.head_dim) continue;
          Element* place = out + (step.row + row) * params.dq.stride_seq + column;
          if (row < rows) *reinterpret_cast<uint32_t*>(place) = pack<Element>(x[i].x * scale, x[i].y * scale);
          if (row + 8 < rows) {
            *reinterpret_cast<uint32_t*>(place + 8 * params.dq.stride_seq) =
                pack<Element>(x[i].z * scale, x[i].w * scale);
          }
        }
      }
    }
  }

  const BackwardArguments& arguments_;
  typename Config::Smem& smem_;
  int lane_;
  TurnFinder<Config> turns_;
};

}  // namespace flashmask::sm90
