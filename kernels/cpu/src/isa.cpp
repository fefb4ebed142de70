#include "isa.h"

#include <atomic>
#include <cpuid.h>
#include <cstdlib>
#include <cstring>
#include <sys/syscall.h>
#include <unistd.h>

#include "api.h"

namespace legato {
namespace {

// Linux hands out the tiles' state (8 KiB a thread) to processes that ask for it.
bool is_granted_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

bool has_amx() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
  constexpr unsigned kBf16 = 1u << 22, kTiles = 1u << 24, kInt8 = 1u << 25;
  constexpr unsigned kAll = kBf16 | kTiles | kInt8;
  return (edx & kAll) == kAll && is_granted_tiles();
}

Isa find_best_isa() {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return Isa::none;
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (!avx512) return Isa::avx2;
  if (!__builtin_cpu_supports("avx512vnni")) return Isa::avx512;
  if (!__builtin_cpu_supports("avx512bf16")) return Isa::avx512_vnni;
  return has_amx() ? Isa::amx : Isa::avx512_bf16;
}

// By the number of an instruction set.
constexpr bool kIsBuilt[] = {true, LEGATO_HAS_avx512, LEGATO_HAS_vnni, LEGATO_HAS_avx512_bf16,
                             LEGATO_HAS_amx};

// The best of those up to this one that the library is built for.
Isa best_built(Isa isa) {
  int number = static_cast<int>(isa);
  while (number > 0 && !kIsBuilt[number]) --number;
  return static_cast<Isa>(number);
}

Isa machine_isa() {
  static const Isa best = find_best_isa();
  return best;
}

Isa named(const char* name) {
  if (std::strcmp(name, "avx2") == 0) return Isa::avx2;
  if (std::strcmp(name, "avx512") == 0) return Isa::avx512;
  if (std::strcmp(name, "avx512_vnni") == 0) return Isa::avx512_vnni;
  if (std::strcmp(name, "avx512_bf16") == 0) return Isa::avx512_bf16;
  return Isa::amx;
}

Isa initial_isa() {
  const Isa best = machine_isa();
  const char* asked = std::getenv("LEGATO_CPU_ISA");
  if (asked == nullptr || *asked == '\0') return best_built(best);
  return best_built(named(asked) < best ? named(asked) : best);
}

std::atomic<Isa>& current() {
  static std::atomic<Isa> isa{initial_isa()};
  return isa;
}

}  // namespace

Isa active_isa() { return current().load(std::memory_order_relaxed); }

}  // namespace legato

LEGATO_API int legato_machine_isa() { return static_cast<int>(legato::machine_isa()); }

LEGATO_API int legato_isa() { return static_cast<int>(legato::active_isa()); }

// For tests: lowers or restores the choice; returns the one in force. Weights packed before it may
// be laid out for another instruction set and must be packed again.
LEGATO_API int legato_set_isa(int isa) {
  const auto asked = static_cast<legato::Isa>(isa);
  const legato::Isa best = legato::machine_isa();
  legato::current().store(legato::best_built(asked < best ? asked : best));
  return legato_isa();
}
