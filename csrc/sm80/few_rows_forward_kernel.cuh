// Forward of a call whose query rows that share a key head, of all its query heads, are few: decoding, a
// token or some against many keys. Such a call takes as long as K and V take from memory, so nothing may lie
// between: a warp has 16 rows, and 16 keys that it reads from global memory into fragments, the next while it
// computes, and meets the other warps once, at the end. Where there are more rows, groups of 16 have warps of
// their own, which read the same keys; the later ones find them in a cache. Key columns are split as well;
// the block of a key head that ends last merges.
//
// No lane reads less than 16 bytes of a key or of a value, since of a product's depth, and of its columns,
// the order is free as long as both operands, or operand and result, have the same: see load_keys() and
// load_values().
//
// For calls without index vectors.
#pragma once

#include "common/kernel_chain.h"
#include "common/mask_tiles.cuh"
#include "common/softmax.cuh"
#include "sm80/ptx.cuh"

namespace flashmask::sm80 {

inline constexpr int kGroupRows = 16;     // of one mma.sync
inline constexpr int kMostSplits = 64;    // one block merges them
inline constexpr int kMostInCluster = 8;  // blocks, on every card that has clusters

// `architecture`: whose table the kernel is in, 80 or 90; code that two tables share would have two homes.
template <int kArchitecture_, typename Element_, int kHeadDim_, int kHeadDimV_, int kWarps_, int kRowGroups_,
          bool kDense_>
struct FewRowsForwardConfig {
  using Element = Element_;
  // Clusters, and a kernel that starts before the one before it has ended.
  static constexpr bool kHopper = kArchitecture_ == 90;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kHeadDimV = kHeadDimV_;
  static constexpr int kColumns =
      (kHeadDimV + 63) / 64 * 64;  // of O: eight lanes read 8 dims each of a value
  static constexpr int kWarps = kWarps_;
  static constexpr int kRowGroups = kRowGroups_;
  static constexpr int kKeyWarps = kWarps / kRowGroups;  // of a group of rows
  static constexpr int kTileKeys = 16;                   // of a warp at a time
  static constexpr int kBlockM = kGroupRows * kRowGroups;
  static constexpr int kBlockN = kTileKeys * kKeyWarps;
  static constexpr int kThreads = 32 * kWarps;
  // Of a multiprocessor, as registers allow.
  static constexpr int kBlocks = kHeadDimV <= 64 && kRowGroups == 1 && !kDense_ ? 2 : 1;
  static constexpr bool kDense = kDense_;
  static constexpr bool kDropout = false;
  static constexpr bool kDeterministic = false;
  static_assert(kArchitecture_ == 80 || kArchitecture_ == 90, "there are these tables");
  static_assert(kHeadDim % 32 == 0, "four lanes read 8 dims each of a key");
  static_assert(kWarps % kRowGroups == 0, "groups of rows have as many warps each");

  // What a warp found: O not yet divided by the sum of weights, which are exp2(scale * (s - maximum)).
  struct Part {
    float o[kColumns];
    float maximum, sum;
  };
  struct Smem {
    union {
      Part parts[kWarps][kGroupRows];
      float shares[kBlockM][kMostSplits];  // of a row's splits in it
    };
    Part merged[kHopper ? kBlockM : 1];  // the warps', for the cluster
  };
  static_assert(sizeof(Part) / 4 % 32 == 2,
                "rows begin two banks apart: a store has conflicts of two at most");
};

struct FewRowsForwardArguments {
  ForwardParams params;
  MaskTiles mask;  // for its dense matrix
  int splits;
  float exponent_scale;
  bool negated;
  bool clustered;      // a key head's blocks are a cluster; they need nothing of what follows
  unsigned* tickets;   // [B, Hk], zero; null where nothing is split
  float* o;            // [B, Hk, splits, Hq / Hk * Sq, kColumns], each split's
  float2* statistics;  // [B, Hk, splits, Hq / Hk * Sq], its maximum and its sum of weights
};

template <class Config>
class FewRowsForward {
 public:
  using Element = typename Config::Element;
  using Part = typename Config::Part;
  static constexpr int kKeyLoads = Config::kHeadDim / 32;    // of 16 bytes a lane, for a key
  static constexpr int kValueLoads = Config::kColumns / 64;  // for a value
  static constexpr int kO8 = Config::kColumns / 8;
  static constexpr int kTileKeys = Config::kTileKeys;

