// bf16 keys and values in fp32, for levels without a product of bf16: as scalar.cpp has it, to the last bit.
#pragma once

#include "flash.h"
#include "repeat.h"

namespace inferloop {
namespace {

template <class Lanes, int num_queries, int num_vectors>
struct HalvesFp32 {
  using Floats = typename Lanes::Floats;

  static constexpr int kQueries = num_queries;
  static constexpr int kTile = num_vectors;
  static constexpr int kVectors = num_vectors;
  static constexpr size_t weight_bytes = sizeof(float) * kRange;
  static constexpr int half_bytes_per_dim = 32;

  static size_t query_bytes(int dim) { return sizeof(float) * dim; }

  static void encode(const float* q, int dim, float factor, uint8_t* to) {
    float* floats = reinterpret_cast<float*>(to);
    for (int d = 0; d < dim; d += 16) Lanes::store(floats + d, Lanes::mul(Lanes::load(q + d), Lanes::all(factor)));
  }

  template <int n, int blocks>
  [[gnu::noinline]] static void scores(const uint8_t* const* keys, const uint8_t* const* ahead, int dim,
                                       const uint8_t* queries, float* to) {
    Floats sums[n][blocks];
    repeat<n>([&] EACH(auto j) { repeat<blocks>([&] EACH(auto b) { sums[j][b] = Lanes::zero(); }); });
    const float* q = reinterpret_cast<const float*>(queries);
    for (int i = 0; i < dim / 2; ++i, q += 2)
      repeat<blocks>([&] EACH(auto b) {
        if (ahead[b]) fetch_line(ahead[b] + i * 64);
        const auto pair = Lanes::load_ints(keys[b] + i * 64);
        const Floats first = Lanes::first_half(pair), second = Lanes::second_half(pair);
        repeat<n>([&] EACH(auto j) {
          sums[j][b] = Lanes::fma(first, Lanes::all(q[j * dim]), sums[j][b]);
          sums[j][b] = Lanes::fma(second, Lanes::all(q[j * dim + 1]), sums[j][b]);
        });
      });
    repeat<n>([&] EACH(auto j) {
      repeat<blocks>([&] EACH(auto b) { Lanes::store(to + j * kRange + b * kBlock, sums[j][b]); });
    });
  }

  template <int n>
  [[gnu::noinline]] static void weigh(const float* scores, const Keys& keys, int, const float* m, float* sum,
                                      uint8_t* to) {
    float* weights = reinterpret_cast<float*>(to);
    Floats sums[n];
    repeat<n>([&] EACH(auto j) { sums[j] = Lanes::zero(); });
    for (int b = 0; b < keys.num_blocks(); ++b)
      repeat<n>([&] EACH(auto j) {
        const size_t at = j * kRange + b * kBlock;
        const Floats p = Lanes::exp2(Lanes::sub(Lanes::load(scores + at), Lanes::all(m[j])));
        sums[j] = Lanes::add(sums[j], p);
        Lanes::store(weights + at, p);
      });
    repeat<n>([&] EACH(auto j) { sum[j] = Lanes::sum(sums[j]); });
  }

  template <int n, int vectors>
  [[gnu::noinline]] static void values(const Keys& keys, const uint8_t* const* ahead, int dim, int vector,
                                       const uint8_t* weights, float* to, int ld) {
    const size_t offset = size_t{32} * dim + vector * 64, stride = size_t{4} * dim;
    const float* p = reinterpret_cast<const float*>(weights);
    Floats sums[n][vectors];
    repeat<n>([&] EACH(auto j) { repeat<vectors>([&] EACH(auto v) { sums[j][v] = Lanes::zero(); }); });
    const int count = keys.end - keys.first;
    for (int key = 0; key < count; key += 2, p += 2) {
      const size_t pair = key % kBlock / 2 * stride;
      const uint8_t* from = keys.blocks[key / kBlock] + offset + pair;
      if (const uint8_t* fetch = ahead[key / kBlock]) fetch_bytes(fetch + pair, stride);
      repeat<vectors>([&] EACH(auto v) {
        const auto both = Lanes::load_ints(from + v * 64);
        const Floats first = Lanes::first_half(both), second = Lanes::second_half(both);
        repeat<n>([&] EACH(auto j) { sums[j][v] = Lanes::fma(first, Lanes::all(p[j * kRange]), sums[j][v]); });
        if (key + 1 == count) return;  // there is no second: it may be anything, and 0 * NaN is NaN
        repeat<n>([&] EACH(auto j) { sums[j][v] = Lanes::fma(second, Lanes::all(p[j * kRange + 1]), sums[j][v]); });
      });
    }
    repeat<n>([&] EACH(auto j) {
      repeat<vectors>([&] EACH(auto v) { Lanes::store(to + j * ld + (vector + v) * 16, sums[j][v]); });
    });
  }
};

}  // namespace
}  // namespace inferloop
