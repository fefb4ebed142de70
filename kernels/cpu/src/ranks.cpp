#include "ranks.h"

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

constexpr int64_t kPartBytes = 1 << 20;  // larger sums go through it piece by piece
constexpr int64_t kLineBytes = 64;
constexpr int64_t kTaskElements = 16384;  // less is not worth handing to another thread
// Ranks leave a linear layer some tens of microseconds apart; one that waits for longer gives its
// core to whoever shares it.
constexpr auto kSpinTime = std::chrono::microseconds(60);
constexpr int kPausesPerClockRead = 32;
constexpr timespec kLookEvery = {0, 50'000'000};  // whether the peer's process still lives
constexpr auto kPatience = std::chrono::seconds(300);  // as long as gloo's

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

// A rank's own line of the file. Zero is a valid beginning.
struct Ranks::Line {
  std::atomic<uint32_t> published;  // futex word: parts that peers may read
  std::atomic<uint32_t> sleepers;   // on `published`
  std::atomic<int32_t> process;     // 0: has not joined yet
  std::atomic<uint32_t> closed;
};

int64_t Ranks::file_bytes(int num_ranks) {
  return parts_begin(num_ranks) + 2 * num_ranks * kPartBytes;
}

Ranks* Ranks::open(int fd, int rank, int num_ranks) {
  static_assert(sizeof(Line) <= kLineBytes);
  void* memory = mmap(nullptr, static_cast<size_t>(file_bytes(num_ranks)), PROT_READ | PROT_WRITE,
                      MAP_SHARED, fd, 0);
  return memory == MAP_FAILED ? nullptr : new Ranks(static_cast<char*>(memory), rank, num_ranks);
}

Ranks::Ranks(char* memory, int rank, int num_ranks)
    : memory_(memory), rank_(rank), num_ranks_(num_ranks) {
  line(rank).process.store(getpid());
}

Ranks::~Ranks() { munmap(memory_, static_cast<size_t>(file_bytes(num_ranks_))); }

Ranks::Line& Ranks::line(int rank) const {
  return *reinterpret_cast<Line*>(memory_ + rank * kLineBytes);
}

char* Ranks::parts(uint32_t turn) const {
  return memory_ + parts_begin(num_ranks_) + (turn % 2) * num_ranks_ * kPartBytes;
}

RankError Ranks::sum(void* x, int64_t count, Dtype dtype) {
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
    mine.published.store(turn_);  // sequentially consistent: before the sleepers are looked at
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

RankError Ranks::await(int peer, uint32_t turn) {
  Line& theirs = line(peer);
  // A peer is at most one turn ahead, so that the difference tells, overflow or not.
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
      syscall(SYS_futex, &theirs.published, FUTEX_WAIT, seen, &kLookEvery, nullptr, 0);
    }
    theirs.sleepers.fetch_sub(1);
    if (published()) return RankError::none;
    if (theirs.closed.load() != 0 || line(rank_).closed.load() != 0) return RankError::closed;
    const pid_t process = theirs.process.load();
    if (process != 0 && !lives(process)) return RankError::lost;
    if (Clock::now() - begin > kPatience) return RankError::late;
  }
}

void Ranks::close() {
  Line& mine = line(rank_);
  mine.closed.store(1);
  syscall(SYS_futex, &mine.published, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace legato

LEGATO_API int64_t legato_ranks_file_bytes(int32_t num_ranks) {
  return legato::Ranks::file_bytes(num_ranks);
}

LEGATO_API legato::Ranks* legato_ranks_open(int32_t fd, int32_t rank, int32_t num_ranks) {
  return legato::Ranks::open(fd, rank, num_ranks);
}

LEGATO_API int32_t legato_ranks_sum(legato::Ranks* ranks, void* x, int64_t count, int32_t dtype) {
  return static_cast<int32_t>(ranks->sum(x, count, static_cast<legato::Dtype>(dtype)));
}

LEGATO_API void legato_ranks_close(legato::Ranks* ranks) { ranks->close(); }

LEGATO_API void legato_ranks_free(legato::Ranks* ranks) { delete ranks; }
