// Products of rows with a weight: y = x W^T + bias, W read once for up to 8 rows.
//
// Every element of y is one chain of sums over the columns of x in ascending order (in bfloat16 two
// columns at a time, as the processor's dot product takes them). So its bits depend on its own row
// alone: not on how many rows there are, nor on threads, nor on whether W is read as codes.
#pragma once

#include <type_traits>

#include "numbers.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

constexpr int kOutputs = 16;
typedef float Sums __attribute__((vector_size(kOutputs * sizeof(float)), aligned(4)));
typedef uint32_t Pairs __attribute__((vector_size(kOutputs * sizeof(uint32_t)), aligned(4)));

struct Weight {
  const void* packed;  // see pack() and pack_codes()
  const void* bias;    // [out] or null
  int64_t in, out;
  int64_t bits;  // of a code; 0 if the weights themselves are packed
};

struct Product {
  const void* x;  // [rows, in]
  void* y;        // [rows, out]
  int64_t rows;
  Weight weight;
};

inline int64_t all_blocks(const Weight& weight) { return (weight.out + kOutputs - 1) / kOutputs; }

// One step takes kDepth columns: of every output its weights lie together, 16 outputs side by side.
template <class T>
struct Step;

template <>
struct Step<float> {
  static constexpr int kDepth = 1;
  static inline Sums load(const float* w) {
    Sums v;
    std::memcpy(&v, w, sizeof v);
    return v;
  }
  static inline void add(Sums& sum, Sums w, const float* x) { sum += w * *x; }
  static inline void last(Sums&, Sums, const float*) {}  // there is no half step
};

template <>
struct Step<Bf16> {
  static constexpr int kDepth = 2;
  static inline Pairs load(const Bf16* w) {
    Pairs v;
    std::memcpy(&v, w, sizeof v);
    return v;
  }
  static inline void add(Sums& sum, Pairs w, uint32_t pair) {
#if defined(__AVX512BF16__)
    const __m512i x = _mm512_set1_epi32(static_cast<int>(pair));
    sum = (Sums)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(__m512i)w, (__m512bh)x);
#else
    sum += (Sums)(w << 16) * widen(Bf16{static_cast<uint16_t>(pair)});
    sum += (Sums)(w & 0xffff0000u) * widen(Bf16{static_cast<uint16_t>(pair >> 16)});
#endif
  }
  static inline void add(Sums& sum, Pairs w, const Bf16* x) {
    uint32_t pair;
    std::memcpy(&pair, x, sizeof pair);
    add(sum, w, pair);
  }
  static inline void last(Sums& sum, Pairs w, const Bf16* x) {
    add(sum, w, static_cast<uint32_t>(x->bits));
  }
};

template <class T>
inline int64_t packed_block(int64_t in) {  // elements of 16 outputs' weights
  constexpr int depth = Step<T>::kDepth;
  return (in + depth - 1) / depth * depth * kOutputs;
}

template <class T>
inline void pack(const T* weight, int64_t in, int64_t out, T* packed) {
  constexpr int depth = Step<T>::kDepth;
  for (int64_t block = 0; block * kOutputs < out; ++block) {
    T* to = packed + block * packed_block<T>(in);
    for (int64_t k = 0; k < in; k += depth)
      for (int lane = 0; lane < kOutputs; ++lane)
        for (int d = 0; d < depth; ++d, ++to) {
          const int64_t n = block * kOutputs + lane;
          *to = n < out && k + d < in ? weight[n * in + k + d] : T{};
        }
  }
}

// R rows from `row` on; beyond the last one it repeats, and is not stored.
template <class T, int R>
struct Rows {
  const T* x[R];
  int count;

  Rows(const Product& p, int64_t row) : count(static_cast<int>(std::min<int64_t>(R, p.rows - row))) {
    for (int r = 0; r < R; ++r)
      x[r] = static_cast<const T*>(p.x) + (row + std::min(r, count - 1)) * p.weight.in;
  }
};

template <class T, int R, int B>
void store(const Product& p, int64_t row, int count, int64_t block, const Sums (&sums)[R][B]) {
  const int64_t out = p.weight.out;
  const T* bias = static_cast<const T*>(p.weight.bias);
  for (int r = 0; r < count; ++r)
    for (int b = 0; b < B; ++b) {
      const int64_t n = (block + b) * kOutputs;
      const int lanes = static_cast<int>(std::min<int64_t>(kOutputs, out - n));
      T* y = static_cast<T*>(p.y) + (row + r) * out + n;
      for (int i = 0; i < lanes; ++i)
        y[i] = narrow<T>(bias ? sums[r][b][i] + widen(bias[n + i]) : sums[r][b][i]);
    }
}

// R rows by B blocks of 16 outputs. Inlined, its sums would not stay in registers.
template <class T, int R, int B>
__attribute__((noinline)) void tile(const Product& p, int64_t row, int64_t block) {
  constexpr int depth = Step<T>::kDepth;
  const int64_t in = p.weight.in, stride = packed_block<T>(in);
  const Rows<T, R> rows(p, row);
  const T* const* x = rows.x;
  const T* w = static_cast<const T*>(p.weight.packed) + block * stride;
  Sums sums[R][B] = {};
  int64_t k = 0;
  for (; k + depth <= in; k += depth, w += depth * kOutputs) {
    for (int b = 0; b < B; ++b) {
      const auto part = Step<T>::load(w + b * stride);
      if (R <= 4) __builtin_prefetch(w + b * stride + 16 * depth * kOutputs);
      for (int r = 0; r < R; ++r) Step<T>::add(sums[r][b], part, x[r] + k);
    }
  }
  if (k < in)
    for (int b = 0; b < B; ++b) {
      const auto part = Step<T>::load(w + b * stride);
      for (int r = 0; r < R; ++r) Step<T>::last(sums[r][b], part, x[r] + k);
    }
  store<T, R, B>(p, row, rows.count, block, sums);
}

template <class T, int R, int B>
void panel(const Product& p, int64_t row, int64_t from, int64_t to) {
  int64_t block = from;
  for (; block + B <= to; block += B) tile<T, R, B>(p, row, block);
  for (; block < to; ++block) tile<T, R, 1>(p, row, block);
}

constexpr int kMany = 8;    // more rows than these are taken in parts over weights in the cache
constexpr int kCached = 4;  // so many blocks at a time

template <class T>
void many_rows(const Product& p, int64_t from, int64_t to) {
  int64_t row = 0;
  for (; p.rows - row > 4; row += 6) panel<T, 6, 4>(p, row, from, to);
  if (p.rows - row > 2) panel<T, 4, 4>(p, row, from, to);
  else if (p.rows > row) panel<T, 2, 4>(p, row, from, to);
}

template <class T>
void few_rows(const Product& p, int64_t from, int64_t to) {
  switch (p.rows) {
    case 1: return panel<T, 1, 8>(p, 0, from, to);
    case 2: return panel<T, 2, 8>(p, 0, from, to);
    case 3:
    case 4: return panel<T, 4, 6>(p, 0, from, to);
    case 5:
    case 6: return panel<T, 6, 4>(p, 0, from, to);
    default: return panel<T, 8, 3>(p, 0, from, to);
  }
}

// Computes the outputs of blocks from .. to - 1.
template <class T>
void multiply_blocks(const Product& p, int64_t from, int64_t to) {
  if (p.rows <= kMany) return few_rows<T>(p, from, to);
  for (int64_t block = from; block < to; block += kCached)
    many_rows<T>(p, block, std::min(to, block + kCached));
}

}  // namespace
