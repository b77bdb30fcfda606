// The portable level: what every other one must equal.
#include <bit>
#include <cmath>

#include "bounds.h"
#include "levels.h"

namespace inferloop {
namespace {

void maxima(const float* row, int num_spans, float* out) {
  for (int s = 0; s < num_spans; ++s) {
    float most = -INFINITY;
    for (int i = 0; i < kSpan; ++i) most = row[s * kSpan + i] > most ? row[s * kSpan + i] : most;
    out[s] = most;
  }
}

int find(const float* span, float value) {
  for (int i = 0; i < kSpan; ++i)
    if (span[i] == value) return i;
  return -1;
}

int count_above(const float* row, int num_spans, float value) {
  int count = 0;
  for (int i = 0; i < num_spans * kSpan; ++i) count += row[i] > value;
  return count;
}

void allow(float* row, const uint32_t* words, int num_words) {
  for (int i = 0; i < num_words * 32; ++i)
    if (!(words[i / 32] >> (i % 32) & 1)) row[i] = -INFINITY;
}

int collect(const float* row, const float* maxima, int num_spans, float temperature, float low, float* values) {
  int count = 0;
  for (int s = 0; s < num_spans; ++s) {
    if (!(maxima[s] / temperature >= low)) continue;
    for (int i = s * kSpan; i < (s + 1) * kSpan; ++i)
      if (const float scaled = row[i] / temperature; scaled >= low) values[count++] = scaled;
  }
  return count;
}

int collect_ids(const float* row, const float* maxima, int num_spans, float low, int32_t* ids) {
  int count = 0;
  for (int s = 0; s < num_spans; ++s) {
    if (!(maxima[s] >= low)) continue;
    for (int i = s * kSpan; i < (s + 1) * kSpan; ++i)
      if (row[i] >= low) ids[count++] = i;
  }
  return count;
}

int keep(const float* x, int n, float low, float high, float* out) {
  int count = 0;
  for (int i = 0; i < n; ++i)
    if (x[i] >= low && x[i] <= high) out[count++] = x[i];
  return count;
}

int64_t weigh(const float* x, int n, float temperature, float best) {
  int64_t sum = 0;
  for (int i = 0; i < n; ++i) sum += weight(x[i] / temperature - best);
  return sum;
}

float log32(float x) {
  const uint32_t moved = std::bit_cast<uint32_t>(x) + (0x3F800000 - (kSplit - 0x007FFFFF));
  const float e = static_cast<float>((static_cast<int32_t>(moved) >> 23) - 127);
  const float m = std::bit_cast<float>((moved & 0x007FFFFF) + (kSplit - 0x007FFFFF));
  const float f = m - 1.0f;
  const float s = f / (f + 2.0f);
  const float z = s * s;
  const float r = ((z * kSeries3 + kSeries2) * z + kSeries1) * z + kSeries0;
  return e * kLn2 + (s * 2.0f + (s * z) * r);
}

float noise_of(uint32_t word) {
  const float u = static_cast<float>((word >> 9) * 2 + 1) * kUnit;
  return -log32(-log32(u));
}

void philox(const NoiseKey& key, uint32_t block, uint32_t* words) {
  uint32_t c0, c1, c2, c3;
  auto high = [](uint64_t product) { return static_cast<uint32_t>(product >> 32); };
  auto low = [](uint64_t product) { return static_cast<uint32_t>(product); };
  const uint64_t first = static_cast<uint64_t>(kMultiplier1) * (block ^ static_cast<uint32_t>(key.block_xor));
  c0 = high(first) ^ static_cast<uint32_t>(key.first_xor);
  c1 = low(first);
  const uint64_t second = static_cast<uint64_t>(kMultiplier0) * c0;
  c0 = c1 ^ static_cast<uint32_t>(key.second_xor0);
  c2 = high(second) ^ static_cast<uint32_t>(key.second_xor2);
  c3 = low(second);
  c1 = static_cast<uint32_t>(key.third_xor ^ key.keys0[3]);
  for (int round = 3; round < kNumRounds; ++round) {
    const uint64_t p0 = static_cast<uint64_t>(kMultiplier0) * c0, p1 = static_cast<uint64_t>(kMultiplier1) * c2;
    c0 = high(p1) ^ c1 ^ static_cast<uint32_t>(key.keys0[round]);
    c1 = low(p1);
    c2 = high(p0) ^ c3 ^ static_cast<uint32_t>(key.keys1[round]);
    c3 = low(p0);
  }
  words[0] = c0;
  words[1] = c1;
  words[2] = c2;
  words[3] = c3;
}

void draw(const NoiseKey& key, const float* row, const float* maxima, int num_spans, int id_begin, float temperature,
          float low, Draw& draw) {
  for (int s = 0; s < num_spans; ++s) {
    const float most = maxima[s] / temperature;
    if (!(most >= low) || hopeless(most, draw.best)) continue;
    const uint32_t needed = least_word(most, draw.best);
    for (int i = s * kSpan; i < (s + 1) * kSpan; i += 4) {
      uint32_t words[4];
      philox(key, static_cast<uint32_t>(id_begin + i) / 4, words);
      for (int j = 0; j < 4; ++j) {
        if (words[j] < needed) continue;
        const float scaled = row[i + j] / temperature;
        if (!(scaled >= low)) continue;
        const float noisy = scaled + noise_of(words[j]);
        if (noisy > draw.best || (noisy == draw.best && id_begin + i + j < draw.id)) draw = {noisy, id_begin + i + j};
      }
    }
  }
}

void gumbel(const NoiseKey& key, int id_begin, int n, float* out) {
  for (int i = 0; i < n; i += 4) {
    uint32_t words[4];
    philox(key, static_cast<uint32_t>(id_begin + i) / 4, words);
    for (int j = 0; j < 4; ++j) out[i + j] = noise_of(words[j]);
  }
}

}  // namespace

const SamplingKernels& scalar_sampling() {
  static constexpr SamplingKernels kernels = {maxima,      find, count_above, allow, collect,
                                              collect_ids, keep, weigh,       draw,  gumbel};
  return kernels;
}

}  // namespace inferloop
