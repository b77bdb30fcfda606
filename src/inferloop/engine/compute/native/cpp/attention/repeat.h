// Loops that are unrolled before anything else happens, so that arrays of sums become registers.
#pragma once

#include <utility>

namespace inferloop {
namespace {

template <int i>
struct Index {
  constexpr operator int() const { return i; }
};

/// body(0), body(1), ... body(n - 1), where each index is a constant. Mark the body EACH.
#define EACH [[gnu::always_inline]]
template <int n, class Body>
[[gnu::always_inline]] inline void repeat(Body body) {
  [&]<int... i> EACH(std::integer_sequence<int, i...>) { (body(Index<i>{}), ...); }
  (std::make_integer_sequence<int, n>{});
}

}  // namespace
}  // namespace inferloop
