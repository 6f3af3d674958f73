// The warps beside the consumers of the Hopper forward: one finds the column tiles that a row tile visits and
// has TMA fetch them, others have TMA take O away.
#pragma once

#include <climits>

#include "sm90/forward_config.cuh"

namespace flashmask::sm90 {

// The producer warp. All its lanes walk together; an elected one speaks.
template <class Config>
class Producer {
 public:
  __device__ __forceinline__ Producer(const ForwardArguments& arguments, typename Config::Smem& smem,
                                      int lane)
      : arguments_(arguments), smem_(smem), lane_(lane) {}

  __device__ __forceinline__ void run() {
    int number = Config::kFirstByBlock ? static_cast<int>(blockIdx.x) : __shfl_sync(~0u, take_ticket(), 0);
    while (number < arguments_.work_count) {
      const int next = take_ticket();  // ahead of its use, so that the round trip is hidden
      produce(typename Config::Work(number, arguments_));
      number = __shfl_sync(~0u, next, 0);
    }
    typename Config::Work end(0, arguments_);
    end.row_tile = -1;
    push_without_tile(end);
  }

 private:
  // The extremes of all slots: nobody hides a latency from a lone warp. Splits have no registers left.
  static constexpr bool kAtOnce = !Config::kSplit;

  // Words of Step::touched.
  struct Views {
    uint32_t touched[Config::kViews];
  };

  // Lane 0's value counts. Not atomicAdd(): ptxas joins those of a warp and waits for the result at once.
  __device__ __forceinline__ int take_ticket() {
    unsigned taken = 0;
    if constexpr (Config::kFirstByBlock) {
      if (arguments_.ticket == nullptr) return INT_MAX;
      taken = gridDim.x;
    }
    return lane_ == 0 ? static_cast<int>(taken + atomicInc(arguments_.ticket, INT_MAX)) : 0;
  }

  // Whether the pre-pass has run. Without indices it need not: what is visited and masked is known.
  __device__ __forceinline__ bool has_tables() const {
    return !Config::kBare && (!Config::kKnowsMasks || arguments_.mask.tiles != nullptr);
  }

  __device__ __forceinline__ bool visits_group(const MaskPlane& plane, int group, int row_begin,
                                               int row_end) const {
    if (has_tables()) {
      return flashmask::visits_group<kAtOnce>(arguments_.mask, plane, group, row_begin, row_end);
    }
    return visit_columns(group * kTilesPerGroup, kTilesPerGroup, row_begin, row_end).visited;
  }

  __device__ __forceinline__ TileVisit visit_tile(const MaskPlane& plane, int tile, int row_begin,
                                                  int row_end) const {
    if (has_tables()) {
      return flashmask::visit_tile<kAtOnce>(arguments_.mask, plane, tile, row_begin, row_end);
    }
    return visit_columns(tile, 1, row_begin, row_end);
  }

  // What `count` column tiles from `tile` on are to some rows where causality masks, or nothing. Its
  // intervals begin with the first row.
  __device__ __forceinline__ TileVisit visit_columns(int tile, int count, int row_begin, int row_end) const {
    if (arguments_.mask.visit_all) return {true, touch_bits_of_any(1)};
    if (arguments_.params.mask.causal == 0) return {true, 0};
    const Shape& shape = arguments_.params.shape;
    const int64_t diagonal = shape.seqlen_k - shape.seqlen_q, end = int64_t{tile + count} * Config::kBlockN;
    const TileRange range{row_begin, row_end, tile * Config::kBlockN,
                          static_cast<int>(min(end, shape.seqlen_k))};
    const bool touched = causal_touches(range, diagonal);
    return {!causal_covers(range, diagonal), touched ? 1u | 1u << kEndShift : 0u};
  }

  // The masked rows of a tile's columns. Where there are none the interval is empty in another way than the
  // pre-pass's, which serves as well: starts are looked at together with ends, or not at all.
  __device__ __forceinline__ void write_slots(Slot* slots, int tile) const {
    const Shape& shape = arguments_.params.shape;
    for (int c = lane_; c < Config::kBlockN; c += 32) {
      const int64_t column = int64_t{tile} * Config::kBlockN + c;
      const int64_t above = column - (shape.seqlen_k - shape.seqlen_q);
      int64_t end = arguments_.params.mask.causal ? max(int64_t{0}, min(above, shape.seqlen_q)) : 0;
      if (column >= shape.seqlen_k) end = kInt32Max;
      slots[c] = {0, static_cast<int>(end)};
    }
  }

