// The warp that fetches what the consumers of the Hopper backward kernels read.
#pragma once

#include "common/block_place.cuh"
#include "common/row_runs.cuh"
#include "sm90/backward_arguments.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/ptx.cuh"

namespace flashmask::sm90 {

// The producer: fetches, for every column tile that the block takes, K and V and then Q, dO and the row
// statistics of every visited row tile of every query head of the group or of its part. All lanes walk
// together, so that 32 row tiles are looked at at once; an elected one speaks. It must keep well ahead of the
// consumers: a step of theirs is some 3,000 cycles, and what one thread alone does for a row tile took nearly
// that.
template <class Config>
class RowProducer {
 public:
  __device__ __forceinline__ RowProducer(const BackwardArguments& arguments, typename Config::Smem& smem,
                                         int lane)
      : arguments_(arguments), smem_(smem), lane_(lane) {}

  __device__ __forceinline__ void run() {
    int number = static_cast<int>(blockIdx.x);
    if constexpr (Config::kTickets) number = smem_.first;
    bool more = false;
    do {
      __syncwarp();  // the place before is read no more
      if (elect_one()) smem_.next = place_of(number);
      __syncwarp();
      load_column_tile();
      if constexpr (Config::kPersistent) {
        // Late, so that who is done first takes the next.
        if (elect_one()) smem_.number = atomicAdd(arguments_.ticket, 1);
        __syncwarp();
        number = smem_.number;
        more = number < arguments_.work_count;
      }
      smem_.q_empty[q_.index].wait(q_.parity ^ 1);
      smem_.dout_empty[dout_.index].wait(dout_.parity ^ 1);
      if (elect_one()) {
        smem_.steps[q_.index] = {-1, more, 0};
        smem_.q_full[q_.index].arrive();
        smem_.dout_full[dout_.index].arrive();
      }
      q_.advance();
      dout_.advance();
      taken_ ^= 1;
    } while (more);
    for (int writer = 0; writer < Config::kWriters; ++writer) announce(-1, 0);
  }

 private:
  __device__ __forceinline__ BlockPlace place_of(int number) const {
    const Shape& shape = arguments_.params.shape;
    const int parts = Config::kParts ? arguments_.parts : 1;
    if constexpr (Config::kDeterministic) {
      const int in_turns = __ldg(&arguments_.deterministic_order->heads_in_turns);
      return BlockPlace(shape, arguments_.column_tiles, in_turns, number, parts);
    } else {
      return BlockPlace(shape, arguments_.column_tiles, arguments_.order, number, parts);
    }
  }

  // In a persistent block the places of K and V are in use by the column tile before when those of row tiles
  // become free: Q and dO of as many row tiles as there are stages of dO come first.
  __device__ __forceinline__ void load_column_tile() {
    const MaskTiles& mask = arguments_.mask;
    const Shape& shape = arguments_.params.shape;
    int ahead = Config::kPersistent ? Config::kStages : 0;  // row tiles to fetch before K and V
    if (ahead == 0) load_columns();
    for (int head = smem_.next.first_head; head < smem_.next.end_head; ++head) {
      const MaskPlane plane = plane_at(mask, plane_index(mask, shape, smem_.next.batch, head));
      if (head == smem_.next.first_head || mask.heads == shape.heads_q) {
        __syncwarp();
        if (elect_one()) {
          smem_.runs.build(mask, plane, smem_.next.column_tile, static_cast<int>(shape.seqlen_q),
                           Config::kBlockM, arguments_.rows.tiles);
        }
        __syncwarp();
      }
      const int row_tiles = arguments_.rows.tiles;
      const int before = (smem_.next.batch * shape.heads_q + head) * row_tiles;
      int begin = 0;
      if constexpr (Config::kDeterministic) begin = __ldg(&arguments_.deterministic_order->first_row_tile);
      RowWalk walk{begin, row_tiles};
      for (int first = walk.next(smem_.runs, begin, row_tiles); first < row_tiles;
           first = walk.next(smem_.runs, first + 32, row_tiles)) {
        const int tile = first + lane_;
        const bool visited = tile < walk.end && smem_.runs.next(tile) == tile;
        const uint32_t work = visited ? work_of(tile, before + tile) : 0;
        for (uint32_t tiles = __ballot_sync(~0u, visited); tiles != 0; tiles &= tiles - 1) {
          const int bit = __ffs(static_cast<int>(tiles)) - 1;
          load_rows(first + bit, before + first + bit, head, __shfl_sync(~0u, work, bit), plane);
          if (Config::kPersistent && --ahead == 0) load_columns();
        }
      }
    }
    if (Config::kPersistent && ahead > 0) load_columns();
  }

