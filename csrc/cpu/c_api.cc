#include "flashmask/c_api.h"

#include <cstdio>
#include <exception>

#include "common/column_mask.h"
#include "cpu/kernel.h"
#include "cpu/team.h"

namespace {

using namespace flashmask;

int report(const char* reason, char* message, size_t capacity) {
  if (message && capacity > 0) std::snprintf(message, capacity, "%s", reason);
  return 1;
}

// What the kernel alone knows: rows and columns are compared and counted in 32 bits.
const char* unsupported(const Shape& shape) {
  if (shape.seqlen_q > kInt32Max || shape.seqlen_k > kInt32Max) return "seqlen must be below 2^31";
  return nullptr;
}

template <typename Params>
int run(const Params& params, void (*for_float)(const Params&), void (*for_double)(const Params&),
        char* message, size_t capacity) {
  if (const char* reason = unsupported(params.shape)) return report(reason, message, capacity);
  try {
    (params.dtype == DType::kFloat64 ? for_double : for_float)(params);
    return 0;
  } catch (const std::exception& error) {
    return report(error.what(), message, capacity);
  }
}

}  // namespace

int flashmask_cpu_forward(const ForwardParams* params, char* message, size_t capacity) {
  return run(*params, cpu::forward<float>, cpu::forward<double>, message, capacity);
}

int flashmask_cpu_backward(const BackwardParams* params, char* message, size_t capacity) {
  return run(*params, cpu::backward<float>, cpu::backward<double>, message, capacity);
}

int32_t flashmask_cpu_threads() {
  try {
    return cpu::default_threads();
  } catch (const std::exception&) {
    return 0;
  }
}
