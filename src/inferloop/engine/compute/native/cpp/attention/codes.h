// int8 keys and values in whole numbers: queries and weights in 15 bits, products with codes exact, so every level has
// the same. A level brings
//
//   Dots     sums of products of codes (of keys unsigned, of values signed) and 15-bit numbers, 4 neighbours at a time
//     Part, kParts                             16 of them
//     encode_query(x, count, at, to)           16 whole numbers, -kQuerySteps .. kQuerySteps, in its form: numbers at,
//                                              at + 1, ... of the `count` that begin at `to`
//     encode_weight(x, count, at, to)          the same for 0 .. kWeightSteps
//     kBytes                                   from one number to the next
//     add<is_signed>(from, at, x, size, count, sums)
//                                              vectors of codes at from[v] + at, 4 of each lane, times the 4 numbers at
//                                              x + j * size, for all v and j
//     total(sums, more)                        + more
#pragma once

#include "flash.h"
#include "repeat.h"

namespace inferloop {
namespace {

template <class Lanes, class Dots, int num_queries, int num_vectors>
struct Codes {
  using Floats = typename Lanes::Floats;
  using Part = typename Dots::Part;

  static constexpr int kQueries = num_queries;
  static constexpr int kTile = num_vectors;
  static constexpr int kVectors = num_vectors;
  static constexpr size_t weight_bytes = 2 * kRange + 64;  // 2 bytes each, then their unit
  static constexpr int half_bytes_per_dim = 16;

  struct Tail {
    float step;
    int32_t correction;  // for the 128 that is added to codes of keys
  };

  static size_t query_bytes(int dim) { return (static_cast<size_t>(dim) * 2 + sizeof(Tail) + 63) / 64 * 64; }

  static void encode(const float* q, int dim, float factor, uint8_t* to) {
    Floats most = Lanes::zero();
    for (int d = 0; d < dim; d += 16) {
      const Floats x = Lanes::mul(Lanes::load(q + d), Lanes::all(factor));
      most = Lanes::max(most, Lanes::max(x, Lanes::sub(Lanes::zero(), x)));
    }
    const float m = Lanes::largest(most);
    const Floats inverse = Lanes::all(m > 0 ? kQuerySteps / m : 0);
    Floats sum = Lanes::zero();
    for (int d = 0; d < dim; d += 16) {
      const Floats x = Lanes::round(Lanes::mul(Lanes::mul(Lanes::load(q + d), Lanes::all(factor)), inverse));
      sum = Lanes::add(sum, x);  // exact: below 2^24
      Dots::encode_query(Lanes::to_ints(x), dim, d, to);
    }
    Tail tail;
    tail.step = m * (1.0f / kQuerySteps);
    tail.correction = -128 * static_cast<int32_t>(Lanes::sum(sum));
    std::memcpy(to + 2 * dim, &tail, sizeof tail);
  }

  template <int n, int blocks>
  [[gnu::noinline]] static void scores(const uint8_t* const* keys, const uint8_t* const* ahead, int dim,
                                       const uint8_t* queries, float* to) {
    const size_t size = query_bytes(dim);
    Part sums[n][blocks][Dots::kParts] = {};
    const uint8_t* from[blocks];
    repeat<blocks>([&] EACH(auto b) { from[b] = keys[b]; });
    size_t at = 0;  // 64 bytes of codes for 4 dimensions
    const uint8_t* q = queries;
    for (int part = 0; part < blocks; ++part) {
      const uint8_t* fetch = ahead[part];
      if (fetch) fetch_line(fetch + 32 * dim);  // scales
      if (blocks < kTile) {
        fetch_bytes(fetch, size_t{16} * dim);
        fetch = nullptr;
      }
      const size_t end = blocks == kTile ? at + 16 * dim / blocks : 16 * dim;
      for (; at < end; at += 64, q += 4 * Dots::kBytes) {
        if (fetch) {
          repeat<blocks>([&] EACH(auto i) { fetch_line(fetch + i * 64); });
          fetch += blocks * 64;
        }
        Dots::template add<false, n, blocks>(from, at, q, size, dim, sums);
      }
    }
    repeat<n>([&] EACH(auto j) {
      Tail tail;
      std::memcpy(&tail, queries + j * size + 2 * dim, sizeof tail);
      repeat<blocks>([&] EACH(auto b) {
        const Floats dot = Lanes::to_floats(Dots::total(sums[j][b], tail.correction));
        const Floats scales = Lanes::widen(reinterpret_cast<const Bf16*>(from[b] + 32 * dim));
        Lanes::store(to + j * kRange + b * kBlock, Lanes::mul(dot, Lanes::mul(scales, Lanes::all(tail.step))));
      });
    });
  }

