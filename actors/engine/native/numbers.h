// Element types, conversion to float and back, vectors, and exp.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

struct Bf16 {
  uint16_t bits;
};

inline float widen(float x) { return x; }
inline float widen(Bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

template <class T>
inline T narrow(float x);
template <>
inline float narrow<float>(float x) {
  return x;
}
template <class Bits>  // of a float, or of several
inline Bits narrow_bits(Bits bits) {  // to nearest, ties to even
  const Bits rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16, quiet = (bits >> 16) | 0x40u;
  return (bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded;
}
template <>
inline Bf16 narrow<Bf16>(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return {static_cast<uint16_t>(narrow_bits(bits))};
}
template <class T>
inline float rounded(float x) {
  return widen(narrow<T>(x));
}

// Vectors of the processor's width.
#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
typedef float Vector __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));

template <class V>
inline V load(const void* from) {
  V v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

// Calls f(i, lanes) for every vector of `size` elements, of which the last may have fewer lanes.
template <class F>
inline void each_vector(int64_t size, const F& f) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) f(i, std::integral_constant<int64_t, kLanes>{});
  if (i < size) f(i, size - i);
}

// The first lanes of a vector as floats, zeros behind them.
inline Vector load_floats(const float* from, int64_t lanes) {
  Vector x = {};
  std::memcpy(&x, from, lanes * sizeof *from);
  return x;
}
inline Vector load_floats(const Bf16* from, int64_t lanes) {
  Halves halves = {};
  std::memcpy(&halves, from, lanes * sizeof *from);
  return (Vector)(__builtin_convertvector(halves, Words) << 16);
}

// Stores the first lanes of a vector, each as narrow() has it.
inline void store(Vector x, int64_t lanes, float* to) { std::memcpy(to, &x, lanes * sizeof *to); }
inline Halves narrow_halves(Vector x) {
#if defined(__AVX512BF16__)
  return (Halves)_mm512_cvtneps_pbh((__m512)x);
#else
  return __builtin_convertvector(narrow_bits((Words)x), Halves);
#endif
}
inline void store(Vector x, int64_t lanes, Bf16* to) {
  const Halves halves = narrow_halves(x);
  std::memcpy(to, &halves, lanes * sizeof *to);
}

template <class T>
inline Vector rounded(Vector x) {
  if constexpr (std::is_same_v<T, float>) return x;
  else return (Vector)(__builtin_convertvector(narrow_halves(x), Words) << 16);
}

inline float sum_of(Vector x) {
  float parts[kLanes];
  std::memcpy(parts, &x, sizeof x);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) parts[i] += parts[i + half];
  return parts[0];
}

// exp for x <= 80, relative error about 2e-7, of a float or a vector. In longer loops over floats GCC
// branches at the bound, and computes one element at a time.
template <class V>
inline V exponential(V x) {
  using Bits = std::conditional_t<std::is_same_v<V, float>, uint32_t, Words>;
  const V least = V{} - 87.0f;
  x = x < least ? least : x;
  const V shifted = x * 1.44269504f + 12582912.0f;  // an integer in its last bits
  const V n = shifted - 12582912.0f;
  const V r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  V y = V{} + 1.9875691500e-4f;
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  Bits power;
  std::memcpy(&power, &shifted, sizeof power);
  power = (power + 127u) << 23;
  V scale;
  std::memcpy(&scale, &power, sizeof scale);
  return y * scale;
}

}  // namespace
