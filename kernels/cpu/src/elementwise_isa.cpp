// Norms and activation; see elementwise_kernel.h.

#include "elementwise_kernel.h"
#include "elementwise_vec.h"

namespace legato::LEGATO_ISA {
namespace {

template <class T>
void norm_in(const NormArgs& args, int64_t begin, int64_t end) {
  const int64_t width = args.width, stride = args.stride > 0 ? args.stride : width;
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(args.x) + row * stride;
    if (args.residual != nullptr) {
      T* residual = static_cast<T*>(args.residual) + row * width;
      for_lanes(width, [&](int64_t i, int n) {
        store_lanes(load_lanes(residual + i, n) + load_lanes(x + i, n), residual + i, n);
      });
      x = residual;
    }
    if (args.weight == nullptr) continue;
    const T* weight = static_cast<const T*>(args.weight);
    T* y = static_cast<T*>(args.y);
    const RowPieces pieces =
        row_pieces(row, args.tiled_rows > 0 ? kTiled : stride, args.tiled_rows, width);
    if (args.wide) {
      scale_row(x, static_cast<const float*>(args.weight), y, pieces, width,
                inverse_rms(x, width, args.eps));
    } else if (args.centered) {
      center_row(x, weight, static_cast<const T*>(args.bias), y, pieces, width, args.eps);
    } else {
      scale_row(x, weight, y, pieces, width, inverse_rms(x, width, args.eps));
    }
  }
}

// x Phi(x). The error function by Abramowitz and Stegun 7.1.26, to 1.5e-7; the tail of negative x
// comes without a difference.
inline Vec gelu(Vec x) {
  const Vec one = Vec::set(1.0f), half = Vec::set(0.5f);
  const Vec u = max(x, Vec::zero() - x) * Vec::set(0.70710678118654752f);
  const Vec t = one / fma(u, Vec::set(0.3275911f), one);
  Vec p = fma(t, Vec::set(1.061405429f), Vec::set(-1.453152027f));
  p = fma(p, t, Vec::set(1.421413741f));
  p = fma(p, t, Vec::set(-0.284496736f));
  p = fma(p, t, Vec::set(0.254829592f));
  const Vec tail = half * p * t * exp(Vec::zero() - u * u);  // 1 - Phi(|x|)
  return max(x, Vec::zero()) - max(x, Vec::zero() - x) * tail;
}

// The same with 1 + tanh(z) = 2 / (1 + e^(-2z)), z = sqrt(2 / pi) (x + 0.044715 x^3).
inline Vec gelu_tanh(Vec x) {
  const Vec inner = fma(x * x * x, Vec::set(0.044715f), x);
  return x / (Vec::set(1.0f) + exp(inner * Vec::set(-1.5957691216057308f)));
}

// Of gpt-oss: the gate x sigmoid(1.702 x) with x at most 7; up within 7 of zero, plus one. NaN is
// kept, as the second operand of min and max.
inline Vec clamped_gate(Vec x) {
  const Vec low = min(Vec::set(7.0f), x);
  return low / (Vec::set(1.0f) + exp(low * Vec::set(-1.702f)));
}

inline Vec clamped_up(Vec x) {
  return max(Vec::set(-7.0f), min(Vec::set(7.0f), x)) + Vec::set(1.0f);
}

inline Vec relu2(Vec x) {
  const Vec y = max(Vec::zero(), x);
  return y * y;
}

// of_up: what becomes of up where there is a gate.
template <class T, class F, class U>
void map_rows(const ActivateArgs& args, int64_t begin, int64_t end, F&& f, U&& of_up) {
  for (int64_t row = begin; row < end; ++row) {
    T* y = static_cast<T*>(args.y) + row * args.width;
    if (args.gated) {
      const T* gate = static_cast<const T*>(args.x) + row * 2 * args.width;
      const T* up = gate + args.width;
      for_lanes(args.width, [&](int64_t i, int n) {
        store_lanes(f(load_lanes(gate + i, n)) * of_up(load_lanes(up + i, n)), y + i, n);
      });
    } else {
      const T* x = static_cast<const T*>(args.x) + row * args.width;
      for_lanes(args.width, [&](int64_t i, int n) {
        store_lanes(f(load_lanes(x + i, n)), y + i, n);
      });
    }
  }
}

template <class T>
void activate_in(const ActivateArgs& args, int64_t begin, int64_t end) {
  const auto as_is = [](Vec x) { return x; };
  const auto map = [&](auto&& f, auto&& of_up) { map_rows<T>(args, begin, end, f, of_up); };
  switch (args.activation) {
    case Activation::silu: return map([](Vec x) { return silu(x); }, as_is);
    case Activation::gelu: return map([](Vec x) { return gelu(x); }, as_is);
    case Activation::gelu_tanh: return map([](Vec x) { return gelu_tanh(x); }, as_is);
    case Activation::relu: return map([](Vec x) { return max(Vec::zero(), x); }, as_is);
    case Activation::relu2: return map([](Vec x) { return relu2(x); }, as_is);
    case Activation::clamped_swiglu:
      return map([](Vec x) { return clamped_gate(x); }, [](Vec x) { return clamped_up(x); });
  }
}

template <class T>
void combine_in(const CombineArgs& args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const int64_t assignment = args.assignments[row];
    const Vec weight = Vec::set(args.topk_weights[assignment]);
    const T* x = static_cast<const T*>(args.x) + row * args.width;
    T* y = static_cast<T*>(args.y) + assignment / args.experts_per_token * args.width;
    for_lanes(args.width, [&](int64_t i, int n) {
      const Vec given = rounded<T>(load_lanes(x + i, n) * weight);
      store_lanes(load_lanes(y + i, n) + given, y + i, n);
    });
  }
}

}  // namespace

void norm_rows(const NormArgs& args, int64_t begin, int64_t end) {
  if (args.dtype == Dtype::bfloat16) return norm_in<bf16>(args, begin, end);
  if (args.dtype == Dtype::float16) return norm_in<fp16>(args, begin, end);
  norm_in<float>(args, begin, end);
}

void activate_rows(const ActivateArgs& args, int64_t begin, int64_t end) {
  if (args.dtype == Dtype::bfloat16) return activate_in<bf16>(args, begin, end);
  if (args.dtype == Dtype::float16) return activate_in<fp16>(args, begin, end);
  activate_in<float>(args, begin, end);
}

void combine_rows(const CombineArgs& args, int64_t begin, int64_t end) {
  if (args.dtype == Dtype::bfloat16) return combine_in<bf16>(args, begin, end);
  if (args.dtype == Dtype::float16) return combine_in<fp16>(args, begin, end);
  combine_in<float>(args, begin, end);
}

}  // namespace legato::LEGATO_ISA