  __device__ __forceinline__ FewRowsForward(const FewRowsForwardArguments& arguments,
                                            typename Config::Smem& smem)
      : arguments_(arguments),
        smem_(smem),
        warp_(threadIdx.x / 32),
        first_row_(kGroupRows * group_of(warp_, Config::kKeyWarps)),
        g_(threadIdx.x % 32 / 4),
        t_(threadIdx.x % 4) {
    const Shape& shape = arguments.params.shape;
    pack_ = shape.heads_q / shape.heads_k;
    rows_ = pack_ * static_cast<int>(shape.seqlen_q);
    seqlen_k_ = static_cast<int>(shape.seqlen_k);
    split_ = static_cast<int>(blockIdx.x) % arguments.splits;
    plane_ = static_cast<int>(blockIdx.x) / arguments.splits;
    head_k_ = plane_ % shape.heads_k;
    batch_ = plane_ / shape.heads_k;
    const Tensor &k = arguments.params.k, &v = arguments.params.v;
    k_ = static_cast<const Element*>(k.data) + batch_ * k.stride_batch + head_k_ * k.stride_head;
    v_ = static_cast<const Element*>(v.data) + batch_ * v.stride_batch + head_k_ * v.stride_head;
  }

  __device__ __forceinline__ void run() {
    constexpr int kKeyWarps = Config::kKeyWarps;
    const int64_t tiles = ceil_div(seqlen_k_, kTileKeys);
    int tile =
        static_cast<int>(tiles * split_ / arguments_.splits) + warp_ - kKeyWarps * group_of(warp_, kKeyWarps);
    // None for a group without rows, as the last of four may be.
    end_ = first_row_ < rows_ ? static_cast<int>(tiles * (split_ + 1) / arguments_.splits) : 0;
    load_keys(tile);
    load_values(tile);
    load_queries();
    for (; tile < end_; tile += kKeyWarps) {
      float scores[1][2][4] = {};
      multiply_scores(scores[0]);
      load_keys(tile + kKeyWarps);
      if (arguments_.negated) negate(scores);
      mask(scores[0], tile);
      float rescale[1][2];
      softmax_.advance(scores, arguments_.exponent_scale, rescale);
      softmax_.rescale_rows(o_, rescale);
      multiply_values(scores[0]);
      load_values(tile + kKeyWarps);
    }
    store_part();
    __syncthreads();
    merge_warps();
    if (Config::kHopper && arguments_.clustered) {
      merge_cluster();
    } else if (arguments_.splits > 1 && is_last()) {
      merge_blocks();
    }
  }

 private:
  // Which group of rows the i-th of something is in, of which each group has `size`.
  static __device__ __forceinline__ int group_of(int i, int size) {
    return Config::kRowGroups == 1 ? 0 : i / size;
  }

  // 16 bytes; zeros where there is nothing. Nobody reads them again but the other groups of rows.
  static __device__ __forceinline__ uint4 load(const Element* pointer, bool valid) {
    uint4 x{};
    if (valid && Config::kRowGroups == 1) {
      asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                   : "l"(pointer));
    } else if (valid) {
      asm volatile("ld.global.nc.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                   : "l"(pointer));
    }
    return x;
  }

  static __device__ __forceinline__ uint32_t word(const uint4& x, int i) {
    return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
  }

