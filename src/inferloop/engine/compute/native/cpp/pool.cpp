#include "pool.h"

#include <unistd.h>

#include <thread>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace inferloop {
namespace {

// Pauses of 20 to 50 ns, before a thread sleeps. Within a step longer than its parts are uneven; between steps longer
// than the host takes to plan the next one, because waking a thread takes as long as a tenth of a small step.
constexpr int kSpinsWithin = 2000;
constexpr int kSpinsBetween = 10000;

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// A number that only grows, and that can be waited for.
class Signal {
 public:
  uint32_t value() const { return value_.load(std::memory_order_acquire); }

  void advance() {
    value_.fetch_add(1, std::memory_order_seq_cst);
    if (num_asleep_.load(std::memory_order_seq_cst) > 0) value_.notify_all();
  }

  void wait_beyond(uint32_t seen, int num_spins) {
    for (int i = 0; i < num_spins; ++i) {
      if (value() != seen) return;
      relax();
    }
    num_asleep_.fetch_add(1, std::memory_order_seq_cst);
    value_.wait(seen, std::memory_order_seq_cst);
    num_asleep_.fetch_sub(1, std::memory_order_seq_cst);
  }

 private:
  alignas(64) std::atomic<uint32_t> value_{0};
  std::atomic<int> num_asleep_{0};
};

void pin([[maybe_unused]] std::thread& thread, [[maybe_unused]] int cpu) {
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  pthread_setaffinity_np(thread.native_handle(), sizeof set, &set);  // a wish: where it cannot be, it is not
#endif
}

}  // namespace

struct Pool::Shared {
  int num_threads = 1;
  const pid_t process = getpid();
  std::vector<std::thread> helpers;
  std::unique_ptr<Seat[]> seats;
  const std::function<void(Team&)>* work = nullptr;
  std::atomic<bool> ending{false};
  Signal started;
  Signal met;
  alignas(64) std::atomic<int> num_arrived{0};
};

Pool::Pool(int num_threads, const std::vector<int>& cpus) : shared_(std::make_unique<Shared>()) {
  shared_->num_threads = num_threads;
  shared_->seats = std::make_unique<Seat[]>(num_threads);
  const auto help = [this](int rank) noexcept {
    Team team(*this, shared_->seats.get(), rank, shared_->num_threads);
    for (uint32_t round = 0;; ++round) {
      shared_->started.wait_beyond(round, kSpinsBetween);
      if (shared_->ending.load(std::memory_order_acquire)) return;
      (*shared_->work)(team);
      team.barrier();
    }
  };
  try {
    for (int rank = 1; rank < num_threads; ++rank) {
      shared_->helpers.emplace_back(help, rank);
      if (static_cast<size_t>(rank) <= cpus.size()) pin(shared_->helpers.back(), cpus[rank - 1]);
    }
  } catch (...) {
    stop();  // those that were begun
    throw;
  }
}

Pool::~Pool() { stop(); }

void Pool::stop() {
  if (!can_run()) {  // nobody there to join
    for (std::thread& helper : shared_->helpers) helper.detach();
    return;
  }
  shared_->ending.store(true, std::memory_order_release);
  shared_->started.advance();
  for (std::thread& helper : shared_->helpers) helper.join();
}

int Pool::size() const { return shared_->num_threads; }

bool Pool::can_run() const { return shared_->helpers.empty() || shared_->process == getpid(); }

void Pool::run(const std::function<void(Team&)>& work) noexcept {
  Team team(*this, shared_->seats.get(), 0, shared_->num_threads);
  shared_->work = &work;
  if (shared_->num_threads > 1) shared_->started.advance();
  work(team);
  team.barrier();
}

void Team::barrier() {
  Seat& seat = seats_[rank_];
  // The other counter is the next to be used: nobody has looked at it since the last barrier.
  seat.num_taken[seat.parity ^ 1].store(0, std::memory_order_relaxed);
  seat.parity ^= 1;
  if (size_ == 1) return;
  Pool::Shared& shared = *pool_.shared_;
  const uint32_t seen = shared.met.value();
  if (shared.num_arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
    shared.num_arrived.store(0, std::memory_order_relaxed);
    shared.met.advance();
  } else {
    shared.met.wait_beyond(seen, kSpinsWithin);
  }
}

}  // namespace inferloop
