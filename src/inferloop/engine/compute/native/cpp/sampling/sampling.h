// From logits to tokens: bias, penalties, masks, temperature, top-k, top-p, min-p and Gumbel-max, log-probabilities and
// the scores of prompts. What is drawn is fixed by engine/compute/philox.py, bit for bit.
//
// The head is computed in slices of the vocabulary, and what a row wants decides what becomes of its slices:
//
//   greedy, or a draw without filters   each slice is looked through while it is in the cache, and forgotten
//   anything else                       the slices are kept as a full row, which is finished afterwards
//
// In a step (all of the team do the same; `each` and `barrier` are those of pool.h):
//
//   sampler.begin(plan, wishes);                                       // one thread, before Pool::run or the layers
//   for (int b = 0; b < sampler.num_batches(); ++b) {
//     const RowRange rows = sampler.batch(b);
//     ... the final norm of hidden states sampler.flats()[rows.begin .. rows.end), encoded for the head ...
//     team.each(number of slices, [&](int i) {                         // and of the rows, if there are many
//       multiply(head, ..., logits, ld);
//       sampler.consume(team.rank(), some_rows, id_begin, id_end, logits, ld);
//     });
//     team.barrier();
//     if (sampler.wants_mask() && b == 0) { one thread: sampler.set_mask(...); all: team.barrier(); }
//     if (sampler.num_finishes(b) > 0) {
//       team.each(sampler.num_finishes(b), [&](int i) { sampler.finish(team.rank(), b, i); });
//       team.barrier();
//     }
//   }
//   sampler.end();                                                     // one thread
//
// Nothing depends on the number of threads, on who gets which slice and when, or on where slices begin and end. Every
// level gives the same bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "../isa.h"
#include "../types.h"

namespace inferloop {

constexpr int kSpan = 64;  // slices of the vocabulary begin at multiples of it: four tiles

/// CSR over a plan's sequences; offsets is null when no sequence has any.
struct SparseColumns {
  const int32_t* offsets = nullptr;  // [num_sequences + 1]
  const int32_t* ids = nullptr;
  const float* values = nullptr;
};

/// What a step is to sample, as SamplingColumns and PromptRows of engine/schedule/step.py describe it; the arrays are
/// the caller's and outlive `Sampler::end`. Ids are within the vocabulary, those of a sequence's CSR row distinct.
struct Wishes {
  const int32_t* sample_rows = nullptr;  // [num_sequences]: token of the step, or -1
  const int32_t* num_drafts = nullptr;   // [num_sequences]
  const float* temperature = nullptr;    // [num_sequences], as all of these
  const float* top_p = nullptr;
  const int32_t* top_k = nullptr;
  const float* min_p = nullptr;
  const uint64_t* seed = nullptr;
  const int32_t* num_logprobs = nullptr;
  SparseColumns bias;
  SparseColumns penalties;
  const float* presence = nullptr;  // these three with penalties
  const float* frequency = nullptr;
  const float* repetition = nullptr;
  bool masked = false;  // the mask itself may come late: Sampler::set_mask

  int num_prompt_rows = 0;
  const int32_t* prompt_flat = nullptr;  // [num_prompt_rows], as all of these
  const int32_t* prompt_targets = nullptr;
  const int32_t* prompt_num_top = nullptr;
};

struct RowRange {
  int begin = 0;
  int end = 0;
};

/// Rows are first those to sample, sequence after sequence and draft after draft, then those of prompts.
class Sampler {
 public:
  /// Threads that call consume and finish are numbered from 0 to num_threads - 1.
  Sampler(Isa isa, int vocab, int num_threads);
  ~Sampler();
  Sampler(const Sampler&) = delete;
  Sampler& operator=(const Sampler&) = delete;

  /// Forgets the step before. Memory is kept for the next one.
  void begin(const Plan& plan, const Wishes& wishes);

  int num_rows() const;
  int num_sampled() const;
  const int32_t* flats() const;  // [num_rows]: which token of the step each row's hidden state is of

  /// Full rows share a bounded memory, so rows go through the head in batches; nearly always there is one.
  int num_batches() const;
  RowRange batch(int b) const;

  /// Take logits[r * ld + c] of rows some.begin + r (within a batch) and ids id_begin + c < id_end. id_begin is a multiple
  /// of kSpan, so is id_end unless it is the vocabulary's. May write up to the next multiple of kSpan after id_end, so
  /// ld reaches that far. Any thread, any order, every id of a row once.
  void consume(int thread, RowRange some, int id_begin, int id_end, float* logits, size_t ld);

  /// Whether `set_mask` must be called between the first batch's last `consume` and its first `finish`.
  bool wants_mask() const;
  /// [num_sequences][words] as in SamplingColumns; stays the caller's until `end`.
  void set_mask(const uint32_t* mask, int words);

  int num_finishes(int b) const;
  void finish(int thread, int b, int i);

  /// After the last batch; from now on the results can be read.
  void end();

  const int32_t* token_ids() const;  // [num_sampled]
  /// [num_sampled]: whether all drafts before the row are what was sampled in their places, so that it counts.
  const uint8_t* accepted() const;
  /// [num_rows], natural. Of rows to sample that asked: of the processed logits before temperature, of the token sampled.
  /// Of prompt rows: of the logits as they are, of the target.
  const float* logprobs() const;
  const int32_t* ranks() const;  // [num_rows]: of prompt rows, one more than the number of likelier tokens
  /// [num_rows + 1]: row r's likeliest tokens, best first, equals by id, are top_ids/top_logprobs[offsets[r] ..). A row
  /// to sample with num_logprobs -1 has none.
  const int32_t* top_offsets() const;
  const int32_t* top_ids() const;
  const float* top_logprobs() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace inferloop
