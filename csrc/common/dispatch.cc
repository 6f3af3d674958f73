#include "common/dispatch.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>

namespace flashmask {
namespace {

struct Device {
  int major;
  size_t smem_limit;  // bytes a block may have
};

// A kernel and the family it comes from.
template <class Params>
struct Choice {
  const Kernel<Params>* kernel;
  Family family;
  const char* why;  // this family
};

void write(char* message, size_t capacity, const char* format, ...) {
  if (message == nullptr || capacity == 0) return;
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(message, capacity, format, arguments);
  va_end(arguments);
}

int fail(char* message, size_t capacity, const char* what, cudaError_t error) {
  write(message, capacity, "%s: %s (%s)", what, cudaGetErrorString(error), cudaGetErrorName(error));
  return 1;
}

cudaError_t current_device(Device* out) {
  int device = 0, smem_limit = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&out->major, cudaDevAttrComputeCapabilityMajor, device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&smem_limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  }
  // For tests: what a smaller card would take. No number is 0, for which there is no kernel.
  static const char* const limit = std::getenv("FLASHMASK_TEST_SHARED_MEMORY");
  if (limit != nullptr) smem_limit = std::min(smem_limit, std::max(std::atoi(limit), 0));
  out->smem_limit = static_cast<size_t>(smem_limit);
  return error;
}

const char* name(Family family) { return family == Family::kSm90 ? "sm_90" : "sm_80"; }

bool is_deterministic(const ForwardParams&) {
  return false;
}  // forward has no other way, its kernels do not say so
bool is_deterministic(const BackwardParams& params) { return params.deterministic != 0; }

// The kernel whose head dims fit most tightly; the table's order decides between equals.
template <class Params>
const Kernel<Params>* tightest(const Kernel<Params>* table, int count, const Params& params,
                               size_t smem_limit) {
  const Kernel<Params>* best = nullptr;
  const bool dropout = params.dropout.seed_offset != nullptr;
  for (int i = 0; i < count; ++i) {
    const Kernel<Params>& kernel = table[i];
    if (kernel.dtype != params.dtype || kernel.smem_bytes > smem_limit) continue;
    if (kernel.dropout != dropout || kernel.deterministic != is_deterministic(params)) continue;
    if (kernel.dense != (params.visit == Visit::kDense)) continue;
    if (kernel.bare && params.mask.bounds != 0) continue;
    if (kernel.head_dim < params.shape.head_dim || kernel.head_dim_v < params.shape.head_dim_v) continue;
    if (kernel.split_plan != nullptr && !is_worthwhile(kernel.split_plan(params))) continue;
    if (best == nullptr || kernel.head_dim + kernel.head_dim_v < best->head_dim + best->head_dim_v)
      best = &kernel;
  }
  return best;
}

const ForwardKernel* search(const KernelTable& table, const ForwardParams& params, size_t smem_limit) {
  return tightest(table.forward, table.forward_count, params, smem_limit);
}

const BackwardKernel* search(const KernelTable& table, const BackwardParams& params, size_t smem_limit) {
  return tightest(table.backward, table.backward_count, params, smem_limit);
}

// What every kernel takes for granted of a tensor that is there: 16-byte copies. The stride of a single
// sample, token or head leads nowhere, and may be anything.
bool is_aligned(const Tensor& tensor, int64_t batch, int64_t tokens, int64_t heads) {
  const auto fits = [](int64_t stride, int64_t count) { return stride % 8 == 0 || count <= 1; };
  return tensor.data == nullptr ||
         (fits(tensor.stride_batch, batch) && fits(tensor.stride_seq, tokens) &&
          fits(tensor.stride_head, heads) && reinterpret_cast<uintptr_t>(tensor.data) % 16 == 0);
}

bool are_aligned(const Shape& shape, std::initializer_list<Tensor> of_queries,
                 std::initializer_list<Tensor> of_keys) {
  const auto of_query = [&](const Tensor& t) {
    return is_aligned(t, shape.batch, shape.seqlen_q, shape.heads_q);
  };
  const auto of_key = [&](const Tensor& t) {
    return is_aligned(t, shape.batch, shape.seqlen_k, shape.heads_k);
  };
  return std::all_of(of_queries.begin(), of_queries.end(), of_query) &&
         std::all_of(of_keys.begin(), of_keys.end(), of_key);
}

bool are_aligned(const ForwardParams& p) { return are_aligned(p.shape, {p.q, p.o}, {p.k, p.v}); }
bool are_aligned(const BackwardParams& p) {
  return are_aligned(p.shape, {p.q, p.o, p.dout, p.dq}, {p.k, p.v, p.dk, p.dv});
}

// Why no kernel can take the call, whatever was built; null if one might.
template <class Params>
const char* objection(const Params& params) {
  constexpr int64_t kMostTokens = (int64_t{1} << 31) - 1024;  // rows and columns of a last tile fit into int
  constexpr int64_t kMostTiles = (int64_t{1} << 31) - 1, kSmallestTile = 32;  // blocks of a grid
  const Shape& shape = params.shape;
  if (shape.heads_k < 1 || shape.heads_q % shape.heads_k != 0)
    return "query heads are not a multiple of key heads";
  if (shape.head_dim % 8 != 0 || shape.head_dim_v % 8 != 0) return "head dims are not multiples of 8";
  if (std::max(shape.seqlen_q, shape.seqlen_k) > kMostTokens) return "there are more than 2^31 - 1024 tokens";
  if (ceil_div(std::max(shape.seqlen_q, shape.seqlen_k), kSmallestTile) * shape.heads_q >
      kMostTiles / std::max<int64_t>(shape.batch, 1))
    return "there are more than 2^31 - 1 tiles of 32 tokens";
  if (!are_aligned(params)) return "a tensor's address or strides are not multiples of 16 bytes";
  return nullptr;
}

// Writes why and returns nonzero when there is none.
template <class Params>
int choose(Family family, const Params& params, Choice<Params>* choice, char* message, size_t capacity) {
  if (const char* why = objection(params)) {
    write(message, capacity, "no kernel takes this: %s", why);
    return 1;
  }
  Device device{};
  const cudaError_t error = current_device(&device);
  if (error != cudaSuccess) return fail(message, capacity, "reading the device's limits", error);
  *choice = {nullptr, Family::kSm90, "Hopper's own, on a Hopper device"};
  // TMA describes no empty tensor; the portable kernels write what little there is then.
  const bool empty = params.shape.batch == 0 || params.shape.seqlen_q == 0 || params.shape.seqlen_k == 0;
  if (device.major == 9 && !empty && family != Family::kSm80) {
    choice->kernel = search(sm90::kernel_table(), params, device.smem_limit);
  }
  if (choice->kernel == nullptr && family != Family::kSm90) {
    const char* why = family == Family::kSm80 ? "the portable one, as was asked for"
                      : device.major != 9     ? "the portable one, as the device is no Hopper"
                      : empty                 ? "the portable one, as a tensor is empty"
                      : params.dropout.seed_offset != nullptr
                          ? "the portable one, as Hopper's have no dropout"
                          : "the portable one, as no Hopper kernel was built";
    *choice = {search(sm80::kernel_table(), params, device.smem_limit), Family::kSm80, why};
  }
  if (choice->kernel != nullptr) return 0;
  write(message, capacity,
        "no %s kernel was built for dtype %d, head_dim %d, head_dim_v %d, dropout %d, visit mode %d, "
        "deterministic %d within %zu bytes of shared memory",
        family == Family::kBest ? "CUDA" : name(family), static_cast<int>(params.dtype),
        params.shape.head_dim, params.shape.head_dim_v, params.dropout.seed_offset != nullptr,
        static_cast<int>(params.visit), is_deterministic(params), device.smem_limit);
  return 1;
}

template <class Params>
int workspace_of(Family family, const Params& params, int64_t* bytes, char* message, size_t capacity) {
  Choice<Params> choice;
  if (const int code = choose(family, params, &choice, message, capacity)) return code;
  *bytes = choice.kernel->workspace_bytes(params);
  return 0;
}

template <class Params>
int launch_chosen(Family family, const Params& params, char* message, size_t capacity) {
  Choice<Params> choice;
  if (const int code = choose(family, params, &choice, message, capacity)) return code;
  const cudaError_t error = choice.kernel->launch(params);
  return error == cudaSuccess ? 0 : fail(message, capacity, "launching the kernel", error);
}

template <class Params>
int describe_chosen(Family family, const Params& params, char* message, size_t capacity) {
  Choice<Params> choice;
  if (const int code = choose(family, params, &choice, message, capacity)) return code;
  const Kernel<Params>& kernel = *choice.kernel;
  char how[64] = "";
  if (kernel.split_plan != nullptr) {
    const SplitPlan plan = kernel.split_plan(params);
    write(how, sizeof(how), ", rows of %d heads together, keys in %d splits", plan.pack, plan.splits);
  }
  write(message, capacity,
        "%s (%s), %d query rows x %d key columns a tile, head dims up to %d and %d, %zu bytes of shared "
        "memory%s",
        name(choice.family), choice.why, kernel.block_m, kernel.block_n, kernel.head_dim, kernel.head_dim_v,
        kernel.smem_bytes, how);
  return 0;
}

}  // namespace

int workspace_bytes(Family family, const ForwardParams& params, int64_t* bytes, char* message,
                    size_t capacity) {
  return workspace_of(family, params, bytes, message, capacity);
}

int workspace_bytes(Family family, const BackwardParams& params, int64_t* bytes, char* message,
                    size_t capacity) {
  return workspace_of(family, params, bytes, message, capacity);
}

int launch(Family family, const ForwardParams& params, char* message, size_t capacity) {
  return launch_chosen(family, params, message, capacity);
}

int launch(Family family, const BackwardParams& params, char* message, size_t capacity) {
  return launch_chosen(family, params, message, capacity);
}

int describe(Family family, const ForwardParams& params, char* message, size_t capacity) {
  return describe_chosen(family, params, message, capacity);
}

int describe(Family family, const BackwardParams& params, char* message, size_t capacity) {
  return describe_chosen(family, params, message, capacity);
}

}  // namespace flashmask