  template <int n>
  [[gnu::noinline]] static void weigh(float* scores, const Keys& keys, int dim, const float* m, float* sum,
                                      uint8_t* to) {
    const int num_blocks = keys.num_blocks();
    Floats sums[n], most[n], inverse[n];
    repeat<n>([&] EACH(auto j) { sums[j] = most[j] = Lanes::zero(); });
    for (int b = 0; b < num_blocks; ++b) {
      const int count = keys.end - keys.first - b * kBlock;
      Floats scales = Lanes::widen(reinterpret_cast<const Bf16*>(keys.blocks[b] + 32 * dim) + kBlock);
      if (count < kBlock) scales = Lanes::only(0, count, scales, Lanes::zero());  // beyond, they may be anything
      repeat<n>([&] EACH(auto j) {
        float* at = scores + j * kRange + b * kBlock;
        const Floats p = Lanes::exp2(Lanes::sub(Lanes::load(at), Lanes::all(m[j])));
        sums[j] = Lanes::add(sums[j], p);
        const Floats scaled = Lanes::mul(p, scales);
        most[j] = Lanes::max(most[j], scaled);
        Lanes::store(at, scaled);
      });
    }
    repeat<n>([&] EACH(auto j) {
      sum[j] = Lanes::sum(sums[j]);
      const float largest = Lanes::largest(most[j]);
      const bool none = largest < kLeastWeight;
      inverse[j] = Lanes::all(none ? 0 : kWeightSteps / largest);
      const float unit = none ? 0 : largest * (1.0f / kWeightSteps);
      std::memcpy(to + j * weight_bytes + 2 * kRange, &unit, sizeof unit);
    });
    for (int b = 0; b < num_blocks; ++b)
      repeat<n>([&] EACH(auto j) {
        const Floats x = Lanes::load(scores + j * kRange + b * kBlock);
        Dots::encode_weight(Lanes::to_ints(Lanes::mul(x, inverse[j])), kRange, b * kBlock, to + j * weight_bytes);
      });
  }

  template <int n, int vectors>
  [[gnu::noinline]] static void values(const Keys& keys, const uint8_t* const* ahead, int dim, int vector,
                                       const uint8_t* weights, float* to, int ld) {
    const size_t offset = size_t{16} * dim + vector * 64, stride = size_t{4} * dim;
    Part sums[n][vectors][Dots::kParts] = {};
    const int count = keys.end - keys.first, num_blocks = keys.num_blocks();
    const uint8_t* p = weights;
    for (int b = 0; b < num_blocks; ++b) {
      const uint8_t* from[vectors];
      repeat<vectors>([&] EACH(auto v) { from[v] = keys.blocks[b] + offset + v * 64; });
      const uint8_t* fetch = ahead[b];
      const int num_keys = count - b * kBlock < kBlock ? count - b * kBlock : kBlock;
      size_t at = 0;
      for (int key = 0; key < num_keys; key += 4, at += stride, p += 4 * Dots::kBytes) {
        if (fetch) fetch_bytes(fetch + at, stride);
        Dots::template add<true, n, vectors>(from, at, p, weight_bytes, kRange, sums);  // weights beyond are zero
      }
    }
    repeat<n>([&] EACH(auto j) {
      float unit;
      std::memcpy(&unit, weights + j * weight_bytes + 2 * kRange, sizeof unit);
      repeat<vectors>([&] EACH(auto v) {
        const Floats dot = Lanes::to_floats(Dots::total(sums[j][v], 0));
        Lanes::store(to + j * ld + (vector + v) * 16, Lanes::mul(dot, Lanes::all(unit)));
      });
    });
  }
};

}  // namespace
}  // namespace inferloop
