// Norm, activation and rotary embedding.
#pragma once

#include "numbers.h"

namespace {

// x += delta if there is one; out = x / rms(x) * weight, over `size` elements; out may be x.
template <class T>
void add_norm(T* x, const T* delta, const T* weight, float eps, int64_t size, T* out) {
  if (delta != nullptr)
    for (int64_t i = 0; i < size; ++i) x[i] = narrow<T>(widen(x[i]) + widen(delta[i]));
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < size; ++i) sum += widen(x[i]) * widen(x[i]);
  const float scale = 1.0f / std::sqrt(sum / static_cast<float>(size) + eps);
  for (int64_t i = 0; i < size; ++i)
    out[i] = narrow<T>(rounded<T>(widen(x[i]) * scale) * widen(weight[i]));
}

// out = silu(gate) * up.
template <class T>
void silu_mul(const T* gate, const T* up, int64_t size, T* out) {
  for (int64_t i = 0; i < size; ++i) {
    const float x = widen(gate[i]);
    // exponential() must not overflow.
    const float silu = x / (1.0f + exponential(std::min(-x, 80.0f)));
    out[i] = narrow<T>(rounded<T>(silu) * widen(up[i]));
  }
}

// Rotates one head; the sine table includes the sign of the rotated half.
template <class T, class Out>
void rotate(const T* in, const T* cos, const T* sin, int64_t dim, Out* out) {
  const int64_t half = dim / 2;
  const auto turn = [&](int64_t from, int64_t to, int64_t other) {  // `other`: of the other half
    for (int64_t i = from; i < to; ++i) {
      const float straight = rounded<T>(widen(in[i]) * widen(cos[i]));
      const float crossed = rounded<T>(widen(in[i + other]) * widen(sin[i]));
      out[i] = narrow<Out>(rounded<T>(straight + crossed));
    }
  };
  turn(0, half, half);
  turn(half, dim, -half);
}

}  // namespace
