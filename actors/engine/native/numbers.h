// Element types, conversion to float and back, vectors, and exp.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

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

// Stores the first lanes of a vector, each as narrow() has it.
inline void store(Vector x, int64_t lanes, float* to) { std::memcpy(to, &x, lanes * sizeof *to); }
inline void store(Vector x, int64_t lanes, Bf16* to) {
  const Halves halves = __builtin_convertvector(narrow_bits((Words)x), Halves);
  std::memcpy(to, &halves, lanes * sizeof *to);
}

// exp for x <= 80, relative error about 2e-7; branch-free, so that loops vectorise.
inline float exponential(float x) {
  x = std::max(x, -87.0f);
  const float n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float y = 1.9875691500e-4f;
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  const uint32_t power = (static_cast<uint32_t>(static_cast<int32_t>(n)) + 127u) << 23;
  float scale;
  std::memcpy(&scale, &power, sizeof scale);
  return y * scale;
}

}  // namespace
