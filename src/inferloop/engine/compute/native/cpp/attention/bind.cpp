// The kernels by themselves, for tests and benchmarks.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <vector>

#include "../pool.h"
#include "attention.h"

namespace nb = nanobind;

namespace inferloop {
namespace {

template <class T, size_t rank>
using Array = nb::ndarray<T, nb::ndim<rank>, nb::c_contig, nb::device::cpu>;
using Cache = Array<uint8_t, 4>;  // [layer][block][KV head][head_bytes]
using Heads = Array<float, 3>;    // [token][head][head_dim]
using Ints = Array<const int32_t, 1>;
using Table = Array<const int32_t, 2>;

Isa level_of(const std::string& name) {
  const auto isa = isa_named(name);
  if (!isa || *isa > best_isa()) throw std::invalid_argument("not a level of this machine: " + name);
  return *isa;
}

KvFormat format_of(const std::string& name) {
  if (name == "bf16") return KvFormat::bf16;
  if (name == "int8") return KvFormat::int8;
  throw std::invalid_argument("not a KV format: " + name);
}

void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

KvCache cache_of(const std::string& format, const Cache& array, size_t head_dim) {
  KvCache cache;
  cache.format = format_of(format);
  cache.num_layers = static_cast<int>(array.shape(0));
  cache.num_blocks = static_cast<int>(array.shape(1));
  cache.num_heads = static_cast<int>(array.shape(2));
  cache.head_dim = static_cast<int>(head_dim);
  cache.head_bytes = array.shape(3);
  cache.data = array.data();
  require(head_dim % 16 == 0, "head_dim is not a multiple of 16");
  require(cache.head_bytes == head_bytes(cache.format, cache.head_dim), "the cache has other head_bytes");
  require(reinterpret_cast<uintptr_t>(cache.data) % 64 == 0, "the cache is not 64-byte aligned");
  return cache;
}

void write(const std::string& isa, const std::string& format, Cache array, int layer, Ints table, int position,
           Heads key, Heads value) {
  const KvCache cache = cache_of(format, array, key.shape(2));
  const int num_heads = cache.num_heads, count = static_cast<int>(key.shape(0));
  require(static_cast<int>(key.shape(1)) == num_heads, "key has other heads than the cache");
  for (size_t i = 0; i < 3; ++i) require(value.shape(i) == key.shape(i), "key and value differ in shape");
  require(count == 0 || (position + count - 1) / kBlock < static_cast<int>(table.shape(0)), "the table is too short");
  for (int head = 0; head < num_heads; ++head) {
    const size_t column = static_cast<size_t>(head) * cache.head_dim;
    attention_kernels(level_of(isa)).write(cache, layer, table.data(), position, count, head, key.data() + column,
                                           value.data() + column, static_cast<size_t>(num_heads) * cache.head_dim);
  }
}

/// Layers 0 .. num_layers - 1 of a step, `num_times` over, with the same queries and the results of the last: seconds of
/// each layer, [num_times * num_layers].
std::vector<double> attend(const std::string& isa, int num_threads, const std::string& format, Cache array, int num_layers,
                Ints offsets, Ints first_positions, Table table, Heads q, Heads out, float scale, int window,
                float soft_cap, int num_times) {
  const KvCache cache = cache_of(format, array, q.shape(2));
  require(q.shape(1) % cache.num_heads == 0, "query heads are not a multiple of the cache's");
  for (size_t i = 0; i < 3; ++i) require(out.shape(i) == q.shape(i), "q and out differ in shape");
  Plan plan;
  plan.num_sequences = static_cast<int>(first_positions.shape(0));
  plan.num_tokens = static_cast<int>(q.shape(0));
  plan.table_width = static_cast<int>(table.shape(1));
  plan.offsets = offsets.data();
  plan.first_positions = first_positions.data();
  plan.block_table = table.data();
  const AttentionSpec spec{static_cast<int>(q.shape(1)), scale, window, soft_cap};
  const size_t ld = q.shape(1) * q.shape(2);
  Pool pool(num_threads);
  AttentionWork work(level_of(isa), plan, cache, spec, num_threads);
  const size_t scratch_bytes = (work.scratch_bytes() + 127) / 64 * 64;
  std::vector<uint8_t> memory(num_threads * scratch_bytes + 64);
  uint8_t* scratch = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64);
  // A layer ends when the first of the threads comes out of the barrier: the others may be kept from running.
  using Clock = std::chrono::steady_clock;
  std::vector<std::vector<Clock::time_point>> ends(num_threads);
  pool.run([&](Team& team) {
    std::vector<Clock::time_point>& mine = ends[team.rank()];
    mine.push_back(Clock::now());
    team.barrier();
    for (int i = 0; i < num_times * num_layers; ++i) {
      team.each(work.num_tasks(), [&](int task) {
        work.run(task, i % num_layers, q.data(), ld, out.data(), ld, scratch + team.rank() * scratch_bytes);
      });
      team.barrier();
      mine.push_back(Clock::now());
    }
  });
  std::vector<double> seconds;
  Clock::time_point begin;
  for (size_t i = 0; i < ends[0].size(); ++i) {
    Clock::time_point end = ends[0][i];
    for (const auto& of_thread : ends) end = std::min(end, of_thread[i]);
    if (i > 0) seconds.push_back(std::chrono::duration<double>(end - begin).count());
    begin = end;
  }
  return seconds;
}

size_t partial_bytes(int num_threads, int num_kv_heads, int group, int head_dim, Ints offsets, Ints first_positions,
                     int window) {
  KvCache cache;
  cache.num_heads = num_kv_heads;
  cache.head_dim = head_dim;
  Plan plan;
  plan.num_sequences = static_cast<int>(first_positions.shape(0));
  plan.offsets = offsets.data();
  plan.first_positions = first_positions.data();
  plan.num_tokens = plan.offsets[plan.num_sequences];
  const AttentionSpec spec{.num_heads = num_kv_heads * group, .window = window};
  return AttentionWork(Isa::scalar, plan, cache, spec, num_threads).partial_bytes();
}

}  // namespace

void bind_attention(nb::module_& m) {
  m.def("partial_bytes", &partial_bytes, nb::arg("num_threads"), nb::arg("num_kv_heads"), nb::arg("group"),
        nb::arg("head_dim"), nb::arg("offsets"), nb::arg("first_positions"), nb::arg("window"));
  m.def("head_bytes", [](const std::string& format, int head_dim) { return head_bytes(format_of(format), head_dim); },
        nb::arg("format"), nb::arg("head_dim"));
  m.attr("range") = kRange;
  m.def("write", &write, nb::arg("isa"), nb::arg("format"), nb::arg("cache"), nb::arg("layer"), nb::arg("table"),
        nb::arg("position"), nb::arg("key"), nb::arg("value"));
  m.def("attend", &attend, nb::arg("isa"), nb::arg("num_threads"), nb::arg("format"), nb::arg("cache"),
        nb::arg("num_layers"), nb::arg("offsets"), nb::arg("first_positions"), nb::arg("table"), nb::arg("q"),
        nb::arg("out"), nb::arg("scale"), nb::arg("window") = 0, nb::arg("soft_cap") = 0.0f, nb::arg("num_times") = 1);
}

}  // namespace inferloop
