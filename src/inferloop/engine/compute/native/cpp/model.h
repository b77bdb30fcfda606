// A decoder's weights as the step reads them: one row of a table for each layer.
#pragma once

#include <vector>

#include "rows/rows.h"
#include "types.h"

namespace inferloop {

/// One layer. Vectors are fp32; those that a model lacks are null.
struct Layer {
  Matrix qkv;      // query heads, then key heads, then value heads
  Matrix out;
  Matrix gate_up;  // 32 outputs of gate and 32 of up in turn
  Matrix down;
  const float* input_norm = nullptr;  // [hidden_size]
  const float* post_norm = nullptr;   // [hidden_size]
  const float* q_norm = nullptr;      // [head_dim]
  const float* k_norm = nullptr;      // [head_dim]
  int window = 0;                     // keys a query sees, itself included; 0: all
};

struct Model {
  int hidden_size = 0;
  int num_heads = 0;
  int num_kv_heads = 0;
  int head_dim = 0;
  int ffn_size = 0;
  int vocab_size = 0;
  float norm_eps = 0;
  float attention_scale = 0;
  Activation activation = Activation::silu;
  std::vector<Layer> layers;
  Matrix embed;
  Matrix head;
  const float* norm = nullptr;  // [hidden_size]
  // Rotary embedding by position, [num_positions][rope_dim / 2].
  int rope_dim = 0;
  int num_positions = 0;
  const float* cos = nullptr;
  const float* sin = nullptr;

  int q_size() const { return num_heads * head_dim; }
};

}  // namespace inferloop
