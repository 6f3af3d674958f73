// The kernels of one call, one behind the other in a stream. Between two of them lie some microseconds, a
// good part of short calls: the first one's last blocks, then the launch, then what every kernel begins with.
// Hopper can have the second one's blocks start before the first has ended (programmatic dependent launch).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <utility>

namespace flashmask {

// Every kernel of a chain calls this before it reads what kernels before it wrote, or writes what they read:
// it returns when the one before has ended and what it wrote can be seen. As that one has waited likewise, so
// have all before it. What they wrote is not constant for this kernel: no __restrict__. (The tables of a mask
// are read by __ldg() all the same, as other loads cost spills: nobody has read them before, and by the
// listings no kernel has a global access before its wait, ACQBULK.)
__device__ __forceinline__ void wait_for_kernels_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// When all blocks of a kernel have called this, or ended, blocks of the next one may start where there is
// room. So all blocks of the one before have their places, and nobody who waits keeps them from starting. The
// last kernel of a call does not call it: who comes next is not known to wait.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

class KernelChain {
 public:
  // `overlap`: whether a kernel may start before the one before it has ended. Devices before Hopper cannot;
  // and all of the chain's kernels must have been compiled for compute capability 9.0, or they do not wait.
  KernelChain(cudaStream_t stream, bool overlap) : stream_(stream), overlap_(overlap) {}

  // The first kernel waits for all that the stream holds, as kernels do.
  template <class... Parameters, class... Arguments>
  cudaError_t launch(void (*kernel)(Parameters...), int64_t blocks, int threads, int smem_bytes,
                     Arguments&&... arguments) {
    if (blocks == 0) return cudaSuccess;
    constexpr int kOffered = 48 << 10;  // of shared memory, unless a kernel asks for more
    if (smem_bytes > kOffered) {
      const cudaError_t error =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
      if (error != cudaSuccess) return error;
    }
    cudaLaunchAttribute early{};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = static_cast<size_t>(smem_bytes);
    config.stream = stream_;
    config.attrs = &early;
    config.numAttrs = overlap_ && !first_ ? 1 : 0;
    first_ = false;
    const cudaError_t error = cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
    if (error != cudaSuccess) cudaGetLastError();  // or whoever asks next takes it for theirs
    return error;
  }

  cudaStream_t stream() const { return stream_; }

 private:
  cudaStream_t stream_;
  bool overlap_;
  bool first_ = true;
};

}  // namespace flashmask
