#include "cpu/team.h"

#include <algorithm>
#include <cstdlib>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <sched.h>
#endif

namespace flashmask::cpu {

namespace {

// About 40 microseconds of one core with AVX-512: what makes starting a thread worth while.
constexpr double kMultiplyAddsPerThread = 4e6;

int openmp_threads() {
  if (const char* value = std::getenv("OMP_NUM_THREADS")) {
    const int threads = std::atoi(value);  // of a list for nested levels, the first
    if (threads > 0) return threads;
  }
#if defined(__linux__)
  // What a container or taskset leaves of the machine.
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) == 0) return CPU_COUNT(&allowed);
#endif
  return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

}  // namespace

int team_size(int32_t requested, double multiply_adds) {
  const double most = requested > 0 ? requested : openmp_threads();
  return static_cast<int>(std::max(1.0, std::min(most, multiply_adds / kMultiplyAddsPerThread)));
}

void Team::run(const std::function<void(int worker)>& body) {
  std::vector<std::thread> threads;
  threads.reserve(size_ - 1);
  {
    // The workers' first step needs the mutex, so that none counts a team that is still being formed.
    const std::lock_guard<std::mutex> forming(mutex_);
    for (int worker = 1; worker < size_; ++worker) {
      try {
        threads.emplace_back([this, &body, worker] {
          {
            const std::lock_guard<std::mutex> formed(mutex_);
          }
          body(worker);
        });
      } catch (const std::system_error&) {
        size_ = worker;
        break;
      }
    }
  }
  body(0);
  for (std::thread& thread : threads) thread.join();
}

void Team::wait_for_all() {
  std::unique_lock<std::mutex> lock(mutex_);
  if (++waiting_ < size_) {
    const int64_t round = round_;
    changed_.wait(lock, [&] { return round_ != round; });
    return;
  }
  waiting_ = 0;
  next_ = 0;
  ++round_;
  changed_.notify_all();
}

}  // namespace flashmask::cpu