  // keys_[n][i] has dims [32 i + 8 t, + 8) of key 8 n + g: words 2 h and 2 h + 1 are what a lane holds of b
  // in depth step 2 i + h, if a has the same dims in the same places, as load_queries() sees to.
  __device__ __forceinline__ void load_keys(int tile) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int key = kTileKeys * tile + 8 * n + g_;
      const Element* row = k_ + key * arguments_.params.k.stride_seq;
#pragma unroll
      for (int i = 0; i < kKeyLoads; ++i) {
        const int dim = 32 * i + 8 * t_;
        keys_[n][i] =
            load(row + dim, tile < end_ && key < seqlen_k_ && dim < arguments_.params.shape.head_dim);
      }
    }
  }

  // values_[x][c] has dims [64 c + 8 g, + 8) of key 2 t + x % 2 + x / 2 * 8, that is of the four keys which
  // are a lane's in b. Column g of the product's eight j is dim 64 (j / 8) + 8 g + j % 8, see dim_of().
  __device__ __forceinline__ void load_values(int tile) {
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      const int key = kTileKeys * tile + 2 * t_ + x % 2 + x / 2 * 8;
      const Element* row = v_ + key * arguments_.params.v.stride_seq;
#pragma unroll
      for (int c = 0; c < kValueLoads; ++c) {
        const int dim = 64 * c + 8 * g_;
        values_[x][c] =
            load(row + dim, tile < end_ && key < seqlen_k_ && dim < arguments_.params.shape.head_dim_v);
      }
    }
  }

  // The dim of O that element e of accumulator j is, of row g or g + 8.
  __device__ __forceinline__ int dim_of(int j, int e) const {
    return 64 * (j / 8) + 8 * (2 * t_ + e % 2) + j % 8;
  }

  __device__ __forceinline__ void load_queries() {
    const Tensor& q = arguments_.params.q;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = first_row_ + g_ + 8 * h;
      const Element* query = static_cast<const Element*>(q.data) + batch_ * q.stride_batch +
                             row / pack_ * q.stride_seq + (head_k_ * pack_ + row % pack_) * q.stride_head;
#pragma unroll
      for (int i = 0; i < kKeyLoads; ++i) {
        const int dim = 32 * i + 8 * t_;
        queries_[h][i] = load(query + dim, row < rows_ && dim < arguments_.params.shape.head_dim);
      }
    }
  }

  // scores: [16 rows x 2 times 8 keys]
  __device__ __forceinline__ void multiply_scores(float (&scores)[2][4]) const {
#pragma unroll
    for (int i = 0; i < kKeyLoads; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t a[4] = {word(queries_[0][i], 2 * h), word(queries_[1][i], 2 * h),
                               word(queries_[0][i], 2 * h + 1), word(queries_[1][i], 2 * h + 1)};
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          mma_m16n8k16<Element>(scores[n], a, word(keys_[n][i], 2 * h), word(keys_[n][i], 2 * h + 1));
        }
      }
    }
  }

  __device__ __forceinline__ void mask(float (&scores)[2][4], int tile) const {
    const Shape& shape = arguments_.params.shape;
    // Of row 0; those that follow see no less.
    const int64_t first_hidden =
        arguments_.params.mask.causal ? shape.seqlen_k - shape.seqlen_q + 1 : shape.seqlen_k;
    if (!Config::kDense && kTileKeys * (tile + 1) <= first_hidden) return;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int key = kTileKeys * tile + 8 * n + 2 * t_ + e % 2;
        const int row = first_row_ + g_ + e / 2 * 8, token = row / pack_;
        bool visible = key < seqlen_k_ && row < rows_;
        if constexpr (Config::kDense) {
          const int head = head_k_ * pack_ + row % pack_;
          visible =
              visible && dense_plane(arguments_.mask, shape, batch_, head)[token * shape.seqlen_k + key] != 0;
        } else {
          visible = visible && (!arguments_.params.mask.causal || key < first_hidden + token);
        }
        if (!visible) scores[n][e] = -INFINITY;
      }
    }
  }

  // O += P V, with P rounded.
  __device__ __forceinline__ void multiply_values(const float (&p)[2][4]) {
    const uint32_t a[4] = {pack<Element>(p[0][0], p[0][1]), pack<Element>(p[0][2], p[0][3]),
                           pack<Element>(p[1][0], p[1][1]), pack<Element>(p[1][2], p[1][3])};
#pragma unroll
    for (int j = 0; j < kO8; ++j) {
      const int c = j / 8, w = j % 8 / 2;
      const uint32_t half = j % 2 == 0 ? 0x5410 : 0x7632;  // which of a word's two dims, of two keys
      mma_m16n8k16<Element>(o_[0][j], a, __byte_perm(word(values_[0][c], w), word(values_[1][c], w), half),
                            __byte_perm(word(values_[2][c], w), word(values_[3][c], w), half));
    }
  }

  __device__ __forceinline__ void store_part() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float sum = softmax_.total(0, h);
      const int row = g_ + 8 * h;
      if (first_row_ + row >= rows_) continue;
      Part& part = smem_.parts[warp_][row];
      if (t_ == 0) part.maximum = softmax_.maximum[0][h], part.sum = sum;
