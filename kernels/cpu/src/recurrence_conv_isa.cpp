// A task of a convolution; see recurrence.h.

#include "elementwise_vec.h"
#include "recurrence.h"

namespace legato::LEGATO_ISA {
namespace {

constexpr int kLanes = Vec::kLanes;

// The inputs of the J taps of a token, oldest first; null before the first token.
template <class T>
struct Taps {
  const T* inputs[kMaxTaps];

  // position: of the token in its slice.
  Taps(const ConvArgs& args, const StateRows& rows, int32_t slice, int64_t position) {
    const int64_t before = args.num_taps - 1, read = rows.reads[slice];
    for (int64_t j = 0; j <= before; ++j) {
      const int64_t at = position - before + j;
      if (at >= 0) {
        inputs[j] = static_cast<const T*>(args.x) + (rows.query_starts[slice] + at) * args.x_stride;
      } else {
        inputs[j] = read < 0 ? nullptr
                             : static_cast<const T*>(args.states) +
                                   (read * before + before + at) * args.num_channels;
      }
    }
  }
};

// V registers of channels, the last one of n lanes.
template <class T, int V>
inline void convolve_channels(const ConvArgs& args, const Taps<T>& taps, T* y, int64_t channel,
                              int n) {
  Vec sums[V];
  // Not -0, so that zeros of before the first token change no bits and can be left out.
  for (int v = 0; v < V; ++v) sums[v] = Vec::zero();
  if (args.bias != nullptr) {
    for (int v = 0; v < V; ++v) {
      sums[v] = sums[v] + load_lanes(args.bias + channel + v * kLanes, n);
    }
  }
  for (int32_t j = 0; j < args.num_taps; ++j) {
    if (taps.inputs[j] == nullptr) continue;
    const float* weight = args.weight + j * args.num_channels + channel;
    for (int v = 0; v < V; ++v) {
      sums[v] = fma(load_lanes(taps.inputs[j] + channel + v * kLanes, n),
                    load_lanes(weight + v * kLanes, n), sums[v]);
    }
  }
  for (int v = 0; v < V; ++v) {
    store_lanes(args.silu ? silu(sums[v]) : sums[v], y + channel + v * kLanes, n);
  }
}

// The state after this many tokens of a slice, of some channels, into a row.
template <class T>
void keep_inputs(const ConvArgs& args, const StateRows& rows, int32_t slice, int64_t length,
                 int64_t row, int64_t first_channel, int64_t end_channel) {
  const Taps<T> next(args, rows, slice, length);
  const int64_t before = args.num_taps - 1, num_bytes = (end_channel - first_channel) * sizeof(T);
  T* state = static_cast<T*>(args.states) + row * before * args.num_channels + first_channel;
  for (int64_t j = 0; j < before; ++j, state += args.num_channels) {
    if (next.inputs[j] == nullptr) {
      __builtin_memset(state, 0, num_bytes);
    } else {
      __builtin_memcpy(state, next.inputs[j] + first_channel, num_bytes);
    }
  }
}

template <class T>
void convolve_in(const ConvArgs& args, const StateRows& rows, int64_t first_token,
                 int64_t end_token, int64_t first_channel, int64_t end_channel) {
  constexpr int kAtOnce = 4;
  for (int32_t s = 0; s < rows.num_slices; ++s) {
    const int64_t begin = rows.query_starts[s], end = rows.query_starts[s + 1];
    const int64_t stop = end < end_token ? end : end_token;
    for (int64_t t = begin > first_token ? begin : first_token; t < stop; ++t) {
      const Taps<T> taps(args, rows, s, t - begin);
      T* y = static_cast<T*>(args.y) + t * args.num_channels;
      int64_t c = first_channel;
      for (; c + kAtOnce * kLanes <= end_channel; c += kAtOnce * kLanes) {
        convolve_channels<T, kAtOnce>(args, taps, y, c, kLanes);
      }
      for (; c < end_channel; c += kLanes) {
        const int64_t left = end_channel - c;
        convolve_channels<T, 1>(args, taps, y, c, left < kLanes ? static_cast<int>(left) : kLanes);
      }
      const int64_t length = t + 1 - begin;
      if (const int32_t row = rows.save_after(s, length); row >= 0) {
        keep_inputs<T>(args, rows, s, length, row, first_channel, end_channel);
      }
      if (t + 1 == end) {
        keep_inputs<T>(args, rows, s, length, rows.writes[s], first_channel, end_channel);
      }
    }
  }
}

}  // namespace

void convolve(const ConvArgs& args, const StateRows& rows, int64_t first_token, int64_t end_token,
              int64_t first_channel, int64_t end_channel) {
  const auto in = args.dtype == Dtype::bfloat16  ? convolve_in<bf16>
                  : args.dtype == Dtype::float16 ? convolve_in<fp16>
                                                 : convolve_in<float>;
  in(args, rows, first_token, end_token, first_channel, end_channel);
}

}  // namespace legato::LEGATO_ISA
