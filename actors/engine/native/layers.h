// Norm, activation and rotary embedding.
#pragma once

#include "numbers.h"

namespace {

// x += delta if there is one; out = x / rms(x) * weight, over `size` elements; out may be x.
template <class T>
void add_norm(T* x, const T* delta, const T* weight, float eps, int64_t size, T* out) {
  if (delta != nullptr)
    each_vector(size, [&](int64_t i, auto lanes) {
      store(load_floats(x + i, lanes) + load_floats(delta + i, lanes), lanes, x + i);
    });
  Vector squares[2] = {};
  each_vector(size, [&](int64_t i, auto lanes) {
    const Vector own = load_floats(x + i, lanes);
    squares[i / kLanes % 2] += own * own;
  });
  const float sum = sum_of(squares[0] + squares[1]);
  const float scale = 1.0f / std::sqrt(sum / static_cast<float>(size) + eps);
  each_vector(size, [&](int64_t i, auto lanes) {
    const Vector own = rounded<T>(load_floats(x + i, lanes) * scale);
    store(own * load_floats(weight + i, lanes), lanes, out + i);
  });
}

// out = silu(gate) * up.
template <class T>
void silu_mul(const T* gate, const T* up, int64_t size, T* out) {
  const Vector most = Vector{} + 80.0f;  // or exponential() would overflow
  each_vector(size, [&](int64_t i, auto lanes) {
    const Vector x = load_floats(gate + i, lanes);
    const Vector silu = x / (1.0f + exponential(-x > most ? most : -x));
    store(rounded<T>(silu) * load_floats(up + i, lanes), lanes, out + i);
  });
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
