#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "../memory.h"
#include "filter.h"
#include "kernels.h"
#include "process.h"
#include "sampling.h"

namespace inferloop {
namespace {

constexpr size_t kFullBytes = 16 << 20;  // what full rows of a batch take at most, unless one alone is larger
constexpr int kMaximaAtOnce = 16;

int spans_of(int num_ids) { return (num_ids + kSpan - 1) / kSpan; }

struct Row {
  int owner;        // sequence of the plan, or -1: of a prompt
  int index;        // of its kind
  int num_ahead;    // drafts before it
  int num_top;
  int slot;         // among the full rows of its batch, or -1: its slices are looked through
  float temperature;
  NoiseKey key;     // when it is drawn
};

/// Floats in pages that only grow.
struct Floats {
  Pages pages;

  void reserve(size_t size) {
    if (size * sizeof(float) > pages.size()) pages = Pages(size * sizeof(float));
  }
  float* data() const { return reinterpret_cast<float*>(pages.data()); }
};

/// What one thread keeps; aligned so that no two write to one cache line.
struct alignas(64) Thread {
  std::vector<Draw> draws;  // of every row whose slices are looked through
  Floats first, second;     // see Lists
  std::vector<int32_t> ids;
};

struct Batch {
  RowRange rows;
  std::vector<int> full;  // rows, by slot
};

}  // namespace

struct Sampler::State {
  State(Isa isa, int vocab, int num_threads)
      : kernels(sampling_kernels(isa)),
        vocab(vocab),
        num_spans(spans_of(vocab)),
        num_groups(spans_of(num_spans)),
        max_full(std::max<int>(1, kFullBytes / (static_cast<size_t>(num_spans) * kSpan * sizeof(float)))),
        threads(num_threads) {}

  const SamplingKernels& kernels;
  const int vocab;
  const int num_spans;
  const int num_groups;  // spans of maxima
  const int max_full;

  Plan plan;
  Wishes wishes;
  const uint32_t* mask = nullptr;
  int mask_words = 0;
  int num_sampled = 0;
  std::vector<Row> rows;
  std::vector<int32_t> flats;
  std::vector<Batch> batches;
  std::vector<Thread> threads;
  Floats full;    // [slot][num_spans * kSpan]
  Floats maxima;  // [slot][num_groups * kSpan]

  std::vector<int32_t> token_ids, ranks, top_offsets, top_ids;
  std::vector<uint8_t> accepted;
  std::vector<float> logprobs, top_logprobs;

  bool needs_all(int owner) const {
    const auto has = [owner](const SparseColumns& columns) {
      return columns.offsets && columns.offsets[owner + 1] > columns.offsets[owner];
    };
    const bool filters = wishes.top_k[owner] > 0 || wishes.top_p[owner] < 1.0f || wishes.min_p[owner] > 0.0f;
    return wishes.masked || has(wishes.bias) || has(wishes.penalties) || wishes.num_logprobs[owner] >= 0 ||
           (filters && wishes.temperature[owner] > 0.0f);
  }

  float* full_row(int slot) { return full.data() + static_cast<size_t>(slot) * num_spans * kSpan; }
  float* maxima_of(int slot) { return maxima.data() + static_cast<size_t>(slot) * num_groups * kSpan; }