#pragma unroll
      for (int j = 0; j < kO8; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) part.o[dim_of(j, e)] = o_[0][j][2 * h + e];
    }
  }

  // Calls use(row, dim) for each element of O, a thread's share of them.
  template <class Use>
  __device__ __forceinline__ void for_each_element(Use use) const {
    for (int i = threadIdx.x; i < rows_ * Config::kColumns; i += Config::kThreads) {
      use(i / Config::kColumns, i % Config::kColumns);
    }
  }

  // Where a split's part of a row lies, in rows.
  __device__ __forceinline__ int64_t part_of(int split, int row) const {
    return (int64_t{plane_} * arguments_.splits + split) * rows_ + row;
  }

  // What weights under one maximum are worth under another, which is no smaller; both may be -inf.
  __device__ __forceinline__ float worth(float maximum, float under) const {
    return exp2_approx((maximum - OnlineSoftmax<1>::finite(under)) * arguments_.exponent_scale);
  }

  __device__ __forceinline__ void merge_warps() {
    for_each_element([&](int row, int dim) {
      const int group = group_of(row, kGroupRows), own = row - kGroupRows * group;
      const auto parts = &smem_.parts[Config::kKeyWarps * group];
      float maximum = -INFINITY, sum = 0.f, value = 0.f;
#pragma unroll
      for (int w = 0; w < Config::kKeyWarps; ++w) maximum = fmaxf(maximum, parts[w][own].maximum);
#pragma unroll
      for (int w = 0; w < Config::kKeyWarps; ++w) {
        const Part& part = parts[w][own];
        const float factor = worth(part.maximum, maximum);
        sum += factor * part.sum;
        value += factor * part.o[dim];
      }
      if (arguments_.splits == 1) {
        store(row, dim, sum == 0.f ? 0.f : value / sum);
        if (dim == 0) store_lse(row, maximum, sum);
        return;
      }
      if (Config::kHopper && arguments_.clustered) {
        Part& part = smem_.merged[row];
        part.o[dim] = value;
        if (dim == 0) part.maximum = maximum, part.sum = sum;
        return;
      }
      const int64_t part = part_of(split_, row);
      arguments_.o[part * Config::kColumns + dim] = value;
      if (dim == 0) arguments_.statistics[part] = {maximum, sum};
    });
  }

  // What lies at an address of this block's shared memory in that of another of the cluster.
  static __device__ __forceinline__ float load_of(int block, const float& place) {
    float value = 0.f;
#if __CUDA_ARCH__ >= 900
    uint32_t address;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                 : "=r"(address)
                 : "r"(shared_address(&place)), "r"(block));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
