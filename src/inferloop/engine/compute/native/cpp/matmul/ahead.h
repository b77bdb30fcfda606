// What is fetched while something else is multiplied.
//
// One or two rows are as fast as their weights come, so these are read in one stream and prefetched a fixed way ahead.
// More rows take longer to multiply than to fetch weights for: while all of them pass by some tiles, the next ones
// come, evenly.
#pragma once

#include <cstddef>
#include <cstdint>

namespace inferloop {
namespace {

constexpr int kStreamedRows = 2;
constexpr ptrdiff_t kLeadBytes = 8192;

/// What a block of rows prefetches when weights do not stream: in each of its rounds `step` bytes more, from `at` on.
struct Ahead {
  const uint8_t* at;
  ptrdiff_t step;

  /// Of `num` pieces of num_bytes, the first at `next` and `stride` bytes from one to the next, what falls to `rows` of
  /// m, from `row` on.
  Ahead(const uint8_t* next, ptrdiff_t num, ptrdiff_t num_bytes, ptrdiff_t stride, ptrdiff_t row, ptrdiff_t rows,
        ptrdiff_t m, ptrdiff_t num_rounds)
      : at(next + num * row / m * stride + num * num_bytes * row / m % num_bytes),
        step(num * num_bytes * rows / (m * num_rounds)) {}
};

}  // namespace
}  // namespace inferloop
