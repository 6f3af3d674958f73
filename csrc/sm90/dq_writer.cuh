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
      : arguments_(arguments),
        near_(near),
        work_(arguments.params.shape, arguments.column_tiles, arguments.heads_in_turns),
        lane_(lane) {}

  // What the counter of a step's row tile holds when it is this block's turn.
  __device__ __forceinline__ int turn(const typename Config::Step& step) {
    const Shape& shape = arguments_.params.shape;
    const int head = step.tile / arguments_.rows.tiles % shape.heads_q;
    const int64_t index = plane_index(arguments_.mask, shape, work_.batch, head);
    const MaskPlane plane = plane_at(arguments_.mask, index);
    if (index != near_plane_) {
      __syncwarp();
      near_.load(arguments_.mask, plane, work_.column_tile, lane_);
      near_plane_ = index;
      __syncwarp();
    }
    const int row_end = min(static_cast<int>(shape.seqlen_q), step.row + Config::kBlockM);
    return next_visitor(arguments_.mask, plane, near_, work_.column_tile, step.row, row_end, lane_) + 1;
  }

  __device__ __forceinline__ int column_tile() const { return work_.column_tile; }

 private:
  const BackwardArguments& arguments_;
  NearTiles& near_;
  BlockPlace work_;
  int lane_;
  int64_t near_plane_ = -1;
};

// A warp that adds the dQ of every kWriters-th step to the workspace, both consumers' at once. Adding takes
// longer than a step in deterministic order, though little of it is work: the look for the predecessor, the
// wait for its turn, the copy, its completion, the release of the turn. Several warps have several steps'
// time. So what a hand-over takes is how far one block trails the other, not what a step costs.
//
// Nobody waits for ever. A turn is waited for only from column tiles after this block's, of the same head, so
// from blocks before it (BlockPlace). Blocks start in order, so of those that have not ended the first waits
// for turns of ended blocks only, and those have been passed: a block ends when its writers have ended, and
// they pass each turn without waiting for anything of a later step.
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
      const typename Config::Step step = smem_.departures[writer_];
      if (step.tile < 0) break;
      __syncwarp();
      if (lane_ == 0) smem_.departures_empty[writer_].arrive();
      int turn = 0;
      if constexpr (Config::kDeterministic) turn = turns_.turn(step);
      if (lane_ == 0) add(step.tile, turn, parity);
      __syncwarp();
    }
  }

 private:
  // What `visits` of a row tile holds in free order where the first stores: 0, then kClaimed by the first to
  // come, then kStored when there is something to add to.
  static constexpr int kClaimed = 1, kStored = 2;

  // The turn most often comes before dQ does, so it is waited for first. What other blocks' copies added
  // before it comes before what this one adds: a copy that is complete is visible to its thread, which
  // releases the counter; here the counter is acquired, and the fence carries that over to copies.
  __device__ __forceinline__ void add(int tile, int turn, int parity) {
    const bool wanted = arguments_.params.dq.data != nullptr;
    int32_t* counter = arguments_.dq_turn + tile;
    bool first = false, stored = false;
    if (Config::kDeterministic && wanted) {
      acquire_turn(counter, turn);
      fence_async_global();
      first = turn == 0;
    } else if (Config::kFirstStores && wanted) {
      stored = load_acquire(counter) == kStored;  // most often so, and known before dQ comes
      fence_async_global();
    }
    smem_.dq_full[writer_].wait(parity);
    if (!Config::kDeterministic && Config::kFirstStores && wanted && !stored) first = is_first(counter);
    if (wanted) {
      constexpr int kBytes = DqWorkspace<Config>::kTileFloats * static_cast<int>(sizeof(float));
      float* part = arguments_.dq + int64_t{tile} * DqWorkspace<Config>::kTileFloats;
      if (Config::kFirstStores && first) {
        bulk_store(part, smem_.dq[0], kBytes);
      } else {
        bulk_reduce_add(part, smem_.dq[0], kBytes);
      }
      bulk_commit();
      bulk_wait_read();
    }
    smem_.dq_empty.arrive();
    if (Config::kDeterministic && wanted) {
      bulk_wait();
      pass_turn(counter, turns_.column_tile());
    } else if (first) {
      bulk_wait();
      pass_turn(counter, kStored - 1);
    }
  }

  // Whether nobody came before to a row tile; if somebody did, returns when what it stores is there.
  __device__ __forceinline__ bool is_first(int32_t* visits) {
    if (atomicCAS(visits, 0, kClaimed) == 0) return true;
    acquire_turn(visits, kStored);
    fence_async_global();
    return false;
  }

  const BackwardArguments& arguments_;
  typename Config::Smem& smem_;
  int writer_;
  int lane_;
  TurnFinder<Config> turns_;
};

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
    for (int parity = 0;; parity ^= 1) {
      smem_.part_full[group_].wait(parity);
      const int tile = smem_.part_tiles[group_];
      if (tile < 0) return;
      if (arguments_.params.dq.data != nullptr) {
        constexpr int kFloats = DqWorkspace<Config>::kTileFloats / Config::kConsumers;
        bulk_reduce_add(arguments_.dq + int64_t{tile} * DqWorkspace<Config>::kTileFloats + group_ * kFloats,
                        smem_.dq[group_], kFloats * static_cast<int>(sizeof(float)));
        bulk_commit();
        bulk_wait_read();
      }
      smem_.part_empty[group_].arrive();
    }
  }

 private:
  const BackwardArguments& arguments_;
  typename Config::Smem& smem_;
  int group_;
  int lane_;
};

}  // namespace flashmask::sm90
