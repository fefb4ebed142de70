// One source, several instruction sets, one choice at run time.
//
// Sources named *_isa.cpp are compiled once per instruction set, each time with LEGATO_ISA naming
// the namespace their code belongs in:
//
//   // norm.h                              // norm_isa.cpp
//   LEGATO_FOR_EACH_ISA(                   namespace legato::LEGATO_ISA {
//       void norm(const Args& args))       void norm(const Args& args) { ... }
//                                          }
//   // norm.cpp, compiled once
//   void norm(const Args& args) { LEGATO_PICK(norm)(args); }
//
// Sources named *_vnni.cpp and *_amx.cpp are compiled once, in the namespaces vnni and amx: what they
// leave out is that of avx512 and of avx512_bf16.
//
// Inside a *_isa.cpp file test __AVX512F__, __AVX512BF16__ and __AVX512VNNI__; "vec.h" has what
// most kernels need. Keep standard-library templates out of them (see setup.py on link order).
#pragma once

namespace legato {

enum class Isa : int {
  none = -1,         // not even AVX2: the library must not be used
  avx2 = 0,          // AVX2, FMA, F16C
  avx512 = 1,        // AVX-512 F, BW, DQ, VL
  avx512_vnni = 2,   // and VNNI
  avx512_bf16 = 3,   // and BF16
  amx = 4,           // and AMX's tiles of bf16 and int8, which the system must grant
};

// The best this machine runs, lowered by LEGATO_CPU_ISA, one of these names, at first use.
Isa active_isa();

// Those of avx512 and avx512_bf16 are null where this library was built without these.
template <class Function>
inline Function pick(Function avx2, Function avx512, Function avx512_bf16) {
  const Isa isa = active_isa();
  return isa >= Isa::avx512_bf16 ? avx512_bf16 : isa >= Isa::avx512 ? avx512 : avx2;
}

}  // namespace legato

#define LEGATO_FOR_EACH_ISA(...)      \
  namespace avx2 {                    \
  __VA_ARGS__;                        \
  }                                   \
  namespace avx512 {                  \
  __VA_ARGS__;                        \
  }                                   \
  namespace avx512_bf16 {             \
  __VA_ARGS__;                        \
  }

// A function of such a namespace, or null. Sources that are compiled once are told which sets the
// library is built for (LEGATO_HAS_..., 0 or 1, by setup.py): a checkout's is for one machine.
#define LEGATO_IF_BUILT(set, name) LEGATO_IF_(LEGATO_HAS_##set, &::legato::set::name)
#define LEGATO_IF_(has, function) LEGATO_IF_OF_(has, function)
#define LEGATO_IF_OF_(has, function) LEGATO_IF_##has(function)
#define LEGATO_IF_0(function) nullptr
#define LEGATO_IF_1(function) function

#define LEGATO_PICK(name)                                                                   \
  ::legato::pick<decltype(&::legato::avx2::name)>(&::legato::avx2::name,                    \
                                                  LEGATO_IF_BUILT(avx512, name),            \
                                                  LEGATO_IF_BUILT(avx512_bf16, name))
