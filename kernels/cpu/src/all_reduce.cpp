#include "all_reduce.h"

#include <errno.h>
#include <linux/futex.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstring>

#include "api.h"
#include "pool.h"

namespace legato {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kPartBytes = 1 << 20;  // larger tensors are reduced in chunks of this size
constexpr int64_t kLineBytes = 64;
constexpr int64_t kTaskElements = 16384;  // a smaller task costs more to hand over than it saves
// Ranks finish a linear layer some tens of microseconds apart; one that waits longer yields its
// core to other processes.
constexpr auto kSpinTime = std::chrono::microseconds(60);
constexpr int kPausesPerClockRead = 32;
constexpr timespec kLivenessInterval = {0, 50'000'000};  // a sleeper checks that its peer is alive
constexpr auto kPatience = std::chrono::seconds(300);  // gloo's default timeout

int64_t parts_begin(int num_ranks) {
  return (num_ranks * kLineBytes + 4095) / 4096 * 4096;
}

bool lives(pid_t process) { return kill(process, 0) == 0 || errno != ESRCH; }

template <class F>
void for_elements(int64_t count, F&& f) {
  const int64_t num_tasks = (count + kTaskElements - 1) / kTaskElements;
  if (num_tasks <= 1) return f(0, count);
  Pool::get().run(num_tasks, [&](int64_t i, int) {
    f(i * kTaskElements, std::min(count, (i + 1) * kTaskElements));
  });
}

}  // namespace

// A rank's cache line in the shared file. All zero is a valid initial state.
struct AllReduce::Line {
  std::atomic<uint32_t> published;  // futex word: parts that peers may read
  std::atomic<uint32_t> sleepers;   // on `published`
  std::atomic<int32_t> process;     // 0: not joined yet
  std::atomic<uint32_t> closed;
};

int64_t AllReduce::file_bytes(int num_ranks) {
  return parts_begin(num_ranks) + 2 * num_ranks * kPartBytes;
}

AllReduce* AllReduce::open(int fd, int rank, int num_ranks) {
  static_assert(sizeof(Line) <= kLineBytes);
  void* memory = mmap(nullptr, static_cast<size_t>(file_bytes(num_ranks)), PROT_READ | PROT_WRITE,
                      MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) return nullptr;
  return new AllReduce(static_cast<char*>(memory), rank, num_ranks);
}

AllReduce::AllReduce(char* memory, int rank, int num_ranks)
    : memory_(memory), rank_(rank), num_ranks_(num_ranks) {
  line(rank).process.store(getpid());
}

AllReduce::~AllReduce() { munmap(memory_, static_cast<size_t>(file_bytes(num_ranks_))); }

AllReduce::Line& AllReduce::line(int rank) const {
  return *reinterpret_cast<Line*>(memory_ + rank * kLineBytes);
}

char* AllReduce::parts(uint32_t turn) const {
  return memory_ + parts_begin(num_ranks_) + (turn % 2) * num_ranks_ * kPartBytes;
}

RankError AllReduce::sum(void* x, int64_t count, Dtype dtype) {
  const auto sum_range = LEGATO_PICK(sum_parts);
  const int64_t bytes = bytes_of(dtype), most = kPartBytes / bytes;
  char* next = static_cast<char*>(x);
  for (int64_t done = 0; done < count && error_ == RankError::none; done += most) {
    const int64_t n = std::min(most, count - done);
    char* first = parts(++turn_);
    char* ours = first + rank_ * kPartBytes;
    for_elements(n, [&](int64_t begin, int64_t end) {
      std::memcpy(ours + begin * bytes, next + begin * bytes,
                  static_cast<size_t>((end - begin) * bytes));
    });
    Line& mine = line(rank_);
    mine.published.store(turn_);  // sequentially consistent: ordered before the read of `sleepers`
    if (mine.sleepers.load() > 0) {
      syscall(SYS_futex, &mine.published, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    }
    for (int peer = 0; peer < num_ranks_ && error_ == RankError::none; ++peer) {
      if (peer != rank_) error_ = await(peer, turn_);
    }
    if (error_ != RankError::none) break;
    const SumArgs args{first, kPartBytes, num_ranks_, next, dtype};
    for_elements(n, [&](int64_t begin, int64_t end) { sum_range(args, begin, end); });
    next += n * bytes;
  }
  return error_;
}

RankError AllReduce::await(int peer, uint32_t turn) {
  Line& theirs = line(peer);
  // A peer is at most one turn ahead, so the signed difference is correct across an overflow.
  const auto published = [&] {
    return static_cast<int32_t>(theirs.published.load(std::memory_order_acquire) - turn) >= 0;
  };
  const auto begin = Clock::now();
  do {
    for (int i = 0; i < kPausesPerClockRead; ++i) {
      if (published()) return RankError::none;
      __builtin_ia32_pause();
    }
  } while (Clock::now() - begin < kSpinTime);
  while (true) {
    theirs.sleepers.fetch_add(1);
    const uint32_t seen = theirs.published.load();
    if (static_cast<int32_t>(seen - turn) < 0 && theirs.closed.load() == 0 &&
        line(rank_).closed.load() == 0) {
      syscall(SYS_futex, &theirs.published, FUTEX_WAIT, seen, &kLivenessInterval, nullptr, 0);
    }
    theirs.sleepers.fetch_sub(1);
    if (published()) return RankError::none;
    if (theirs.closed.load() != 0 || line(rank_).closed.load() != 0) return RankError::closed;
    const pid_t process = theirs.process.load();
    if (process != 0 && !lives(process)) return RankError::lost;
    if (Clock::now() - begin > kPatience) return RankError::late;
  }
}

void AllReduce::close() {
  Line& mine = line(rank_);
  mine.closed.store(1);
  syscall(SYS_futex, &mine.published, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace legato

LEGATO_API int64_t legato_all_reduce_file_bytes(int32_t num_ranks) {
  return legato::AllReduce::file_bytes(num_ranks);
}

LEGATO_API legato::AllReduce* legato_all_reduce_open(int32_t fd, int32_t rank, int32_t num_ranks) {
  return legato::AllReduce::open(fd, rank, num_ranks);
}

LEGATO_API int32_t legato_all_reduce_sum(legato::AllReduce* all_reduce, void* x, int64_t count,
                                         int32_t dtype) {
  return static_cast<int32_t>(all_reduce->sum(x, count, static_cast<legato::Dtype>(dtype)));
}

LEGATO_API void legato_all_reduce_close(legato::AllReduce* all_reduce) { all_reduce->close(); }

LEGATO_API void legato_all_reduce_free(legato::AllReduce* all_reduce) { delete all_reduce; }
