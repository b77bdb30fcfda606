// The step, as native/runner.py calls it.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <optional>
#include <vector>

#include "bind_model.h"
#include "bind_plan.h"
#include "bind_unlocked.h"
#include "step.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace inferloop {
namespace {

Isa level_named(const std::string& name) {
  const auto isa = isa_named(name);
  if (!isa || *isa > best_isa()) throw std::invalid_argument("not a level of this machine: " + name);
  return *isa;
}

/// Model, KV memory, threads and the step that they take together. One step at a time, from one thread.
class Engine {
 public:
  Engine(nb::handle packed, nb::handle program, const std::string& isa, const std::string& kv, int num_blocks,
         int num_threads)
      : held_(packed, program),
        memory_(kv == "int8" ? KvFormat::int8 : KvFormat::bf16, static_cast<int>(held_.model.layers.size()), num_blocks,
                held_.model.num_kv_heads, held_.model.head_dim),
        pool_(num_threads), step_(held_.model, memory_, level_named(isa), pool_) {}

  size_t block_bytes() const { return memory_.block_bytes(); }

  bool layers(nb::handle plan, nb::handle give_up) {
    if (!pool_.can_run()) throw std::runtime_error("this process was forked off: its threads are in the other one");
    plan_.read(plan, held_.model, memory_, step_.num_slots());
    if (!give_up.is_none()) plan_.input.give_up = plan_.views.numbers<uint8_t>(give_up, "give_up", 1);
    const Unlocked free;
    return step_.layers(plan_.input, plan_.wishes);
  }

  int num_sampled() const { return plan_.num_sampled; }
  bool wants_logprobs() const { return plan_.wants_logprobs; }

  void sample(nb::handle mask) {
    if (mask.is_none() == plan_.wishes.masked) throw std::invalid_argument("a mask comes with a plan that has one");
    const uint32_t* words = nullptr;
    int num_words = 0;
    if (!mask.is_none()) {
      num_words = (held_.model.vocab_size + 31) / 32;
      words = plan_.views.numbers<uint32_t>(mask, "mask", size_t(plan_.input.plan.num_sequences) * num_words);
    }
    const Unlocked free;
    step_.sample(words, num_words);
  }

  /// Fills in the accepted tokens, and where those of each sequence begin; returns how many there are.
  int tokens(nb::handle offsets, nb::handle token_ids) {
    const int n = plan_.input.plan.num_sequences;
    auto* offset = plan_.views.writable<int32_t>(offsets, "offsets", n + 1);
    auto* token = plan_.views.writable<int32_t>(token_ids, "token_ids", plan_.num_sampled);
    const Sampler& sampler = step_.sampler();
    int count = 0, row = 0;
    offset[0] = 0;
    for (int i = 0; i < n; ++i) {
      for (int k = plan_.rows_of(i); k > 0; --k, ++row)
        if (sampler.accepted()[row]) token[count++] = sampler.token_ids()[row];
      offset[i + 1] = count;
    }
    return count;
  }

  /// Of every sequence the accepted rows, none if it did not ask; and the prompt rows. A row is (log-probability,
  /// ((id, log-probability), ...), rank).
  nb::tuple scores() const {
    nb::list sequences, prompt;
    int row = 0;
    for (int i = 0; i < plan_.input.plan.num_sequences; ++i) {
      nb::list found;
      for (int k = plan_.rows_of(i); k > 0; --k, ++row)
        if (plan_.wishes.num_logprobs[i] >= 0 && step_.sampler().accepted()[row]) found.append(score(row));
      sequences.append(found);
    }
    for (; row < step_.sampler().num_rows(); ++row) prompt.append(score(row));
    return nb::make_tuple(sequences, prompt);
  }

  /// The content of blocks[i] into rows[i].
  void save(nb::handle blocks, nb::list rows) {
    const size_t count = nb::len(rows);
    const int32_t* ids = plan_.views.numbers<int32_t>(blocks, "saves", count);
    for (size_t i = 0; i < count; ++i) {
      if (ids[i] < 0 || ids[i] >= memory_.cache().num_blocks) throw std::invalid_argument("a block beyond the cache");
      auto* bytes = plan_.views.writable<uint8_t>(rows[i], "saved", memory_.block_bytes());
      plan_.input.saves.push_back({ids[i], bytes});
    }
    const Unlocked free;
    step_.save();
  }

  /// The sums of the pooled sequences into `out`, [num_pooled][hidden_size].
  void pooled(nb::handle out) {
    const size_t size = static_cast<size_t>(plan_.input.num_pooled) * held_.model.hidden_size;
    auto* sums = plan_.views.writable<double>(out, "pooled", size);
    const Unlocked free;
    step_.pool_hidden(sums);
  }

