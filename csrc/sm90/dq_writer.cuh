// The warps that take dQ from shared memory to the workspace, in deterministic mode when its turn has come.
#pragma once

#include "common/block_place.cuh"
#include "common/ordered_add.cuh"
#include "sm90/backward_arguments.cuh"
#include "sm90/ptx.cuh"

namespace flashmask::sm90 {

// Finds out whose turn to add to a row tile comes before this block's. Used by a whole warp.
template <class Config>
class TurnFinder {
 public:
  __device__ __forceinline__ TurnFinder(const BackwardArguments& arguments, NearTiles& near, int lane)
      : arguments_(arguments), near_(near), lane_(lane) {}

  // What the counter of a step's row tile holds when it is this column tile's turn.
  __device__ __forceinline__ int turn(int row_tile, int row, int column_tile) {
    const Shape& shape = arguments_.params.shape;
    const int head = row_tile / arguments_.rows.tiles;  // of all samples'
    const int index =
        static_cast<int>(plane_index(arguments_.mask, shape, head / shape.heads_q, head % shape.heads_q));
    const MaskPlane plane = plane_at(arguments_.mask, index);
    if (index != near_plane_ || column_tile != near_tile_) {
      __syncwarp();
      near_.load(arguments_.mask, plane, column_tile, lane_);
      near_plane_ = index;
      near_tile_ = column_tile;
      __syncwarp();
    }
    const int row_end = min(static_cast<int>(shape.seqlen_q), row + Config::kBlockM);
    return next_visitor(arguments_.mask, plane, near_, column_tile, row, row_end, lane_) + 1;
  }

 private:
  const BackwardArguments& arguments_;
  NearTiles& near_;
  int lane_;
  int near_plane_ = -1, near_tile_ = -1;
};

// Copies dQ, or a part of it, to the workspace, stored if it is the first there, else added; returns when
// shared memory has been read.
__device__ __forceinline__ void take_away_dq(float* place, const float* dq, int floats, bool first) {
  const int bytes = floats * static_cast<int>(sizeof(float));
  if (first) {
    bulk_store(place, dq, bytes);
  } else {
    bulk_reduce_add(place, dq, bytes);
  }
  bulk_commit();
  bulk_wait_read();
}

// A warp that adds the dQ of every kWriters-th step to the workspace, both consumers' at once. Adding takes
// longer than a step in deterministic order, though little of it is work: the look for the predecessor, the
// wait for its turn, the copy, its completion, the release of the turn. Several warps have several steps'
// time. So what a hand-over takes is how far one block trails the other, not what a step costs.
//
// Nobody waits for ever. A turn is waited for only from column tiles after this one, of the same head, so
// from those with lower numbers (BlockPlace). Blocks that run take the numbers in order and see to theirs in
// order, so of the column tiles that are not done the first is being seen to, and waits for turns of those
// that are done only, and these have been passed: writers pass each turn without waiting for anything of a
// later step.
template <class Config>
class DqWriter {
 public:
  __device__ __forceinline__ DqWriter(const BackwardArguments& arguments, typename Config::Smem& smem,
                                      int writer, int lane)
      : arguments_(arguments),
        smem_(smem),
        writer_(writer),
        lane_(lane),
        turns_(arguments, smem.near[writer], lane) {}

  __device__ __forceinline__ void run() {
    for (int parity = 0;; parity ^= 1) {
      smem_.departures_full[writer_].wait(parity);
      const typename Config::Departure step = smem_.departures[writer_];
      if (step.tile < 0) break;
      __syncwarp();
      if (lane_ == 0) smem_.departures_empty[writer_].arrive();
      const int turn = turns_.turn(step.tile, step.row, step.column_tile);
      if (lane_ == 0) add(step, turn, parity);
      __syncwarp();
    }
  }

