#include "measure.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <new>

namespace inferloop {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kStep = 512;  // what the kernels read at a time

/// The best way to read that this level or one below it has.
auto reader(Isa isa) {
  for (int level = static_cast<int>(isa); level > 0; --level)
    if (auto read = hardware_kernels(static_cast<Isa>(level)).read) return read;
  return hardware_kernels(Isa::scalar).read;
}

/// From when all are ready until all are done.
template <class Work>
double seconds(Pool& pool, Work&& work) {
  using Clock = std::chrono::steady_clock;
  Clock::time_point begin, end;
  pool.run([&](Team& team) {
    team.barrier();
    if (team.rank() == 0) begin = Clock::now();
    work(team);
    team.barrier();
    if (team.rank() == 0) end = Clock::now();
  });
  return std::chrono::duration<double>(end - begin).count();
}

}  // namespace

Arena::Arena(size_t num_bytes) : num_mapped_(num_bytes + kHugePage), num_bytes_(num_bytes) {
  void* mapped = mmap(nullptr, num_mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  mapped_ = static_cast<uint8_t*>(mapped);
  begin_ = mapped_ + (kHugePage - reinterpret_cast<uintptr_t>(mapped_) % kHugePage) % kHugePage;
#if defined(MADV_HUGEPAGE)
  madvise(begin_, num_bytes_, MADV_HUGEPAGE);  // a wish
#endif
  std::memset(begin_, 1, num_bytes_);  // pages that nobody wrote are one page of zeros
}

Arena::~Arena() { munmap(mapped_, num_mapped_); }

double read_seconds(Pool& pool, const Arena& arena, size_t num_bytes, int num_passes, Isa isa) {
  const auto read = reader(isa);
  const size_t part = std::min(num_bytes, arena.num_bytes()) / pool.size() / kStep * kStep;
  return seconds(pool, [&](Team& team) {
    volatile uint64_t seen = 0;
    for (int i = 0; i < num_passes; ++i) seen = seen | read(arena.begin() + team.rank() * part, part);
  });
}

double multiply_seconds(Pool& pool, const Multiplier& multiplier, int64_t num_rounds) {
  return seconds(pool, [&](Team&) { multiplier.run(num_rounds); });
}

}  // namespace inferloop
