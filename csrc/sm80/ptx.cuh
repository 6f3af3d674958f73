// The few PTX instructions the sm_80 kernels are made of, each with the layout it implies.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace flashmask::sm80 {

inline __device__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// D[16x8] += A[16x16] * B[16x8], fp32 accumulators. With g = lane / 4 and t = lane % 4 a lane holds
//   a: (g, 2t..) (g + 8, 2t..) (g, 2t + 8..) (g + 8, 2t + 8..)   two elements a register
//   b: (2t.., g) (2t + 8.., g)                                   two elements a register
//   d: (g, 2t) (g, 2t + 1) (g + 8, 2t) (g + 8, 2t + 1)
template <typename Element>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

template <>
__device__ __forceinline__ void mma_m16n8k16<__nv_bfloat16>(float (&d)[4], const uint32_t (&a)[4],
                                                            uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void mma_m16n8k16<__half>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                                     uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four 8x8 matrices; lanes 8i..8i+7 give the row addresses of matrix i, register i receives it.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

// Copies 16 bytes to shared memory, or writes 16 zero bytes without reading when !valid.
__device__ __forceinline__ void cp_async_16(uint32_t shared, const void* global, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(bytes));
}

__device__ __forceinline__ void cp_async_4(uint32_t shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared), "l"(global));
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;"); }

// Waits until at most `kPending` of this thread's newest groups are unfinished.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Adds an m16n8 accumulator to 128 floats of global memory. How its elements lie there is known here and in
// load_fragment alone: 16 bytes a lane where one instruction adds them, else one word a lane at a time so
// that requests coalesce.
__device__ __forceinline__ void reduce_add_fragment(float* fragment, const float (&x)[4], int lane) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(fragment + 4 * lane),
               "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
#else
#pragma unroll
  for (int e = 0; e < 4; ++e) atomicAdd(fragment + 32 * e + lane, x[e]);
#endif
}

__device__ __forceinline__ void load_fragment(float (&x)[4], const float* fragment, int lane) {
#if __CUDA_ARCH__ >= 900
  const float4 v = *reinterpret_cast<const float4*>(fragment + 4 * lane);
  x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
#else
#pragma unroll
  for (int e = 0; e < 4; ++e) x[e] = fragment[32 * e + lane];
#endif
}

}  // namespace flashmask::sm80