  /// Logits of every token of a plan into `out`, [num_tokens][vocab_size].
  void logits(nb::handle plan, nb::handle out) {
    plan_.read(plan, held_.model, memory_, step_.num_slots());
    plan_.input.wants_all = true;
    const int num = plan_.input.plan.num_tokens;
    const size_t vocab = held_.model.vocab_size;
    auto* rows = plan_.views.writable<float>(out, "logits", num * vocab);
    const Unlocked free;
    step_.layers(plan_.input, plan_.wishes);
    step_.logits(0, num, rows);
  }

  /// What a slot holds from the next step on; None empties it.
  void set_adapter(int slot, nb::handle packed) {
    if (slot < 0 || slot >= kMaxSlots) throw std::invalid_argument("no such slot of adapters");
    std::unique_ptr<HeldAdapter> held;
    if (!packed.is_none()) held = std::make_unique<HeldAdapter>(packed, held_.model);
    if (static_cast<size_t>(slot) >= adapters_.size()) adapters_.resize(slot + 1);
    step_.set_adapter(slot, held == nullptr ? nullptr : &held->adapter);
    adapters_[slot] = std::move(held);
  }

  /// Let go of the plan's arrays.
  void forget() { plan_.views.clear(); }

  /// Ticks since the last call, by phase and thread: {phase: [(work, wait), ...]}. Begins with the first call.
  nb::dict profile() {
    nb::dict found;
    const std::vector<Profile> profiles = step_.take_profiles();
    for (int phase = 0; phase < kNumPhases; ++phase) {
      nb::list threads;
      for (const Profile& one : profiles) threads.append(nb::make_tuple(one.work[phase], one.wait[phase]));
      found[kPhaseNames[phase]] = threads;
    }
    return found;
  }

 private:
  nb::tuple score(int row) const {
    const Sampler& sampler = step_.sampler();
    nb::list top;
    for (int i = sampler.top_offsets()[row]; i < sampler.top_offsets()[row + 1]; ++i)
      top.append(nb::make_tuple(sampler.top_ids()[i], sampler.top_logprobs()[i]));
    return nb::make_tuple(sampler.logprobs()[row], nb::tuple(top), sampler.ranks()[row]);
  }

  static constexpr int kMaxSlots = 1 << 16;

  HeldModel held_;
  std::vector<std::unique_ptr<HeldAdapter>> adapters_;  // by slot
  KvMemory memory_;
  Pool pool_;
  Step step_;
  HeldPlan plan_;
};

}  // namespace

void bind_step(nb::module_& m) {
  nb::class_<Engine>(m, "Engine")
      .def(nb::init<nb::handle, nb::handle, const std::string&, const std::string&, int, int>(), "packed"_a, "program"_a,
           "isa"_a, "kv"_a, "num_blocks"_a, "num_threads"_a)
      .def_prop_ro("block_bytes", &Engine::block_bytes)
      .def_prop_ro("num_sampled", &Engine::num_sampled)
      .def_prop_ro("wants_logprobs", &Engine::wants_logprobs)
      .def("layers", &Engine::layers, "plan"_a, "give_up"_a.none())
      .def("sample", &Engine::sample, "mask"_a.none())
      .def("tokens", &Engine::tokens, "offsets"_a, "token_ids"_a)
      .def("scores", &Engine::scores)
      .def("save", &Engine::save, "blocks"_a, "rows"_a)
      .def("pooled", &Engine::pooled, "out"_a)
      .def("logits", &Engine::logits, "plan"_a, "out"_a)
      .def("set_adapter", &Engine::set_adapter, "slot"_a, "packed"_a.none())
      .def("forget", &Engine::forget)
      .def("profile", &Engine::profile);
  m.def("kv_block_bytes", [](const std::string& kv, int head_dim) {
    return head_bytes(kv == "int8" ? KvFormat::int8 : KvFormat::bf16, head_dim);
  }, "kv"_a, "head_dim"_a, "Bytes of 16 tokens of one KV head.");
  m.def("most_partial_bytes", &most_partial_bytes, "num_threads"_a, "group"_a, "head_dim"_a, "num_positions"_a,
        "The most that the attention of a layer takes for what is known of parts of contexts.");
  m.def("most_expert_bytes", [](int num_experts, int per_token, int hidden_size, int ffn_size, int num_threads) {
    Model model;
    model.num_experts = num_experts;
    model.num_per_token = per_token;
    model.hidden_size = hidden_size;
    model.expert_ffn_size = ffn_size;
    return most_expert_bytes(model, num_threads);
  }, "num_experts"_a, "per_token"_a, "hidden_size"_a, "ffn_size"_a, "num_threads"_a,
  "The most that a step takes between the products of experts.");
  m.def("ticks", &ticks, "What `Engine.profile` counts in.");
}

}  // namespace inferloop
