// What the pipelines of the Hopper kernels share.
#pragma once

namespace flashmask::sm90 {

inline constexpr int kMaxSmemBytes = 232448;

// Where a pipeline stands: stage and the parity of its barriers.
template <int kStages>
struct Stage {
  int index = 0;
  int parity = 0;

  __device__ __forceinline__ void advance() {
    if (++index == kStages) {
      index = 0;
      parity ^= 1;
    }
  }
};

}  // namespace flashmask::sm90
