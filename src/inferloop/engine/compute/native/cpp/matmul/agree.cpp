// A trial of kernels that could not be tested on a machine that has what they need.
#include <cstring>
#include <vector>

#include "levels.h"
#include "record.h"

namespace inferloop {
namespace {

constexpr int kRows = 19, kInputs = 128, kOutputs = 2 * kTile;

/// Small whole numbers, from which every order of summation gives the same.
int number(size_t i) { return static_cast<int>(i * 2654435761u >> 24) % 9 - 4; }

struct Trial {
  std::vector<uint8_t> weights;
  std::vector<float> f32;
  std::vector<Bf16> bf16;
  std::vector<int8_t> codes;
  std::vector<float> scales;
  std::vector<int32_t> sums;
  Matrix w;
  Rows x;

  explicit Trial(const Matrix& kind) : w(kind) {
    const RecordShape record(w);
    const size_t tile = w.format == Format::f32    ? kInputs * kTile * sizeof(float)
                        : w.format == Format::bf16 ? kInputs * kTile * sizeof(Bf16)
                                                   : kInputs / kGroup * record.size;
    w.n = kOutputs;
    w.k = kInputs;
    w.tile_bytes = (tile + 63) / 64 * 64;
    weights.resize(w.tile_bytes * w.num_tiles() + 64);
    uint8_t* data = weights.data() + (64 - reinterpret_cast<uintptr_t>(weights.data()) % 64) % 64;
    w.data = data;
    for (int t = 0; t < w.num_tiles(); ++t, data += w.tile_bytes) fill(data, record, t);
    for (int i = 0; i < kRows * kInputs; ++i) {
      f32.push_back(static_cast<float>(number(i)));
      bf16.push_back(upper_half(f32.back()));
      codes.push_back(static_cast<int8_t>(number(i)));
      if (i % 16 == 0) sums.push_back(0);
      sums.back() += codes.back();
      if (i % kGroup == 0) scales.push_back(static_cast<float>(number(i) + 5));
    }
    x = {.form = form_of(w.format), .m = kRows, .k = kInputs, .f32 = f32.data(), .bf16 = bf16.data(),
         .codes = codes.data(), .scales = scales.data(), .sums = sums.data()};
  }

  static Bf16 upper_half(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return static_cast<Bf16>(bits >> 16);
  }

  void fill(uint8_t* tile, const RecordShape& record, int t) const {
    for (size_t i = 0; i < static_cast<size_t>(kInputs) * kTile && w.format != Format::group; ++i) {
      const float value = static_cast<float>(number(i + t));
      const Bf16 half = upper_half(value);
      if (w.format == Format::f32) std::memcpy(tile + i * sizeof value, &value, sizeof value);
      if (w.format == Format::bf16) std::memcpy(tile + i * sizeof half, &half, sizeof half);
    }
    for (int g = 0; g < kInputs / kGroup && w.format == Format::group; ++g, tile += record.size) {
      for (size_t i = 0; i < record.scales; ++i) tile[i] = static_cast<uint8_t>((i + g + t) * 2654435761u >> 13);
      for (size_t i = record.scales; i < record.size; i += sizeof(float)) {
        const float value = static_cast<float>(number(i + t));
        std::memcpy(tile + i, &value, sizeof value);
      }
    }
  }

  std::vector<float> product(const MatmulKernels& kernels) const {
    std::vector<float> out(kRows * kOutputs);
    std::vector<uint8_t> scratch(kernels.scratch_bytes(w, kRows) + 64);
    const size_t skip = (64 - reinterpret_cast<uintptr_t>(scratch.data()) % 64) % 64;
    kernels.multiply(w, x, 0, w.num_tiles(), out.data(), kOutputs, scratch.data() + skip);
    return out;
  }
};

}  // namespace

bool agree(const MatmulKernels& some, const MatmulKernels& others) {
  const Matrix kinds[] = {{.format = Format::f32},
                          {.format = Format::bf16},
                          {.format = Format::group, .bits = 4, .wide = true, .has_min = true},
                          {.format = Format::group, .bits = 8, .group = 16, .offset = 128, .wide = true}};
  for (const Matrix& kind : kinds) {
    const Trial trial(kind);
    if (trial.product(some) != trial.product(others)) return false;
  }
  return true;
}

}  // namespace inferloop
