// Attention over paged keys and values, for a step that mixes decoding sequences and prompt chunks.
//
// A block of a KV head holds 16 tokens. Numbers that a dot product takes together stand together, and keys are turned
// so that one load brings the same dimensions of all 16: scores need no sums across a register.
//
//   bf16   keys    [head_dim / 2][16 tokens][2 dims]
//          values  [8][head_dim][2 tokens]
//   int8   keys    [head_dim / 4][16 tokens][4 dims] codes
//          values  [4][head_dim][4 tokens] codes
//          scales  bf16 [16] of the keys, [16] of the values
//          number = scale * (code - 128) for keys, whose codes are unsigned, scale * code for values; |code| <= 127.
//          A token of a head has one scale, max |number| / 127 rounded up to bf16.
//
// Conversions to bf16 round to nearest even and take subnormal numbers for zero. What a block holds of tokens that are
// not written yet, or of ones from before, is never part of a result, be it NaN.
//
// How a row's result comes about is fixed, and depends on its own query, keys and values alone. Keys are taken in
// ranges that begin at multiples of kRange. Within a range: all scores, their maximum m, p = 2^(score - m), the sum of
// p and of p * value; then ranges are folded in order. scalar.cpp says it in full. All levels agree bit for bit, with
// one exception: with bf16 keys and values, avx512_bf16 and up round queries and p to bf16 and use the machine's own
// product, which is off by as much as that rounding.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "../isa.h"
#include "../types.h"

namespace inferloop {

constexpr int kRange = 256;  // keys whose scores are known before the first value is read; a multiple of 64

/// Bytes of 16 tokens of one KV head; a multiple of 64.
constexpr size_t head_bytes(KvFormat format, int head_dim) {
  return format == KvFormat::bf16 ? size_t{64} * head_dim : size_t{32} * head_dim + 64;
}

/// What differs between layers.
struct AttentionSpec {
  int num_heads = 0;      // query heads; num_heads / cache.num_heads of them share a KV head
  float scale = 1;        // of the scores, 1 / sqrt(head_dim) for most
  int window = 0;         // keys a query sees, itself included; 0: all before it
  float soft_cap = 0;     // scores become cap * tanh(score / cap); 0: none
};

/// Some rows of a sequence, one KV head with its query heads, and the keys from ranges range_begin .. range_end - 1.
struct Span {
  const uint8_t* head = nullptr;   // of block 0
  size_t block_bytes = 0;          // from one block to the next
  const int32_t* table = nullptr;  // the sequence's blocks
  int head_dim = 0;
  int group = 0;     // query heads
  int num_rows = 0;
  int position = 0;  // of the first row
  int range_begin = 0;
  int range_end = 0;
  float scale = 1;
  int window = 0;
  float soft_cap = 0;
  const float* q = nullptr;  // of the first row and query head; heads stand side by side
  size_t ld_q = 0;           // from row to row
  float* out = nullptr;      // the same for the result; null when `partial` is wanted
  size_t ld_out = 0;
  float* partial = nullptr;  // [rows][group][partial_size(head_dim)]: sum of p * value, m, sum of p
  const Span* next = nullptr;  // what this thread does afterwards, to be fetched meanwhile
};

constexpr int partial_size(int head_dim) { return head_dim + 16; }

struct AttentionKernels {
  /// Store keys and values (fp32 [count][head_dim], rows `ld` apart, keys rotated) of a KV head of the tokens at
  /// `position`, `position` + 1, ... of the sequence whose blocks `table` names. Others may write other tokens of the
  /// same block at the same time.
  void (*write)(const KvCache& cache, int layer, const int32_t* table, int position, int count, int head,
                const float* key, const float* value, size_t ld);

  // What AttentionWork is made of. Scratch is 64-byte aligned.
  void (*attend[2])(const Span& span, uint8_t* scratch);  // by KvFormat
  size_t (*scratch_bytes)(int head_dim, int num_queries);  // rows x query heads of a span
  void (*fold)(float* partials, int num_partials, size_t stride, int head_dim, float* out);  // the first is overwritten
};

/// The kernels of a level that this machine has.
const AttentionKernels& attention_kernels(Isa isa);

/// How one step's attention is divided into tasks. Made once a step, used by every layer with the same spec; plan and
/// cache must outlive it. The keys and values of a layer's tokens must be written before its tasks run.
///
/// Work is divided so that `num_threads` are busy to the end, be it one long sequence or many: by rows, KV heads, and
/// where that is too coarse ranges of keys, whose partial results the last one to finish folds. Tasks come largest
/// first, so whoever is free takes the next one. How it is divided does not show in the results.
class AttentionWork {
 public:
  AttentionWork(Isa isa, const Plan& plan, const KvCache& cache, const AttentionSpec& spec, int num_threads);

  int num_tasks() const { return static_cast<int>(tasks_.size()) - 1; }

  /// q: fp32 rows of the step's tokens `ld_q` apart, [num_heads][head_dim], rotated. out: the same, `ld_out` apart.
  /// Tasks of a layer run in any order and at the same time; all must have ended before those of another layer begin.
  void run(int task, int layer, const float* q, size_t ld_q, float* out, size_t ld_out, uint8_t* scratch);

  size_t scratch_bytes() const;  // of each thread, 64-byte aligned
  size_t partial_bytes() const;  // of all of them, from construction on

 private:
  struct Unit {
    int sequence = 0;
    int head = 0;
    int first_row = 0;  // of the step
    int num_rows = 0;
    int range_begin = 0;
    int range_end = 0;
    int split = -1;  // which of splits_ it is a part of
    int64_t cost = 0;
  };
  struct Split {
    int num_parts = 0;
    int first_range = 0;
    size_t first_partial = 0;
  };

  void divide(int num_threads);
  void add(Unit unit, int64_t most);
  int64_t cost_of(const Unit& unit) const;
  int first_position(const Unit& unit) const;
  int first_key(int position) const;  // that the row at `position` sees
  float* partial_of(const Unit& unit, int range) const;
  Span span_of(const Unit& unit, int layer, const float* q, size_t ld_q, float* out, size_t ld_out) const;
  void finish(const Unit& unit, float* out, size_t ld_out);

  const AttentionKernels& kernels_;
  Plan plan_;
  KvCache cache_;
  AttentionSpec spec_;
  int group_ = 1;
  std::vector<Unit> units_;
  std::vector<int> tasks_;  // task i is units tasks_[i] .. tasks_[i + 1] - 1
  std::vector<Split> splits_;
  std::unique_ptr<std::atomic<int>[]> num_done_;  // of each split's parts
  size_t num_partials_ = 0;
  std::unique_ptr<float[]> partials_;
};

/// No AttentionWork whose positions are below `num_positions` has more partial_bytes(); `group` query heads share a KV
/// head.
size_t most_partial_bytes(int num_threads, int group, int head_dim, int num_positions);

}  // namespace inferloop