  __device__ __forceinline__ void produce(const typename Config::Work& work) {
    const MaskTiles& mask = arguments_.mask;
    const Shape& shape = arguments_.params.shape;
    const MaskPlane plane = plane_at(mask, plane_index(mask, shape, work.batch, work.head));
    const int head_k = work.head / (shape.heads_q / shape.heads_k);
    int group_rows = kWarpgroupRows;
    TileSpan span{0, mask.tile_count};
    if constexpr (Config::kSplit) {
      group_rows = arguments_.split.plan.group_rows;
      span = tiles_of_split(arguments_.split.plan, work.split, mask.tile_count);
    }
    const int block_rows = Config::kConsumers * group_rows;
    const int row_begin = work.row_tile * block_rows;
    const int row_end = min(static_cast<int>(shape.seqlen_q), row_begin + block_rows);
    const int group_end =
        Config::kSplit ? (span.end + kTilesPerGroup - 1) / kTilesPerGroup : mask.group_count;
    bool any = false;

    for (int base = span.begin / kTilesPerGroup; base < group_end; base += 32) {
      const bool live = base + lane_ < group_end && visits_group(plane, base + lane_, row_begin, row_end);
      for (uint32_t groups = __ballot_sync(~0u, live); groups != 0; groups &= groups - 1) {
        const int first = (base + __ffs(static_cast<int>(groups)) - 1) * kTilesPerGroup;
        TileVisit visit{false, 0};
        if (first + lane_ < span.end && (!Config::kSplit || first + lane_ >= span.begin))
          visit = visit_tile(plane, first + lane_, row_begin, row_end);
        Views views{};
        if constexpr (!Config::kByGroup) {
          views.touched[0] = visit.touched;
        } else if (visit.touched != 0) {
          views = views_of_groups(plane, first + lane_, row_begin, row_end, group_rows);
        }
        for (uint32_t tiles = __ballot_sync(~0u, visit.visited); tiles != 0; tiles &= tiles - 1) {
          const int bit = __ffs(static_cast<int>(tiles)) - 1;
          const int tile = first + bit;
          uint32_t added = any ? 0 : Config::kOpens;
          if (int64_t{tile + 1} * Config::kBlockN > shape.seqlen_k) added |= touch_bits_of_any(1);
          Views here;
#pragma unroll
          for (int g = 0; g < Config::kViews; ++g) {
            here.touched[g] = __shfl_sync(~0u, views.touched[g], bit) | added;
          }
          push_k(tile, here, plane, head_k, work.batch);
          push_due_v();  // before Q, which may have to wait for what needs V
          if (!any) load_q(work);
          any = true;
          due_ = {tile, head_k, work.batch};
        }
      }
    }
    if (!any) push_without_tile(work);
  }

  // Of a tile that some slot touches, what it is to each consumer.
  __device__ __forceinline__ Views views_of_groups(const MaskPlane& plane, int tile, int row_begin,
                                                   int row_end, int group_rows) const {
    Views views;
#pragma unroll
    for (int g = 0; g < Config::kViews; ++g) {
      const int begin = row_begin + g * group_rows, end = min(row_end, begin + group_rows);
      const TileVisit visit = visit_tile(plane, tile, begin, end);
      views.touched[g] = begin < end && visit.visited ? visit.touched : Config::kHidden;
    }
    return views;
  }

  // The entry of a row tile that visits no column tile, or of no row tile. Q is not read, but O of the row
  // tile takes its place.
  __device__ __forceinline__ void push_without_tile(const typename Config::Work& work) {
    push_due_v();
    smem_.k_empty[k_.index].wait(k_.parity ^ 1);
    if (elect_one()) {
      smem_.steps[k_.index].tile = -1;
      for (uint32_t& touched : smem_.steps[k_.index].touched) touched = Config::kOpens;
      smem_.k_full[k_.index].arrive();
    }
    __syncwarp();
    k_.advance();
    smem_.q_empty[q_.index].wait(q_.parity ^ 1);  // after the entry, which the O in its place waits for
    if (elect_one()) {
      smem_.works[q_.index] = work;
      smem_.q_full[q_.index].arrive();
    }
    __syncwarp();
    q_.advance();
  }