 private:
  // The turn most often comes before dQ does, so it is waited for first. What other blocks' copies added
  // before it comes before what this one adds: a copy that is complete is visible to its thread, which
  // releases the counter; here the counter is acquired, and the fence carries that over to copies.
  __device__ __forceinline__ void add(const typename Config::Departure& step, int turn, int parity) {
    const bool wanted = arguments_.params.dq.data != nullptr;
    int32_t* counter = arguments_.dq_turn + step.tile;
    if (wanted) {
      acquire_turn(counter, turn);
      fence_async_global();
    }
    smem_.dq_full[writer_].wait(parity);
    if (wanted) {
      constexpr int kFloats = DqWorkspace<Config>::kTileFloats;
      take_away_dq(arguments_.dq + int64_t{step.tile} * kFloats, smem_.dq[0], kFloats, turn == 0);
    }
    smem_.dq_empty.arrive();
    if (wanted) {
      bulk_wait();
      pass_turn(counter, step.column_tile);
    }
  }

  const BackwardArguments& arguments_;
  typename Config::Smem& smem_;
  int writer_;
  int lane_;
  TurnFinder<Config> turns_;
};

// Up to so many column tiles a row tile's dQ is not cleared before they add: the first to come stores. With
// more of them clearing costs less than what they wait for each other, who often come at the same time.
inline constexpr int kFewVisits = 12;

// The warp that adds one consumer's part of every dQ, in any order. The consumers stand half a step apart: if
// their parts left together, the one's would wait for the other's, and the next of the one for both.
template <class Config>
class PartWriter {
 public:
  __device__ __forceinline__ PartWriter(const BackwardArguments& arguments, typename Config::Smem& smem,
                                        int group, int lane)
      : arguments_(arguments), smem_(smem), group_(group), lane_(lane) {}

  __device__ __forceinline__ void run() {
    if (lane_ != 0) return;
    const Shape& shape = arguments_.params.shape;
    int32_t* visits =
        arguments_.dq_turn + group_ * (shape.batch * shape.heads_q * int64_t{arguments_.rows.tiles});
    const bool wanted = arguments_.params.dq.data != nullptr;
    const bool cleared =
        wanted && (arguments_.dq_cleared != nullptr ? *arguments_.dq_cleared != 0 : arguments_.known_cleared);
    int stored = -1;  // a row tile of which it is known that there is something to add to
    for (int parity = 0;; parity ^= 1) {
      smem_.part_full[group_].wait(parity);
      const typename Config::Part part = smem_.parts[group_];
      if (part.tile < 0) break;
      bool first = false;
      if (wanted) {
        if (!cleared && part.tile != stored) first = is_first(visits + part.tile);
        constexpr int kFloats = DqWorkspace<Config>::kTileFloats / Config::kConsumers;
        take_away_dq(arguments_.dq + int64_t{part.tile} * DqWorkspace<Config>::kTileFloats + group_ * kFloats,
                     smem_.dq[group_], kFloats, first);
      }
      smem_.part_empty[group_].arrive();
      if (!wanted || cleared) continue;
      if (first) {
        bulk_wait();
        pass_turn(visits + part.tile, kStored - 1);
      }
      // Long before the next part comes.
      stored = part.next >= 0 && load_acquire(visits + part.next) == kStored ? part.next : -1;
      fence_async_global();
    }
    bulk_wait();  // the conversion may start before this kernel has ended
  }

  // What `visits` of a row tile holds: 0, then kClaimed by the first to come, then kStored when there is
  // something to add to.
  static constexpr int kClaimed = 1, kStored = 2;

 private:
  // Whether nobody came before to a row tile; if somebody did, returns when what it stores is there. That
  // one waits for nothing.
  __device__ __forceinline__ bool is_first(int32_t* visits) {
    if (atomicCAS(visits, 0, kClaimed) == 0) return true;
    acquire_turn(visits, kStored);
    fence_async_global();
    return false;
  }

  const BackwardArguments& arguments_;
  typename Config::Smem& smem_;
  int group_;
  int lane_;
};

}  // namespace flashmask::sm90
