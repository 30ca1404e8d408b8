// Products of rows with a weight: y = x W^T + bias, W read once for up to 8 rows.
//
// Every element of y is one chain of sums over the columns of x in ascending order (two columns at a
// time where dot products of bfloat16 take them; see tiles.h for those). So its bits depend on its own
// row alone: not on how many rows there are, nor on threads, nor on whether W is read as codes.
#pragma once

#include <type_traits>
#include <vector>

#include "numbers.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#if defined(__AMX_BF16__) && defined(PACELINE_TILES_ALLOWED)
#define PACELINE_TILES 1
#endif
// Intel's processors multiply and add floats at twice the rate of dot products of bfloat16, so
// library.py asks for them there; beside tiles little is left for either.
#if PACELINE_TILES || !defined(PACELINE_MULTIPLY_ADDS)
#define PACELINE_DOTS 1
#endif
#endif

namespace {

constexpr int kOutputs = 16;
constexpr int kParts = kOutputs / kLanes;  // vectors of as many outputs
using Pairs = Words;  // of bfloat16

// Of a packed weight so many columns of an output lie together, padded with zeros, those of 16 outputs
// one after another: what one step takes, or a tile.
#if PACELINE_TILES
constexpr int kTogether = 32;
#else
constexpr int kTogether = 2;
#endif
template <class T>
constexpr int kColumns = std::is_same_v<T, float> ? 1 : kTogether;

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
// Rows are read as Input. A step is kTurns turns: a part of the weights, and of a row what they are
// multiplied by, spread over a vector.
template <class T>
struct Step;

template <>
struct Step<float> {
  using Input = float;
  using Weights = Vector;
  static constexpr int kDepth = 1, kTurns = 1;
  template <int>
  static inline Vector part(Vector w) { return w; }
  template <int>
  static inline Vector spread(const float* x) { return *x - Vector{}; }
  static inline void add(Vector& sum, Vector w, Vector x) { sum += w * x; }
  static inline void last(Vector&, Vector, const float*) {}  // there is no half step
};

template <>
struct Step<Bf16> {
  using Weights = Pairs;
  static constexpr int kDepth = 2;
#if PACELINE_DOTS
  using Input = Bf16;
  static constexpr int kTurns = 1;
  static inline Input input(float x) { return narrow<Bf16>(x); }
  template <int>
  static inline Pairs part(Pairs w) { return w; }
  template <int>
  static inline Pairs spread(const Bf16* x) { return load<uint32_t>(x) - Pairs{}; }
  static inline void add(Vector& sum, Pairs w, Pairs x) {
    sum = (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(__m512i)w, (__m512bh)(__m512i)x);
  }
  static inline void last(Vector& sum, Pairs w, const Bf16* x) {
    add(sum, w, static_cast<uint32_t>(x->bits) - Pairs{});
  }
#else
  using Input = float;
  static constexpr int kTurns = 2;
  static inline Input input(float x) { return rounded<Bf16>(x); }
  template <int Turn>
  static inline Vector part(Pairs w) { return (Vector)(Turn == 0 ? w << 16 : w & 0xffff0000u); }
  template <int Turn>
  static inline Vector spread(const float* x) { return x[Turn] - Vector{}; }
  static inline void add(Vector& sum, Vector w, Vector x) { sum += w * x; }
  static inline void last(Vector& sum, Pairs w, const float* x) { add(sum, part<0>(w), spread<0>(x)); }
#endif
};

// Adds a step of N vectors of outputs for R rows, from column `k` on. Row by row within a turn: with
// all that is spread at hand the sums would not stay in registers.
template <class S, int Turn = 0, int R, int N>
__attribute__((always_inline)) inline void add_step(Vector (&sums)[R][N],
                                                    const typename S::Weights (&w)[N],
                                                    const typename S::Input* const (&x)[R], int64_t k) {
  decltype(S::template part<Turn>(w[0])) own[N];
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) own[i] = S::template part<Turn>(w[i]);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const auto input = S::template spread<Turn>(x[r] + k);
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) S::add(sums[r][i], own[i], input);
  }
  if constexpr (Turn + 1 < S::kTurns) add_step<S, Turn + 1>(sums, w, x, k);
}

template <class T>
inline int64_t packed_block(int64_t in) {  // elements of 16 outputs' weights
  return (in + kColumns<T> - 1) / kColumns<T> * kColumns<T> * kOutputs;
}

// Where a column of one of a block's outputs lies.
template <class T>
inline int64_t packed_at(int64_t column, int64_t output) {
  return (column / kColumns<T> * kOutputs + output) * kColumns<T> + column % kColumns<T>;
}

template <class T>
inline void pack(const T* weight, int64_t in, int64_t out, T* packed) {
  const int64_t size = packed_block<T>(in);
  std::fill(packed, packed + (out + kOutputs - 1) / kOutputs * size, T{});
  for (int64_t n = 0; n < out; ++n)
    for (int64_t k = 0; k < in; ++k)
      packed[n / kOutputs * size + packed_at<T>(k, n % kOutputs)] = weight[n * in + k];
}

// R rows from `row` on; beyond the last one it repeats, and is not stored.
template <class T, int R>
struct Rows {
  using Input = typename Step<T>::Input;
  const Input* x[R];
  int count;

  Rows(const Product& p, int64_t row) : count(static_cast<int>(std::min<int64_t>(R, p.rows - row))) {
    for (int r = 0; r < R; ++r)
      x[r] = static_cast<const Input*>(p.x) + (row + std::min(r, count - 1)) * p.weight.in;
  }
};