  void add_row(int flat, const Row& row, bool needs_all);
  void look_through(const Row& row, int id_begin, int num_spans, const float* logits, Draw& draw) const;
  void find_best(const float* logits, const float* maxima, int num_spans, int id_begin, Draw& best) const;
  bool process(const Row& row, int flat, float* logits) const;
  int sample(const Row& row, const FullRow& full_row, const Lists& lists) const;
  void finish(Thread& thread, int r);
};

Sampler::Sampler(Isa isa, int vocab, int num_threads) : state_(std::make_unique<State>(isa, vocab, num_threads)) {}
Sampler::~Sampler() = default;

int Sampler::num_rows() const { return static_cast<int>(state_->rows.size()); }
int Sampler::num_sampled() const { return state_->num_sampled; }
const int32_t* Sampler::flats() const { return state_->flats.data(); }
int Sampler::num_batches() const { return static_cast<int>(state_->batches.size()); }
RowRange Sampler::batch(int b) const { return state_->batches[b].rows; }
bool Sampler::wants_mask() const { return state_->wishes.masked && state_->num_sampled > 0; }
int Sampler::num_finishes(int b) const { return static_cast<int>(state_->batches[b].full.size()); }
const int32_t* Sampler::token_ids() const { return state_->token_ids.data(); }
const uint8_t* Sampler::accepted() const { return state_->accepted.data(); }
const float* Sampler::logprobs() const { return state_->logprobs.data(); }
const int32_t* Sampler::ranks() const { return state_->ranks.data(); }
const int32_t* Sampler::top_offsets() const { return state_->top_offsets.data(); }
const int32_t* Sampler::top_ids() const { return state_->top_ids.data(); }
const float* Sampler::top_logprobs() const { return state_->top_logprobs.data(); }

void Sampler::set_mask(const uint32_t* mask, int words) {
  state_->mask = mask;
  state_->mask_words = words;
}

void Sampler::State::add_row(int flat, const Row& row, bool needs_all) {
  if (batches.empty() || (needs_all && static_cast<int>(batches.back().full.size()) == max_full))
    batches.push_back({{static_cast<int>(rows.size()), 0}, {}});
  Batch& batch = batches.back();
  rows.push_back(row);
  if (needs_all) {
    rows.back().slot = static_cast<int>(batch.full.size());
    batch.full.push_back(static_cast<int>(rows.size()) - 1);
  }
  batch.rows.end = static_cast<int>(rows.size());
  flats.push_back(flat);
  top_offsets.push_back(top_offsets.back() + std::clamp(row.num_top, 0, vocab));
}

void Sampler::begin(const Plan& plan, const Wishes& wishes) {
  State& s = *state_;
  s.plan = plan;
  s.wishes = wishes;
  s.mask = nullptr;
  s.rows.clear();
  s.flats.clear();
  s.batches.clear();
  s.top_offsets.assign(1, 0);
  for (int owner = 0; owner < plan.num_sequences; ++owner) {
    if (wishes.sample_rows[owner] < 0) continue;
    const float temperature = wishes.temperature[owner];
    for (int ahead = 0; ahead <= wishes.num_drafts[owner]; ++ahead) {
      const int flat = wishes.sample_rows[owner] + ahead;
      const int index = static_cast<int>(s.rows.size());
      const int64_t position = int64_t{plan.first_positions[owner]} + (flat - plan.offsets[owner]) + 1;
      Row row = {owner, index, ahead, wishes.num_logprobs[owner], -1, temperature, {}};
      if (temperature > 0.0f) row.key = noise_key(wishes.seed[owner], static_cast<uint64_t>(position));
      s.add_row(flat, row, s.needs_all(owner));
    }
  }
  s.num_sampled = static_cast<int>(s.rows.size());
  for (int i = 0; i < wishes.num_prompt_rows; ++i)
    s.add_row(wishes.prompt_flat[i], {-1, i, 0, wishes.prompt_num_top[i], -1, 0.0f, {}}, true);

  size_t most_full = 0;
  for (const Batch& batch : s.batches) most_full = std::max(most_full, batch.full.size());
  const size_t row_size = static_cast<size_t>(s.num_spans) * kSpan;
  s.full.reserve(most_full * row_size);
  s.maxima.reserve(most_full * s.num_groups * kSpan);
  for (size_t slot = 0; slot < most_full; ++slot)
    std::fill(s.maxima_of(slot) + s.num_spans, s.maxima_of(slot) + s.num_groups * kSpan, -INFINITY);
  for (Thread& thread : s.threads) {
    thread.draws.assign(s.num_sampled, {});
    if (most_full == 0) continue;
    thread.first.reserve(row_size + kSlack);
    thread.second.reserve(row_size + kSlack);
    thread.ids.resize(row_size + kSlack);
  }
  s.token_ids.assign(s.num_sampled, 0);
  s.accepted.assign(s.num_sampled, 0);
  s.logprobs.assign(s.rows.size(), 0.0f);
  s.ranks.assign(s.rows.size(), 0);
  s.top_ids.assign(s.top_offsets.back(), 0);
  s.top_logprobs.assign(s.top_offsets.back(), 0.0f);
}

void Sampler::State::find_best(const float* logits, const float* maxima, int num_spans, int id_begin,
                               Draw& best) const {
  for (int span = 0; span < num_spans; ++span) {
    const int first = id_begin + span * kSpan;
    const bool ties = maxima[span] == best.best && best.best > -INFINITY && first < best.id;
    if (maxima[span] > best.best || ties)
      best = {maxima[span], first + kernels.find(logits + span * kSpan, maxima[span])};
  }
}

void Sampler::State::look_through(const Row& row, int id_begin, int num_spans, const float* logits, Draw& draw) const {
  float maxima[kMaximaAtOnce];
  for (int span = 0; span < num_spans; span += kMaximaAtOnce) {
    const int some = std::min(kMaximaAtOnce, num_spans - span);
    const float* part = logits + span * kSpan;
    const int first = id_begin + span * kSpan;
    kernels.maxima(part, some, maxima);
    if (row.temperature > 0.0f) {
      kernels.draw(row.key, part, maxima, some, first, row.temperature, -INFINITY, draw);
    } else {
      find_best(part, maxima, some, first, draw);
    }
  }
}

void Sampler::consume(int thread, RowRange some, int id_begin, int id_end, float* logits, size_t ld) {
  State& s = *state_;
  const int num_spans = spans_of(id_end - id_begin);
  const int missing = num_spans * kSpan - (id_end - id_begin);
  for (int r = some.begin; r < some.end; ++r) {
    float* slice = logits + (r - some.begin) * ld;
    std::fill_n(slice + (id_end - id_begin), missing, -INFINITY);
    const Row& row = s.rows[r];
    if (row.slot < 0) {
      s.look_through(row, id_begin, num_spans, slice, s.threads[thread].draws[r]);
      continue;
    }
    std::memcpy(s.full_row(row.slot) + id_begin, slice, num_spans * kSpan * sizeof(float));
    s.kernels.maxima(slice, num_spans, s.maxima_of(row.slot) + id_begin / kSpan);
  }
}

bool Sampler::State::process(const Row& row, int flat, float* logits) const {
  if (row.owner < 0) return false;
  bool changed = false;
  if (wishes.bias.offsets) {
    add_bias(wishes.bias, row.owner, logits);
    changed = true;
  }
  if (wishes.penalties.offsets) {
    penalize(wishes, row.owner, plan.token_ids + flat - row.num_ahead + 1, row.num_ahead, logits);
    changed = true;
  }
  if (wishes.masked) {
    kernels.allow(logits, mask + static_cast<size_t>(row.owner) * mask_words, std::min(mask_words, num_spans * 2));
    changed = true;
  }
  return changed;
}

int Sampler::State::sample(const Row& row, const FullRow& full_row, const Lists& lists) const {
  Draw draw;
  if (row.temperature > 0.0f) {
    const int i = row.owner;
    const float low = threshold(kernels, full_row, row.temperature, wishes.top_k[i], wishes.top_p[i], wishes.min_p[i],
                                lists);
    kernels.draw(row.key, full_row.logits, full_row.maxima, num_spans, 0, row.temperature, low, draw);
  } else {
    find_best(full_row.logits, full_row.maxima, num_spans, 0, draw);
  }
  return draw.id < vocab ? draw.id : 0;
}

void Sampler::finish(int thread, int b, int i) { state_->finish(state_->threads[thread], state_->batches[b].full[i]); }

void Sampler::State::finish(Thread& thread, int r) {
  const Row& row = rows[r];
  float* logits = full_row(row.slot);
  float* maxima = maxima_of(row.slot);
  const Lists lists = {thread.first.data(), thread.second.data(), thread.ids.data()};
  if (process(row, flats[r], logits)) kernels.maxima(logits, num_spans, maxima);
  kernels.maxima(maxima, num_groups, lists.first);
  const FullRow all = {logits, maxima, num_spans, *std::max_element(lists.first, lists.first + num_groups)};
  int token;
  if (row.owner >= 0) {
    token = token_ids[r] = sample(row, all, lists);
    if (row.num_top < 0) return;
  } else {
    token = wishes.prompt_targets[row.index];
    ranks[r] = 1 + kernels.count_above(logits, num_spans, logits[token]);
  }
  const double whole = log_sum_exp(kernels, all);
  const auto logprob = [whole](float logit) { return static_cast<float>(static_cast<double>(logit) - whole); };
  logprobs[r] = logprob(logits[token]);
  const int begin = top_offsets[r], end = top_offsets[r + 1];
  likeliest(kernels, all, end - begin, top_ids.data() + begin, top_logprobs.data() + begin, lists);
  for (int j = begin; j < end; ++j) top_logprobs[j] = logprob(top_logprobs[j]);
}

void Sampler::end() {
  State& s = *state_;
  for (int r = 0; r < s.num_sampled; ++r) {
    const Row& row = s.rows[r];
    if (row.slot < 0) {
      Draw best;
      for (const Thread& thread : s.threads) {
        const Draw& other = thread.draws[r];
        if (other.best > best.best || (other.best == best.best && other.id < best.id)) best = other;
      }
      s.token_ids[r] = best.id < s.vocab ? best.id : 0;
    }
    s.accepted[r] = row.num_ahead == 0 || (s.accepted[r - 1] && s.plan.token_ids[s.flats[r]] == s.token_ids[r - 1]);
  }
}

}  // namespace inferloop
