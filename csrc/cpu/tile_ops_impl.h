// The implementation of tile_ops.h, compiled once per instruction set: a source file defines FLASHMASK_ISA
// (the namespace), FLASHMASK_VECTOR_BYTES and FLASHMASK_MICRO_ROWS, sets the compiler's target and includes
// this file. It is written in the compiler's portable vectors, so the three instances differ in width alone.
//
// Everything here lives in the instance's own namespace or is always inlined, and no standard header with
// code in it is included: a function shared between instances would be kept once, in whichever instruction
// set the linker met first.
#include <cstdint>

#include "common/philox.h"
#include "cpu/tile_ops.h"

namespace flashmask::cpu::FLASHMASK_ISA {

#define FLASHMASK_INLINE inline __attribute__((always_inline))

inline constexpr int kMicroRows =
    FLASHMASK_MICRO_ROWS;  // rows of a product held in registers, 2 vectors each

// ---- vectors ----------------------------------------------------------------------------------------------

template <typename T>
struct Lane;
template <>
struct Lane<float> {
  using Int = int32_t;
  static constexpr int kMantissaBits = 23, kExponentBias = 127;
  static constexpr float kRound = 12582912.0f;                 // 1.5 * 2^23: adding it rounds to an integer
  static constexpr float kExpLow = -104.0f, kExpHigh = 89.0f;  // exp is 0 below, inf above
  static constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440055e-4f;
  // (exp(r) - 1 - r) / r^2 on |r| <= ln(2) / 2, minimax in relative error of exp: 5.2e-11.
  static constexpr float kPolynomial[] = {0.500000006784f,   0.16666665867f,    0.0416662943649f,
                                          0.00833349734224f, 0.00139447035565f, 0.000197902973689f};
};
template <>
struct Lane<double> {
  using Int = int64_t;
  static constexpr int kMantissaBits = 52, kExponentBias = 1023;
  static constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr double kExpLow = -746.0, kExpHigh = 710.0;
  static constexpr double kLn2High = 0x1.62e42fefp-1, kLn2Low = 7.44061711001239671613e-11;
  // The same for double: 3.6e-18.
  static constexpr double kPolynomial[] = {0.50000000000000106688,     0.16666666666666411508,
                                           0.041666666666529728218,    0.0083333333334949772613,
                                           0.0013888888943759965395,   0.00019841269505773775103,
                                           0.000024801492949633869166, 2.7557586803895324478e-6,
                                           2.7630306250293600047e-7,   2.5000018833187373177e-8};
};

template <typename T>
struct VectorOf {
  typedef T Type __attribute__((vector_size(FLASHMASK_VECTOR_BYTES)));
  static constexpr int kLanes = FLASHMASK_VECTOR_BYTES / sizeof(T);
};
template <typename T>
using Vec = typename VectorOf<T>::Type;
template <typename T>
using IntVec = Vec<typename Lane<T>::Int>;
template <typename T>
inline constexpr int kLanes = VectorOf<T>::kLanes;

template <typename T>
FLASHMASK_INLINE Vec<T> load(const T* p) {
  Vec<T> v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
template <typename T>
FLASHMASK_INLINE void store(T* p, Vec<T> v) {
  __builtin_memcpy(p, &v, sizeof v);
}
template <typename T>
FLASHMASK_INLINE Vec<T> fill(T value) {
  return Vec<T>{} + value;
}
template <typename T>
FLASHMASK_INLINE IntVec<T> bits_of(Vec<T> v) {
  return reinterpret_cast<IntVec<T>>(v);
}
template <typename T>
FLASHMASK_INLINE Vec<T> from_bits(IntVec<T> v) {
  return reinterpret_cast<Vec<T>>(v);
}
template <typename T>
inline constexpr T kInfinity = static_cast<T>(__builtin_inf());

// exp within about an ulp, subnormal results included; exp(0) is exactly 1, exp(-inf) exactly 0.
template <typename T>
FLASHMASK_INLINE Vec<T> exponential(Vec<T> x) {
  using L = Lane<T>;
  x = x < L::kExpLow ? fill<T>(L::kExpLow) : x;
  x = x > L::kExpHigh ? fill<T>(L::kExpHigh) : x;
  const Vec<T> rounded = x * static_cast<T>(1.442695040888963407) + L::kRound;
  const Vec<T> n = rounded - L::kRound;
  const Vec<T> r = (x - n * L::kLn2High) - n * L::kLn2Low;
  constexpr int kTerms = sizeof(L::kPolynomial) / sizeof(T);
  Vec<T> p = fill<T>(L::kPolynomial[kTerms - 1]);
#pragma GCC unroll 16
  for (int i = kTerms - 2; i >= 0; --i) p = p * r + L::kPolynomial[i];
  const Vec<T> y = (p * (r * r) + r) + static_cast<T>(1);
  // 2^n in two factors: n reaches beyond the exponents of normal numbers at both ends.
  const IntVec<T> zero = bits_of<T>(fill<T>(L::kRound));
  const IntVec<T> n_all = bits_of<T>(rounded) - zero;
  const IntVec<T> n_half = bits_of<T>(n * static_cast<T>(0.5) + L::kRound) - zero;
  const auto power = [](IntVec<T> e) {
    return from_bits<T>((e + static_cast<typename L::Int>(L::kExponentBias)) << L::kMantissaBits);
  };
  return y * power(n_half) * power(n_all - n_half);
}

// ---- products ---------------------------------------------------------------------------------------------

template <typename T, bool kTransposedA, int kRows, int kVecs>
FLASHMASK_INLINE void micro_kernel(const Product<T>& p, int m, int n) {
  const T* a = kTransposedA ? p.a + m : p.a + m * p.lda;
  const T* b = p.b + n;
  T* c = p.c + m * p.ldc + n;
  Vec<T> sum[kRows][kVecs];
  if (p.into == Into::kOverwrite) {
    for (int i = 0; i < kRows; ++i) {
      for (int v = 0; v < kVecs; ++v) sum[i][v] = Vec<T>{};
    }
  } else {
    for (int i = 0; i < kRows; ++i) {
      for (int v = 0; v < kVecs; ++v) sum[i][v] = load(c + i * p.ldc + v * kLanes<T>);
    }
    if (p.into == Into::kRescaled) {
      for (int v = 0; v < kVecs; ++v) {
        const Vec<T> factor = load(p.column_scale + n + v * kLanes<T>);
        for (int i = 0; i < kRows; ++i) sum[i][v] *= factor;
      }
    }
  }
  for (int k = 0; k < p.k; ++k) {
    Vec<T> b_row[kVecs];
    for (int v = 0; v < kVecs; ++v) b_row[v] = load(b + k * p.ldb + v * kLanes<T>);
    for (int i = 0; i < kRows; ++i) {
      const T a_element = kTransposedA ? a[k * p.lda + i] : a[i * p.lda + k];
      for (int v = 0; v < kVecs; ++v) sum[i][v] += a_element * b_row[v];
    }
  }
  if (p.into == Into::kOverwrite) {
    for (int i = 0; i < kRows; ++i) {
      for (int v = 0; v < kVecs; ++v) sum[i][v] *= p.scale;
    }
  }
  for (int i = 0; i < kRows; ++i) {
    for (int v = 0; v < kVecs; ++v) store(c + i * p.ldc + v * kLanes<T>, sum[i][v]);
  }
}

template <typename T, bool kTransposedA, int kVecs>
FLASHMASK_INLINE void multiply_columns(const Product<T>& p, int n) {
  int m = 0;
  for (; m + kMicroRows <= p.m; m += kMicroRows) micro_kernel<T, kTransposedA, kMicroRows, kVecs>(p, m, n);
  for (; m + 2 <= p.m; m += 2) micro_kernel<T, kTransposedA, 2, kVecs>(p, m, n);
  if (m < p.m) micro_kernel<T, kTransposedA, 1, kVecs>(p, m, n);
}

template <typename T, bool kTransposedA>
void multiply_layout(const Product<T>& p) {
  int n = 0;
  for (; n + 2 * kLanes<T> <= p.n; n += 2 * kLanes<T>) multiply_columns<T, kTransposedA, 2>(p, n);
  if (n < p.n) multiply_columns<T, kTransposedA, 1>(p, n);
}

template <typename T>
void multiply(const Product<T>& p) {
  p.a_transposed ? multiply_layout<T, true>(p) : multiply_layout<T, false>(p);
}

// ---- masks ------------------------------------------------------------------------------------------------

template <typename T>
FLASHMASK_INLINE IntVec<T> lane_numbers() {
  IntVec<T> numbers{};
  for (int i = 0; i < kLanes<T>; ++i) numbers[i] = i;
  return numbers;
}

template <typename T>
void hide(T* scores, int32_t columns, int32_t rows, int32_t row_begin, const HiddenRows* hidden) {
  using Int = typename Lane<T>::Int;
  for (int j = 0; j < columns; ++j) {
    const HiddenRows h = hidden[j];
    for (int i = 0; i < rows; i += kLanes<T>) {
      const IntVec<T> row = lane_numbers<T>() + static_cast<Int>(row_begin + i);
      const IntVec<T> is_hidden = ((row >= Int{h.lower_begin}) & (row < Int{h.lower_end})) |
                                  ((row >= Int{h.upper_begin}) & (row < Int{h.upper_end})) |
                                  (row < Int{h.first});
      T* s = scores + j * kBlockM + i;
      store(s, is_hidden ? fill<T>(-kInfinity<T>) : load(s));
    }
  }
}

template <typename T>
void hide_dense(T* scores, int32_t columns, int32_t rows, const uint8_t* dense, int64_t dense_stride) {
  for (int j = 0; j < columns; ++j) {
    for (int i = 0; i < rows; ++i) {
      if (!dense[i * dense_stride + j]) scores[j * kBlockM + i] = -kInfinity<T>;
    }
  }
}

// ---- softmax ----------------------------------------------------------------------------------------------

template <typename T>
void softmax_step(T* scores, int32_t columns, int32_t rows, T* row_max, T* row_sum, T* rescale) {
  for (int i = 0; i < rows; i += kLanes<T>) {
    const Vec<T> old_max = load(row_max + i);
    Vec<T> new_max = old_max;
    for (int j = 0; j < columns; ++j) {
      const Vec<T> s = load(scores + j * kBlockM + i);
      new_max = s > new_max ? s : new_max;
    }
    // The maximum stays -inf until a visible key is met; 0 stands in for it here only.
    const Vec<T> shift = new_max == -kInfinity<T> ? Vec<T>{} : new_max;
    const Vec<T> factor = exponential<T>(old_max - shift);
    Vec<T> sum = load(row_sum + i) * factor;
    for (int j = 0; j < columns; ++j) {
      T* s = scores + j * kBlockM + i;
      const Vec<T> p = exponential<T>(load(s) - shift);
      store(s, p);
      sum += p;
    }
    store(row_max + i, new_max);
    store(row_sum + i, sum);
    store(rescale + i, factor);
  }
}

template <typename T, bool kDropout>
FLASHMASK_INLINE void softmax_backward_loop(T* scores, T* dp, const T* keep, int32_t columns, int32_t rows,
                                            const T* lse, const T* delta, T scale) {
  for (int j = 0; j < columns; ++j) {
    for (int i = 0; i < rows; i += kLanes<T>) {
      const int at = j * kBlockM + i;
      const Vec<T> p = exponential<T>(load(scores + at) - load(lse + i));
      Vec<T> dp_kept = load(dp + at);
      if constexpr (kDropout) {
        dp_kept *= load(keep + at);
        store(scores + at, p * load(keep + at));
      } else {
        store(scores + at, p);
      }
      store(dp + at, p * (dp_kept - load(delta + i)) * scale);
    }
  }
}

template <typename T>
void softmax_backward(T* scores, T* dp, const T* keep, int32_t columns, int32_t rows, const T* lse,
                      const T* delta, T scale) {
  if (keep) {
    softmax_backward_loop<T, true>(scores, dp, keep, columns, rows, lse, delta, scale);
  } else {
    softmax_backward_loop<T, false>(scores, dp, keep, columns, rows, lse, delta, scale);
  }
}

// ---- dropout ----------------------------------------------------------------------------------------------

template <typename T>
void draw_keep(T* keep, int32_t columns, int32_t rows, const DropoutTile& tile) {
  const T kept = static_cast<T>(tile.keep_scale);
  for (int column_block = 0; column_block < columns; column_block += 16) {
    for (int row_block = 0; row_block < rows; row_block += 16) {
      // Drawn lane by lane, laid out so that the bits of 16 rows of a column are contiguous.
      uint32_t words[2][4][2][8];  // [column >= 8][column % 8 / 2][row >= 8][row % 8]
      for (uint32_t pair = 0; pair < 4; ++pair) {
        for (uint32_t r = 0; r < 8; ++r) {
          const PhiloxWords drawn =
              dropout_words(tile.seed, tile.offset, tile.head, (tile.row_begin + row_block) / 16,
                            (tile.column_begin + column_block) / 16, r * 4 + pair);
          for (int w = 0; w < 4; ++w) words[w / 2][pair][w % 2][r] = drawn.word[w];
        }
      }
      for (int c = 0; c < 16; ++c) {
        const uint32_t* of_rows = words[c / 8][c % 8 / 2][0];
        const int shift = c % 2 == 0 ? 0 : 16;
        T* out = keep + (column_block + c) * kBlockM + row_block;
        for (int r = 0; r < 16; ++r) out[r] = (of_rows[r] >> shift & 0xFFFFu) < tile.threshold ? T{0} : kept;
      }
    }
  }
}

template <typename T>
void drop(T* p, const T* keep, int32_t columns, int32_t rows) {
  for (int j = 0; j < columns; ++j) {
    for (int i = 0; i < rows; i += kLanes<T>) {
      T* s = p + j * kBlockM + i;
      store(s, load(s) * load(keep + j * kBlockM + i));
    }
  }
}

// ---- storage types ----------------------------------------------------------------------------------------

using FloatVec = Vec<float>;
using UIntVec = Vec<uint32_t>;
typedef uint16_t HalfVec __attribute__((vector_size(FLASHMASK_VECTOR_BYTES / 2)));

FLASHMASK_INLINE UIntVec uint_bits(FloatVec v) { return reinterpret_cast<UIntVec>(v); }
FLASHMASK_INLINE FloatVec float_of(UIntVec v) { return reinterpret_cast<FloatVec>(v); }

struct BFloat16 {
  static FLASHMASK_INLINE FloatVec widen(HalfVec h) {
    return float_of(__builtin_convertvector(h, UIntVec) << 16);
  }
  // To nearest, ties to even; a NaN stays one.
  static FLASHMASK_INLINE HalfVec narrow(FloatVec v) {
    const UIntVec u = uint_bits(v);
    const UIntVec rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
    const UIntVec quiet = (u >> 16) | 0x40u;
    return __builtin_convertvector(v != v ? quiet : rounded, HalfVec);
  }
};

struct Float16 {
  static FLASHMASK_INLINE FloatVec widen(HalfVec h) {
    const UIntVec u = __builtin_convertvector(h, UIntVec);
    const UIntVec magnitude = (u & 0x7FFFu) << 13;  // the exponent is 112 short of a float's
    const UIntVec normal = magnitude + (112u << 23);
    const UIntVec special = magnitude + (224u << 23);  // inf and NaN
    const FloatVec subnormal = float_of(magnitude + (113u << 23)) - 0x1p-14f;
    UIntVec result = magnitude < (1u << 23) ? uint_bits(subnormal) : normal;
    result = magnitude >= (31u << 23) ? special : result;
    return float_of(result | ((u & 0x8000u) << 16));
  }
  // To nearest, ties to even; too large becomes inf, a NaN stays one.
  static FLASHMASK_INLINE HalfVec narrow(FloatVec v) {
    const UIntVec u = uint_bits(v);
    const UIntVec magnitude = u & 0x7FFFFFFFu;
    const UIntVec normal = (magnitude - (112u << 23) + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
    // Adding 0.5 leaves a float's last bits worth 2^-24, the step of subnormal halves.
    const UIntVec subnormal = uint_bits(float_of(magnitude) + 0.5f) - (126u << 23);
    UIntVec result = magnitude < (113u << 23) ? subnormal : normal;
    result = magnitude >= 0x477FF000u ? UIntVec{} + 0x7C00u : result;  // 65520 and above
    result = magnitude > 0x7F800000u ? UIntVec{} + 0x7E00u : result;
    return __builtin_convertvector(result | ((u >> 16) & 0x8000u), HalfVec);
  }
};

template <typename Half>
void load_halves(const StoredRows& src, int32_t rows, int32_t columns, float* dst, int32_t ld) {
  for (int r = 0; r < rows; ++r) {
    const uint16_t* from = static_cast<const uint16_t*>(src.data) + r * src.stride;
    float* to = dst + static_cast<int64_t>(r) * ld;
    int c = 0;
    for (; c + kLanes<float> <= columns; c += kLanes<float>) {
      HalfVec h;
      __builtin_memcpy(&h, from + c, sizeof h);
      store(to + c, Half::widen(h));
    }
    if (c < columns) {
      HalfVec h{};
      __builtin_memcpy(&h, from + c, (columns - c) * sizeof(uint16_t));
      const FloatVec wide = Half::widen(h);
      __builtin_memcpy(to + c, &wide, (columns - c) * sizeof(float));
    }
    for (c = columns; c < ld; ++c) to[c] = 0;
  }
}

template <typename Half>
void store_halves(const float* src, int32_t ld, int32_t rows, int32_t columns, const StoredRows& dst) {
  for (int r = 0; r < rows; ++r) {
    const float* from = src + static_cast<int64_t>(r) * ld;
    uint16_t* to = static_cast<uint16_t*>(dst.data) + r * dst.stride;
    int c = 0;
    for (; c + kLanes<float> <= columns; c += kLanes<float>) {
      const HalfVec h = Half::narrow(load(from + c));
      __builtin_memcpy(to + c, &h, sizeof h);
    }
    if (c < columns) {
      FloatVec wide{};
      __builtin_memcpy(&wide, from + c, (columns - c) * sizeof(float));
      const HalfVec h = Half::narrow(wide);
      __builtin_memcpy(to + c, &h, (columns - c) * sizeof(uint16_t));
    }
  }
}

template <typename T>
void load_rows(const StoredRows& src, int32_t rows, int32_t columns, T* dst, int32_t ld) {
  if constexpr (sizeof(T) == sizeof(float)) {
    if (src.dtype == DType::kBFloat16) return load_halves<BFloat16>(src, rows, columns, dst, ld);
    if (src.dtype == DType::kFloat16) return load_halves<Float16>(src, rows, columns, dst, ld);
  }
  for (int r = 0; r < rows; ++r) {
    T* to = dst + static_cast<int64_t>(r) * ld;
    __builtin_memcpy(to, static_cast<const T*>(src.data) + r * src.stride, columns * sizeof(T));
    for (int c = columns; c < ld; ++c) to[c] = 0;
  }
}

template <typename T>
void store_rows(const T* src, int32_t ld, int32_t rows, int32_t columns, const StoredRows& dst) {
  if constexpr (sizeof(T) == sizeof(float)) {
    if (dst.dtype == DType::kBFloat16) return store_halves<BFloat16>(src, ld, rows, columns, dst);
    if (dst.dtype == DType::kFloat16) return store_halves<Float16>(src, ld, rows, columns, dst);
  }
  for (int r = 0; r < rows; ++r) {
    __builtin_memcpy(static_cast<T*>(dst.data) + r * dst.stride, src + static_cast<int64_t>(r) * ld,
                     columns * sizeof(T));
  }
}

// ---- transposition and sums -------------------------------------------------------------------------------

// Alternates lanes of the lower (kHigh: upper) halves of a and b.
template <typename T, bool kHigh>
FLASHMASK_INLINE Vec<T> interleave(Vec<T> a, Vec<T> b) {
  IntVec<T> picks{};
  for (int i = 0; i < kLanes<T>; ++i) {
    picks[i] = i / 2 + (kHigh ? kLanes<T> / 2 : 0) + (i % 2 ? kLanes<T> : 0);
  }
#if defined(__clang__)
  Vec<T> result{};
  for (int i = 0; i < kLanes<T>; ++i) result[i] = i % 2 ? b[picks[i] - kLanes<T>] : a[picks[i]];
  return result;
#else
  return __builtin_shuffle(a, b, picks);
#endif
}

// A square of lanes x lanes: log2(lanes) perfect shuffles of all of its elements.
template <typename T>
FLASHMASK_INLINE void transpose_square(const T* src, int64_t src_stride, T* dst, int64_t dst_stride) {
  constexpr int kSize = kLanes<T>;
  Vec<T> rows[kSize], shuffled[kSize];
  for (int i = 0; i < kSize; ++i) rows[i] = load(src + i * src_stride);
  for (int step = 1; step < kSize; step *= 2) {
    for (int i = 0; i < kSize / 2; ++i) {
      shuffled[2 * i] = interleave<T, false>(rows[i], rows[i + kSize / 2]);
      shuffled[2 * i + 1] = interleave<T, true>(rows[i], rows[i + kSize / 2]);
    }
    for (int i = 0; i < kSize; ++i) rows[i] = shuffled[i];
  }
  for (int i = 0; i < kSize; ++i) store(dst + i * dst_stride, rows[i]);
}

template <typename T>
void transpose(const T* src, int64_t src_stride, int32_t rows, int32_t columns, T* dst, int64_t dst_stride) {
  for (int r = 0; r < rows; r += kLanes<T>) {
    for (int c = 0; c < columns; c += kLanes<T>) {
      const int height = rows - r < kLanes<T> ? rows - r : kLanes<T>;
      const int width = columns - c < kLanes<T> ? columns - c : kLanes<T>;
      const T* from = src + r * src_stride + c;
      T* to = dst + c * dst_stride + r;
      if (height == kLanes<T> && width == kLanes<T>) {
        transpose_square(from, src_stride, to, dst_stride);
        continue;
      }
      for (int i = 0; i < height; ++i) {
        for (int j = 0; j < width; ++j) to[j * dst_stride + i] = from[i * src_stride + j];
      }
    }
  }
}

template <typename T>
void row_dots(const T* a, int64_t lda, const T* b, int64_t ldb, int32_t rows, int32_t columns, T* out) {
  for (int r = 0; r < rows; ++r) {
    const T* x = a + r * lda;
    const T* y = b + r * ldb;
    Vec<T> partial{};
    int c = 0;
    for (; c + kLanes<T> <= columns; c += kLanes<T>) partial += load(x + c) * load(y + c);
    T sum = 0;
    for (int i = 0; i < kLanes<T>; ++i) sum += partial[i];
    for (; c < columns; ++c) sum += x[c] * y[c];
    out[r] = sum;
  }
}

template <typename T>
void exponentials(T* values, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes<T>) {
    const int64_t used = count - i < kLanes<T> ? count - i : kLanes<T>;
    Vec<T> v{};
    __builtin_memcpy(&v, values + i, used * sizeof(T));
    v = exponential<T>(v);
    __builtin_memcpy(values + i, &v, used * sizeof(T));
  }
}

template <typename T>
constexpr TileOps<T> make_table(const char* isa) {
  return {isa,           kLanes<T>,       multiply<T>,         hide<T>,
          hide_dense<T>, softmax_step<T>, softmax_backward<T>, draw_keep<T>,
          drop<T>,       load_rows<T>,    store_rows<T>,       transpose<T>,
          row_dots<T>,   exponentials<T>};
}

extern const TileOps<float> kFloatOps;
extern const TileOps<double> kDoubleOps;

#define FLASHMASK_STRING2(x) #x
#define FLASHMASK_STRING(x) FLASHMASK_STRING2(x)
const TileOps<float> kFloatOps = make_table<float>(FLASHMASK_STRING(FLASHMASK_ISA));
const TileOps<double> kDoubleOps = make_table<double>(FLASHMASK_STRING(FLASHMASK_ISA));

}  // namespace flashmask::cpu::FLASHMASK_ISA
