// What a Hopper forward kernel is made of: its arguments, tiles and shared memory.
#pragma once

#include <cuda.h>

#include <type_traits>

#include "common/mask_tiles.cuh"
#include "common/tile_order.cuh"
#include "sm90/operand.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/ptx.cuh"
#include "sm90/split_rows.cuh"

namespace flashmask::sm90 {

struct ForwardArguments {
  // Boxes: 64 rows (q, o) or block_n rows (k, v) of one panel; q of a split as load_packed_q() says.
  CUtensorMap q, k, v, o;
  ForwardParams params;
  MaskTiles mask;
  int row_tiles;
  int work_count;        // row_tiles * Hq * B, or what SplitWork counts
  unsigned* ticket;      // zeroed; the next row tile that nobody has taken, see kFirstByBlock
  float exponent_scale;  // exponent_scale(softmax_scale)
  bool negated;          // softmax_scale < 0
  SplitArguments split;
  TileOrder order;  // of row tiles
};

// A head's row tiles descend, so under causality the longest come first, or come as the order says.
struct RowTileWork {
  int row_tile;  // -1: no more work
  int head;
  int batch;

  __device__ __forceinline__ RowTileWork(int number, const ForwardArguments& arguments) {
    const Shape& shape = arguments.params.shape;
    const TileOrder& order = arguments.order;
    int plane = number / arguments.row_tiles;
    int rank = number % arguments.row_tiles;
    const int in_turns = order.turns();
    if (in_turns > 0) {
      const RankInPlane at(number, arguments.row_tiles, static_cast<int>(shape.batch) * shape.heads_q,
                           in_turns);
      plane = at.plane;
      rank = at.rank;
    }
    head = plane % shape.heads_q;
    batch = plane / shape.heads_q;
    row_tile = order.tiles != nullptr ? order.tile(batch, head, rank) : arguments.row_tiles - 1 - rank;
  }
};

// A split of a row tile. What reads the same part of K and V comes together.
struct SplitWork {
  int row_tile;  // -1: no more work
  int head;      // the first of those that are packed
  int batch;
  int split;

  __device__ __forceinline__ SplitWork(int number, const ForwardArguments& arguments) {
    const Shape& shape = arguments.params.shape;
    const SplitPlan& plan = arguments.split.plan;
    const int units = shape.heads_q / shape.heads_k / plan.pack;  // of a K head's query heads
    row_tile = number % plan.row_tiles;
    number /= plan.row_tiles;
    const int unit = number % units;
    number /= units;
    split = number % plan.splits;
    number /= plan.splits;
    head = (number % shape.heads_k * units + unit) * plan.pack;
    batch = number / shape.heads_k;
  }
};

template <typename Element_, int kHeadDim_, int kHeadDimV_, int kConsumers_, int kBlockN_, int kStages_,
          bool kDense_, bool kSplit_, bool kBare_>
struct ForwardConfig {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kHeadDimV = kHeadDimV_;
  static constexpr int kConsumers = kConsumers_;  // warpgroups
  static constexpr int kBlockM = 64 * kConsumers;
  static constexpr int kBlockN = kBlockN_;
  static constexpr int kStages = kStages_;  // of K and of V
  static constexpr bool kDense = kDense_;   // test mode: the mask is read from a dense matrix
  static constexpr bool kSplit = kSplit_;   // few query rows: row tiles and key columns as SplitPlan says
  static constexpr bool kBare = kBare_;     // no index vectors: nothing or causality masks
  static constexpr int kSlots = kBare ? 1 : kMaxSlots;
  // Whether calls without index vectors need no pre-pass. At larger head dims the producer of splits would
  // spill.
  static constexpr bool kKnowsMasks = kBare || (kSplit && kHeadDim <= 128);
  // A block's first row tile is that of its own number, and the ticket counts those after; it is null in
  // calls of one wave. Elsewhere this would cost the producer a spill.
  static constexpr bool kFirstByBlock = kBare || kSplit;
  static constexpr bool kDropout = false;
  static constexpr bool kDeterministic = false;
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 232 : 160;
  static_assert(kConsumers == 2 || kConsumers == 3,
                "the register file is divided for two or three consumers");
  static_assert(128 * (kProducerRegisters + kConsumers * kConsumerRegisters) <= 65536, "registers of an SM");
  static_assert(!kBare || !kSplit, "splits are for any mask");
  static_assert(kBlockN % 16 == 0, "P is read 16 columns at a time");

  using QTile = Operand<kBlockM, kHeadDim>;
  using KTile = Operand<kBlockN, kHeadDim>;
  using VTile = Operand<kBlockN, kHeadDimV>;
  using OTile = Operand<kBlockM, kHeadDimV>;

  using Work = std::conditional_t<kSplit, SplitWork, RowTileWork>;

  // Whether each consumer is told what a column tile is to its own 64 rows, and passes it over if they see
  // nothing of it: row tiles of 192 rows reach far beyond what some of their rows see. With 128 rows, or
  // without index vectors, the search costs more than that saves.
  static constexpr bool kByGroup = kConsumers == 3 && !kBare;
  static constexpr int kViews = kByGroup ? kConsumers : 1;

  // One entry of the K ring.
  struct alignas(kViews == 1 ? 8 : 4) Step {
    int tile;  // a column tile or -1: none, since the row tile sees no key or there is no more work
    // TileVisit's, of slots that are in Smem::slots, of all rows or of each consumer's; kOpens: the first
    // entry of a row tile; kHidden: this consumer's rows see nothing of the column tile.
    uint32_t touched[kViews];
  };
  static constexpr uint32_t kOpens = 1u << 31, kHidden = 1u << 30;

  // What it is to one consumer.
  struct OwnStep {
    int tile;
    uint32_t touched;

    __device__ __forceinline__ bool opens() const { return static_cast<int>(touched) < 0; }
    __device__ __forceinline__ bool hidden() const { return kByGroup && (touched & kHidden) != 0; }
  };

  // O takes the place of its Q, a consumer's rows that of its rows; a split's goes from registers to memory.
  // Where there is room for a second stage of Q, that of the next row tile comes while this one is worked on.
  static_assert(OTile::kBytes <= QTile::kBytes, "O fits where Q was");
  static constexpr int kSlotBytes = kSlots * kBlockN * static_cast<int>(sizeof(Slot));
  static constexpr int kRingBytes = kStages * (KTile::kBytes + VTile::kBytes + kSlotBytes);
  static constexpr int kQStages = 2 * QTile::kBytes + kRingBytes + 1024 <= kMaxSmemBytes ? 2 : 1;

  struct alignas(1024) Smem {
    char q[kQStages][QTile::kBytes];
    char k[kStages][KTile::kBytes];
    char v[kStages][VTile::kBytes];
    alignas(128) Slot slots[kStages][kSlots][kBlockN];
    Step steps[kStages];
    Work works[kQStages];
    Barrier q_full[kQStages], q_empty[kQStages];
    Barrier o_full[kQStages][kConsumers];
    Barrier k_full[kStages], k_empty[kStages];
    Barrier v_full[kStages], v_empty[kStages];
  };
  static_assert(sizeof(Smem) <= kMaxSmemBytes, "Hopper offers a block 227 KB of shared memory");
};

}  // namespace flashmask::sm90
