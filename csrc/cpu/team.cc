#include "cpu/team.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <stdexcept>
#include <string>
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

// More are surely a mistake.
constexpr int kMostThreads = 4096;

// FLASHMASK_NUM_THREADS, 0 where it is not set.
int own_threads() {
  const char* value = std::getenv("FLASHMASK_NUM_THREADS");
  if (!value || !*value) return 0;
  char* end = nullptr;
  const long threads = std::strtol(value, &end, 10);
  if (*end || threads < 1 || threads > kMostThreads) {
    throw std::invalid_argument("FLASHMASK_NUM_THREADS: expected an integer from 1 to " +
                                std::to_string(kMostThreads) + ", got " + value);
  }
  return static_cast<int>(threads);
}

// Whether OMP_NUM_THREADS was there before any code of this process could set it.
bool started_with_openmp_threads() {
#if defined(__linux__)
  std::ifstream environment("/proc/self/environ", std::ios::binary);
  for (std::string entry; std::getline(environment, entry, '\0');) {
    if (entry.rfind("OMP_NUM_THREADS=", 0) == 0) return true;
  }
#endif
  return false;
}

// OMP_NUM_THREADS, 0 where nobody asked for it: importing Paddle sets it to 1 where it is not set, for the
// sake of its own BLAS.
int openmp_threads() {
  static const bool started_with = started_with_openmp_threads();
  const char* value = std::getenv("OMP_NUM_THREADS");
  const int threads = value ? std::atoi(value) : 0;  // of a list for nested levels, the first
  return threads > 1 || started_with ? std::clamp(threads, 0, kMostThreads) : 0;
}

int processors() {
#if defined(__linux__)
  // What a container or taskset leaves of the machine.
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) == 0) return CPU_COUNT(&allowed);
#endif
  return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

}  // namespace

int default_threads() {
  if (const int threads = own_threads()) return threads;
  if (const int threads = openmp_threads()) return threads;
  return processors();
}

int team_size(int32_t requested, double multiply_adds) {
  const double most = requested > 0 ? requested : default_threads();
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
