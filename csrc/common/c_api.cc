// The C interface of the CUDA kernels.
#include "flashmask/c_api.h"

#include "common/dispatch.h"

namespace flashmask {
namespace {

Family to_family(int32_t number) {
  return number == 80 ? Family::kSm80 : number == 90 ? Family::kSm90 : Family::kBest;
}

}  // namespace
}  // namespace flashmask

using flashmask::to_family;

int flashmask_cuda_forward_workspace(int32_t family, const flashmask::ForwardParams* params, int64_t* bytes,
                                     char* message, size_t capacity) {
  return flashmask::workspace_bytes(to_family(family), *params, bytes, message, capacity);
}

int flashmask_cuda_forward(int32_t family, const flashmask::ForwardParams* params, char* message,
                           size_t capacity) {
  return flashmask::launch(to_family(family), *params, message, capacity);
}

int flashmask_cuda_forward_describe(int32_t family, const flashmask::ForwardParams* params, char* message,
                                    size_t capacity) {
  return flashmask::describe(to_family(family), *params, message, capacity);
}

int flashmask_cuda_backward_workspace(int32_t family, const flashmask::BackwardParams* params, int64_t* bytes,
                                      char* message, size_t capacity) {
  return flashmask::workspace_bytes(to_family(family), *params, bytes, message, capacity);
}

int flashmask_cuda_backward(int32_t family, const flashmask::BackwardParams* params, char* message,
                            size_t capacity) {
  return flashmask::launch(to_family(family), *params, message, capacity);
}

int flashmask_cuda_describe(int32_t family, int32_t backward, flashmask::DType dtype,
                            const flashmask::Shape* shape, int32_t bounds, int32_t dropout,
                            int32_t deterministic, char* message, size_t capacity) {
  const int64_t seed_offset[2] = {0, 0};
  const auto fill = [&](auto params) {
    params.dtype = dtype;
    params.shape = *shape;
    params.mask.batch = params.mask.heads = 1;
    params.mask.bounds = bounds;
    params.dropout.seed_offset = dropout != 0 ? seed_offset : nullptr;
    return params;
  };
  if (backward == 0) {
    return flashmask::describe(to_family(family), fill(flashmask::ForwardParams{}), message, capacity);
  }
  auto params = fill(flashmask::BackwardParams{});
  params.deterministic = deterministic;
  return flashmask::describe(to_family(family), params, message, capacity);
}
