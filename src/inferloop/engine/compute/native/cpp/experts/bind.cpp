// The choice of experts by itself, for tests.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <tuple>
#include <vector>

#include "routes.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace inferloop {
namespace {

using Table = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Part = std::tuple<int, std::vector<int>, std::vector<float>>;

std::vector<Part> parts(Table probabilities, int per_token, bool renormalized, int most) {
  const int m = static_cast<int>(probabilities.shape(0)), n = static_cast<int>(probabilities.shape(1));
  if (m < 1 || per_token < 1 || per_token > n || most < 1) throw std::invalid_argument("no such choice");
  Routes routes(m, n, per_token);
  std::vector<Ranked> ranked(n);
  for (int r = 0; r < m; ++r)
    routes.choose(r, probabilities.data() + static_cast<size_t>(r) * n, renormalized, ranked.data());
  routes.group(m, most);
  std::vector<Part> found;
  for (const ExpertRows& part : routes.parts()) {
    const int32_t* rows = routes.rows() + part.begin;
    const float* counts = routes.counts() + part.begin;
    found.emplace_back(part.expert, std::vector<int>(rows, rows + part.count),
                       std::vector<float>(counts, counts + part.count));
  }
  return found;
}

}  // namespace

void bind_experts(nb::module_& m) {
  m.def("parts", parts, "probabilities"_a, "per_token"_a, "renormalized"_a, "most"_a,
        "(expert, its rows, what it counts for each), at most `most` rows at a time.");
}

}  // namespace inferloop
