// What the device headers under test need of CUDA, for a host compiler.
#pragma once

#include <algorithm>
#include <cstdint>

#define __device__
#define __host__
#define __forceinline__ inline

struct int4 {
  int x, y, z, w;
};

inline int4 __ldg(const int4* pointer) { return *pointer; }

using std::max;
using std::min;