#endif
    return value;
  }

  static __device__ __forceinline__ void cluster_barrier() {
#if __CUDA_ARCH__ >= 900
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
#endif
  }

  // The blocks of the cluster divide O.
  __device__ __forceinline__ void merge_cluster() {
    cluster_barrier();  // all have merged their warps
    for (int i = split_ * Config::kThreads + threadIdx.x; i < rows_ * Config::kColumns;
         i += arguments_.splits * Config::kThreads) {
      const int row = i / Config::kColumns, dim = i % Config::kColumns;
      const Part& place = smem_.merged[row];
      float maxima[kMostInCluster], maximum = -INFINITY, sum = 0.f, value = 0.f;
#pragma unroll
      for (int block = 0; block < kMostInCluster; ++block) {
        maxima[block] = block < arguments_.splits ? load_of(block, place.maximum) : -INFINITY;
        maximum = fmaxf(maximum, maxima[block]);
      }
#pragma unroll
      for (int block = 0; block < kMostInCluster; ++block) {
        if (block >= arguments_.splits) break;
        const float factor = worth(maxima[block], maximum);
        sum += factor * load_of(block, place.sum);
        value += factor * load_of(block, place.o[dim]);
      }
      store(row, dim, sum == 0.f ? 0.f : value / sum);
      if (dim == 0) store_lse(row, maximum, sum);
    }
    cluster_barrier();  // nobody reads this block's shared memory any more
  }

  // Whether all other blocks of the key head have stored their parts, which are visible then.
  __device__ __forceinline__ bool is_last() {
    __shared__ unsigned before;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      wait_for_kernels_before();  // the one that clears the tickets; nothing else here needs it
      before = atomicAdd(arguments_.tickets + plane_, 1u);
    }
    __syncthreads();
    __threadfence();
    return before == static_cast<unsigned>(arguments_.splits) - 1;
  }

  __device__ __forceinline__ void merge_blocks() {
    for (int row = warp_; row < rows_; row += Config::kWarps) find_shares(row);
    __syncthreads();
    // Four dims a thread: what a block waits for is the number of loads one after the other.
    constexpr int kQuads = Config::kColumns / 4;
    for (int i = threadIdx.x; i < rows_ * kQuads; i += Config::kThreads) {
      const int row = i / kQuads, dim = i % kQuads * 4;
      float4 value{};
#pragma unroll 8
      for (int split = 0; split < arguments_.splits; ++split) {
        const float share = smem_.shares[row][split];
        const float* const o = arguments_.o + part_of(split, row) * Config::kColumns + dim;
        const float4 part = __ldcg(reinterpret_cast<const float4*>(o));
        value.x += share * part.x, value.y += share * part.y;
        value.z += share * part.z, value.w += share * part.w;
      }
      store(row, dim, value.x), store(row, dim + 1, value.y);
      store(row, dim + 2, value.z), store(row, dim + 3, value.w);
    }
  }

  // One warp: by what to multiply a row's O of each split.
  __device__ __forceinline__ void find_shares(int row) {
    constexpr int kOwn = kMostSplits / 32;  // of a lane
    static_assert(kMostSplits % 32 == 0, "lanes have as many splits each");
    const int lane = threadIdx.x % 32;
    float2 own[kOwn];
    float maximum = -INFINITY, sum = 0.f;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int split = lane + 32 * i;
      own[i] = {-INFINITY, 0.f};
      if (split < arguments_.splits) own[i] = __ldcg(arguments_.statistics + part_of(split, row));
      maximum = fmaxf(maximum, own[i].x);
    }
    for (int distance = 16; distance > 0; distance /= 2) {
      maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, distance));
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      own[i].x = worth(own[i].x, maximum);
      sum += own[i].x * own[i].y;
    }
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) smem_.shares[row][lane + 32 * i] = sum == 0.f ? 0.f : own[i].x / sum;
    if (lane == 0) store_lse(row, maximum, sum);
  }

  __device__ __forceinline__ void store(int row, int dim, float value) const {
    const ForwardParams& params = arguments_.params;
    if (dim >= params.shape.head_dim_v) return;
    auto* o = static_cast<Element*>(params.o.data) + batch_ * params.o.stride_batch +
              row / pack_ * params.o.stride_seq + (head_k_ * pack_ + row % pack_) * params.o.stride_head;
    o[dim] = static_cast<Element>(value);
  }

  __device__ __forceinline__ void store_lse(int row, float maximum, float sum) const {
    const Shape& shape = arguments_.params.shape;
    const int head = head_k_ * pack_ + row % pack_;
    const int64_t at = (int64_t{batch_} * shape.heads_q + head) * shape.seqlen_q + row / pack_;
    constexpr float kLn2 = 0.6931471805599453f;  // maxima are exponents of 2
    static_cast<float*>(arguments_.params.lse)[at] =
        sum == 0.f ? -INFINITY : maximum * arguments_.exponent_scale * kLn2 + logf(sum);
  }

  const FewRowsForwardArguments& arguments_;
  typename Config::Smem& smem_;
  int warp_, first_row_;  // and the first of the 16 rows of its group
  int g_, t_;             // of 16 x 8 fragments a lane has rows g and g + 8, columns 2 t and 2 t + 1
  int pack_, rows_;       // row r is query token r / pack of query head r % pack of the key head's
  int seqlen_k_, end_;    // one past the last tile of the split
  int split_, plane_;     // of B x Hk
  int head_k_, batch_;
  const Element *k_, *v_;  // of this key head
  uint4 queries_[2][kKeyLoads], keys_[2][kKeyLoads], values_[4][kValueLoads];
  float o_[1][kO8][4] = {};
  OnlineSoftmax<1> softmax_;
};

// A kernel and not a memset, whose end the next one would have to wait for.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads) clear_tickets_kernel(unsigned* tickets, int64_t count) {
  let_next_kernel_start();
  const int64_t i = int64_t{blockIdx.x} * Config::kThreads + threadIdx.x;
  if (i < count) tickets[i] = 0;
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocks)
    few_rows_forward_kernel(const __grid_constant__ FewRowsForwardArguments arguments) {
  extern __shared__ __align__(16) char memory[];
  FewRowsForward<Config>(arguments, *reinterpret_cast<typename Config::Smem*>(memory)).run();
}

}  // namespace flashmask::sm80
