// The online softmax on accumulators held as m16n8 fragments (mma.sync's, and a wgmma warp's).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace flashmask {

// exp(scale * (s - maximum)) needs a positive factor for the maximum of s to be the right one: a negative
// softmax_scale negates s instead (negate()), a zero one becomes so small that every visible key weighs the
// same.
inline __host__ __device__ float exponent_scale(double softmax_scale) {
  return fmaxf(static_cast<float>(fabs(softmax_scale) * 1.4426950408889634), 1e-37f);
}

template <int kM, int kN8>
__device__ __forceinline__ void negate(float (&scores)[kM][kN8][4]) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[m][n][e] = -scores[m][n][e];
}

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two floats rounded to nearest even and packed, the first in the low half.
template <typename Element>
__device__ __forceinline__ uint32_t pack(float low, float high);

template <>
__device__ __forceinline__ uint32_t pack<__nv_bfloat16>(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

template <>
__device__ __forceinline__ uint32_t pack<__half>(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// The two floats that pack() rounded.
template <typename Element>
__device__ __forceinline__ float2 unpack(uint32_t packed);

template <>
__device__ __forceinline__ float2 unpack<__nv_bfloat16>(uint32_t packed) {
  return make_float2(__uint_as_float(packed << 16), __uint_as_float(packed & 0xFFFF0000u));
}

template <>
__device__ __forceinline__ float2 unpack<__half>(uint32_t packed) {
  return __half22float2(*reinterpret_cast<const __half2*>(&packed));
}

// A lane's part of row g (h = 0) or g + 8 to 0: of one that sees no key, where 0 times what is not finite
// would not be.
template <int kN8>
__device__ __forceinline__ void clear_row(float (&fragments)[kN8][4], int h) {
#pragma unroll
  for (int n = 0; n < kN8; ++n) fragments[n][2 * h] = fragments[n][2 * h + 1] = 0.f;
}

// Row statistics of the online softmax; a lane holds rows g and g + 8 of each 16-row fragment.
template <int kM>
struct OnlineSoftmax {
  float maximum[kM][2];  // -inf until a visible key is met
  float sum[kM][2];      // this lane's share; summed over the four lanes of a row at the end

  __device__ __forceinline__ OnlineSoftmax() {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) maximum[m][h] = -INFINITY, sum[m][h] = 0.f;
  }

  // 0 stands in for a maximum of -inf inside exp only, so that -inf - (-inf) is never formed.
  static __device__ __forceinline__ float finite(float maximum) {
    return maximum == -INFINITY ? 0.f : maximum;
  }

  // This lane's maximum of a row: four chains, as one would wait for itself.
  template <int kN8>
  static __device__ __forceinline__ float row_maximum(const float (&scores)[kN8][4], int h) {
    static_assert(kN8 >= 2, "a chain has a score to start with");
    float chains[4] = {scores[0][2 * h], scores[0][2 * h + 1], scores[1][2 * h], scores[1][2 * h + 1]};
#pragma unroll
    for (int n = 2; n < kN8; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) chains[n % 2 * 2 + c] = fmaxf(chains[n % 2 * 2 + c], scores[n][2 * h + c]);
    }
    return fmaxf(fmaxf(chains[0], chains[1]), fmaxf(chains[2], chains[3]));
  }

  // scores -> exp2(scale * (scores - row maximum)). `rescale` receives the factor by which what was summed
  // under the old maximum shrinks.
  template <int kN8>
  __device__ __forceinline__ void advance(float (&scores)[kM][kN8][4], float scale, float (&rescale)[kM][2]) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float row_max = fmaxf(maximum[m][h], row_maximum(scores[m], h));
        row_max = fmaxf(row_max, __shfl_xor_sync(~0u, row_max, 1));
        row_max = fmaxf(row_max, __shfl_xor_sync(~0u, row_max, 2));
        // A difference first: an unchanged maximum must rescale by exactly 1, or a masked tile's visit would
        // show.
        rescale[m][h] = exp2_approx((maximum[m][h] - finite(row_max)) * scale);
        const float shift = finite(row_max) * scale;
        maximum[m][h] = row_max;
        float row_sum = sum[m][h] * rescale[m][h];
#pragma unroll
        for (int n = 0; n < kN8; ++n) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            scores[m][n][2 * h + c] = exp2_approx(scores[m][n][2 * h + c] * scale - shift);
            row_sum += scores[m][n][2 * h + c];
          }
        }
        sum[m][h] = row_sum;
      }
    }
  }

  // A row that does not exist: whatever it is said to see weighs nothing.
  __device__ __forceinline__ void leave_out(int m, int h) { maximum[m][h] = 1e38f; }

  // scores -> exp2(scale * (scores - the maximum so far)), and this lane's sums of them: what advance() makes
  // of them where the maximum does not rise, without looking for it. Any reference serves as well as the
  // maximum does as long as nothing overflows, and `sums` tell that. In a row that has seen no key yet they
  // are infinite as soon as there is one.
  //
  // `mask(n)` has its say on fragments [][n] just before: what it does takes the time that exponentials
  // leave.
  template <int kN8, class Mask>
  __device__ __forceinline__ void weigh_by_past(float (&scores)[kM][kN8][4], float scale,
                                                float (&sums)[kM][2], Mask mask) const {
    constexpr float kLowest = -1e38f;  // below every finite score times the scale
    float shift[kM][2];
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        shift[m][h] = maximum[m][h] == -INFINITY ? kLowest : maximum[m][h] * scale;
        sums[m][h] = 0.f;
      }
    }
#pragma unroll
    for (int n = 0; n < kN8; ++n) {
      mask(n);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          scores[m][n][e] = exp2_approx(scores[m][n][e] * scale - shift[m][e / 2]);
          sums[m][e / 2] += scores[m][n][e];
        }
      }
    }
  }

  // Whether the weights of weigh_by_past() may stay: all of this lane's fit into 16 bits, and none is a NaN.
  static __device__ __forceinline__ bool serve(const float (&sums)[kM][2]) {
    constexpr float kMost = 16384.f;  // fp16 ends at 65504; bf16 and float are as precise anywhere
    bool all = true;
#pragma unroll
    for (int m = 0; m < kM; ++m) all = all && sums[m][0] + sums[m][1] <= kMost;
    return all;
  }

  __device__ __forceinline__ void add(const float (&sums)[kM][2]) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) sum[m][h] += sums[m][h];
  }

  template <int kO8>
  static __device__ __forceinline__ void rescale_rows(float (&output)[kM][kO8][4],
                                                      const float (&rescale)[kM][2]) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (__any_sync(~0u, rescale[m][h] != 1.f)) {  // rare once the large keys have been met
#pragma unroll
          for (int n = 0; n < kO8; ++n) {
            output[m][n][2 * h] *= rescale[m][h];
            output[m][n][2 * h + 1] *= rescale[m][h];
          }
        }
      }
    }
  }

  // The row's sum over the four lanes that share it.
  __device__ __forceinline__ float total(int m, int h) const {
    float all = sum[m][h];
    all += __shfl_xor_sync(~0u, all, 1);
    return all + __shfl_xor_sync(~0u, all, 2);
  }

  // Natural logarithm of the row's sum of exp(scale * score); -inf where no key is visible. `scale` is in
  // exponents of 2.
  __device__ __forceinline__ float lse(int m, int h, float total, float scale) const {
    return total == 0.f ? -INFINITY : maximum[m][h] * scale * 0.6931471805599453f + logf(total);
  }
};

}  // namespace flashmask
