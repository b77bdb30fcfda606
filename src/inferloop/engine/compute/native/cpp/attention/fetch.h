// What to bring into the cache while something else is computed.
#pragma once

#include "attention.h"

namespace inferloop {
namespace {

constexpr int kRangeBlocks = kRange / kBlock;
constexpr int kAhead = 4;  // half blocks, keys or values: 8 KB of bf16

inline void fetch_line(const uint8_t* from) { __builtin_prefetch(from); }

inline void fetch_bytes(const uint8_t* from, size_t count) {
  for (size_t i = 0; from && i < count; i += 64) fetch_line(from + i);
}

/// The keys of a range that some queries see.
struct Keys {
  const uint8_t* blocks[kRangeBlocks];  // from the one with the first key
  int first = 0;                        // key in the first block, a multiple of 16 lower than or equal to `begin`
  int begin = 0;
  int end = 0;

  int num_blocks() const { return (end - first + kBlock - 1) / kBlock; }

  /// Keys of the rows at `low` .. `high` in one range; none when end <= begin.
  static Keys of(const Span& span, int range, int low, int high) {
    Keys keys;
    keys.begin = span.window > 0 && low >= span.window ? low + 1 - span.window : 0;
    if (keys.begin < range * kRange) keys.begin = range * kRange;
    keys.end = high + 1 < (range + 1) * kRange ? high + 1 : (range + 1) * kRange;
    keys.first = keys.begin / kBlock * kBlock;
    for (int b = 0; keys.first + b * kBlock < keys.end; ++b)
      keys.blocks[b] = span.head + static_cast<size_t>(span.table[keys.first / kBlock + b]) * span.block_bytes;
    return keys;
  }
};

/// The half blocks of a range in the order in which they are read, `kAhead` before their time: all keys, all values, and
/// the first keys of what comes next.
class Fetch {
 public:
  static constexpr int kMost = 2 * kRangeBlocks + kAhead + 4;

  void begin(const Keys& keys, size_t half_bytes, const Keys* next) {
    int count = 0;
    const int num_blocks = keys.num_blocks();
    for (int b = 0; b < num_blocks; ++b) ahead_[count++] = keys.blocks[b];
    for (int b = 0; b < num_blocks; ++b) ahead_[count++] = keys.blocks[b] + half_bytes;
    for (int b = 0; next && b < next->num_blocks() && b < kAhead; ++b) ahead_[count++] = next->blocks[b];
    while (count < kMost) ahead_[count++] = nullptr;
    active_ = true;
  }

  void end() { active_ = false; }

  /// For the keys of block b, and for its values when there are num_blocks.
  const uint8_t* const* keys(int b) const { return active_ ? ahead_ + b + kAhead : kNothing; }
  const uint8_t* const* values(int num_blocks) const { return active_ ? ahead_ + num_blocks + kAhead : kNothing; }

 private:
  static constexpr const uint8_t* kNothing[kRangeBlocks] = {};

  const uint8_t* ahead_[kMost];
  bool active_ = false;
};

}  // namespace
}  // namespace inferloop
