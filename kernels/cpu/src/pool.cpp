#include "pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstdlib>
#include <new>
#include <system_error>
#include <thread>

#include "api.h"

namespace legato {
namespace {

// Long enough to bridge the gap between two operations of a decoder layer, short enough that an
// idle engine leaves the cores to other processes.
constexpr auto kSpinTime = std::chrono::microseconds(40);
constexpr int kPausesPerClockRead = 32;
// Tasks take a fraction of this: a worker that is late by more has been descheduled, and a caller
// that goes on spinning keeps the worker from being migrated to this core.
constexpr auto kPatience = std::chrono::milliseconds(1);

thread_local int t_thread = -1;  // this thread's index while it runs a task, else -1

inline void pause() { __builtin_ia32_pause(); }

inline uint32_t unclaimed(uint64_t claims) { return static_cast<uint32_t>(claims); }

int default_size() {
  if (const char* text = std::getenv("LEGATO_CPU_THREADS")) {
    const int asked = std::atoi(text);
    if (asked > 0) return std::min(asked, Pool::kMaxThreads);
  }
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  if (sched_getaffinity(0, sizeof(cpus), &cpus) != 0) return 1;
  return std::clamp(CPU_COUNT(&cpus), 1, Pool::kMaxThreads);
}

// Spins until `ready()`, at most kSpinTime.
template <class Ready>
bool spin(Ready&& ready) {
  const auto deadline = std::chrono::steady_clock::now() + kSpinTime;
  do {
    for (int i = 0; i < kPausesPerClockRead; ++i) {
      if (ready()) return true;
      pause();
    }
  } while (std::chrono::steady_clock::now() < deadline);
  return false;
}

}  // namespace

Pool& Pool::get() {
  static Pool* pool = [] {
    Pool* created = new Pool();
    pthread_atfork(nullptr, nullptr, &Pool::after_fork_in_child);
    return created;
  }();
  return *pool;
}

Pool::Pool() : size_(default_size()) {}

// The child has no workers, and the mutex may have been held: the pool is reinitialized.
void Pool::after_fork_in_child() {
  Pool& pool = get();
  const int size = pool.size();
  new (&pool) Pool();
  pool.size_ = size;
  t_thread = -1;
}

void Pool::resize(int num_threads) {
  std::lock_guard<std::mutex> lock(callers_);
  num_threads = std::clamp(num_threads, 1, kMaxThreads);
  if (num_threads == size()) return;
  ++generation_;
  wake_workers();
  // A worker that has not seen this yet could claim a task of the next job under its old index.
  while (num_workers_.load(std::memory_order_acquire) > 0) sched_yield();
  size_ = num_threads;
  started_ = false;
}

void Pool::start_workers() {
  started_ = true;
  const uint32_t generation = generation_.load();
  for (int thread = 1; thread < size(); ++thread) {
    ++num_workers_;
    try {
      std::thread([this, thread, generation] { work(thread, generation); }).detach();
    } catch (const std::system_error&) {
      --num_workers_;
      size_ = thread;  // no more threads can be created: continue with these
    }
  }
}

void Pool::work(int thread, uint32_t generation) {
  while (generation_.load(std::memory_order_acquire) == generation) {
    const bool work_seen = spin([&] { return unclaimed(claims_.load()) != 0; });
    if (!work_seen) {
      sleep_until_work(generation);
      continue;
    }
    leave_callers_core();
    while (generation_.load(std::memory_order_acquire) == generation && claim_and_run(thread)) {
    }
  }
  num_workers_.fetch_sub(1, std::memory_order_release);
}

bool Pool::claim_and_run(int thread) {
  uint64_t claims = claims_.load(std::memory_order_acquire);
  do {
    if (unclaimed(claims) == 0) return false;
  } while (!claims_.compare_exchange_weak(claims, claims - 1, std::memory_order_acq_rel,
                                          std::memory_order_acquire));
  const int64_t task = num_tasks_ - unclaimed(claims);
  t_thread = thread;
  call_(context_, task, thread);
  t_thread = -1;
  // Read first: once this task is counted, the field may be the next job's.
  const uint32_t num_tasks = static_cast<uint32_t>(num_tasks_);
  // Either the caller sees this count before it sleeps, or its intent to sleep is seen here.
  if (done_.fetch_add(1) + 1 == num_tasks && caller_sleeps_.load()) {
    syscall(SYS_futex, &done_, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
  }
  return true;
}

void Pool::sleep_until_work(uint32_t generation) {
  const uint32_t seen = wakes_.load();
  sleepers_.fetch_add(1);
  // Either this load sees the new job, or its publisher sees this sleeper and wakes it.
  if (unclaimed(claims_.load()) == 0 && generation_.load() == generation) {
    syscall(SYS_futex, &wakes_, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
  }
  sleepers_.fetch_sub(1);
}

void Pool::wake_workers() {
  wakes_.fetch_add(1);
  syscall(SYS_futex, &wakes_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

void Pool::dispatch(int64_t num_tasks, Call call, void* context) {
  if (num_tasks <= 0) return;
  if (t_thread >= 0) {  // inside a task
    const int thread = t_thread;
    for (int64_t task = 0; task < num_tasks; ++task) call(context, task, thread);
    return;
  }
  std::lock_guard<std::mutex> lock(callers_);
  if (num_tasks == 1 || size() == 1) {
    t_thread = 0;
    for (int64_t task = 0; task < num_tasks; ++task) call(context, task, 0);
    t_thread = -1;
    return;
  }
  if (!started_) start_workers();
  caller_cpu_.store(sched_getcpu(), std::memory_order_relaxed);
  call_ = call;
  context_ = context;
  num_tasks_ = num_tasks;
  done_.store(0, std::memory_order_relaxed);
  const uint64_t epoch = (claims_.load(std::memory_order_relaxed) >> 32) + 1;
  claims_.store((epoch << 32) | static_cast<uint32_t>(num_tasks));  // sequentially consistent
  if (sleepers_.load() > 0) wake_workers();
  while (claim_and_run(0)) {
  }
  await_done(static_cast<uint32_t>(num_tasks));
}

void Pool::await_done(uint32_t num_tasks) {
  const auto finished = [&] { return done_.load(std::memory_order_acquire) == num_tasks; };
  const auto begin = std::chrono::steady_clock::now();
  while (!spin(finished)) {
    if (std::chrono::steady_clock::now() - begin < kPatience) {
      sched_yield();
      continue;
    }
    caller_sleeps_.store(true);
    const uint32_t done = done_.load();
    if (done != num_tasks) {
      syscall(SYS_futex, &done_, FUTEX_WAIT_PRIVATE, done, nullptr, nullptr, 0);
    }
    caller_sleeps_.store(false);
  }
}

// A burst of wake-ups elsewhere can leave a worker on its caller's core, where Linux alternates the
// two for hundreds of milliseconds, because neither sleeps long enough to be migrated: steps then
// take twice as long.
void Pool::leave_callers_core() {
  const int cpu = sched_getcpu();
  if (cpu != caller_cpu_.load(std::memory_order_relaxed)) return;
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return;
  cpu_set_t others = allowed;
  CPU_CLR(cpu, &others);
  if (CPU_COUNT(&others) == 0) return;
  // The first call moves this thread at once, the second leaves it free to be moved again.
  sched_setaffinity(0, sizeof(others), &others);
  sched_setaffinity(0, sizeof(allowed), &allowed);
}

}  // namespace legato

// Runs jobs of empty tasks: benchmarks the dispatch of the pool itself.
LEGATO_API void legato_run_empty(int64_t num_tasks, int64_t num_jobs) {
  for (int64_t job = 0; job < num_jobs; ++job) {
    legato::Pool::get().run(num_tasks, [](int64_t, int) {});
  }
}

LEGATO_API int legato_num_threads() { return legato::Pool::get().size(); }

LEGATO_API void legato_set_num_threads(int num_threads) { legato::Pool::get().resize(num_threads); }
