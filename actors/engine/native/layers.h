// Norm, activation and rotary embedding.
#pragma once

#include "numbers.h"

namespace {

// x += delta; out = x / rms(x) * weight, over n rows of `size`.
template <class T>
void add_norm(T* x, const T* delta, const T* weight, float eps, int64_t n, int64_t size, T* out) {
  for (int64_t row = 0; row < n; ++row, x += size, out += size) {
    if (delta != nullptr) {
      for (int64_t i = 0; i < size; ++i) x[i] = narrow<T>(widen(x[i]) + widen(delta[i]));
      delta += size;
    }
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < size; ++i) sum += widen(x[i]) * widen(x[i]);
    const float scale = 1.0f / std::sqrt(sum / static_cast<float>(size) + eps);
    for (int64_t i = 0; i < size; ++i)
      out[i] = narrow<T>(rounded<T>(widen(x[i]) * scale) * widen(weight[i]));
  }
}

// out = silu(gate) * up; rows of 2 * size hold gate, then up.
template <class T>
void silu_mul(const T* gate_up, int64_t n, int64_t size, T* out) {
  for (int64_t row = 0; row < n; ++row, gate_up += 2 * size, out += size) {
    for (int64_t i = 0; i < size; ++i) {
      const float gate = widen(gate_up[i]);
      // exponential() must not overflow.
      const float silu = gate / (1.0f + exponential(std::min(-gate, 80.0f)));
      out[i] = narrow<T>(rounded<T>(silu) * widen(gate_up[size + i]));
    }
  }
}

// Rotates one head; the sine table includes the sign of the rotated half.
template <class T, class Out>
void rotate(const T* in, const T* cos, const T* sin, int64_t dim, Out* out) {
  const int64_t half = dim / 2;
  for (int64_t i = 0; i < dim; ++i) {
    const float other = widen(in[i < half ? i + half : i - half]);
    const float sum = rounded<T>(widen(in[i]) * widen(cos[i])) + rounded<T>(other * widen(sin[i]));
    out[i] = narrow<Out>(rounded<T>(sum));
  }
}

}  // namespace