  __device__ __forceinline__ void load_q(const typename Config::Work& work) {
    smem_.q_empty[q_.index].wait(q_.parity ^ 1);
    char* shared = smem_.q[q_.index];
    Barrier& full = smem_.q_full[q_.index];
    if (elect_one()) {
      smem_.works[q_.index] = work;
      if constexpr (Config::kSplit) {
        const SplitPlan& plan = arguments_.split.plan;
        load_packed_q<Config>(shared, &arguments_.q, full, plan,
                              work.row_tile * Config::kConsumers * plan.group_rows, work.head, work.batch);
      } else {
        full.arrive_expect(Config::QTile::kBytes);
        for (int panel = 0; panel < Config::QTile::kPanels; ++panel) {
          for (int rows = 0; rows < Config::kConsumers; ++rows) {
            tma_load(shared + panel * Config::QTile::kPanelBytes + rows * 64 * 128, &arguments_.q, full,
                     panel * 64, work.row_tile * Config::kBlockM + rows * 64, work.head, work.batch);
          }
        }
      }
    }
    __syncwarp();
    q_.advance();
  }

  __device__ __forceinline__ void push_k(int tile, const Views& views, const MaskPlane& plane, int head_k,
                                         int batch) {
    const int stage = k_.index;
    uint32_t touched = 0;
#pragma unroll
    for (int g = 0; g < Config::kViews; ++g) touched |= views.touched[g];
    smem_.k_empty[stage].wait(k_.parity ^ 1);
    uint32_t copied = touched & kSlotBits;  // slots
    if (!has_tables()) {
      if (copied != 0) write_slots(smem_.slots[stage][0], tile);
      copied = 0;
      __syncwarp();
    }
    if (elect_one()) {
      constexpr int kSlotBytes = Config::kBlockN * static_cast<int>(sizeof(Slot));
      smem_.steps[stage].tile = tile;
#pragma unroll
      for (int g = 0; g < Config::kViews; ++g) smem_.steps[stage].touched[g] = views.touched[g];
      smem_.k_full[stage].arrive_expect(Config::KTile::kBytes + __popc(copied) * kSlotBytes);
      for (int panel = 0; panel < Config::KTile::kPanels; ++panel) {
        tma_load(smem_.k[stage] + panel * Config::KTile::kPanelBytes, &arguments_.k, smem_.k_full[stage],
                 panel * 64, tile * Config::kBlockN, head_k, batch);
      }
      for (uint32_t slots = copied; slots != 0; slots &= slots - 1) {
        const int slot = __ffs(static_cast<int>(slots)) - 1;
        const int64_t column = (int64_t{slot} * arguments_.mask.tile_count + tile) * Config::kBlockN;
        bulk_load(smem_.slots[stage][slot], plane.slots + column, kSlotBytes, smem_.k_full[stage]);
      }
    }
    __syncwarp();
    k_.advance();
  }

  // V follows the K of the tile after.
  __device__ __forceinline__ void push_due_v() {
    if (due_.tile < 0) return;
    const int stage = v_.index;
    smem_.v_empty[stage].wait(v_.parity ^ 1);
    if (elect_one()) {
      smem_.v_full[stage].arrive_expect(Config::VTile::kBytes);
      for (int panel = 0; panel < Config::VTile::kPanels; ++panel) {
        tma_load(smem_.v[stage] + panel * Config::VTile::kPanelBytes, &arguments_.v, smem_.v_full[stage],
                 panel * 64, due_.tile * Config::kBlockN, due_.head_k, due_.batch);
      }
    }
    __syncwarp();
    v_.advance();
    due_.tile = -1;
  }

  const ForwardArguments& arguments_;
  typename Config::Smem& smem_;
  int lane_;
  struct {
    int tile = -1;
    int head_k, batch;
  } due_;  // the tile whose V has not been fetched
  Stage<Config::kQStages> q_;
  Stage<Config::kStages> k_, v_;
};

// Stores O of one consumer, row tile by row tile, and gives its rows of Q back. One thread.
template <class Config>
__device__ __forceinline__ void run_storer(const ForwardArguments& arguments, typename Config::Smem& smem,
                                           int group) {
  for (Stage<Config::kQStages> q;; q.advance()) {
    smem.q_full[q.index].wait(q.parity);
    const typename Config::Work work = smem.works[q.index];
    if (work.row_tile < 0) return;
    smem.o_full[q.index][group].wait(q.parity);
    for (int panel = 0; panel < Config::OTile::kPanels; ++panel) {
      tma_store(&arguments.o, smem.q[q.index] + panel * Config::OTile::kPanelBytes + group * 64 * 128,
                panel * 64, work.row_tile * Config::kBlockM + group * 64, work.head, work.batch);
    }
    bulk_commit();
    bulk_wait_read();
    smem.q_empty[q.index].arrive();
  }
}

}  // namespace flashmask::sm90
