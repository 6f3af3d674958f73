// The arguments of every flashmask kernel: plain structs of raw pointers, strides and sizes.
//
// Nothing here knows Paddle, CUDA or a mask type. The same structs cross the C interface (c_api.h), so they
// stay standard-layout and a ctypes.Structure can mirror them field by field.
#pragma once

#include <cstdint>
#include <type_traits>

namespace flashmask {

enum class DType : int32_t { kFloat16 = 0, kBFloat16 = 1, kFloat32 = 2, kFloat64 = 3 };

// Which tiles a kernel computes. The test modes keep the schedule, the dQ order and the split plan of kSkip,
// so whatever differs between two runs is due to skipping alone.
enum class Visit : int32_t {
  kSkip = 0,   // production: fully masked tiles are skipped, unmasked ones are not compared
  kAll = 1,    // test mode: every tile is computed and masked by element
  kDense = 2,  // test mode: every tile is computed and masked by element from Mask::dense
};

// B batch, Sq/Sk query/key tokens, Hq/Hk query/key heads (Hq % Hk == 0), D/Dv head dims of q,k / v,o.
struct Shape {
  int64_t batch;
  int64_t seqlen_q;
  int64_t seqlen_k;
  int32_t heads_q;
  int32_t heads_k;
  int32_t head_dim;
  int32_t head_dim_v;
};

// A [batch, seqlen, heads, dim] tensor; strides in elements, the last dim is contiguous.
struct Tensor {
  void* data;
  int64_t stride_batch;
  int64_t stride_seq;
  int64_t stride_head;
};

// startend_row_indices as the user gave them. Values are compared, never used as addresses: any is harmless.
struct Mask {
  const int32_t* indices;  // [Bm, Hm, Sk, bounds], contiguous; null when there are none (bounds is then 0)
  const uint8_t*
      dense;       // [Bm, Hm, Sq, Sk], contiguous, 1 = visible; read under Visit::kDense only, else null
  int32_t batch;   // Bm in {1, B}
  int32_t heads;   // Hm in {1, Hk, Hq}
  int32_t bounds;  // C: causal 1 = [LTS, Sq), 2 = [LTS, LTE); else 2 = [LTS, Sq) and [0, UTE); 4 = all four,
                   // on top of the diagonal when causal (a window with C = 2 makes that; users cannot)
  int32_t causal;  // 0 or 1; row i sees column j iff j <= i + Sk - Sq
};

// An element is dropped as a function of (seed, offset, b, h, i, j) alone; philox.h says how.
struct Dropout {
  const int64_t* seed_offset;  // [2], in the kernel's memory space; null: no dropout
  double probability;          // of being dropped, in [0, 1)
};

struct ForwardParams {
  Shape shape;
  DType dtype;
  Visit visit;
  Tensor q;   // [B, Sq, Hq, D]
  Tensor k;   // [B, Sk, Hk, D]
  Tensor v;   // [B, Sk, Hk, Dv]
  Tensor o;   // [B, Sq, Hq, Dv], written
  void* lse;  // [B, Hq, Sq] contiguous, written; float64 for float64 inputs, else float32
  Mask mask;
  Dropout dropout;
  double softmax_scale;
  void* workspace;      // device kernels: at least *_workspace_bytes(); CPU: unused
  void* stream;         // device kernels: a cudaStream_t; CPU: unused
  int32_t num_threads;  // CPU: 0 = flashmask_cpu_threads() of c_api.h; device kernels: unused
  int32_t reserved;
};

struct BackwardParams {
  Shape shape;
  DType dtype;
  Visit visit;
  Tensor q;          // [B, Sq, Hq, D]
  Tensor k;          // [B, Sk, Hk, D]
  Tensor v;          // [B, Sk, Hk, Dv]
  Tensor o;          // [B, Sq, Hq, Dv]
  Tensor dout;       // [B, Sq, Hq, Dv]
  Tensor dq;         // [B, Sq, Hq, D], written; data null when not asked for
  Tensor dk;         // [B, Sk, Hk, D], written; data null when not asked for
  Tensor dv;         // [B, Sk, Hk, Dv], written; data null when not asked for
  const void* lse;   // [B, Hq, Sq] contiguous, as the forward wrote it
  const void* dlse;  // [B, Hq, Sq] contiguous, lse's dtype; null when lse has no gradient
  Mask mask;
  Dropout dropout;
  double softmax_scale;
  void* workspace;        // device kernels: at least *_workspace_bytes(); CPU: unused
  void* stream;           // device kernels: a cudaStream_t; CPU: unused
  int32_t num_threads;    // CPU: 0 = flashmask_cpu_threads() of c_api.h; device kernels: unused
  int32_t deterministic;  // device kernels: 1 = bit-identical from run to run; the CPU always is
};

static_assert(std::is_standard_layout_v<ForwardParams> && std::is_trivial_v<ForwardParams>,
              "ForwardParams crosses the C interface");
static_assert(std::is_standard_layout_v<BackwardParams> && std::is_trivial_v<BackwardParams>,
              "BackwardParams crosses the C interface");

}  // namespace flashmask
