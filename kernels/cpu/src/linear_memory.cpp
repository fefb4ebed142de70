#include "linear_memory.h"

#include <sys/mman.h>

#include <mutex>
#include <new>

namespace legato {
namespace {

constexpr int64_t kHugePage = int64_t{2} << 20;
constexpr int64_t kRegion = int64_t{32} << 20;
constexpr int64_t kAlignment = 4096;

int64_t round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

// Mapped with one huge page to spare, so that the usable part is aligned to huge pages.
struct Region {
  Region(int64_t num_bytes) : mapped_bytes(round_up(num_bytes, kHugePage) + kHugePage) {
    mapped = mmap(nullptr, mapped_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    begin = reinterpret_cast<char*>(round_up(reinterpret_cast<int64_t>(mapped), kHugePage));
    size = mapped_bytes - kHugePage;
    madvise(begin, size, MADV_HUGEPAGE);
  }
  ~Region() { munmap(mapped, mapped_bytes); }
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  int64_t mapped_bytes;
  void* mapped;
  char* begin;
  int64_t size;
  int64_t used = 0;
};

std::mutex g_mutex;

// The region being filled, kept alive only by the weights in it.
std::weak_ptr<Region>& current_region() {
  static auto* current = new std::weak_ptr<Region>();
  return *current;
}

}  // namespace

WeightMemory allocate_weight(int64_t num_bytes) {
  num_bytes = round_up(num_bytes > 0 ? num_bytes : 1, kAlignment);
  std::lock_guard<std::mutex> lock(g_mutex);
  std::shared_ptr<Region> region = current_region().lock();
  if (region == nullptr || region->size - region->used < num_bytes) {
    region = std::make_shared<Region>(num_bytes > kRegion ? num_bytes : kRegion);
    current_region() = region;
  }
  char* data = region->begin + region->used;
  region->used += num_bytes;
  return {region, data};
}

}  // namespace legato
