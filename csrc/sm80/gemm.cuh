// One warp's share of a tile product, operands in shared memory or registers.
#pragma once

#include "sm80/smem_tile.cuh"

namespace flashmask::sm80 {

// acc[m][n] (16x8 each) += sum over k of A(m, k) * B(n / 2, k).
// load_a(fragment, m, k) and load_b(fragment, n16, k) fetch 16x16 blocks; each B block is fetched one step
// before it is used, so that its latency hides under the products of the step before.
template <typename Element, int kM, int kN8, int kK, class LoadA, class LoadB>
__device__ __forceinline__ void warp_gemm(float (&acc)[kM][kN8][4], LoadA load_a, LoadB load_b) {
  static_assert(kN8 % 2 == 0, "B is fetched 16 columns at a time");
  constexpr int kN16 = kN8 / 2;
  uint32_t a[2][kM][4];
  uint32_t b[2][4];
#pragma unroll
  for (int m = 0; m < kM; ++m) load_a(a[0][m], m, 0);
  load_b(b[0], 0, 0);
#pragma unroll
  for (int k = 0; k < kK; ++k) {
#pragma unroll
    for (int n = 0; n < kN16; ++n) {
      const int step = k * kN16 + n;
      if (n + 1 == kN16 && k + 1 < kK) {
#pragma unroll
        for (int m = 0; m < kM; ++m) load_a(a[(k + 1) % 2][m], m, k + 1);
      }
      if (step + 1 < kK * kN16) load_b(b[(step + 1) % 2], (n + 1) % kN16, n + 1 < kN16 ? k : k + 1);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        mma_m16n8k16<Element>(acc[m][2 * n], a[k % 2][m], b[step % 2][0], b[step % 2][1]);
        mma_m16n8k16<Element>(acc[m][2 * n + 1], a[k % 2][m], b[step % 2][2], b[step % 2][3]);
      }
    }
  }
}

template <int kM, int kN8>
__device__ __forceinline__ void clear(float (&acc)[kM][kN8][4]) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[m][n][e] = 0.f;
}

}  // namespace flashmask::sm80
