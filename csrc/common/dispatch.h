// Which of the CUDA kernels that were built runs a call.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/kernel_table.h"

namespace flashmask {

// The kernels of one architecture, or (kBest) those made for the current device where they can do what is
// asked, else the portable ones.
enum class Family { kBest, kSm80, kSm90 };

// Each returns 0, or nonzero after writing the reason to `message`; see c_api.h.
int workspace_bytes(Family family, const ForwardParams& params, int64_t* bytes, char* message,
                    size_t capacity);
int workspace_bytes(Family family, const BackwardParams& params, int64_t* bytes, char* message,
                    size_t capacity);
int launch(Family family, const ForwardParams& params, char* message, size_t capacity);
int launch(Family family, const BackwardParams& params, char* message, size_t capacity);
int describe(Family family, const ForwardParams& params, char* message, size_t capacity);
int describe(Family family, const BackwardParams& params, char* message, size_t capacity);

}  // namespace flashmask
