// The kernels in terms of a level's registers: included by the file of a level, after what it builds on.
#pragma once

#include <cfloat>
#include <cmath>

namespace inferloop {
namespace {

constexpr int kParts = kSpan / kLanes;  // registers in a span

/// Lanes i, i + 1, ... of a list that ends at n.
inline Lanes lanes_of(int i, int n) { return n - i >= kLanes ? (1u << kLanes) - 1 : (1u << (n - i)) - 1; }

void maxima(const float* row, int num_spans, float* out) {
  for (int s = 0; s < num_spans; ++s, row += kSpan) {
    Floats most = spread(-__builtin_inff());
    for (int part = 0; part < kParts; ++part) most = larger(load(row + part * kLanes), most);
    out[s] = largest(most);
  }
}

int find(const float* span, float value) {
  const Floats wanted = spread(value);
  for (int part = 0; part < kParts; ++part)
    if (const Lanes hits = equal(load(span + part * kLanes), wanted)) return part * kLanes + __builtin_ctz(hits);
  return -1;
}

int count_above(const float* row, int num_spans, float value) {
  const Floats limit = spread(value);
  int count = 0;
  for (int i = 0; i < num_spans * kSpan; i += kLanes) count += __builtin_popcount(above(load(row + i), limit));
  return count;
}

void allow(float* row, const uint32_t* words, int num_words) {
  for (int w = 0; w < num_words; ++w)
    for (int i = 0; i < 32; i += kLanes) {
      float* some = row + w * 32 + i;
      store(some, only(load(some), words[w] >> i));
    }
}

/// Call take(i) for the registers of the spans whose maximum / temperature is at least `low`.
template <class Take>
inline void each_register(const float* maxima, int num_spans, float temperature, float low, Take take) {
  const Floats divisor = spread(temperature), limit = spread(low);
  for (int s = 0; s < num_spans; s += kLanes)
    for (Lanes spans = at_least(div(load(maxima + s), divisor), limit); spans; spans &= spans - 1) {
      const int first = (s + __builtin_ctz(spans)) * kSpan;
      for (int part = 0; part < kParts; ++part) take(first + part * kLanes);
    }
}

// Packing without asking whether there is anything to pack: a branch that nobody can predict costs more.

int collect(const float* row, const float* maxima, int num_spans, float temperature, float low, float* values) {
  const Floats divisor = spread(temperature), limit = spread(low);
  // Nothing less can have a quotient of `low`. Only what passes is divided, as divisions are slow.
  float least = low * temperature;
  least -= std::fabs(least) * 1e-6f + 1e-30f;
  const Floats enough = spread(temperature == 1.0f ? low : least >= -FLT_MAX ? least : -FLT_MAX);
  int passed = 0;
  each_register(maxima, num_spans, temperature, low, [&](int i) {
    const Floats some = load(row + i);
    const Lanes hits = at_least(some, enough);
    pack(values + passed, some, hits);
    passed += __builtin_popcount(hits);
  });
  if (temperature == 1.0f) return passed;
  int count = 0;
  for (int i = 0; i < passed; i += kLanes) {
    const Floats scaled = div(load(values + i), divisor);
    const Lanes hits = at_least(scaled, limit) & lanes_of(i, passed);
    pack(values + count, scaled, hits);
    count += __builtin_popcount(hits);
  }
  return count;
}

int collect_ids(const float* row, const float* maxima, int num_spans, float low, int32_t* ids) {
  const Floats limit = spread(low);
  int count = 0;
  each_register(maxima, num_spans, 1.0f, low, [&](int i) {
    const Lanes hits = at_least(load(row + i), limit);
    pack_ids(ids + count, i, hits);
    count += __builtin_popcount(hits);
  });
  return count;
}

int keep(const float* x, int n, float low, float high, float* out) {
  const Floats least = spread(low), limit = spread(high);
  int count = 0;
  for (int i = 0; i < n; i += kLanes) {
    const Floats some = load(x + i);
    const Lanes hits = at_least(some, least) & at_least(limit, some) & lanes_of(i, n);
    pack(out + count, some, hits);
    count += __builtin_popcount(hits);
  }
  return count;
}

int64_t weigh(const float* x, int n, float temperature, float best) {
  const Floats divisor = spread(temperature), most = spread(best);
  Sum sum;
  for (int i = 0; i < n; i += kLanes) {
    Floats scaled = load(x + i);
    if (temperature != 1.0f) scaled = div(scaled, divisor);
    if (n - i < kLanes) scaled = only(scaled, lanes_of(i, n));
    // As `weight` does it.
    const Floats d = larger(sub(scaled, most), spread(kNoWeight));
    const Floats shifted = add(mul(d, spread(kLog2E)), spread(kRound));
    const Floats whole = sub(shifted, spread(kRound));
    const Floats r = sub(sub(d, mul(whole, spread(kLn2High))), mul(whole, spread(kLn2Low)));
    const Floats square = mul(r, r);
    const Floats upper = add(add(mul(r, spread(kExp3)), spread(kExp2)), mul(square, spread(kExp4)));
    const Floats p = add(mul(upper, square), add(mul(r, spread(kExp1)), spread(kExp0)));
    const Floats part = add(add(mul(p, square), r), spread(1.0f));
    sum.add(floats_of(add(bits_of(part), left<23>(bits_of(shifted)))));
  }
  return sum.total();
}

inline Floats log32(Floats x) {
  const Words moved = add(bits_of(x), spread(0x3F800000u - (kSplit - 0x007FFFFFu)));
  const Floats e = converted(add(right<23>(moved), spread(static_cast<uint32_t>(-127))));
  const Floats m = floats_of(add(both(moved, spread(0x007FFFFFu)), spread(kSplit - 0x007FFFFFu)));
  const Floats f = sub(m, spread(1.0f));
  const Floats s = div(f, add(f, spread(2.0f)));
  const Floats z = mul(s, s);
  Floats r = add(mul(z, spread(kSeries3)), spread(kSeries2));
  r = add(mul(r, z), spread(kSeries1));
  r = add(mul(r, z), spread(kSeries0));
  return add(mul(e, spread(kLn2)), add(mul(s, spread(2.0f)), mul(mul(s, z), r)));
}

inline Floats noise_of(Words words) {
  const Floats u = mul(converted(either(right<8>(words), spread(1u))), spread(kUnit));
  return negate(log32(negate(log32(u))));
}

inline void words_of(const NoiseKey& key, int first_id, Words* words) {
  for (int part = 0; part < kParts; part += kPhilox)
    philox(key, static_cast<uint32_t>(first_id + part * kLanes) / 4, words + part);
}

void draw(const NoiseKey& key, const float* row, const float* maxima, int num_spans, int id_begin, float temperature,
          float low, Draw& draw) {
  const Floats divisor = spread(temperature), limit = spread(low);
  for (int s = 0; s < num_spans; ++s, row += kSpan) {
    const float most = maxima[s] / temperature;
    if (!(most >= low) || hopeless(most, draw.best)) continue;
    const Words needed = spread(least_word(most, draw.best));
    const int first = id_begin + s * kSpan;
    Words words[kParts];
    words_of(key, first, words);
    uint64_t hits = 0;
    for (int part = 0; part < kParts; ++part)
      hits |= static_cast<uint64_t>(at_least(words[part], needed)) << (part * kLanes);
    if (!hits) continue;
    for (int part = 0; part < kParts; ++part) {
      Lanes some = static_cast<Lanes>(hits >> (part * kLanes)) & lanes_of(0, kLanes);
      if (!some) continue;
      const Floats scaled = div(load(row + part * kLanes), divisor);
      const Floats noisy = add(scaled, noise_of(words[part]));
      some &= at_least(scaled, limit) & at_least(noisy, spread(draw.best));
      if (!some) continue;
      alignas(64) float values[kLanes];
      store(values, noisy);
      for (; some; some &= some - 1) {
        const int lane = __builtin_ctz(some), id = first + part * kLanes + lane;
        if (values[lane] > draw.best || (values[lane] == draw.best && id < draw.id)) draw = {values[lane], id};
      }
    }
  }
}

void gumbel(const NoiseKey& key, int id_begin, int n, float* out) {
  for (int i = 0; i < n; i += kSpan) {
    Words words[kParts];
    words_of(key, id_begin + i, words);
    for (int part = 0; part < kParts; ++part) store(out + i + part * kLanes, noise_of(words[part]));
  }
}

}  // namespace
}  // namespace inferloop
