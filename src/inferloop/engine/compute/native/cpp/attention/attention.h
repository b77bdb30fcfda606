// Attention over paged keys and values, for a step that mixes decoding sequences and prompt chunks.
//
// (The layout of a block of a head, for KvFormat::bf16 and int8, is described here by whoever writes the kernels.)
#pragma once

#include <vector>

#include "../isa.h"
#include "../types.h"

namespace inferloop {

/// Bytes of 16 tokens of one KV head; a multiple of 64.
size_t head_bytes(KvFormat format, int head_dim);

/// What differs between layers.
struct AttentionSpec {
  int num_heads = 0;      // query heads; num_heads / cache.num_heads of them share a KV head
  float scale = 1;        // of the scores, 1 / sqrt(head_dim) for most
  int window = 0;         // keys a query sees, itself included; 0: all before it
  float soft_cap = 0;     // scores become cap * tanh(score / cap); 0: none
};

struct AttentionKernels {
  /// Store key and value (fp32 [head_dim], the key rotated) of the token at `position` into its block.
  void (*write)(const KvCache& cache, int layer, int block, int place, int head, const float* key, const float* value);

  /// (Declared by whoever writes the kernels: what a task of AttentionWork runs.)
};

const AttentionKernels& attention_kernels(Isa isa);

/// How one step's attention is divided into tasks. Made once a step, used by every layer with the same window. A task
/// is some rows of a sequence, one KV head, and a range of keys; where a sequence's keys are more than one range, a
/// second round merges them. Ranges begin at fixed positions, so results depend on the sequence alone.
class AttentionWork {
 public:
  AttentionWork(Isa isa, const Plan& plan, const KvCache& cache, const AttentionSpec& spec);

  int num_tasks() const;
  /// q: fp32 [num_tokens][num_heads][head_dim], rotated. out: fp32, same shape.
  void run(int task, int layer, const float* q, float* out, uint8_t* scratch);

  /// 0 when no sequence is long enough to be split. After a barrier.
  int num_merges() const;
  void merge(int task, float* out);

  size_t scratch_bytes() const;  // of each thread
};

}  // namespace inferloop
