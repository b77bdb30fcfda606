// What sampling does with many logits at once, for each instruction set. All levels give the same bits.
#pragma once

#include <cstdint>

#include "../isa.h"
#include "noise.h"
#include "sampling.h"

namespace inferloop {

/// Lists have room for so many more values than are in them, to be read and written without meaning.
constexpr int kSlack = 16;

/// Weights are summed as integers, in units of 2^-44 of the likeliest token's: exact, so in any order. 2^18 of the
/// largest do not overflow, and what 2^18 of the smallest lose is 1e-8 of the whole.
constexpr int kWeightBits = 44;

/// One row's draw, as far as it has come: the entry with the largest logit / temperature + noise, and of equals the
/// smallest id.
struct Draw {
  float best = -__builtin_inff();
  int id = 0x7fffffff;  // none yet
};

/// Rows are whole spans of kSpan logits; their maxima are one per span, of the logits as they are. A row's entries
/// beyond the vocabulary are -infinity, and what is not a number counts as that.
struct SamplingKernels {
  /// out[s] = the largest of span s.
  void (*maxima)(const float* row, int num_spans, float* out);

  /// Where in a span the value stands first, or -1.
  int (*find)(const float* span, float value);

  /// How many of a row are greater.
  int (*count_above)(const float* row, int num_spans, float value);

  /// What bit j of word w does not allow becomes -infinity: entry 32 w + j of words 0 .. num_words - 1.
  void (*allow)(float* row, const uint32_t* words, int num_words);

  /// The quotients row[i] / temperature that are at least `low`, in their order. `maxima` are whole spans as well.
  /// Returns how many.
  int (*collect)(const float* row, const float* maxima, int num_spans, float temperature, float low, float* values);

  /// The ids of logits that are at least `low`, ascending, as `collect` at temperature 1 finds them.
  int (*collect_ids)(const float* row, const float* maxima, int num_spans, float low, int32_t* ids);

  /// The values with low <= x[i] <= high, in their order. `out` may be x. Returns how many.
  int (*keep)(const float* x, int n, float low, float high, float* out);

  /// The sum of exp(x[i] / temperature - best), each rounded to units of 2^-kWeightBits, of a list or a row. best is the
  /// largest quotient.
  int64_t (*weigh)(const float* x, int n, float temperature, float best);

  /// Let the entries of some spans into the draw, the first having the id `id_begin`, those with
  /// row[i] / temperature >= low. Noise is made only where it can decide.
  void (*draw)(const NoiseKey& key, const float* row, const float* maxima, int num_spans, int id_begin,
               float temperature, float low, Draw& draw);

  /// The noise of ids id_begin .. id_begin + n - 1, both multiples of kSpan.
  void (*gumbel)(const NoiseKey& key, int id_begin, int n, float* out);
};

/// The kernels of a level that this machine has.
const SamplingKernels& sampling_kernels(Isa isa);

}  // namespace inferloop
