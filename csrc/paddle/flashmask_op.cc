// The custom operators `flashmask` and `flashmask_grad`: Paddle tensors in, parameter structs out.
//
// The only file that includes a Paddle header. Shapes, dtypes and argument pairs are checked in Python, where
// an error can name the user's argument; what is checked here is what a caller that bypasses Python (a saved
// program, say) could still get wrong and that would address memory.

#ifdef PADDLE_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "common/column_mask.h"
#include "flashmask/c_api.h"
#include "paddle/extension.h"
#include "paddle/phi/core/allocator.h"
#include "paddle/phi/core/stream.h"

#ifdef PADDLE_WITH_CUDA
// What this header declares for CUDA alone takes the headers of cuBLAS, cuDNN and others, which need not be
// installed; phi::DenseTensor is the same without.
#pragma push_macro("PADDLE_WITH_CUDA")
#undef PADDLE_WITH_CUDA
#include "paddle/phi/core/dense_tensor.h"
#pragma pop_macro("PADDLE_WITH_CUDA")

namespace phi::memory_utils {
// As declared by Paddle's memory_utils.h, 2.6 and 3.3, which would ask for the headers of all of CUDA's
// libraries.
std::shared_ptr<Allocation> AllocShared(const Place& place, size_t size, const Stream& stream);
}  // namespace phi::memory_utils

namespace paddle::memory {
// As declared by Paddle 3.3's malloc.h, which 2.6 has too but does not ship.
bool RecordStream(std::shared_ptr<phi::Allocation> allocation, cudaStream_t stream);
}  // namespace paddle::memory
#endif

