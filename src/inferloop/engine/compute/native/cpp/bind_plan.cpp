#include "bind_plan.h"

namespace nb = nanobind;

namespace inferloop {
namespace {

void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

SparseColumns sparse(nb::handle rows, Views& views, size_t n) {
  SparseColumns columns;
  columns.offsets = views.array<int32_t>(rows, "offsets", n + 1);
  const auto count = static_cast<size_t>(columns.offsets[n]);
  columns.ids = views.array<int32_t>(rows, "ids", count);
  columns.values = views.array<float>(rows, "values", count);
  return columns;
}

}  // namespace

void HeldPlan::read(nb::handle plan, const Model& model, const KvMemory& memory, int num_slots) {
  views.clear();
  input = StepInput{};
  wishes = Wishes{};
  const nb::object slots = plan.attr("slots"), tokens = plan.attr("token_ids"), tables = plan.attr("block_tables");
  const size_t n = length_of(slots), t = length_of(tokens);
  require(length_of(tables) == 1, "the native runner has one KV group");
  const nb::object table = tables[0];
  input.plan.num_sequences = static_cast<int>(n);
  input.plan.num_tokens = static_cast<int>(t);
  input.plan.table_width = nb::cast<int>(table.attr("shape")[1]);
  input.plan.offsets = views.array<int32_t>(plan, "offsets", n + 1);
  input.plan.token_ids = views.numbers<int32_t>(tokens, "token_ids", t);
  input.plan.first_positions = views.array<int32_t>(plan, "first_positions", n);
  input.plan.block_table = views.numbers<int32_t>(table, "block_tables", n * input.plan.table_width);
  wishes.sample_rows = views.array<int32_t>(plan, "sample_rows", n);
  wishes.num_drafts = views.array<int32_t>(plan, "num_drafts", n);
  read_sampling(plan.attr("sampling"), n);
  read_moves(plan, memory);
  if (const nb::object rows = plan.attr("prompt_rows"); !rows.is_none()) {
    const size_t count = length_of(rows.attr("flat"));
    wishes.num_prompt_rows = static_cast<int>(count);
    wishes.prompt_flat = views.array<int32_t>(rows, "flat", count);
    wishes.prompt_targets = views.array<int32_t>(rows, "targets", count);
    wishes.prompt_num_top = views.array<int32_t>(rows, "num_top", count);
  }
  if (const nb::object pooled = plan.attr("pooled"); !pooled.is_none()) {
    input.num_pooled = static_cast<int>(length_of(pooled));
    input.pooled = views.numbers<int32_t>(pooled, "pooled", input.num_pooled);
  }
  if (const nb::object adapters = plan.attr("adapters"); !adapters.is_none())
    input.adapters = views.numbers<int32_t>(adapters, "adapters", n);
  check(model, memory, num_slots);
  num_sampled = 0;
  wants_logprobs = false;
  for (int i = 0; i < input.plan.num_sequences; ++i) {
    num_sampled += rows_of(i);
    wants_logprobs |= wishes.num_logprobs[i] >= 0;
  }
}

void HeldPlan::read_sampling(nb::handle columns, size_t n) {
  wishes.temperature = views.array<float>(columns, "temperature", n);
  wishes.top_p = views.array<float>(columns, "top_p", n);
  wishes.top_k = views.array<int32_t>(columns, "top_k", n);
  wishes.min_p = views.array<float>(columns, "min_p", n);
  wishes.seed = views.array<uint64_t>(columns, "seed", n);
  wishes.num_logprobs = views.array<int32_t>(columns, "num_logprobs", n);
  if (const nb::object bias = columns.attr("bias"); !bias.is_none()) wishes.bias = sparse(bias, views, n);
  if (const nb::object penalties = columns.attr("penalties"); !penalties.is_none()) {
    wishes.penalties = sparse(penalties, views, n);
    wishes.presence = views.array<float>(columns, "presence", n);
    wishes.frequency = views.array<float>(columns, "frequency", n);
    wishes.repetition = views.array<float>(columns, "repetition", n);
  }
  wishes.masked = !columns.attr("mask").is_none();
}

void HeldPlan::read_moves(nb::handle plan, const KvMemory& memory) {
  if (const nb::object copies = plan.attr("copies"); length_of(copies) > 0) {
    input.num_copies = static_cast<int>(length_of(copies[0]));
    const int32_t* pairs = views.numbers<int32_t>(copies[0], "copies", size_t{2} * input.num_copies);
    input.copies = reinterpret_cast<const int32_t(*)[2]>(pairs);
  }
  if (const nb::object loads = plan.attr("loads"); !loads.is_none()) {
    const nb::object data = loads.attr("data"), blocks = loads.attr("blocks")[0];
    const size_t count = length_of(data);
    const int32_t* ids = views.numbers<int32_t>(blocks, "loads", count);
    for (size_t i = 0; i < count; ++i) {
      const uint8_t* bytes = views.numbers<uint8_t>(data[i], "the data of a load", memory.block_bytes());
      input.loads.push_back({ids[i], const_cast<uint8_t*>(bytes)});  // only read from
    }
  }
}

void HeldPlan::check(const Model& model, const KvMemory& memory, int num_slots) const {
  const Plan& plan = input.plan;
  const int num_blocks = memory.cache().num_blocks;
  const auto is_block = [&](int block) { return 0 <= block && block < num_blocks; };
  require(plan.offsets[0] == 0 && plan.offsets[plan.num_sequences] == plan.num_tokens, "offsets do not fit the tokens");
  for (int i = 0; i < plan.num_sequences; ++i) {
    const int64_t num = int64_t{plan.offsets[i + 1]} - plan.offsets[i], end = plan.first_positions[i] + num;
    require(num >= 0 && plan.first_positions[i] >= 0 && end <= model.num_positions, "a position beyond the context");
    require(end <= int64_t{plan.table_width} * kBlock, "a token without a block");
    const int32_t* table = plan.block_table + static_cast<size_t>(i) * plan.table_width;
    for (int64_t b = 0; b < (end + kBlock - 1) / kBlock; ++b) require(is_block(table[b]), "a block beyond the cache");
  }
  for (int i = 0; input.adapters != nullptr && i < plan.num_sequences; ++i)
    require(input.adapters[i] < num_slots, "an adapter beyond the slots");
  for (int t = 0; t < plan.num_tokens; ++t)
    require(0 <= plan.token_ids[t] && plan.token_ids[t] < model.vocab_size, "a token beyond the vocabulary");
  for (int i = 0; i < input.num_copies; ++i)
    require(is_block(input.copies[i][0]) && is_block(input.copies[i][1]), "a block beyond the cache");
  for (const BlockAt& load : input.loads) require(is_block(load.block), "a block beyond the cache");
  check_wishes(model.vocab_size);
}

void HeldPlan::check_wishes(int vocab_size) const {
  const Plan& plan = input.plan;
  const int n = plan.num_sequences;
  for (int i = 0; i < n; ++i) {
    const int row = wishes.sample_rows[i], drafts = wishes.num_drafts[i];
    const bool within = plan.offsets[i] <= row && drafts >= 0 && drafts < plan.offsets[i + 1] - row;
    require(row < 0 || within, "a row to sample that is not of its sequence");
  }
  for (int r = 0, i = 0; r < wishes.num_prompt_rows; ++r) {
    while (i < n && plan.offsets[i + 1] <= wishes.prompt_flat[r]) ++i;
    require(i < n && plan.offsets[i] <= wishes.prompt_flat[r], "rows of prompts beyond the tokens or out of order");
    require(0 <= wishes.prompt_targets[r] && wishes.prompt_targets[r] < vocab_size, "a target beyond the vocabulary");
  }
  for (int i = 0; i < input.num_pooled; ++i)
    require((i == 0 ? -1 : input.pooled[i - 1]) < input.pooled[i] && input.pooled[i] < n, "pooled sequences in order");
  for (const SparseColumns* columns : {&wishes.bias, &wishes.penalties}) {
    if (columns->offsets == nullptr) continue;
    for (int i = 0; i < n; ++i) require(columns->offsets[i] <= columns->offsets[i + 1], "offsets that fall");
    require(columns->offsets[0] == 0, "offsets that begin at 0");
    for (int j = 0; j < columns->offsets[n]; ++j)
      require(0 <= columns->ids[j] && columns->ids[j] < vocab_size, "a token beyond the vocabulary");
  }
}

}  // namespace inferloop
