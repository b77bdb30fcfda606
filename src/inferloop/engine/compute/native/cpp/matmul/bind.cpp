// The products by themselves, for tests and benchmarks.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <nanobind/stl/optional.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>
#include <vector>

#include "../pool.h"
#include "levels.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace inferloop {
namespace {

template <class T, int Dims>
using Array = nb::ndarray<const T, nb::ndim<Dims>, nb::c_contig, nb::device::cpu>;

void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

/// "amx_played" besides the levels: that of amx with tiles played in software.
const MatmulKernels& kernels_named(const std::string& isa) {
#if defined(__x86_64__)
  if (isa == "amx_played" && best_isa() >= Isa::avx512_bf16) return played_amx_matmul();
#endif
  const auto level = isa_named(isa);
  if (!level || *level > best_isa()) throw std::invalid_argument("not a level of this machine: " + isa);
  return matmul_kernels(*level);
}

struct FreeAligned {
  void operator()(uint8_t* p) const { ::operator delete(p, std::align_val_t{64}); }
};
using Scratch = std::unique_ptr<uint8_t, FreeAligned>;

Scratch scratch_of(size_t bytes) {
  return Scratch(static_cast<uint8_t*>(::operator new(bytes + 64, std::align_val_t{64})));
}

Matrix matrix_of(const std::string& format, int n, int k, Array<uint8_t, 1> data, size_t tile_bytes, int bits,
                 int group, int offset, bool wide, bool has_min, const std::optional<Array<float, 1>>& bias) {
  Matrix w{.n = n, .k = k, .data = data.data(), .tile_bytes = tile_bytes, .bits = bits, .group = group,
           .offset = offset, .wide = wide, .has_min = has_min};
  require(format == "f32" || format == "bf16" || format == "group", "format is f32, bf16 or group");
  w.format = format == "f32" ? Format::f32 : format == "bf16" ? Format::bf16 : Format::group;
  require(n > 0 && k > 0 && k % kGroup == 0, "n and k are positive, k a multiple of 32");
  require(bits == 4 || bits == 8, "bits is 4 or 8");
  require(group == 16 || group == 32, "group is 16 or 32");
  const size_t record = kTile * (kGroup * bits / 8 + kGroup / group * (wide ? 4 : 2) * (has_min ? 2 : 1));
  const size_t least = w.format == Format::f32 ? k * kTile * 4ul : w.format == Format::bf16 ? k * kTile * 2ul
                                                                                            : k / kGroup * record;
  require(tile_bytes >= least && tile_bytes % 64 == 0, "tile_bytes is a multiple of 64 that holds a tile");
  require(data.shape(0) >= tile_bytes * w.num_tiles(), "data does not hold all tiles");
  require(reinterpret_cast<uintptr_t>(data.data()) % 64 == 0, "data begins at a multiple of 64 bytes");
  if (bias) {
    require(bias->shape(0) == static_cast<size_t>(n), "bias has n numbers");
    w.bias = bias->data();
  }
  return w;
}

/// Checks that rows in a form are [m][k] of this matrix.
template <class T>
Rows rows_of(const Matrix& w, Form form, const Array<T, 2>& x) {
  require(form == form_of(w.format) && x.shape(1) == static_cast<size_t>(w.k), "rows do not fit the matrix");
  return {.form = form, .m = static_cast<int>(x.shape(0)), .k = w.k};
}

nb::ndarray<nb::numpy, float> product(const std::string& isa, const Matrix& w, const Rows& x, int begin, int end) {
  const MatmulKernels& kernels = kernels_named(isa);
  require(0 <= begin && begin <= end && end <= w.num_tiles(), "no such tiles");
  const size_t m = x.m, columns = static_cast<size_t>(kTile) * (end - begin);
  float* out = new float[m * columns + 1];
  nb::capsule owner(out, [](void* p) noexcept { delete[] static_cast<float*>(p); });
  {
    nb::gil_scoped_release free;
    const Scratch scratch = scratch_of(kernels.scratch_bytes(w, x.m));
    kernels.multiply(w, x, begin, end, out, columns, scratch.get());
  }
  return nb::ndarray<nb::numpy, float>(out, {m, columns}, owner);
}

auto multiply_f32(const std::string& isa, const Matrix& w, Array<float, 2> x, int begin, int end) {
  Rows rows = rows_of(w, Form::f32, x);
  rows.f32 = const_cast<float*>(x.data());
  return product(isa, w, rows, begin, end);
}

auto multiply_bf16(const std::string& isa, const Matrix& w, Array<Bf16, 2> x, int begin, int end) {
  Rows rows = rows_of(w, Form::bf16, x);
  rows.bf16 = const_cast<Bf16*>(x.data());
  return product(isa, w, rows, begin, end);
}

Rows q8_rows(const Matrix& w, const Array<int8_t, 2>& codes, const Array<float, 2>& scales,
             const Array<int32_t, 2>& sums) {
  Rows rows = rows_of(w, Form::q8, codes);
  const size_t m = rows.m, k = rows.k;
  require(scales.shape(0) == m && scales.shape(1) == k / kGroup, "scales are [m, k / 32]");
  require(sums.shape(0) == m && sums.shape(1) == k / 16, "sums are [m, k / 16]");
  rows.codes = const_cast<int8_t*>(codes.data());
  rows.scales = const_cast<float*>(scales.data());
  rows.sums = const_cast<int32_t*>(sums.data());
  return rows;
}

auto multiply_q8(const std::string& isa, const Matrix& w, Array<int8_t, 2> codes, Array<float, 2> scales,
                 Array<int32_t, 2> sums, int begin, int end) {
  return product(isa, w, q8_rows(w, codes, scales, sums), begin, end);
}

/// Rows of any one kind, all alike.
struct SomeRows {
  std::vector<float> f32, scales;
  std::vector<Bf16> bf16;
  std::vector<int8_t> codes;
  std::vector<int32_t> sums;

