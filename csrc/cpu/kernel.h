// The two passes, for the type computed in: double for float64 storage, else float.
#pragma once

#include "flashmask/params.h"

namespace flashmask::cpu {

template <typename T>
void forward(const ForwardParams& params);

template <typename T>
void backward(const BackwardParams& params);

}  // namespace flashmask::cpu
