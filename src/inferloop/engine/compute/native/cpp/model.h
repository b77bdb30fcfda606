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
  Matrix gate_up;  // 32 outputs of gate and 32 of up in turn; of experts, one expert after the other
  Matrix down;     // of experts, all outputs of one, then of the next
  Matrix router;   // f32, an output for each expert; no data: the layer has none
  const float* input_norm = nullptr;  // [hidden_size]
  const float* post_norm = nullptr;   // [hidden_size], before gate_up
  const float* attended_norm = nullptr;  // [hidden_size], of what `out` gives
  const float* fed_norm = nullptr;       // [hidden_size], of what `down` gives
  const float* q_norm = nullptr;      // [head_dim]
  const float* k_norm = nullptr;      // [head_dim]
  int window = 0;                     // keys a query sees, itself included; 0: all
  const float* cos = nullptr;         // rotary embedding by position, [num_positions][rope_dim / 2]
  const float* sin = nullptr;

  bool has_experts() const { return router.data != nullptr; }
};

struct Model {
  int hidden_size = 0;
  int num_heads = 0;
  int num_kv_heads = 0;
  int head_dim = 0;
  int ffn_size = 0;         // of layers without experts
  int expert_ffn_size = 0;
  int num_experts = 0;      // of a layer that has any
  int num_per_token = 0;    // of them, which a row goes through
  bool renormalized = false;  // what these count is made to sum to 1
  int vocab_size = 0;
  float norm_eps = 0;
  float attention_scale = 0;
  float attention_soft_cap = 0;  // scores become cap * tanh(score / cap); 0: none
  float final_soft_cap = 0;      // the same of logits
  float embedding_scale = 1;
  Activation activation = Activation::silu;
  bool has_output_norms = false;
  std::vector<Layer> layers;
  Matrix embed;
  Matrix head;
  const float* norm = nullptr;  // [hidden_size]
  int rope_dim = 0;
  int num_positions = 0;

  int q_size() const { return num_heads * head_dim; }
};

}  // namespace inferloop