// Stores sums of a vector of outputs from `n` on.
template <class T>
inline void store_outputs(const Product& p, int64_t row, int64_t n, Vector sum) {
  const int64_t out = p.weight.out, lanes = std::clamp<int64_t>(out - n, 0, kLanes);
  const T* bias = static_cast<const T*>(p.weight.bias);
  T* y = static_cast<T*>(p.y) + row * out + n;
  if (bias != nullptr)
    for (int64_t lane = 0; lane < lanes; ++lane) sum[lane] += widen(bias[n + lane]);
  if (lanes == kLanes) store(sum, kLanes, y);  // of a length that the compiler knows
  else store(sum, lanes, y);
}

template <class T, int R, int N>
void store(const Product& p, int64_t row, int count, int64_t block, const Vector (&sums)[R][N]) {
  for (int r = 0; r < count; ++r)
    for (int i = 0; i < N; ++i)
      store_outputs<T>(p, row + r, block * kOutputs + i * kLanes, sums[r][i]);
}

// R rows by B blocks of 16 outputs. Inlined, its sums would not stay in registers.
template <class T, int R, int B>
__attribute__((noinline)) void tile(const Product& p, int64_t row, int64_t block) {
  constexpr int depth = Step<T>::kDepth;
  const int64_t in = p.weight.in, stride = packed_block<T>(in);
  const Rows<T, R> rows(p, row);
  const T* w = static_cast<const T*>(p.weight.packed) + block * stride;
  const auto part = [&](int i) {
    return load<typename Step<T>::Weights>(w + i / kParts * stride + i % kParts * depth * kLanes);
  };
  Vector sums[R][B * kParts] = {};
  int64_t k = 0;
  for (; k + depth <= in; k += depth, w += depth * kOutputs) {
    if (R <= 4)
      for (int b = 0; b < B; ++b) __builtin_prefetch(w + b * stride + 16 * depth * kOutputs);
    typename Step<T>::Weights own[B * kParts];
#pragma GCC unroll 16
    for (int i = 0; i < B * kParts; ++i) own[i] = part(i);
    add_step<Step<T>>(sums, own, rows.x, k);
  }
  if (k < in)
    for (int i = 0; i < B * kParts; ++i) {
      const auto own = part(i);
      for (int r = 0; r < R; ++r) Step<T>::last(sums[r][i], own, rows.x[r] + k);
    }
  store<T>(p, row, rows.count, block, sums);
}

template <class T, int R, int B>
void panel(const Product& p, int64_t row, int64_t from, int64_t to) {
  int64_t block = from;
  for (; block + B <= to; block += B) tile<T, R, B>(p, row, block);
  for (; block < to; ++block) tile<T, R, 1>(p, row, block);
}

constexpr int kMany = kLanes == 16 ? 8 : 6;  // more rows are taken in parts over weights in the cache
constexpr int kCached = 4;                   // so many blocks at a time

// Tiles whose sums stay in registers: 32 of them where vectors have 16 lanes, 16 where they have 8.
template <class T>
void many_rows(const Product& p, int64_t from, int64_t to) {
  constexpr int B = kLanes == 16 ? 4 : 1;
  int64_t row = 0;
  for (; p.rows - row > 4; row += 6) panel<T, 6, B>(p, row, from, to);
  if (p.rows - row > 2) panel<T, 4, B>(p, row, from, to);
  else if (p.rows > row) panel<T, 2, B>(p, row, from, to);
}

template <class T>
void few_rows(const Product& p, int64_t from, int64_t to) {
  constexpr bool wide = kLanes == 16;
  switch (p.rows) {
    case 1: return panel<T, 1, wide ? 8 : 4>(p, 0, from, to);
    case 2: return panel<T, 2, wide ? 8 : 3>(p, 0, from, to);
    case 3:
    case 4: return panel<T, 4, wide ? 6 : 1>(p, 0, from, to);
    case 5:
    case 6: return panel<T, 6, wide ? 4 : 1>(p, 0, from, to);
  }
  if constexpr (wide) panel<T, 8, 3>(p, 0, from, to);
}

struct alignas(64) Line {
  char bytes[64];
};

// Rows as products read them, if that is not as they are.
template <class T>
struct InputLayout {
  using Input = typename Step<T>::Input;

  static int64_t lines(const Product& p) {
    constexpr int64_t size = sizeof(Input);
    return std::is_same_v<Input, T> ? 0 : (p.rows * p.weight.in * size + 63) / 64;
  }

  static constexpr int64_t kPart = 16;  // rows that one thread lays out
  static int64_t parts(const Product& p) { return (p.rows + kPart - 1) / kPart; }

  static void lay_out(const Product& p, int64_t part, Line* lines) {
    const int64_t from = part * kPart * p.weight.in;
    const int64_t to = std::min(p.rows, (part + 1) * kPart) * p.weight.in;
    if constexpr (!std::is_same_v<Input, T>)
      for (int64_t i = from; i < to; ++i)
        reinterpret_cast<Input*>(lines)[i] = widen(static_cast<const T*>(p.x)[i]);
  }
};

// Computes the outputs of blocks from .. to - 1; rows are in their InputLayout.
template <class T>
void multiply_blocks(const Product& p, int64_t from, int64_t to) {
  if (p.rows <= kMany) return few_rows<T>(p, from, to);
  for (int64_t block = from; block < to; block += kCached)
    many_rows<T>(p, block, std::min(to, block + kCached));
}

}  // namespace
