// The PTX instructions the Hopper kernels are made of: mbarriers, the tensor memory accelerator (TMA),
// warpgroup bookkeeping, named barriers.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace flashmask::sm90 {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// A value that all lanes of the warp hold, such that the compiler knows: what follows from it lies in uniform
// registers, where wgmma reads its descriptors.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(~0u, value, 0); }

// Whether this lane speaks for its warp, all of whose lanes call it: always the same one. ptxas knows that
// one lane alone runs what hangs on it; where a lane's number decides, it makes a loop over lanes of every
// copy.
__device__ __forceinline__ bool elect_one() {
  uint32_t chosen;
  asm volatile(
      "{\n.reg .pred chosen;\n"
      "elect.sync _|chosen, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, chosen;\n}\n"
      : "=r"(chosen));
  return chosen != 0;
}

// An mbarrier in shared memory. A phase completes when `count` arrivals and all announced bytes are in.
struct alignas(8) Barrier {
  uint64_t state;

  __device__ __forceinline__ void init(int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&state)), "r"(count));
  }

  __device__ __forceinline__ void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&state)) : "memory");
  }

  // Arrives and announces bytes that asynchronous copies will bring.
  __device__ __forceinline__ void arrive_expect(int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&state)),
                 "r"(bytes)
                 : "memory");
  }

  // Returns once the phase of this parity has completed. A fresh barrier has completed the phase of parity 1.
  __device__ __forceinline__ void wait(int parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}\n" ::"r"(shared_address(&state)),
        "r"(parity)
        : "memory");
  }
};

// Makes barrier initialisations visible to the asynchronous copies.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Orders this thread's ordinary writes to shared memory before asynchronous reads of it.
__device__ __forceinline__ void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The same of global memory.
__device__ __forceinline__ void fence_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

__device__ __forceinline__ void prefetch_descriptor(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map));
}

// One box of a [batch, head, row, column] tensor (innermost last) into shared memory; out-of-range elements
// become zero.
__device__ __forceinline__ void tma_load(void* shared, const CUtensorMap* map, Barrier& barrier, int column,
                                         int row, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
      "%6}], [%2];" ::"r"(shared_address(shared)),
      "l"(map), "r"(shared_address(&barrier.state)), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}

// The same of a tensor of one dimension more, between column and row.
__device__ __forceinline__ void tma_load(void* shared, const CUtensorMap* map, Barrier& barrier, int column,
                                         int member, int row, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
      "%6, %7}], [%2];" ::"r"(shared_address(shared)),
      "l"(map), "r"(shared_address(&barrier.state)), "r"(column), "r"(member), "r"(row), "r"(head), "r"(batch)
      : "memory");
}

// One box of shared memory into the tensor; out-of-range elements are not written.
__device__ __forceinline__ void tma_store(const CUtensorMap* map, const void* shared, int column, int row,
                                          int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
      "r"(shared_address(shared)), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}

// `bytes` consecutive bytes, a multiple of 16, between 16-byte aligned addresses.
__device__ __forceinline__ void bulk_load(void* shared, const void* global, int bytes, Barrier& barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(&barrier.state))
      : "memory");
}

// Adds `bytes` of floats in shared memory to as many in global memory.
__device__ __forceinline__ void bulk_reduce_add(float* global, const float* shared, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global),
               "r"(shared_address(shared)), "r"(bytes)
               : "memory");
}

// Copies `bytes` of floats from shared to global memory.
__device__ __forceinline__ void bulk_store(float* global, const float* shared, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
               "r"(shared_address(shared)), "r"(bytes)
               : "memory");
}

// Closes a group of this thread's copies out of shared memory.
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until this thread's copies out of shared memory have read it.
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Waits until they are complete, and what they wrote visible to this thread.
__device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

template <int kRegisters>
__device__ __forceinline__ void grow_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void shrink_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// All that wait for each other must do so in the same instruction of the program.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Whether `value` holds for any of the threads, all of which wait for each other.
__device__ __forceinline__ bool named_barrier_any(int id, int threads, bool value) {
  int any;
  asm volatile(
      "{\n.reg .pred p, q;\n"
      "setp.ne.s32 p, %1, 0;\n"
      "bar.red.or.pred q, %2, %3, p;\n"
      "selp.s32 %0, 1, 0, q;\n}\n"
      : "=r"(any)
      : "r"(static_cast<int>(value)), "r"(id), "r"(threads)
      : "memory");
  return __any_sync(~0u, any);  // a warp's vote, or ptxas does not know that its lanes agree
}

// Four 8x8 matrices of 16-bit elements, a register each as accumulators hold them, to shared memory. Lane l
// names the row of 16 bytes of row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrices(void* row, const uint32_t (&matrices)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
               "r"(matrices[0]), "r"(matrices[1]), "r"(matrices[2]), "r"(matrices[3])
               : "memory");
}

// The same of the matrices transposed: what a lane names is a column.
__device__ __forceinline__ void store_matrices_transposed(void* column, const uint32_t (&matrices)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(column)),
      "r"(matrices[0]), "r"(matrices[1]), "r"(matrices[2]), "r"(matrices[3])
      : "memory");
}

// wgmma runs asynchronously: registers it reads or writes must be settled before (fence), products are
// grouped (commit) and waited for.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// The same, but not before `settled`, which never has its highest bit set, has been computed. ptxas hoists a
// plain wait over all arithmetic that does not read the products, which then run while nothing else does; it
// hoists none over a branch.
template <int kPending>
__device__ __forceinline__ void wgmma_wait_behind(uint32_t settled) {
  asm volatile(
      "{\n.reg .pred ready;\n"
      "setp.ge.s32 ready, %0, 0;\n"
      "@ready bra behind;\n"
      "wgmma.wait_group.sync.aligned %1;\n"
      "behind:\n"
      "wgmma.wait_group.sync.aligned %1;\n}\n" ::"r"(settled),
      "n"(kPending)
      : "memory");
}

// Keeps the compiler from moving accesses of an accumulator across this point.
template <int kCount>
__device__ __forceinline__ void pin(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

}  // namespace flashmask::sm90
