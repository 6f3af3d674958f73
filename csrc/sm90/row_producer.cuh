// The thread that fetches what the consumers of the Hopper backward kernels read.
#pragma once

#include "common/block_place.cuh"
#include "common/row_runs.cuh"
#include "sm90/backward_arguments.cuh"
#include "sm90/forward_kernel.cuh"
#include "sm90/ptx.cuh"

namespace flashmask::sm90 {

// The producer: one thread fetches, for every column tile that the block takes, K and V and then Q, dO and
// the row statistics of every visited row tile of every query head of the group.
template <class Config>
class RowProducer {
 public:
  __device__ __forceinline__ RowProducer(const BackwardArguments& arguments, typename Config::Smem& smem)
      : arguments_(arguments), smem_(smem) {}

  __device__ __forceinline__ void run() {
    int number = static_cast<int>(blockIdx.x);
    if constexpr (Config::kPersistent) number = smem_.first;
    bool more = false;
    do {
      smem_.next = BlockPlace(arguments_.params.shape, arguments_.column_tiles, arguments_.order, number);
      load_column_tile();
      if constexpr (Config::kPersistent) {
        number = atomicAdd(arguments_.ticket, 1);  // late, so that who is done first takes the next
        more = number < arguments_.work_count;
      }
      const int stage = entries_ % Config::kStages;
      smem_.rows_empty[stage].wait(entries_ / Config::kStages % 2 ^ 1);
      smem_.steps[stage] = {-1, more, 0};
      smem_.rows_full[stage].arrive();
      ++entries_;
      taken_ ^= 1;
    } while (more);
    for (int writer = 0; writer < Config::kWriters; ++writer) announce(-1, 0);
  }

 private:
  // In a persistent block the places of K and V are in use by the column tile before when those of row tiles
  // become free: Q and dO of as many row tiles as there are stages come first.
  __device__ __forceinline__ void load_column_tile() {
    const MaskTiles& mask = arguments_.mask;
    const Shape& shape = arguments_.params.shape;
    const int group = shape.heads_q / shape.heads_k;
    int ahead = Config::kPersistent ? Config::kStages : 0;  // row tiles to fetch before K and V
    if (ahead == 0) load_columns();
    RowRuns& runs = smem_.runs;
    for (int member = 0; member < group; ++member) {
      const int head = smem_.next.head_k * group + member;
      const MaskPlane plane = plane_at(mask, plane_index(mask, shape, smem_.next.batch, head));
      if (member == 0 || mask.heads == shape.heads_q) {
        runs.build(mask, plane, smem_.next.column_tile, static_cast<int>(shape.seqlen_q), Config::kBlockM,
                   arguments_.rows.tiles);
      }
      for (int tile = runs.next(0); tile < arguments_.rows.tiles; tile = runs.next(tile + 1)) {
        const int row_begin = tile * Config::kBlockM;
        const int row_end = min(static_cast<int>(shape.seqlen_q), row_begin + Config::kBlockM);
        load_rows(tile, head, runs.touched(tile, row_begin, row_end), plane);
        if (Config::kPersistent && --ahead == 0) load_columns();
      }
    }
    if (Config::kPersistent && ahead > 0) load_columns();
  }

  __device__ __forceinline__ void load_columns() {
    if constexpr (Config::kPersistent) smem_.kv_empty.wait(taken_ ^ 1);
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

  __device__ __forceinline__ void load_rows(int tile, int head, uint32_t touched, const MaskPlane& plane) {
    const int stage = entries_ % Config::kStages;
    const int64_t row_tile =
        (int64_t{smem_.next.batch} * arguments_.params.shape.heads_q + head) * arguments_.rows.tiles + tile;
    const uint32_t empty = arguments_.rows.empty[row_tile] ? Config::kEmptyRows : 0;
    if (int64_t{smem_.next.column_tile + 1} * Config::kBlockN > arguments_.params.shape.seqlen_k)
      touched |= touch_bits_of_any(1);
    constexpr int kRowBytes = Config::kBlockM * static_cast<int>(sizeof(float));
    constexpr int kSlotBytes = Config::kBlockN * static_cast<int>(sizeof(Slot));
    Barrier& full = smem_.rows_full[stage];

    smem_.rows_empty[stage].wait(entries_ / Config::kStages % 2 ^ 1);
    smem_.steps[stage] = {static_cast<int>(row_tile), tile * Config::kBlockM, touched | empty};
    full.arrive_expect(Config::QTile::kBytes + Config::DoTile::kBytes + 2 * kRowBytes +
                       __popc(touched & kSlotBits) * kSlotBytes);
    for (int panel = 0; panel < Config::QTile::kPanels; ++panel) {
      tma_load(smem_.q[stage] + panel * Config::QTile::kPanelBytes, &arguments_.q, full, panel * 64,
               tile * Config::kBlockM, head, smem_.next.batch);
    }
    for (int panel = 0; panel < Config::DoTile::kPanels; ++panel) {
      tma_load(smem_.dout[stage] + panel * Config::DoTile::kPanelBytes, &arguments_.dout, full, panel * 64,
               tile * Config::kBlockM, head, smem_.next.batch);
    }
    bulk_load(smem_.lse[stage], arguments_.rows.lse + row_tile * Config::kBlockM, kRowBytes, full);
    bulk_load(smem_.delta[stage], arguments_.rows.delta + row_tile * Config::kBlockM, kRowBytes, full);
    for (uint32_t slots = touched & kSlotBits; slots != 0; slots &= slots - 1) {
      const int slot = __ffs(static_cast<int>(slots)) - 1;
      const int64_t column =
          (int64_t{slot} * arguments_.mask.tile_count + smem_.next.column_tile) * Config::kBlockN;
      bulk_load(smem_.slots[stage][slot], plane.slots + column, kSlotBytes, full);
    }
    ++entries_;
    announce(static_cast<int>(row_tile), tile * Config::kBlockM);
  }

  // Tells the writer whose turn it is which dQ will come.
  __device__ __forceinline__ void announce(int row_tile, int row) {
    if constexpr (Config::kWriters > 0 && !Config::kByParts) {
      smem_.departures_empty[writer_.index].wait(writer_.parity ^ 1);
      smem_.departures[writer_.index] = {row_tile, row, smem_.next.column_tile};
      smem_.departures_full[writer_.index].arrive();
      writer_.advance();
    }
  }

  const BackwardArguments& arguments_;
  typename Config::Smem& smem_;
  int taken_ = 0;         // column tiles before it, modulo 2
  uint32_t entries_ = 0;  // of the ring of row tiles
  Stage<Config::kWriters> writer_;
};

}  // namespace flashmask::sm90
