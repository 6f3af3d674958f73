#include "cpu/tile_ops.h"

#include <cstdlib>
#include <cstring>

#include "cpu/isa.h"

namespace flashmask::cpu {

#define FLASHMASK_DECLARE(isa)             \
  namespace isa {                          \
  extern const TileOps<float> kFloatOps;   \
  extern const TileOps<double> kDoubleOps; \
  }
FLASHMASK_DECLARE(baseline)
#if defined(__x86_64__)
FLASHMASK_DECLARE(avx2)
FLASHMASK_DECLARE(avx512)
#endif
#undef FLASHMASK_DECLARE

namespace {

struct Tables {
  const TileOps<float>* for_float;
  const TileOps<double>* for_double;
};

Tables choose() {
#if defined(__x86_64__)
  const char* wanted = std::getenv("FLASHMASK_CPU_ISA");
  const auto allowed = [wanted](const char* isa) { return !wanted || std::strcmp(isa, wanted) == 0; };
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                          __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                          __builtin_cpu_supports("avx512vl");
  if (has_avx512 && allowed("avx512")) return {&avx512::kFloatOps, &avx512::kDoubleOps};
  if (has_avx2 && (allowed("avx2") || allowed("avx512"))) {
    return {&avx2::kFloatOps, &avx2::kDoubleOps};
  }
#endif
  return {&baseline::kFloatOps, &baseline::kDoubleOps};
}

const Tables& tables() {
  static const Tables chosen = choose();
  return chosen;
}

}  // namespace

template <>
const TileOps<float>& tile_ops<float>() {
  return *tables().for_float;
}
template <>
const TileOps<double>& tile_ops<double>() {
  return *tables().for_double;
}

}  // namespace flashmask::cpu

FLASHMASK_API const char* flashmask_cpu_isa() { return flashmask::cpu::tile_ops<float>().isa; }

FLASHMASK_API void flashmask_cpu_exp(int32_t dtype, void* values, int64_t count) {
  if (dtype == static_cast<int32_t>(flashmask::DType::kFloat64)) {
    flashmask::cpu::tile_ops<double>().exponential(static_cast<double*>(values), count);
  } else {
    flashmask::cpu::tile_ops<float>().exponential(static_cast<float*>(values), count);
  }
}