  Rows of(const Matrix& w, int m) {
    const size_t count = static_cast<size_t>(m) * w.k;
    f32.assign(count, 0.5f);
    bf16.assign(count, 0x3f00);
    codes.assign(count, 3);
    scales.assign(count / kGroup, 0.01f);
    sums.assign(count / 16, 48);
    return {.form = form_of(w.format), .m = m, .k = w.k, .f32 = f32.data(), .bf16 = bf16.data(),
            .codes = codes.data(), .scales = scales.data(), .sums = sums.data()};
  }
};

std::vector<double> sweep(const std::string& isa, const std::vector<const Matrix*>& matrices, int m, int num_threads,
             int max_tiles, int repeats) {
  const MatmulKernels& kernels = kernels_named(isa);
  require(m > 0 && num_threads > 0 && max_tiles > 0 && repeats > 0, "counts are positive");
  nb::gil_scoped_release free;
  std::vector<SomeRows> memory(matrices.size());
  std::vector<Rows> rows;
  size_t scratch_bytes = 0, columns = 0;
  for (size_t i = 0; i < matrices.size(); ++i) {
    rows.push_back(memory[i].of(*matrices[i], m));
    scratch_bytes = std::max(scratch_bytes, kernels.scratch_bytes(*matrices[i], m));
    columns = std::max<size_t>(columns, matrices[i]->num_tiles() * kTile);
  }
  std::vector<float> out(m * columns);
  std::vector<Scratch> scratches;
  for (int i = 0; i < num_threads; ++i) scratches.push_back(scratch_of(scratch_bytes));
  std::vector<int> cpus;
  for (int i = 1; i < num_threads; ++i) cpus.push_back(i);
  Pool pool(num_threads, cpus);
  std::vector<double> seconds;
  for (int i = 0; i < repeats; ++i) {
    const auto start = std::chrono::steady_clock::now();
    pool.run([&](Team& team) {
      for (size_t j = 0; j < matrices.size(); ++j) {
        const Matrix& w = *matrices[j];
        const size_t width = w.num_tiles() * kTile;
        team.share(w.num_tiles(), max_tiles, [&](int begin, int end) {
          kernels.multiply(w, rows[j], begin, end, out.data() + begin * kTile, width, scratches[team.rank()].get());
        });
        team.barrier();
      }
    });
    seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return seconds;
}

auto row(const std::string& isa, const Matrix& w, int output) {
  require(0 <= output && output < w.n, "no such output");
  const size_t k = w.k;
  float* out = new float[k];
  nb::capsule owner(out, [](void* p) noexcept { delete[] static_cast<float*>(p); });
  kernels_named(isa).row(w, output, out);
  return nb::ndarray<nb::numpy, float>(out, {k}, owner);
}

}  // namespace

void bind_matmul(nb::module_& m) {
  nb::class_<Matrix>(m, "Matrix", "A weight matrix as types.h describes it; keeps the arrays that it reads.")
      .def("__init__",
           [](Matrix* self, const std::string& format, int n, int k, Array<uint8_t, 1> data, size_t tile_bytes,
              int bits, int group, int offset, bool wide, bool has_min, std::optional<Array<float, 1>> bias) {
             new (self)
                 Matrix(matrix_of(format, n, k, data, tile_bytes, bits, group, offset, wide, has_min, bias));
           },
           "format"_a, "n"_a, "k"_a, "data"_a, "tile_bytes"_a, "bits"_a = 8, "group"_a = kGroup, "offset"_a = 0,
           "wide"_a = false, "has_min"_a = false, "bias"_a = nb::none(), nb::keep_alive<1, 5>(),
           nb::keep_alive<1, 12>());
  m.def("multiply_f32", multiply_f32, "isa"_a, "w"_a, "x"_a, "tile_begin"_a, "tile_end"_a);
  m.def("multiply_bf16", multiply_bf16, "isa"_a, "w"_a, "x"_a, "tile_begin"_a, "tile_end"_a);
  m.def("multiply_q8", multiply_q8, "isa"_a, "w"_a, "codes"_a, "scales"_a, "sums"_a, "tile_begin"_a, "tile_end"_a,
        "[m, 16 * (tile_end - tile_begin)] fp32.");
  m.def("sweep", sweep, "isa"_a, "matrices"_a, "m"_a, "num_threads"_a, "max_tiles"_a, "repeats"_a,
        "Seconds that the products of all matrices with m rows take, one after the other and divided as in a step, "
        "`repeats` times. The caller should be pinned to CPU 0; its helpers are pinned to 1, 2, ...");
  m.def("agree", [](const std::string& some, const std::string& others) {
    return agree(kernels_named(some), kernels_named(others));
  }, "some"_a, "others"_a, "Whether two levels give the same results in the trial that amx must stand at first use.");
  m.def("row", row, "isa"_a, "w"_a, "output"_a, "The weights of one output.");
}

}  // namespace inferloop
