// The values that the parts of a step hand to each other. Plain data; whoever fills them owns the memory.
#pragma once

#include <cstddef>
#include <cstdint>

namespace inferloop {

constexpr int kTile = 16;   // outputs in a tile of weights
constexpr int kGroup = 32;  // inputs in a record of weights, and activations that share a scale
constexpr int kBlock = 16;  // tokens in a KV block

using Bf16 = uint16_t;  // the upper half of an fp32
using Fp16 = uint16_t;  // IEEE half

/// How the numbers of a weight matrix are stored.
enum class Format : uint8_t { f32, bf16, group };

/// A weight matrix of n outputs and k inputs (k a multiple of 32), repacked in tiles of 16 outputs; what lies beyond n
/// in the last tile is zero. Tiles are `tile_bytes` apart, 64-byte aligned, and hold, input after input:
///
///   f32    [k][16] fp32
///   bf16   [k / 2][16][2] bf16: pairs of inputs side by side, as vdpbf16ps and AMX take them
///   group  k / 32 records of 32 inputs: codes, scales, mins
///          weight = scale * (code - offset) + min
///          codes   8 bits: [8][16][4] bytes, inputs 4j .. 4j + 3 of every output in the j-th 64 bytes
///                  4 bits: [4][64] bytes, the low halves are the 64 bytes j of the 8-bit form, the high halves j + 4
///          scales  [32 / group][16] fp32 or fp16 (wide or not), one for `group` inputs in order
///          mins    the same shape, only when there are any
struct Matrix {
  Format format = Format::f32;
  int n = 0;
  int k = 0;
  const uint8_t* data = nullptr;
  size_t tile_bytes = 0;
  const float* bias = nullptr;  // [n] or null
  // Of Format::group alone:
  int bits = 8;                 // 4 or 8: codes are unsigned, 0 .. 15 or 0 .. 255
  int group = kGroup;           // 16 or 32
  int offset = 0;
  bool wide = false;
  bool has_min = false;

  int num_tiles() const { return (n + kTile - 1) / kTile; }
};

/// The form that the other side of a product has: f32 weights take f32, bf16 bf16, group q8.
enum class Form : uint8_t { f32, bf16, q8 };

constexpr Form form_of(Format format) {
  return format == Format::f32 ? Form::f32 : format == Format::bf16 ? Form::bf16 : Form::q8;
}

/// m rows of k activations (k a multiple of 32) in one form; the pointers of the others are null.
///
/// q8: every 32 values share scale = max |value| / 127, code = value * (127 / max) rounded to nearest even; scale and codes
/// are 0 when no value exceeds 1e-30, and the scale is NaN when one is not finite. sums[i] is that of codes 16 i ..
/// 16 i + 15, which weights with an offset or a min need.
struct Rows {
  Form form = Form::f32;
  int m = 0;
  int k = 0;
  float* f32 = nullptr;      // [m][k]
  Bf16* bf16 = nullptr;      // [m][k]
  int8_t* codes = nullptr;   // [m][k]
  float* scales = nullptr;   // [m][k / 32]
  int32_t* sums = nullptr;   // [m][k / 16]
};

enum class KvFormat : uint8_t { bf16, int8 };

/// The keys and values of all layers: [layer][block][KV head][head_bytes], 64-byte aligned. How the `head_bytes` of a
/// block of 16 tokens are laid out is described in attention/attention.h.
struct KvCache {
  KvFormat format = KvFormat::bf16;
  int num_layers = 0;
  int num_blocks = 0;
  int num_heads = 0;
  int head_dim = 0;  // a multiple of 16
  size_t head_bytes = 0;
  uint8_t* data = nullptr;

  uint8_t* at(int layer, int block, int head) const {
    return data + ((static_cast<size_t>(layer) * num_blocks + block) * num_heads + head) * head_bytes;
  }
};

/// A step as the seam describes it (engine/schedule/step.py); the arrays are the caller's and outlive the step.
struct Plan {
  int num_sequences = 0;
  int num_tokens = 0;
  int table_width = 0;                       // blocks in a row of the table
  const int32_t* offsets = nullptr;          // [num_sequences + 1] into the tokens
  const int32_t* token_ids = nullptr;        // [num_tokens]
  const int32_t* first_positions = nullptr;  // [num_sequences]
  const int32_t* block_table = nullptr;      // [num_sequences][table_width], -1 beyond a sequence's blocks
};

}  // namespace inferloop