namespace {

using flashmask::BackwardParams;
using flashmask::DType;
using flashmask::ForwardParams;
using flashmask::Visit;
using OptionalTensor = paddle::optional<paddle::Tensor>;
using Dims = std::vector<int64_t>;
using OptionalDims = paddle::optional<Dims>;
using OptionalDType = paddle::optional<paddle::DataType>;

static_assert(sizeof(double) == sizeof(int64_t), "double attributes travel as the bits of an int64_t");

// Paddle 2.6 has no double attribute, and a float one would round softmax_scale to float32.
double double_from_bits(int64_t bits) {
  double value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

DType to_dtype(paddle::DataType dtype) {
  switch (dtype) {
    case paddle::DataType::FLOAT16:
      return DType::kFloat16;
    case paddle::DataType::BFLOAT16:
      return DType::kBFloat16;
    case paddle::DataType::FLOAT32:
      return DType::kFloat32;
    case paddle::DataType::FLOAT64:
      return DType::kFloat64;
    default:
      PD_THROW("flashmask: q, k and v must be float16, bfloat16, float32 or float64");
  }
}

paddle::DataType lse_dtype(paddle::DataType dtype) {
  return dtype == paddle::DataType::FLOAT64 ? paddle::DataType::FLOAT64 : paddle::DataType::FLOAT32;
}

bool on_cpu(const paddle::Tensor& tensor) { return tensor.place().GetType() == phi::AllocationType::CPU; }

[[noreturn]] void refuse_place(const paddle::Place& place) {
  PD_THROW("flashmask: this build has no kernels for ", place.DebugString());
}

#ifdef PADDLE_WITH_CUDA

void check_cuda(cudaError_t error, const char* what) {
  if (error != cudaSuccess) PD_THROW("flashmask: ", what, ": ", cudaGetErrorString(error));
}

// Makes a tensor's device the current one for a while: the kernels are launched on that, and Paddle's empty()
// and stream() mean that, whatever the tensor's place.
class DeviceGuard {
 public:
  explicit DeviceGuard(const paddle::Tensor& tensor) {
    if (tensor.place().GetType() != phi::AllocationType::GPU) return;
    const int device = tensor.place().GetDeviceId();
    int current = device;
    check_cuda(cudaGetDevice(&current), "asking for the current device");
    if (current == device) return;
    check_cuda(cudaSetDevice(device), "changing the current device");
    previous_ = current;
  }
  ~DeviceGuard() {
    if (previous_ >= 0) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = -1;
};

// A tensor's memory. Paddle 2.6 keeps DenseTensor::Holder() from custom operators.
struct Memory : phi::DenseTensor {
  static std::shared_ptr<phi::Allocation> of(const paddle::Tensor& tensor) {
    const auto dense = std::dynamic_pointer_cast<phi::DenseTensor>(tensor.impl());
    return dense == nullptr ? nullptr : (*dense).*(&Memory::holder_);
  }
};

size_t bytes_of(const paddle::Tensor& tensor) {
  return static_cast<size_t>(tensor.numel()) * phi::SizeOf(tensor.dtype());
}

#else

struct DeviceGuard {
  explicit DeviceGuard(const paddle::Tensor&) {}
};

#endif

// Memory that one call needs until its work is launched.
class Scratch {
 public:
  // What `tensor` holds, where the kernels can read it: those of CUDA read 16 bytes at once, but a view into
  // another tensor may start anywhere.
  void* aligned(const paddle::Tensor& tensor) {
    void* data = const_cast<void*>(tensor.data());
    if (on_cpu(tensor) || reinterpret_cast<uintptr_t>(data) % 16 == 0) return data;
#ifdef PADDLE_WITH_CUDA
    const size_t bytes = bytes_of(tensor);
    void* copy = on_device(bytes, tensor);
    check_cuda(cudaMemcpyAsync(copy, data, bytes, cudaMemcpyDeviceToDevice, tensor.stream()),
               "copying an input");
    return copy;
#else
    refuse_place(tensor.place());
#endif
  }

  // As many zeros as `like` has values.
  void* zeros_like(const paddle::Tensor& like) {
    if (on_cpu(like)) {
      auto zeros = std::make_shared<paddle::Tensor>(paddle::zeros(like.shape(), like.dtype(), like.place()));
      held_.push_back(zeros);
      return zeros->data();
    }
#ifdef PADDLE_WITH_CUDA
    const size_t bytes = bytes_of(like);
    void* zeros = on_device(bytes, like);
    check_cuda(cudaMemsetAsync(zeros, 0, bytes, like.stream()), "clearing a gradient");
    return zeros;
#else
    refuse_place(like.place());
#endif
  }

#ifdef PADDLE_WITH_CUDA
  // Memory for the stream that the device of `like` launches to: who gets it next works on that stream too.
  // That of paddle::empty() belongs to the device's first stream, whose work would get it while a kernel on a
  // stream of stream_guard() still runs.
  void* on_device(size_t bytes, const paddle::Tensor& like) {
    const phi::Stream stream(reinterpret_cast<phi::StreamId>(like.stream()));
    auto memory = phi::memory_utils::AllocShared(like.place(), bytes, stream);
    held_.push_back(memory);
    return memory->ptr();
  }
#endif

 private:
  std::vector<std::shared_ptr<void>> held_;
};

// Tensors that a call reads or writes may be dropped before it has run, as attention() drops lse where nobody
// asked for it. No other stream gets their memory until the work launched so far has run: what Paddle
// allocates belongs to the device's first stream, whatever stream_guard() says. On that stream this records
// nothing.
void hold_until_run([[maybe_unused]] const paddle::Tensor& q,
                    [[maybe_unused]] std::initializer_list<const paddle::Tensor*> tensors) {
#ifdef PADDLE_WITH_CUDA
  if (on_cpu(q)) return;
  for (const paddle::Tensor* tensor : tensors) {
    if (tensor == nullptr || !tensor->initialized()) continue;
    if (const auto memory = Memory::of(*tensor)) paddle::memory::RecordStream(memory, q.stream());
  }
#endif
}

// Q, K, V and the mask, as both operators take them.
struct Operands {
  const paddle::Tensor& q;
  const paddle::Tensor& k;
  const paddle::Tensor& v;
  const OptionalTensor& indices;
  const OptionalTensor& dense_mask;
  const OptionalTensor& seed_offset;
};

struct Attributes {
  bool causal;
  double softmax_scale;
  double dropout_p;
  Visit visit;
};

Attributes to_attributes(bool causal, int64_t softmax_scale_bits, int64_t dropout_p_bits, int visit) {
  return {causal, double_from_bits(softmax_scale_bits), double_from_bits(dropout_p_bits),
          static_cast<Visit>(visit)};
}

// A contiguous [batch, seqlen, heads, dim] tensor of the shape of `tensor`: Paddle hands no others to a
// custom operator.
flashmask::Tensor to_tensor(const paddle::Tensor& tensor, void* data) {
  const Dims dims = tensor.shape();
  PD_CHECK(dims.size() == 4, "flashmask: expected a tensor of rank 4, got rank ", dims.size());
  return {data, dims[1] * dims[2] * dims[3], dims[2] * dims[3], dims[3]};
}

void check_place(const char* name, const paddle::Tensor& tensor, const paddle::Tensor& q) {
  PD_CHECK(tensor.place() == q.place(), "flashmask: ", name, " must be on the device of q, ",
           q.place().DebugString(), ", got ", tensor.place().DebugString());
}

flashmask::Shape to_shape(const Operands& in) {
  const Dims q = in.q.shape(), k = in.k.shape(), v = in.v.shape();
  PD_CHECK(q.size() == 4 && k.size() == 4 && v.size() == 4, "flashmask: q, k and v must have rank 4");
  PD_CHECK(k[0] == q[0] && v[0] == q[0] && v[1] == k[1] && v[2] == k[2] && k[3] == q[3],
           "flashmask: the shapes of q, k and v do not fit together");
  PD_CHECK(k[2] > 0 && q[2] % k[2] == 0, "flashmask: the heads of q must be a multiple of those of k, got ",
           q[2], " and ", k[2]);
  PD_CHECK(std::max(q[1], k[1]) <= flashmask::kInt32Max,
           "flashmask: sequences are limited to 2^31 - 1 tokens, as the indices are int32");
  PD_CHECK(in.k.dtype() == in.q.dtype() && in.v.dtype() == in.q.dtype(),
           "flashmask: q, k and v must have one dtype");
  check_place("k", in.k, in.q);
  check_place("v", in.v, in.q);
  return {q[0],
          q[1],
          k[1],
          static_cast<int32_t>(q[2]),
          static_cast<int32_t>(k[2]),
          static_cast<int32_t>(q[3]),
          static_cast<int32_t>(v[3])};
}

void check_mask_dims(const char* name, const Dims& dims, const flashmask::Shape& shape) {
  PD_CHECK(dims.size() == 4, "flashmask: ", name, " must have rank 4, got rank ", dims.size());
  PD_CHECK(dims[0] == 1 || dims[0] == shape.batch, "flashmask: the batch of ", name,
           " must be 1 or that of q, got ", dims[0]);
  PD_CHECK(dims[1] == 1 || dims[1] == shape.heads_k || dims[1] == shape.heads_q, "flashmask: the heads of ",
           name, " must be 1 or those of k or q, got ", dims[1]);
}

flashmask::Mask to_mask(const Operands& in, const Attributes& attributes, const flashmask::Shape& shape) {
  flashmask::Mask mask{nullptr, nullptr, 1, 1, 0, attributes.causal ? 1 : 0};
  if (in.indices) {
    const Dims dims = in.indices->shape();
    check_mask_dims("startend_row_indices", dims, shape);
    check_place("startend_row_indices", *in.indices, in.q);
    PD_CHECK(dims[2] == shape.seqlen_k && (dims[3] == 1 || dims[3] == 2 || dims[3] == 4),
             "flashmask: startend_row_indices must be [Bm, Hm, Sk, C] with C 1, 2 or 4");
    mask.indices = in.indices->data<int32_t>();
    mask.batch = static_cast<int32_t>(dims[0]);
    mask.heads = static_cast<int32_t>(dims[1]);
    mask.bounds = static_cast<int32_t>(dims[3]);
  }
  PD_CHECK((attributes.visit == Visit::kDense) == static_cast<bool>(in.dense_mask),
           "flashmask: a dense mask goes with visit=dense, and with that alone");
  if (in.dense_mask) {
    const Dims dims = in.dense_mask->shape();
    check_mask_dims("dense_mask", dims, shape);
    check_place("dense_mask", *in.dense_mask, in.q);
    PD_CHECK(dims[2] == shape.seqlen_q && dims[3] == shape.seqlen_k,
             "flashmask: dense_mask must be [Bm, Hm, Sq, Sk]");
    PD_CHECK(!in.indices || (dims[0] == mask.batch && dims[1] == mask.heads),
             "flashmask: dense_mask and startend_row_indices must agree in batch and heads");
    mask.dense = reinterpret_cast<const uint8_t*>(in.dense_mask->data<bool>());
    mask.batch = static_cast<int32_t>(dims[0]);
    mask.heads = static_cast<int32_t>(dims[1]);
  }
  return mask;
}

flashmask::Dropout to_dropout(const Operands& in, const Attributes& attributes) {
  PD_CHECK(attributes.dropout_p >= 0.0 && attributes.dropout_p < 1.0,
           "flashmask: dropout_p must be in [0, 1), got ", attributes.dropout_p);
  PD_CHECK((attributes.dropout_p > 0.0) == static_cast<bool>(in.seed_offset),
           "flashmask: dropout needs a seed, and a seed is for dropout");
  if (!in.seed_offset) return {nullptr, 0.0};
  check_place("seed_offset", *in.seed_offset, in.q);
  PD_CHECK(in.seed_offset->numel() == 2, "flashmask: seed_offset must hold two values, got ",
           in.seed_offset->numel());
  return {in.seed_offset->data<int64_t>(), attributes.dropout_p};
}

// One pass's entries of the C interface.
template <typename Params>
struct Entries {
  int (*cpu)(const Params*, char*, size_t);
#ifdef PADDLE_WITH_CUDA
  int (*cuda_workspace)(int32_t, const Params*, int64_t*, char*, size_t);
  int (*cuda)(int32_t, const Params*, char*, size_t);
#endif
};

#ifdef PADDLE_WITH_CUDA
constexpr Entries<ForwardParams> kForward{flashmask_cpu_forward, flashmask_cuda_forward_workspace,
                                          flashmask_cuda_forward};
constexpr Entries<BackwardParams> kBackward{flashmask_cpu_backward, flashmask_cuda_backward_workspace,
                                            flashmask_cuda_backward};
#else
constexpr Entries<ForwardParams> kForward{flashmask_cpu_forward};
constexpr Entries<BackwardParams> kBackward{flashmask_cpu_backward};
#endif

#ifdef PADDLE_WITH_CUDA
constexpr int32_t kBestFamily = 0;  // of c_api.h

template <typename Params>
void launch_cuda(const paddle::Tensor& q, Params params, const Entries<Params>& entries, Scratch& scratch) {
  const flashmask::Shape& shape = params.shape;
  PD_CHECK(params.dtype == DType::kFloat16 || params.dtype == DType::kBFloat16,
           "flashmask: on CUDA q, k and v must be float16 or bfloat16");
  for (const int dim : {shape.head_dim, shape.head_dim_v}) {
    PD_CHECK(dim % 8 == 0 && dim <= 256,
             "flashmask: on CUDA head dims must be multiples of 8 up to 256, got ", dim);
  }
  char message[512] = "";
  int64_t bytes = 0;
  if (entries.cuda_workspace(kBestFamily, &params, &bytes, message, sizeof(message)) != 0) {
    PD_THROW("flashmask: ", message);
  }
  if (bytes > 0) params.workspace = scratch.on_device(static_cast<size_t>(bytes), q);
  params.stream = q.stream();
  if (entries.cuda(kBestFamily, &params, message, sizeof(message)) != 0) PD_THROW("flashmask: ", message);
}
#endif

// Calls the kernel of the place that the tensors are on.
template <typename Params>
void launch(const paddle::Tensor& q, const Params& params, const Entries<Params>& entries,
            [[maybe_unused]] Scratch& scratch) {
  if (on_cpu(q)) {
    char message[512] = "";
    if (entries.cpu(&params, message, sizeof(message)) != 0) PD_THROW("flashmask: ", message);
    return;
  }
#ifdef PADDLE_WITH_CUDA
  if (q.place().GetType() == phi::AllocationType::GPU) return launch_cuda(q, params, entries, scratch);
#endif
  refuse_place(q.place());
}

std::vector<paddle::Tensor> forward(const paddle::Tensor& q, const paddle::Tensor& k, const paddle::Tensor& v,
                                    const OptionalTensor& indices, const OptionalTensor& dense_mask,
                                    const OptionalTensor& seed_offset, bool causal,
                                    int64_t softmax_scale_bits, int64_t dropout_p_bits, int visit,
                                    bool /*deterministic*/, bool /*needs_dq*/, bool /*needs_dk*/,
                                    bool /*needs_dv*/) {
  const DeviceGuard guard(q);
  Scratch scratch;
  const Operands in{q, k, v, indices, dense_mask, seed_offset};
  const Attributes attributes = to_attributes(causal, softmax_scale_bits, dropout_p_bits, visit);
  ForwardParams params{};
  params.shape = to_shape(in);
  const flashmask::Shape& shape = params.shape;
  paddle::Tensor out =
      paddle::empty({shape.batch, shape.seqlen_q, shape.heads_q, shape.head_dim_v}, q.dtype(), q.place());
  paddle::Tensor lse =
      paddle::empty({shape.batch, shape.heads_q, shape.seqlen_q}, lse_dtype(q.dtype()), q.place());
  params.dtype = to_dtype(q.dtype());
  params.visit = attributes.visit;
  params.q = to_tensor(q, scratch.aligned(q));
  params.k = to_tensor(k, scratch.aligned(k));
  params.v = to_tensor(v, scratch.aligned(v));
  params.o = to_tensor(out, out.data());
  params.lse = lse.data();
  params.mask = to_mask(in, attributes, shape);
  params.dropout = to_dropout(in, attributes);
  params.softmax_scale = attributes.softmax_scale;
  launch(q, params, kForward, scratch);
  hold_until_run(q, {&q, &k, &v, indices.get_ptr(), dense_mask.get_ptr(), seed_offset.get_ptr(), &out, &lse});
  return {out, lse};
}

// An output whose gradient nobody asked for gets no buffer in the parameters; Paddle still wants a tensor of
// its shape, which it then drops.
flashmask::Tensor to_gradient(const paddle::Tensor& gradient, bool needed) {
  return to_tensor(gradient, needed ? const_cast<void*>(gradient.data()) : nullptr);
}

std::vector<paddle::Tensor> backward(const paddle::Tensor& q, const paddle::Tensor& k,
                                     const paddle::Tensor& v, const OptionalTensor& indices,
                                     const OptionalTensor& dense_mask, const OptionalTensor& seed_offset,
                                     const paddle::Tensor& out, const paddle::Tensor& lse,
                                     const paddle::Tensor& dout, const paddle::Tensor& dlse, bool causal,
                                     int64_t softmax_scale_bits, int64_t dropout_p_bits, int visit,
                                     bool deterministic, bool needs_dq, bool needs_dk, bool needs_dv) {
  const DeviceGuard guard(q);
  Scratch scratch;
  const Operands in{q, k, v, indices, dense_mask, seed_offset};
  const Attributes attributes = to_attributes(causal, softmax_scale_bits, dropout_p_bits, visit);
  BackwardParams params{};
  params.shape = to_shape(in);
  const flashmask::Shape& shape = params.shape;
  PD_CHECK(out.dtype() == q.dtype() &&
               out.shape() == Dims({shape.batch, shape.seqlen_q, shape.heads_q, shape.head_dim_v}),
           "flashmask: the output has changed its shape or dtype since forward");
  PD_CHECK(lse.dtype() == lse_dtype(q.dtype()) &&
               lse.shape() == Dims({shape.batch, shape.heads_q, shape.seqlen_q}),
           "flashmask: lse has changed its shape or dtype since forward");
  paddle::Tensor dq = paddle::empty(q.shape(), q.dtype(), q.place());
  paddle::Tensor dk = paddle::empty(k.shape(), k.dtype(), k.place());
  paddle::Tensor dv = paddle::empty(v.shape(), v.dtype(), v.place());
  // In eager mode the gradient of an output that nothing used arrives uninitialised, and reading it crashes.
  const bool given = dout.initialized();
  PD_CHECK(!given || (dout.dtype() == q.dtype() && dout.shape() == out.shape()),
           "flashmask: the gradient of the output must have its shape and dtype");
  params.dtype = to_dtype(q.dtype());
  params.visit = attributes.visit;
  params.q = to_tensor(q, scratch.aligned(q));
  params.k = to_tensor(k, scratch.aligned(k));
  params.v = to_tensor(v, scratch.aligned(v));
  params.o = to_tensor(out, scratch.aligned(out));
  params.dout = to_tensor(out, given ? scratch.aligned(dout) : scratch.zeros_like(out));
  params.dq = to_gradient(dq, needs_dq);
  params.dk = to_gradient(dk, needs_dk);
  params.dv = to_gradient(dv, needs_dv);
  params.lse = lse.data();
  if (dlse.initialized()) {
    PD_CHECK(dlse.dtype() == lse.dtype() && dlse.shape() == lse.shape(),
             "flashmask: the gradient of lse must have its shape and dtype");
    params.dlse = dlse.data();
  }
  params.mask = to_mask(in, attributes, shape);
  params.dropout = to_dropout(in, attributes);
  params.softmax_scale = attributes.softmax_scale;
  params.deterministic = deterministic ? 1 : 0;
  launch(q, params, kBackward, scratch);
  hold_until_run(q, {&q, &k, &v, indices.get_ptr(), dense_mask.get_ptr(), seed_offset.get_ptr(), &out, &lse,
                     &dout, &dlse, &dq, &dk, &dv});
  return {dq, dk, dv};
}

// Registered so that a second derivative is an error: without it Paddle would leave the term out in silence.
std::vector<paddle::Tensor> double_backward(const paddle::Tensor& /*ddq*/, const paddle::Tensor& /*ddk*/,
                                            const paddle::Tensor& /*ddv*/) {
  PD_THROW("flashmask: the second derivative of attention is not implemented (create_graph=True)");
}

std::vector<Dims> infer_shape(const Dims& q, const Dims& /*k*/, const Dims& v,
                              const OptionalDims& /*indices*/, const OptionalDims& /*dense_mask*/,
                              const OptionalDims& /*seed_offset*/) {
  return {{q[0], q[1], q[2], v[3]}, {q[0], q[2], q[1]}};
}

std::vector<paddle::DataType> infer_dtype(paddle::DataType q, paddle::DataType /*k*/, paddle::DataType /*v*/,
                                          const OptionalDType& /*indices*/,
                                          const OptionalDType& /*dense_mask*/,
                                          const OptionalDType& /*seed_offset*/) {
  return {q, lse_dtype(q)};
}

}  // namespace

PD_BUILD_OP(flashmask)
    .Inputs({"Q", "K", "V", paddle::Optional("StartendRowIndices"), paddle::Optional("DenseMask"),
             paddle::Optional("SeedOffset")})
    .Outputs({"Out", "Lse"})
    .Attrs({"causal: bool", "softmax_scale: int64_t", "dropout_p: int64_t", "visit: int",
            "deterministic: bool", "needs_dq: bool", "needs_dk: bool", "needs_dv: bool"})
    .SetKernelFn(PD_KERNEL(forward))
    .SetInferShapeFn(PD_INFER_SHAPE(infer_shape))
    .SetInferDtypeFn(PD_INFER_DTYPE(infer_dtype));

PD_BUILD_GRAD_OP(flashmask)
    .Inputs({"Q", "K", "V", paddle::Optional("StartendRowIndices"), paddle::Optional("DenseMask"),
             paddle::Optional("SeedOffset"), "Out", "Lse", paddle::Grad("Out"), paddle::Grad("Lse")})
    .Outputs({paddle::Grad("Q"), paddle::Grad("K"), paddle::Grad("V")})
    .Attrs({"causal: bool", "softmax_scale: int64_t", "dropout_p: int64_t", "visit: int",
            "deterministic: bool", "needs_dq: bool", "needs_dk: bool", "needs_dv: bool"})
    .SetKernelFn(PD_KERNEL(backward));

PD_BUILD_DOUBLE_GRAD_OP(flashmask)
    .Inputs({paddle::Grad(paddle::Grad("Q")), paddle::Grad(paddle::Grad("K")),
             paddle::Grad(paddle::Grad("V"))})
    .Outputs({paddle::Grad(paddle::Grad("Out"))})
    .SetKernelFn(PD_KERNEL(double_backward));