  // Step::work of a row tile, `row_tile` among those of all heads and samples.
  __device__ __forceinline__ uint32_t work_of(int tile, int row_tile) const {
    const int64_t seqlen_k = arguments_.params.shape.seqlen_k;
    const int row_begin = tile * Config::kBlockM;
    const int row_end = min(static_cast<int>(arguments_.params.shape.seqlen_q), row_begin + Config::kBlockM);
    uint32_t work = smem_.runs.touched(tile, row_begin, row_end);
    if (int64_t{smem_.next.column_tile + 1} * Config::kBlockN > seqlen_k) work |= touch_bits_of_any(1);
    return arguments_.rows.empty[row_tile] ? work | Config::kEmptyRows : work;
  }

  __device__ __forceinline__ void load_columns() {
    if constexpr (Config::kPersistent) smem_.kv_empty.wait(taken_ ^ 1);
    if (elect_one()) {
      smem_.place = smem_.next;
      smem_.kv_full.arrive_expect(Config::KTile::kBytes + Config::VTile::kBytes);
      const int row = smem_.next.column_tile * Config::kBlockN;
      for (int panel = 0; panel < Config::KTile::kPanels; ++panel) {
        tma_load(smem_.k + panel * Config::KTile::kPanelBytes, &arguments_.k, smem_.kv_full, panel * 64, row,
                 smem_.next.head_k, smem_.next.batch);
      }
      for (int panel = 0; panel < Config::VTile::kPanels; ++panel) {
        tma_load(smem_.v + panel * Config::VTile::kPanelBytes, &arguments_.v, smem_.kv_full, panel * 64, row,
                 smem_.next.head_k, smem_.next.batch);
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ void load_rows(int tile, int row_tile, int head, uint32_t work,
                                            const MaskPlane& plane) {
    constexpr int kRowBytes = Config::kBlockM * static_cast<int>(sizeof(float));
    constexpr int kSlotBytes = Config::kBlockN * static_cast<int>(sizeof(Slot));
    const int64_t statistics = int64_t{row_tile} * Config::kBlockM;
    const int batch = smem_.next.batch;

    smem_.q_empty[q_.index].wait(q_.parity ^ 1);
    if (elect_one()) {
      Barrier& full = smem_.q_full[q_.index];
      smem_.steps[q_.index] = {row_tile, tile * Config::kBlockM, work};
      full.arrive_expect(Config::QTile::kBytes + kRowBytes);
      for (int panel = 0; panel < Config::QTile::kPanels; ++panel) {
        tma_load(smem_.q[q_.index] + panel * Config::QTile::kPanelBytes, &arguments_.q, full, panel * 64,
                 tile * Config::kBlockM, head, batch);
      }
      bulk_load(smem_.lse[q_.index], arguments_.rows.lse + statistics, kRowBytes, full);
    }
    __syncwarp();
    q_.advance();

    smem_.dout_empty[dout_.index].wait(dout_.parity ^ 1);
    if (elect_one()) {
      Barrier& full = smem_.dout_full[dout_.index];
      full.arrive_expect(Config::DoTile::kBytes + kRowBytes + __popc(work & kSlotBits) * kSlotBytes);
      for (int panel = 0; panel < Config::DoTile::kPanels; ++panel) {
        tma_load(smem_.dout[dout_.index] + panel * Config::DoTile::kPanelBytes, &arguments_.dout, full,
                 panel * 64, tile * Config::kBlockM, head, batch);
      }
      bulk_load(smem_.delta[dout_.index], arguments_.rows.delta + statistics, kRowBytes, full);
      for (uint32_t slots = work & kSlotBits; slots != 0; slots &= slots - 1) {
        const int slot = __ffs(static_cast<int>(slots)) - 1;
        const int64_t column =
            (int64_t{slot} * arguments_.mask.tile_count + smem_.next.column_tile) * Config::kBlockN;
        bulk_load(smem_.slots[dout_.index][slot], plane.slots + column, kSlotBytes, full);
      }
    }
    __syncwarp();
    dout_.advance();
    announce(row_tile, tile * Config::kBlockM);
  }

  // Tells the writer whose turn it is which dQ will come.
  __device__ __forceinline__ void announce(int row_tile, int row) {
    if constexpr (Config::kWriters > 0 && Config::kDeterministic) {
      smem_.departures_empty[writer_.index].wait(writer_.parity ^ 1);
      if (elect_one()) {
        smem_.departures[writer_.index] = {row_tile, row, smem_.next.column_tile};
        smem_.departures_full[writer_.index].arrive();
      }
      __syncwarp();
      writer_.advance();
    }
  }

  const BackwardArguments& arguments_;
  typename Config::Smem& smem_;
  int lane_;
  int taken_ = 0;  // column tiles before it, modulo 2
  Stage<Config::kQStages> q_;
  Stage<Config::kStages> dout_;
  Stage<Config::kWriters> writer_;
};

}  // namespace flashmask::sm90
