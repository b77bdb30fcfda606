#include "step.h"

#include <algorithm>
#include <cmath>

#include "worker.h"

namespace inferloop {

Step::Step(const Model& model, KvMemory& memory, Isa isa, Pool& pool)
    : model_(model), memory_(memory), pool_(pool), isa_(isa), matmul_(matmul_kernels(isa)), rows_(row_kernels(isa)),
      attention_(attention_kernels(isa)), sampler_(isa, model.vocab_size, pool.size()), profiles_(pool.size()) {
  for (const Layer& layer : model.layers)
    if (std::find(windows_.begin(), windows_.end(), layer.window) == windows_.end()) windows_.push_back(layer.window);
}

bool Step::layers(const StepInput& input, const Wishes& wishes) {
  input_ = &input;
  given_up_ = false;
  find_tail(wishes);
  plan_attention();
  plan_adapters();
  sampler_.begin(input.plan, wishes);
  reserve();
  memory_.reserve_copies(input.num_copies, pool_.size());
  pool_.run([this](Team& team) { Worker(*this, team).layers(); });
  return !given_up_;
}

void Step::sample(const uint32_t* mask, int words) {
  if (sampler_.num_rows() > 0)
    pool_.run([&](Team& team) { Worker(*this, team).sample(mask, words); });
  sampler_.end();
}

void Step::pool_hidden(double* out) {
  pool_.run([&](Team& team) { Worker(*this, team).pool_hidden(out); });
}

void Step::save() {
  pool_.run([&](Team& team) { Worker(*this, team).save(); });
}

void Step::logits(int begin, int count, float* out) {
  pool_.run([&](Team& team) { Worker(*this, team).logits(begin, count, out); });
}

std::vector<Profile> Step::take_profiles() {
  std::vector<Profile> taken(pool_.size());
  taken.swap(profiles_);
  is_profiled_ = true;
  return taken;
}

void Step::find_tail(const Wishes& wishes) {
  const Plan& plan = input_->plan;
  std::vector<int32_t>& first = tail_.first_positions;  // at first: the first row that is asked for
  first.assign(plan.offsets + 1, plan.offsets + plan.num_sequences + 1);
  for (int i = 0; i < plan.num_sequences; ++i) {
    if (input_->wants_all) first[i] = plan.offsets[i];
    else if (wishes.sample_rows[i] >= 0) first[i] = wishes.sample_rows[i];
  }
  for (int i = 0; i < input_->num_pooled; ++i) first[input_->pooled[i]] = plan.offsets[input_->pooled[i]];
  for (int r = 0, i = 0; r < wishes.num_prompt_rows; ++r) {
    while (plan.offsets[i + 1] <= wishes.prompt_flat[r]) ++i;
    first[i] = std::min(first[i], wishes.prompt_flat[r]);
  }
  tail_.offsets.assign(1, 0);
  for (int i = 0; i < plan.num_sequences; ++i) {
    tail_.offsets.push_back(tail_.offsets[i] + plan.offsets[i + 1] - first[i]);
    first[i] += plan.first_positions[i] - plan.offsets[i];
  }
  tail_.plan = plan;
  tail_.plan.num_tokens = tail_.offsets.back();
  tail_.plan.offsets = tail_.offsets.data();
  tail_.plan.first_positions = tail_.first_positions.data();
}

int Step::row_of(int flat) const {
  const Plan& plan = input_->plan;
  if (tail_.num_rows() == plan.num_tokens) return flat;
  const int32_t* end = plan.offsets + plan.num_sequences + 1;
  const auto after = std::upper_bound(plan.offsets, end, flat) - plan.offsets;  // the sequence is the one before
  return tail_.offsets[after] - (plan.offsets[after] - flat);
}

void Step::plan_attention() {
  AttentionSpec spec;
  spec.num_heads = model_.num_heads;
  spec.scale = model_.attention_scale;
  spec.soft_cap = model_.attention_soft_cap;
  work_.clear();
  work_.reserve(windows_.size());
  for (const int window : windows_) {
    spec.window = window;
    work_.emplace_back(isa_, input_->plan, memory_.cache(), spec, pool_.size());
  }
  last_.clear();
  if (tail_.num_rows() > 0 && tail_.num_rows() < input_->plan.num_tokens) {
    spec.window = model_.layers.back().window;
    last_.emplace_back(isa_, tail_.plan, memory_.cache(), spec, pool_.size());
  }
}

void Step::set_adapter(int slot, const Adapter* adapter) {
  if (slot >= num_slots()) adapters_.resize(slot + 1);
  adapters_[slot] = adapter;
}

void Step::plan_adapters() {
  adapted_.clear();
  last_adapted_.clear();
  max_width_ = 0;
  num_shrunk_ = 0;
  if (input_->adapters == nullptr) return;
  const auto plan = [&](const Plan& rows, std::vector<AdaptedRows>& found) {
    const int most = std::clamp((rows.num_tokens + pool_.size() - 1) / pool_.size(), kFewRows, kRowBlock);
    for (int i = 0; i < rows.num_sequences; ++i) {
      const Adapter* adapter = input_->adapters[i] < 0 ? nullptr : adapters_[input_->adapters[i]];
      if (adapter == nullptr) continue;
      max_width_ = std::max(max_width_, adapter->max_width);
      for (int begin = rows.offsets[i]; begin < rows.offsets[i + 1];) {
        const bool goes_on = !found.empty() && found.back().adapter == adapter &&
                             found.back().begin + found.back().count == begin && found.back().count < most;
        if (!goes_on) found.push_back({adapter, begin, 0});
        const int count = std::min(rows.offsets[i + 1] - begin, most - found.back().count);
        found.back().count += count;
        begin += count;
      }
    }
  };
  plan(input_->plan, adapted_);
  plan(tail_.plan, last_adapted_);
}

void Step::reserve() {
  // More rows may go through the head than there are tokens: one can be sampled from and be scored, even repeatedly.
  const int wanted = std::max({kFewRows, input_->plan.num_tokens, sampler_.num_rows()});
  const int block = std::min(wanted, kRowBlock);
  size_t scratch = matmul_.scratch_bytes(model_.head, block);
  for (const Layer& layer : model_.layers)
    for (const Matrix* w : {&layer.qkv, &layer.out, &layer.gate_up, &layer.down})
      scratch = std::max(scratch, matmul_.scratch_bytes(*w, block));
  for (const AdaptedRows& rows : adapted_)
    for (const AdaptedLayer& layer : rows.adapter->layers)
      for (const LowRank* update : {&layer.qkv, &layer.out, &layer.gate_up, &layer.down})
        if (update->is_there()) scratch = std::max(scratch, matmul_.scratch_bytes(update->a, kRowBlock));
  const size_t shrunk = adapted_.empty() ? 0 : static_cast<size_t>(wanted) * max_width_;
  for (const std::vector<AttentionWork>* works : {&work_, &last_})
    for (const AttentionWork& work : *works) scratch = std::max(scratch, work.scratch_bytes());
  const bool has_experts = model_.num_experts > 0;
  for (const Layer& layer : model_.layers)
    if (layer.has_experts()) scratch = std::max(scratch, matmul_.scratch_bytes(layer.router, block));
  if (wanted <= num_rows_ && scratch <= scratch_bytes_ && shrunk <= shrunk_floats_) return;

  const int num_rows = std::max(wanted, num_rows_ + num_rows_ / 2);
  num_rows_ = 0;  // until there is memory for them
  scratch_bytes_ = std::max(scratch, scratch_bytes_);
  shrunk_floats_ = std::max(shrunk, shrunk_floats_);
  const size_t widest = std::max(model_.hidden_size, model_.q_size());
  // A block of rows by four tiles, or by a key and a value, is the least that a product is divided into.
  const size_t out_floats = std::max(kOutFloats, size_t{kRowBlock} * std::max(4 * kTile, 2 * model_.head_dim));
  benches_.resize(pool_.size());
  const auto carve = [&](uint8_t* base) {
    Carver carver(base);
    x_ = carver.take<float>(static_cast<size_t>(num_rows) * model_.hidden_size);
    q_ = carver.take<float>(static_cast<size_t>(num_rows) * model_.q_size());
    attended_ = carver.take<float>(static_cast<size_t>(num_rows) * model_.q_size());
    if (model_.has_output_norms) projected_ = carver.take<float>(static_cast<size_t>(num_rows) * model_.hidden_size);
    inputs_ = carver.take<uint8_t>(rows_bytes(num_rows, widest));
    units_ = carver.take<uint8_t>(rows_bytes(num_rows, model_.ffn_size));
    if (has_experts) experts_.carve(carver, model_, std::min(num_rows, kMostRouted), pool_.size());
    shrunk_ = carver.take<float>(shrunk_floats_);
    for (Bench& bench : benches_) {
      bench.inputs = carver.take<uint8_t>(rows_bytes(kFewRows, widest));
      bench.row = carver.take<float>(widest);
      bench.out = carver.take<float>(out_floats);
      bench.scratch = carver.take<uint8_t>(scratch_bytes_);
    }
    return carver.num_bytes();
  };
  pages_ = Pages();
  if (has_experts) routes_ = Routes(std::min(num_rows, kMostRouted), model_.num_experts, model_.num_per_token);
  pages_ = Pages(carve(nullptr));
  carve(pages_.data());
  num_rows_ = num_rows;
}

}  // namespace inferloop
