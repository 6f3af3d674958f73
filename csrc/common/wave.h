// How many thread blocks run at once.
#pragma once

#include <cstdint>

namespace flashmask {

// Hopper's multiprocessors, taken to be the most of any card: a constant, so that plans hang on shapes alone.
inline constexpr int64_t kWave = 132;

}  // namespace flashmask
