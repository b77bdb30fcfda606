// 16 lanes, in as many registers as the level needs for them: compilers do badly with vectors wider than a register.
#pragma once

#include <cstdint>
#include <cstring>

#pragma GCC diagnostic ignored "-Wpsabi"  // of vectors as parameters: all who take them are inlined

namespace inferloop {
namespace {

#if defined(__AVX512F__)
constexpr int kParts = 1;
#elif defined(__AVX2__)
constexpr int kParts = 2;
#else
constexpr int kParts = 4;
#endif
constexpr int kLanes = 16, kPartLanes = kLanes / kParts;

template <class Number>
struct Lanes {
  using Part [[gnu::vector_size(kPartLanes * sizeof(Number))]] = Number;
  Part part[kParts];
};
using Floats = Lanes<float>;
using Ints = Lanes<int32_t>;

#define INFERLOOP_INLINE [[gnu::always_inline]] inline

// Register by register: compilers copy larger things by way of memory.

/// `from` a place in memory with as many bytes; its values need not be of the same kind.
template <class To, class From>
INFERLOOP_INLINE To load(const From* from) {
  To value;
  for (int i = 0; i < kParts; ++i)
    std::memcpy(&value.part[i], reinterpret_cast<const char*>(from) + i * sizeof value.part[i], sizeof value.part[i]);
  return value;
}

template <class Number, class To>
INFERLOOP_INLINE void store(To* to, const Lanes<Number>& value) {
  for (int i = 0; i < kParts; ++i)
    std::memcpy(reinterpret_cast<char*>(to) + i * sizeof value.part[i], &value.part[i], sizeof value.part[i]);
}

/// The same bits as lanes of another kind.
template <class To, class Number>
INFERLOOP_INLINE To bits_of(const Lanes<Number>& from) {
  To value;
  for (int i = 0; i < kParts; ++i) value.part[i] = reinterpret_cast<typename To::Part>(from.part[i]);
  return value;
}

template <class Number>
INFERLOOP_INLINE Lanes<Number> all(Number value) {
  Lanes<Number> v;
  for (int i = 0; i < kParts; ++i) v.part[i] = typename Lanes<Number>::Part{} + value;
  return v;
}

#define INFERLOOP_OPERATOR(op)                                                                    \
  template <class Number>                                                                         \
  INFERLOOP_INLINE Lanes<Number> operator op(const Lanes<Number>& a, const Lanes<Number>& b) {    \
    Lanes<Number> v;                                                                              \
    for (int i = 0; i < kParts; ++i) v.part[i] = a.part[i] op b.part[i];                          \
    return v;                                                                                     \
  }                                                                                               \
  template <class Number>                                                                         \
  INFERLOOP_INLINE Lanes<Number> operator op(const Lanes<Number>& a, Number b) {                  \
    Lanes<Number> v;                                                                              \
    for (int i = 0; i < kParts; ++i) v.part[i] = a.part[i] op b;                                  \
    return v;                                                                                     \
  }
INFERLOOP_OPERATOR(+)
INFERLOOP_OPERATOR(-)
INFERLOOP_OPERATOR(*)
INFERLOOP_OPERATOR(/)
INFERLOOP_OPERATOR(&)
INFERLOOP_OPERATOR(|)
INFERLOOP_OPERATOR(^)
INFERLOOP_OPERATOR(<<)
INFERLOOP_OPERATOR(>>)
#undef INFERLOOP_OPERATOR

/// The larger and the smaller of each two; b where they cannot be compared.
template <class Number>
INFERLOOP_INLINE Lanes<Number> larger(const Lanes<Number>& a, const Lanes<Number>& b) {
  Lanes<Number> v;
  for (int i = 0; i < kParts; ++i) v.part[i] = a.part[i] > b.part[i] ? a.part[i] : b.part[i];
  return v;
}
template <class Number>
INFERLOOP_INLINE Lanes<Number> smaller(const Lanes<Number>& a, const Lanes<Number>& b) {
  Lanes<Number> v;
  for (int i = 0; i < kParts; ++i) v.part[i] = a.part[i] < b.part[i] ? a.part[i] : b.part[i];
  return v;
}

/// One value of all lanes: of lane i and lane i + 8, of these and those of i + 4, then i + 2, i + 1.
template <class Number, class Join>
INFERLOOP_INLINE Number fold(const Lanes<Number>& lanes, Join join) {
  using Eight [[gnu::vector_size(8 * sizeof(Number))]] = Number;
  using Four [[gnu::vector_size(4 * sizeof(Number))]] = Number;
  Four v;
  if constexpr (kParts == 4) {
    v = join(join(lanes.part[0], lanes.part[2]), join(lanes.part[1], lanes.part[3]));
  } else {
    Eight half;
    if constexpr (kParts == 2)
      half = join(lanes.part[0], lanes.part[1]);
    else
      half = join(__builtin_shufflevector(lanes.part[0], lanes.part[0], 0, 1, 2, 3, 4, 5, 6, 7),
                  __builtin_shufflevector(lanes.part[0], lanes.part[0], 8, 9, 10, 11, 12, 13, 14, 15));
    v = join(__builtin_shufflevector(half, half, 0, 1, 2, 3), __builtin_shufflevector(half, half, 4, 5, 6, 7));
  }
  v = join(v, __builtin_shufflevector(v, v, 2, 3, 0, 1));
  v = join(v, __builtin_shufflevector(v, v, 1, 0, 3, 2));
  return v[0];
}

template <class Number>
INFERLOOP_INLINE Number sum_of(const Lanes<Number>& lanes) {
  return fold(lanes, [](const auto& a, const auto& b) { return a + b; });
}

INFERLOOP_INLINE int32_t max_of(const Ints& lanes) {
  return fold(lanes, [](const auto& a, const auto& b) { return a > b ? a : b; });
}

/// The lower bits of each lane.
template <class Narrow>
INFERLOOP_INLINE void store_narrow(Narrow* to, const Ints& value) {
  using Shorts [[gnu::vector_size(kPartLanes * sizeof(int16_t))]] = int16_t;
  using Part [[gnu::vector_size(kPartLanes * sizeof(Narrow))]] = Narrow;
  for (int i = 0; i < kParts; ++i) {
    Part part;
    if constexpr (kParts == 1)
      part = __builtin_convertvector(value.part[i], Part);  // one instruction
    else
      part = __builtin_convertvector(__builtin_convertvector(value.part[i], Shorts), Part);
    std::memcpy(to + i * kPartLanes, &part, sizeof part);
  }
}

}  // namespace
}  // namespace inferloop
