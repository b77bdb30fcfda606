// The row kernels by themselves, for tests and benchmarks.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <stdexcept>

#include "rows.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace inferloop {
namespace {

using Vector = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

const RowKernels& kernels_named(const std::string& isa) {
  const auto level = isa_named(isa);
  if (!level || *level > best_isa()) throw std::invalid_argument("not a level of this machine: " + isa);
  return row_kernels(*level);
}

void require(bool fits) {
  if (!fits) throw std::invalid_argument("the shapes do not fit each other");
}

/// A new array that owns its memory.
template <class T>
nb::ndarray<nb::numpy, T> array_of(size_t rows, size_t columns) {
  T* data = new T[rows * columns + 1];
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return nb::ndarray<nb::numpy, T>(data, {rows, columns}, owner);
}

nb::object encode(const std::string& isa, Table x, const std::string& form) {
  const RowKernels& kernels = kernels_named(isa);
  const size_t m = x.shape(0), k = x.shape(1);
  require(k % kGroup == 0);
  Rows rows{.m = static_cast<int>(m), .k = static_cast<int>(k)};
  const auto fill = [&] {
    nb::gil_scoped_release free;
    for (size_t r = 0; r < m; ++r) kernels.encode(x.data() + r * k, 0, rows.k, rows, static_cast<int>(r));
  };
  if (form == "q8") {
    auto codes = array_of<int8_t>(m, k);
    auto scales = array_of<float>(m, k / kGroup);
    auto sums = array_of<int32_t>(m, k / 16);
    rows.form = Form::q8;
    rows.codes = codes.data();
    rows.scales = scales.data();
    rows.sums = sums.data();
    fill();
    return nb::make_tuple(codes, scales, sums);
  }
  if (form == "bf16") {
    auto numbers = array_of<Bf16>(m, k);
    rows.form = Form::bf16;
    rows.bf16 = numbers.data();
    fill();
    return nb::cast(numbers);
  }
  if (form != "f32") throw std::invalid_argument("form is f32, bf16 or q8, not " + form);
  auto numbers = array_of<float>(m, k);
  rows.f32 = numbers.data();
  fill();
  return nb::cast(numbers);
}

auto norm(const std::string& isa, Table x, Vector gain, float eps) {
  const RowKernels& kernels = kernels_named(isa);
  const size_t m = x.shape(0), k = x.shape(1);
  require(gain.shape(0) == k && k % 16 == 0);
  auto out = array_of<float>(m, k);
  {
    nb::gil_scoped_release free;
    for (size_t r = 0; r < m; ++r)
      kernels.norm(x.data() + r * k, gain.data(), eps, static_cast<int>(k), out.data() + r * k);
  }
  return out;
}

auto gated(const std::string& isa, const std::string& activation, Vector gate, Vector up) {
  const RowKernels& kernels = kernels_named(isa);
  const size_t n = gate.shape(0);
  require(up.shape(0) == n && n % 16 == 0);
  auto out = array_of<float>(1, n);
  const Activation act = activation == "silu" ? Activation::silu : Activation::gelu_tanh;
  {
    nb::gil_scoped_release free;
    kernels.gated(act, gate.data(), up.data(), static_cast<int>(n), out.data());
  }
  return out;
}

auto soften(const std::string& isa, Vector x, float cap) {
  const RowKernels& kernels = kernels_named(isa);
  require(x.shape(0) % 16 == 0);
  auto out = array_of<float>(1, x.shape(0));
  std::copy_n(x.data(), x.shape(0), out.data());
  kernels.soften(out.data(), cap, static_cast<int>(x.shape(0)));
  return out;
}

auto rotate(const std::string& isa, Vector head, Vector cos, Vector sin) {
  const RowKernels& kernels = kernels_named(isa);
  const size_t half = cos.shape(0);
  require(sin.shape(0) == half && head.shape(0) >= 2 * half);
  auto out = array_of<float>(1, head.shape(0));
  std::copy_n(head.data(), head.shape(0), out.data());
  kernels.rotate(out.data(), cos.data(), sin.data(), static_cast<int>(2 * half));
  return out;
}

auto add(const std::string& isa, Vector x, Vector y) {
  const RowKernels& kernels = kernels_named(isa);
  require(x.shape(0) == y.shape(0));
  auto out = array_of<float>(1, x.shape(0));
  std::copy_n(x.data(), x.shape(0), out.data());
  kernels.add(out.data(), y.data(), static_cast<int>(x.shape(0)));
  return out;
}

auto add_scaled(const std::string& isa, Vector x, Vector y, float scale) {
  const RowKernels& kernels = kernels_named(isa);
  require(x.shape(0) == y.shape(0) && x.shape(0) % 16 == 0);
  auto out = array_of<float>(1, x.shape(0));
  std::copy_n(x.data(), x.shape(0), out.data());
  kernels.add_scaled(out.data(), y.data(), scale, static_cast<int>(x.shape(0)));
  return out;
}

auto softmax(const std::string& isa, Vector x) {
  const RowKernels& kernels = kernels_named(isa);
  require(x.shape(0) % 16 == 0 && x.shape(0) > 0);
  auto out = array_of<float>(1, x.shape(0));
  std::copy_n(x.data(), x.shape(0), out.data());
  kernels.softmax(out.data(), static_cast<int>(x.shape(0)));
  return out;
}

}  // namespace

void bind_rows(nb::module_& m) {
  m.def("encode", encode, "isa"_a, "x"_a, "form"_a,
        "Rows [m, k] as q8 (codes, scales, sums), as bf16 (their bits) or as f32.");
  m.def("norm", norm, "isa"_a, "x"_a, "gain"_a, "eps"_a);
  m.def("gated", gated, "isa"_a, "activation"_a, "gate"_a, "up"_a, "As [1, n]; activation is silu or gelu_tanh.");
  m.def("soften", soften, "isa"_a, "x"_a, "cap"_a, "cap * tanh(x / cap), as [1, n].");
  m.def("rotate", rotate, "isa"_a, "head"_a, "cos"_a, "sin"_a, "A rotated copy, as [1, n].");
  m.def("add", add, "isa"_a, "x"_a, "y"_a, "x + y, as [1, n].");
  m.def("add_scaled", add_scaled, "isa"_a, "x"_a, "y"_a, "scale"_a, "x + scale * y, as [1, n].");
  m.def("softmax", softmax, "isa"_a, "x"_a, "As [1, n].");
}

}  // namespace inferloop
