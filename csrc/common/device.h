// What a launch asks of the device that it runs on.
#pragma once

#include <cuda_runtime.h>

namespace flashmask {

inline cudaError_t current_device_attribute(cudaDeviceAttr attribute, int* value) {
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  return error != cudaSuccess ? error : cudaDeviceGetAttribute(value, attribute, device);
}

}  // namespace flashmask
