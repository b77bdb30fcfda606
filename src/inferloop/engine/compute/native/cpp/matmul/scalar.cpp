// Portable products: what every other level is checked against, and what machines without one of them use.
#include <cstring>

#include "levels.h"
#include "numbers.h"
#include "record.h"

namespace inferloop {
namespace {

/// The i-th of a record's scales or mins.
float number_at(const uint8_t* numbers, bool wide, int i) {
  if (wide) {
    float value;
    std::memcpy(&value, numbers + i * sizeof value, sizeof value);
    return value;
  }
  Fp16 value;
  std::memcpy(&value, numbers + i * sizeof value, sizeof value);
  return from_fp16(value);
}

int code_at(const uint8_t* record, int bits, int input, int output) {
  const int j = input / 4, place = output * 4 + input % 4;
  if (bits == 8) return record[j * 64 + place];
  const uint8_t pair = record[j % 4 * 64 + place];
  return j < 4 ? pair & 15 : pair >> 4;
}

/// A record with its codes by input, so that the loops over outputs are the inner ones.
struct Unpacked {
  uint8_t codes[kGroup][kTile];
  float scales[2][kTile];
  float mins[2][kTile];

  Unpacked(const uint8_t* record, const RecordShape& shape) {
    for (int i = 0; i < kGroup; ++i)
      for (int c = 0; c < kTile; ++c) codes[i][c] = code_at(record, shape.bits, i, c);
    for (int p = 0; p < shape.parts; ++p)
      for (int c = 0; c < kTile; ++c) {
        scales[p][c] = number_at(record + shape.scales, shape.wide, p * kTile + c);
        if (shape.has_min) mins[p][c] = number_at(record + shape.mins, shape.wide, p * kTile + c);
      }
  }
};

/// Add a record's part to the sums of one row. THE order for group formats, which the other levels repeat bit for bit:
/// what the record is worth in units of its activations' scale (its scales, then its mins, part after part), then the
/// sum over records in order. `offset` is that of the codes; x and code_sums are the record's.
void add_record(const Unpacked& record, const RecordShape& shape, int offset, const int8_t* x, float x_scale,
                const int32_t* code_sums, float* sums) {
  int32_t dots[2][kTile] = {};
  const int part_size = kGroup / shape.parts;
  for (int i = 0; i < kGroup; ++i)
    for (int c = 0; c < kTile; ++c) dots[i / part_size][c] += record.codes[i][c] * x[i];
  int32_t part_sums[2] = {code_sums[0], code_sums[1]};
  if (shape.parts == 1) part_sums[0] += part_sums[1];
  for (int c = 0; c < kTile; ++c) {
    float worth = static_cast<float>(dots[0][c] - offset * part_sums[0]) * record.scales[0][c];
    if (shape.parts == 2)
      worth = std::fma(static_cast<float>(dots[1][c] - offset * part_sums[1]), record.scales[1][c], worth);
    if (shape.has_min)
      for (int p = 0; p < shape.parts; ++p)
        worth = std::fma(static_cast<float>(part_sums[p]), record.mins[p][c], worth);
    sums[c] = std::fma(worth, x_scale, sums[c]);
  }
}

void group_tile(const Matrix& w, const uint8_t* tile, const Rows& x, float* out, size_t ld_out) {
  const RecordShape shape(w);
  const int num_records = w.k / kGroup;
  for (int g = 0; g < num_records; ++g) {
    const Unpacked record(tile + g * shape.size, shape);
    for (int r = 0; r < x.m; ++r) {
      const size_t at = static_cast<size_t>(r) * num_records + g;
      add_record(record, shape, w.offset, x.codes + at * kGroup, x.scales[at], x.sums + 2 * at, out + r * ld_out);
    }
  }
}

void f32_tile(const Matrix& w, const uint8_t* tile, const Rows& x, float* out, size_t ld_out) {
  const float* weights = reinterpret_cast<const float*>(tile);
  for (int r = 0; r < x.m; ++r)
    for (int i = 0; i < w.k; ++i) {
      const float value = x.f32[static_cast<size_t>(r) * w.k + i];
      for (int c = 0; c < kTile; ++c) out[r * ld_out + c] += weights[i * kTile + c] * value;
    }
}

void bf16_tile(const Matrix& w, const uint8_t* tile, const Rows& x, float* out, size_t ld_out) {
  const Bf16* weights = reinterpret_cast<const Bf16*>(tile);
  for (int r = 0; r < x.m; ++r)
    for (int i = 0; i < w.k; ++i) {
      const float value = from_bf16(x.bf16[static_cast<size_t>(r) * w.k + i]);
      const Bf16* pairs = weights + i / 2 * 2 * kTile + i % 2;
      for (int c = 0; c < kTile; ++c) out[r * ld_out + c] += from_bf16(pairs[2 * c]) * value;
    }
}

void multiply(const Matrix& w, const Rows& x, int tile_begin, int tile_end, float* out, size_t ld_out, uint8_t*) {
  const auto tile_of = w.format == Format::f32 ? f32_tile : w.format == Format::bf16 ? bf16_tile : group_tile;
  for (int t = tile_begin; t < tile_end; ++t, out += kTile) {
    for (int r = 0; r < x.m; ++r) std::memset(out + r * ld_out, 0, kTile * sizeof(float));
    tile_of(w, w.data + t * w.tile_bytes, x, out, ld_out);
    if (!w.bias) continue;
    for (int r = 0; r < x.m; ++r)
      for (int c = 0; c < kTile && t * kTile + c < w.n; ++c) out[r * ld_out + c] += w.bias[t * kTile + c];
  }
}

size_t scratch_bytes(const Matrix&, int) { return 0; }

void row(const Matrix& w, int output, float* out) {
  const uint8_t* tile = w.data + output / kTile * w.tile_bytes;
  const int c = output % kTile;
  if (w.format == Format::f32) {
    for (int i = 0; i < w.k; ++i) out[i] = reinterpret_cast<const float*>(tile)[i * kTile + c];
  } else if (w.format == Format::bf16) {
    for (int i = 0; i < w.k; ++i)
      out[i] = from_bf16(reinterpret_cast<const Bf16*>(tile)[(i / 2 * kTile + c) * 2 + i % 2]);
  } else {
    const RecordShape shape(w);
    for (int g = 0; g < w.k / kGroup; ++g) {
      const uint8_t* record = tile + g * shape.size;
      for (int p = 0; p < shape.parts; ++p) {
        const double scale = number_at(record + shape.scales, shape.wide, p * kTile + c);
        const double min = shape.has_min ? number_at(record + shape.mins, shape.wide, p * kTile + c) : 0;
        for (int i = p * w.group; i < (p + 1) * w.group; ++i)
          out[g * kGroup + i] = static_cast<float>(scale * (code_at(record, shape.bits, i, c) - w.offset) + min);
      }
    }
  }
}

constexpr MatmulKernels kKernels = {multiply, scratch_bytes, row};

}  // namespace

const MatmulKernels& scalar_matmul() { return kKernels; }

}  // namespace inferloop
