// Counter-based random bits for dropout: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as
// 1, 2, 3", SC11). Whether element (i, j) of head h of sample b is dropped depends on (seed, offset, b, h, i,
// j) alone.
//
// One call serves the eight elements that one lane of a tensor-core m16n8 accumulator pair holds of a 16x16
// block: rows {r, r + 8}, columns {c, c + 1, c + 8, c + 9}, with r = lane / 4 and c = 2 * (lane % 4). Each
// element takes 16 of the 128 bits: word 2 * (column >= 8) + (row >= 8), low half for an even column, high
// half for an odd one.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace flashmask {

struct PhiloxWords {
  uint32_t word[4];
};

FLASHMASK_HOST_DEVICE PhiloxWords philox4x32_10(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3,
                                                uint32_t k0, uint32_t k1) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c0;
    const uint64_t p1 = uint64_t{0xCD9E8D57u} * c2;
    const uint32_t n0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    const uint32_t n2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(p1);
    c3 = static_cast<uint32_t>(p0);
    c0 = n0;
    c2 = n2;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// The bits of lane `lane` of the 16x16 block (row_block, column_block) = (i / 16, j / 16) of head `head` = b
// * Hq + h.
FLASHMASK_HOST_DEVICE PhiloxWords dropout_words(uint64_t seed, uint64_t offset, uint32_t head,
                                                uint32_t row_block, uint32_t column_block, uint32_t lane) {
  return philox4x32_10(column_block * 32u + lane, row_block, head, static_cast<uint32_t>(offset),
                       static_cast<uint32_t>(seed),
                       static_cast<uint32_t>(seed >> 32) ^ static_cast<uint32_t>(offset >> 32));
}

// An element is dropped iff its 16 bits are below this: probability rounded to 1/65536.
FLASHMASK_HOST_DEVICE uint32_t dropout_threshold(double probability) {
  return static_cast<uint32_t>(probability * 65536.0 + 0.5);
}

}  // namespace flashmask
