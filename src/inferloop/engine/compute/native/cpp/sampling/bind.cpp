// Sampling by itself, for tests and benchmarks: from logits that are there already.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "../bind_plan.h"
#include "../pool.h"
#include "kernels.h"
#include "sampling.h"

namespace nb = nanobind;

namespace inferloop {
namespace {

template <class T>
using Vector = nb::ndarray<nb::numpy, T, nb::ndim<1>>;
using Logits = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Mask = nb::ndarray<const uint32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Slices = std::vector<std::tuple<int, int, int>>;

template <class T>
Vector<T> vector_of(const T* from, size_t n) {
  T* copy = new T[n];
  std::copy_n(from, n, copy);
  return Vector<T>(copy, {n}, nb::capsule(copy, [](void* p) noexcept { delete[] static_cast<T*>(p); }));
}

Isa level_of(const std::string& name) {
  const std::optional<Isa> isa = isa_named(name);
  if (!isa || *isa > best_isa()) throw std::invalid_argument(name + " is no level of this machine");
  return *isa;
}

/// A sampler with its threads and logits to sample from.
class Bench {
 public:
  Bench(const std::string& isa, int vocab, int num_threads)
      : vocab_(vocab), ld_((vocab + kSpan - 1) / kSpan * kSpan), memory_(KvFormat::bf16, 1, 1, 1, kTile),
        pool_(num_threads), sampler_(level_of(isa), vocab, num_threads) {
    model_.vocab_size = vocab;
    model_.num_positions = std::numeric_limits<int>::max();
  }

  void load(const Logits& logits) {
    if (static_cast<int>(logits.shape(1)) != vocab_) throw std::invalid_argument("rows are as wide as the vocabulary");
    logits_.resize(logits.shape(0) * ld_ + kSpan);
    for (size_t r = 0; r < logits.shape(0); ++r)
      std::memcpy(row(static_cast<int>(r)), logits.data() + r * vocab_, vocab_ * sizeof(float));
  }

  nb::object run(nb::handle step_plan, const std::optional<Mask>& mask, const std::optional<Slices>& slices,
                 int rows_at_once, int ids_at_once) {
    plan_.read(step_plan, model_, memory_, 0);
    double consuming = 0, finishing = 0;
    {
      nb::gil_scoped_release release;
      sampler_.begin(plan_.input.plan, plan_.wishes);
      if (logits_.size() < sampler_.num_rows() * ld_) throw std::invalid_argument("fewer logits than rows");
      for (int b = 0; b < sampler_.num_batches(); ++b) {
        const auto start = std::chrono::steady_clock::now();
        consume(b, slices, rows_at_once, ids_at_once);
        if (mask && b == 0) sampler_.set_mask(mask->data(), static_cast<int>(mask->shape(1)));
        const auto between = std::chrono::steady_clock::now();
        if (sampler_.num_finishes(b) > 0)
          pool_.run([&](Team& team) {
            team.each(sampler_.num_finishes(b), [&](int i) { sampler_.finish(team.rank(), b, i); });
          });
        const auto stop = std::chrono::steady_clock::now();
        consuming += std::chrono::duration<double>(between - start).count();
        finishing += std::chrono::duration<double>(stop - between).count();
      }
      sampler_.end();
    }
    const size_t num_rows = sampler_.num_rows(), num_sampled = sampler_.num_sampled();
    const size_t num_top = sampler_.top_offsets()[num_rows];
    nb::dict found;
    found["token_ids"] = vector_of(sampler_.token_ids(), num_sampled);
    found["accepted"] = vector_of(sampler_.accepted(), num_sampled);
    found["logprobs"] = vector_of(sampler_.logprobs(), num_rows);
    found["ranks"] = vector_of(sampler_.ranks(), num_rows);
    found["top_offsets"] = vector_of(sampler_.top_offsets(), num_rows + 1);
    found["top_ids"] = vector_of(sampler_.top_ids(), num_top);
    found["top_logprobs"] = vector_of(sampler_.top_logprobs(), num_top);
    plan_.views.clear();
    found["seconds"] = nb::make_tuple(consuming, finishing);
    return found;
  }

 private:
  float* row(int r) {
    const size_t shift = (64 - reinterpret_cast<uintptr_t>(logits_.data()) % 64) % 64 / sizeof(float);
    return logits_.data() + shift + r * ld_;
  }

  void consume(int b, const std::optional<Slices>& slices, int rows_at_once, int ids_at_once) {
    const RowRange rows = sampler_.batch(b);
    const auto slice = [&](int thread, int id_begin, int id_end) {
      for (int r = rows.begin; r < rows.end; r += rows_at_once)
        sampler_.consume(thread, {r, std::min(r + rows_at_once, rows.end)}, id_begin, id_end, row(r) + id_begin, ld_);
    };
    if (slices) {
      for (const auto& [thread, id_begin, id_end] : *slices) slice(thread, id_begin, id_end);
      return;
    }
    pool_.run([&](Team& team) {
      team.each((vocab_ + ids_at_once - 1) / ids_at_once, [&](int i) {
        slice(team.rank(), i * ids_at_once, std::min((i + 1) * ids_at_once, vocab_));
      });
    });
  }

  const int vocab_;
  const size_t ld_;
  std::vector<float> logits_;
  Model model_;  // what a plan is checked against: any position, and one block
  KvMemory memory_;
  HeldPlan plan_;
  Pool pool_;
  Sampler sampler_;
};

Vector<float> gumbel(const std::string& isa, uint64_t seed, uint64_t position, int num_ids) {
  std::vector<float> out((num_ids + kSpan - 1) / kSpan * kSpan);
  sampling_kernels(level_of(isa)).gumbel(noise_key(seed, position), 0, static_cast<int>(out.size()), out.data());
  return vector_of(out.data(), num_ids);
}

}  // namespace

void bind_sampling(nb::module_& m) {
  nb::class_<Bench>(m, "Bench")
      .def(nb::init<const std::string&, int, int>(), nb::arg("isa"), nb::arg("vocab"), nb::arg("num_threads"))
      .def("load", &Bench::load, nb::arg("logits"), "Logits (rows, vocab): rows to sample, then rows of prompts.")
      .def("run", &Bench::run, nb::arg("plan"), nb::arg("mask") = nb::none(), nb::arg("slices") = nb::none(),
           nb::arg("rows_at_once") = 1 << 30, nb::arg("ids_at_once") = 256,
           "What Sampler finds for a StepPlan. `slices`: (thread, id_begin, id_end) in the order in which they are to "
           "be taken, by this thread in the others' names; otherwise all threads take them. `seconds`: two parts.");
  m.def("gumbel", &gumbel, nb::arg("isa"), nb::arg("seed"), nb::arg("position"), nb::arg("num_ids"));
}

}  // namespace inferloop
