// Attention over the paged KV cache.
#pragma once

#include <vector>

#include "layers.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

// Vectors of the processor's width.
#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
typedef float Vector __attribute__((vector_size(4 * kLanes)));
typedef int32_t Lanes __attribute__((vector_size(4 * kLanes)));

// Selects lanes of the concatenation of `a` and `b`.
inline Vector shuffled(Vector a, Vector b, Lanes from) {
#if defined(__clang__)
  Vector out;
  for (int i = 0; i < kLanes; ++i) out[i] = from[i] < kLanes ? a[from[i]] : b[from[i] - kLanes];
  return out;
#else
  return __builtin_shuffle(a, b, from);
#endif
}

// Adds lanes that are `Step` apart; the sums of `b` come beside those of `a`.
template <int Step>
inline Vector folded(Vector a, Vector b) {
  Lanes low, high;
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    low[i] = (i & Step) != 0 ? kLanes + (i ^ Step) : i;
    high[i] = (i & Step) != 0 ? kLanes + i : (i ^ Step);
  }
  return shuffled(a, b, low) + shuffled(a, b, high);
}

// Lane p of the result is the sum over all lanes of sums[p * Stride], in one fixed order.
template <int Count>
inline Vector transposed_sum(const Vector* sums) {
  if constexpr (Count == 1) {
    return sums[0];
  } else {
    constexpr int half = Count / 2;
    return folded<half>(transposed_sum<half>(sums), transposed_sum<half>(sums + half));
  }
}

struct Attention {
  int64_t batch, steps, q_heads, kv_heads, dim, block_size, columns, span, window;
  const int64_t *rows, *positions;  // [batch], [batch, steps]
  const int64_t* slots;             // [batch], where a row's tokens lie; null if in order
  const int32_t* tables;            // [rows of the cache, columns]
  float scale;

  int64_t first_token(int64_t row) const { return (slots == nullptr ? row : slots[row]) * steps; }
};

constexpr int64_t kTile = 16;   // queries that share a widened block
constexpr int64_t kAhead = 4;   // blocks to prefetch ahead

inline int64_t padded(int64_t dim) { return (dim + kLanes - 1) / kLanes * kLanes; }

// Widens one head of `count` positions of a block to rows of padded(dim) floats, zeros behind dim.
template <class T>
void widen_block(const Attention& a, const T* block, int64_t count, float* out) {
  const int64_t size = padded(a.dim), stride = a.kv_heads * a.dim;
  for (int64_t p = 0; p < count; ++p, block += stride, out += size) {
    for (int64_t i = 0; i < a.dim; ++i) out[i] = widen(block[i]);
    for (int64_t i = a.dim; i < size; ++i) out[i] = 0.0f;
  }
}

// Prefetches the block that is read kAhead reads after the i-th, since blocks are scattered.
// A head reads the keys of `count` blocks, then their values; the next head follows.
// Always inlined: otherwise GCC drops the calls as having no effect.
template <class T>
__attribute__((always_inline)) inline void prefetch(const Attention& a, const int32_t* blocks, int64_t count, const T* keys,
                     const T* values, int64_t i) {
  const int64_t stride = a.kv_heads * a.dim, line = 64 / sizeof(T), read = i + kAhead;
  const int64_t at = blocks[read % count] * a.block_size * stride;
  const T* block = read < count ? keys + at : read < 2 * count ? values + at : keys + at + a.dim;
  for (int64_t p = 0; p < a.block_size; ++p, block += stride)
    for (int64_t d = 0; d < a.dim; d += line) __builtin_prefetch(block + d);
}

// Dot products of a query with the keys of kLanes positions.
inline Vector products(const float* query, const float* keys, int64_t size) {
  Vector sums[kLanes] = {};
  for (int64_t i = 0; i < size; i += kLanes) {
    Vector q;
    std::memcpy(&q, query + i, sizeof q);
#pragma GCC unroll 16
    for (int p = 0; p < kLanes; ++p) {
      Vector key;
      std::memcpy(&key, keys + p * size + i, sizeof key);
      sums[p] += q * key;
    }
  }
  return transposed_sum<kLanes>(sums);
}

// sum += weights * values over `count` positions; N vectors of a row of `size` floats.
template <int N>
inline void add_weighted(const float* weights, const float* values, int64_t count, int64_t size,
                         float* sum) {
  Vector sums[N];
  std::memcpy(sums, sum, sizeof sums);
  for (int64_t p = 0; p < count; ++p) {
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) {
      Vector value;
      std::memcpy(&value, values + p * size + i * kLanes, sizeof value);
      sums[i] += weights[p] * value;
    }
  }
  std::memcpy(sum, sums, sizeof sums);
}

// Exponentiates scores in place; returns the sum to divide by.
inline float softmax(float* scores, int64_t count) {
  float largest = -std::numeric_limits<float>::infinity(), total = 0.0f;
#pragma omp simd reduction(max : largest)
  for (int64_t s = 0; s < count; ++s) largest = std::max(largest, scores[s]);
  for (int64_t s = 0; s < count; ++s) scores[s] = exponential(scores[s] - largest);
#pragma omp simd reduction(+ : total)
  for (int64_t s = 0; s < count; ++s) total += scores[s];
  return total;
}

template <class T>
struct Query {
  int64_t first, last;  // visible positions
  T* rotated;           // padded(dim)
  float *scores, *sum;  // [span]; padded(dim), and behind them what to divide by
  T* weights;           // [span]
};

// Attends for up to kTile queries of one row and key/value head.
template <class T>
void attend_tile(const Attention& a, const int32_t* table, const T* keys, const T* values,
                 Query<float>* queries, int64_t count, float* wide) {
  const int64_t size = padded(a.dim), block = a.block_size * a.kv_heads * a.dim;
  int64_t first = queries[0].first, last = queries[0].last;
  for (int64_t q = 1; q < count; ++q) {
    first = std::min(first, queries[q].first);
    last = std::max(last, queries[q].last);
  }
  const int64_t begin = first / a.block_size, end = last / a.block_size + 1;
  const int64_t reads = end - begin;
  for (int64_t column = begin; column < end; ++column) {
    const int64_t start = column * a.block_size;
    const int64_t here = std::min(a.block_size, last + 1 - start);
    const int64_t tiles = (here + kLanes - 1) / kLanes * kLanes;
    prefetch(a, table + begin, reads, keys, values, column - begin);
    widen_block(a, keys + table[column] * block, tiles, wide);
    for (int64_t q = 0; q < count; ++q) {
      if (queries[q].last < start || queries[q].first >= start + here) continue;
      for (int64_t p = 0; p < tiles; p += kLanes) {
        const Vector scores = products(queries[q].rotated, wide + p * size, size) * a.scale;
        std::memcpy(queries[q].scores + start + p, &scores, sizeof scores);
      }
    }
  }
  for (int64_t q = 0; q < count; ++q) {
    const Query<float>& own = queries[q];
    const float total = softmax(own.scores + own.first, own.last + 1 - own.first);
    std::fill(own.sum, own.sum + size, 0.0f);
    own.sum[size] = total;
  }
  for (int64_t column = begin; column < end; ++column) {
    const int64_t start = column * a.block_size;
    const int64_t here = std::min(a.block_size, last + 1 - start);
    prefetch(a, table + begin, reads, keys, values, reads + column - begin);
    widen_block(a, values + table[column] * block, here, wide);
    for (int64_t q = 0; q < count; ++q) {
      const int64_t from = std::max(queries[q].first, start);
      const int64_t seen = std::min(queries[q].last + 1, start + here) - from;
      if (seen <= 0) continue;
      const float *weights = queries[q].scores + from, *rows = wide + (from - start) * size;
      int64_t i = 0;
      for (; i + 4 * kLanes <= size; i += 4 * kLanes)
        add_weighted<4>(weights, rows + i, seen, size, queries[q].sum + i);
      for (; i < size; i += kLanes)
        add_weighted<1>(weights, rows + i, seen, size, queries[q].sum + i);
    }
  }
}

#if defined(__AVX512BF16__)

// The same for bfloat16 by the processor's dot products: of two columns for a score, and of two
// positions, whose weights are rounded to bfloat16 as transformers' modules do, for a sum. A query's
// bits do not depend on the others.
constexpr int64_t kDots = 4;  // queries at a time

// Transposes 16 rows of 16 words.
inline void transpose_words(__m512i* r) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4)
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
      r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
    }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

inline __m512bh broadcast_pair(const Bf16* from) {
  int32_t pair;
  std::memcpy(&pair, from, sizeof pair);
  return (__m512bh)_mm512_set1_epi32(pair);
}

// Scores of Q queries with 16 keys, whose columns 2j and 2j + 1 are words[j].
template <int Q>
void score_dots(const __m512i* words, int64_t pairs, const Query<Bf16>* queries, float scale,
                int64_t at) {
  __m512 sums[Q][2] = {};
  for (int64_t j = 0; j < pairs; j += 2)
#pragma GCC unroll 8
    for (int q = 0; q < Q; ++q)
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i)
        sums[q][i] = _mm512_dpbf16_ps(sums[q][i], (__m512bh)words[j + i],
                                      broadcast_pair(queries[q].rotated + 2 * (j + i)));
  for (int q = 0; q < Q; ++q) {
    const __m512 sum = _mm512_mul_ps(_mm512_add_ps(sums[q][0], sums[q][1]), _mm512_set1_ps(scale));
    _mm512_storeu_ps(queries[q].scores + at, sum);
  }
}

// Adds weighted values of pairs of positions to the sums of Q queries, 32 columns, which lie as
// unpacking brings them: see sort_columns().
template <int Q>
void add_dots(const Query<Bf16>* queries, int64_t at, const Bf16* values, int64_t stride, int64_t pairs,
              int64_t column) {
  __m512 sums[Q][2];
  for (int q = 0; q < Q; ++q)
    for (int h = 0; h < 2; ++h) sums[q][h] = _mm512_loadu_ps(queries[q].sum + column + 16 * h);
  for (int64_t p = 0; p < pairs; ++p, values += 2 * stride) {
    const __m512i even = _mm512_loadu_si512(values), odd = _mm512_loadu_si512(values + stride);
    const __m512i low = _mm512_unpacklo_epi16(even, odd), high = _mm512_unpackhi_epi16(even, odd);
#pragma GCC unroll 8
    for (int q = 0; q < Q; ++q) {
      const __m512bh weights = broadcast_pair(queries[q].weights + at + 2 * p);
      sums[q][0] = _mm512_dpbf16_ps(sums[q][0], (__m512bh)low, weights);
      sums[q][1] = _mm512_dpbf16_ps(sums[q][1], (__m512bh)high, weights);
    }
  }
  for (int q = 0; q < Q; ++q)
    for (int h = 0; h < 2; ++h) _mm512_storeu_ps(queries[q].sum + column + 16 * h, sums[q][h]);
}

// Adds one pair that a query sees, or the first of it, which is its last.
inline void add_last(const Attention& a, const Query<Bf16>& query, int64_t at, const Bf16* values) {
  if (at > query.last) return;
  const int64_t stride = a.kv_heads * a.dim;
  const bool both = at < query.last;
  Bf16 pair[2] = {query.weights[at], both ? query.weights[at + 1] : Bf16{}};
  for (int64_t d = 0; d < a.dim; d += 32) {
    const __m512i even = _mm512_loadu_si512(values + d);
    const __m512i odd = both ? _mm512_loadu_si512(values + stride + d) : _mm512_setzero_si512();
    for (int h = 0; h < 2; ++h) {
      const __m512i own = h ? _mm512_unpackhi_epi16(even, odd) : _mm512_unpacklo_epi16(even, odd);
      const __m512 sum = _mm512_loadu_ps(query.sum + d + 16 * h);
      const __m512 next = _mm512_dpbf16_ps(sum, (__m512bh)own, broadcast_pair(pair));
      _mm512_storeu_ps(query.sum + d + 16 * h, next);
    }
  }
}

inline void sort_columns(float* sum, int64_t dim) {
  const __m512i first = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  for (int64_t d = 0; d < dim; d += 32) {
    const __m512 low = _mm512_loadu_ps(sum + d), high = _mm512_loadu_ps(sum + d + 16);
    _mm512_storeu_ps(sum + d, _mm512_permutex2var_ps(low, first, high));
    _mm512_storeu_ps(sum + d + 16, _mm512_permutex2var_ps(low, second, high));
  }
}

// Calls f(first query, number of them as a constant) for groups of queries.
template <class F>
void by_dots(int64_t count, const F& f) {
  int64_t q = 0;
  for (; q + kDots <= count; q += kDots) f(q, std::integral_constant<int, kDots>{});
  switch (count - q) {
    case 1: return f(q, std::integral_constant<int, 1>{});
    case 2: return f(q, std::integral_constant<int, 2>{});
    case 3: return f(q, std::integral_constant<int, 3>{});
  }
}

inline void attend_tile(const Attention& a, const int32_t* table, const Bf16* keys,
                        const Bf16* values, Query<Bf16>* queries, int64_t count) {
  const int64_t stride = a.kv_heads * a.dim, block = a.block_size * stride;
  int64_t first = queries[0].first, last = queries[0].last, all = queries[0].last;
  for (int64_t q = 1; q < count; ++q) {
    first = std::min(first, queries[q].first);
    last = std::max(last, queries[q].last);
    all = std::min(all, queries[q].last);
  }
  const int64_t begin = first / a.block_size, end = last / a.block_size + 1;
  for (int64_t column = begin; column < end; ++column) {
    prefetch(a, table + begin, end - begin, keys, values, column - begin);
    const Bf16* own = keys + table[column] * block;
    for (int64_t p = 0; p < a.block_size; p += 16) {
      const int64_t at = column * a.block_size + p;
      if (at > last) break;
      __m512i words[8 * kLanes];
      for (int64_t part = 0; part < a.dim / 32; ++part) {
        for (int64_t k = 0; k < 16; ++k)
          words[part * 16 + k] = _mm512_loadu_si512(own + (p + k) * stride + 32 * part);
        transpose_words(words + part * 16);
      }
      by_dots(count, [&](int64_t q, auto dots) {
        score_dots<dots.value>(words, a.dim / 2, queries + q, a.scale, at);
      });
    }
  }
  for (int64_t q = 0; q < count; ++q) {
    const Query<Bf16>& own = queries[q];
    const float total = softmax(own.scores + own.first, own.last + 1 - own.first);
    std::fill(own.weights + begin * a.block_size, own.weights + own.first, Bf16{});
    for (int64_t p = own.first; p <= own.last; ++p) own.weights[p] = narrow<Bf16>(own.scores[p]);
    std::fill(own.sum, own.sum + a.dim, 0.0f);
    own.sum[a.dim] = total;  // padded(dim) is dim
  }
  // Pairs that every query sees; beyond them a query must not read what it does not see.
  const int64_t shared = (all + 1) / 2 * 2;
  for (int64_t column = begin; column < end; ++column) {
    const int64_t start = column * a.block_size, stop = std::min(start + a.block_size, last + 1);
    const Bf16* own = values + table[column] * block;
    prefetch(a, table + begin, end - begin, keys, values, end - begin + column - begin);
    const int64_t pairs = std::max<int64_t>(0, std::min(stop, shared) - start) / 2;
    for (int64_t d = 0; d < a.dim; d += 32)
      by_dots(count, [&](int64_t q, auto dots) {
        add_dots<dots.value>(queries + q, start, own + d, stride, pairs, d);
      });
    for (int64_t at = start + 2 * pairs; at < stop; at += 2)
      for (int64_t q = 0; q < count; ++q) add_last(a, queries[q], at, own + (at - start) * stride);
  }
  for (int64_t q = 0; q < count; ++q) sort_columns(queries[q].sum, a.dim);
}

#endif

// States of tokens in a paged cache [blocks, block_size, size].
template <class T>
struct PagedStates {
  T* cache;
  const int32_t* tables;  // [rows of the cache, columns]
  int64_t columns, block_size, size;
  const int64_t *rows, *positions;  // [batch], [batch, steps]
  int64_t batch, steps;

  T* at(int64_t b, int64_t position) const {
    const int64_t column = std::min(position / block_size, columns - 1);
    const int64_t block = tables[rows[b] * columns + column];
    return cache + (block * block_size + position % block_size) * size;
  }

  // Reads to `out` [batch, steps, size], zeros at negative positions.
  void read(T* out) const {
    for (int64_t i = 0; i < batch * steps; ++i, out += size) {
      if (positions[i] < 0) std::fill(out, out + size, T{});
      else std::memcpy(out, at(i / steps, positions[i]), size * sizeof(T));
    }
  }

  void write(const T* states) const {
    for (int64_t i = 0; i < batch * steps; ++i, states += size)
      std::memcpy(at(i / steps, positions[i]), states, size * sizeof(T));
  }
};

// Rotates and stores the new keys of one token of batch * steps, stores its new values.
template <class T>
void store_token(const Attention& a, int64_t index, const T* qkv, const T* cos, const T* sin,
                 T* keys, T* values) {
  const int64_t width = (a.q_heads + 2 * a.kv_heads) * a.dim, at = a.positions[index];
  const int64_t row = index / a.steps, token = a.first_token(row) + index % a.steps;
  const int64_t block = a.tables[a.rows[row] * a.columns + at / a.block_size];
  const int64_t offset = (block * a.block_size + at % a.block_size) * a.kv_heads * a.dim;
  const T* key = qkv + token * width + a.q_heads * a.dim;
  for (int64_t h = 0; h < a.kv_heads; ++h)
    rotate(key + h * a.dim, cos + at * a.dim, sin + at * a.dim, a.dim, keys + offset + h * a.dim);
  std::memcpy(values + offset, key + a.kv_heads * a.dim, a.kv_heads * a.dim * sizeof(T));
}

// Buffers of a tile of queries, parts of one allocation of the thread's.
struct Scratch {
  float *rotated, *sums, *wide, *scores, *weights;

  explicit Scratch(const Attention& a) {
    thread_local std::vector<float> memory;
    const int64_t size = padded(a.dim);
    memory.resize(kTile * (2 * size + kLanes + 2 * a.span) + a.block_size * size);
    rotated = memory.data();
    sums = rotated + kTile * size;
    wide = sums + kTile * (size + kLanes);
    scores = wide + a.block_size * size;
    weights = scores + kTile * a.span;
  }
};

// Attends for queries start .. start + count - 1 of a row's key/value head `h`; Narrow is the type of
// rotated queries.
template <class T, class Narrow>
void attend_some(const Attention& a, const T* qkv, const T* cos, const T* sin, const int64_t* at,
                 const int32_t* table, const T* keys, const T* values, int64_t h, int64_t start,
                 int64_t count, T* out) {
  const Scratch scratch(a);
  const int64_t width = (a.q_heads + 2 * a.kv_heads) * a.dim, size = padded(a.dim);
  const int64_t group = a.q_heads / a.kv_heads;
  Query<Narrow> queries[kTile];
  for (int64_t q = 0; q < count; ++q) {
    const int64_t token = (start + q) / group, head = h * group + (start + q) % group;
    const int64_t last = std::min(at[token], a.span - 1);  // only padding exceeds the span
    const int64_t first = a.window > 0 ? std::max<int64_t>(0, last - a.window + 1) : 0;
    Narrow* rotated = reinterpret_cast<Narrow*>(scratch.rotated) + q * size;
    queries[q] = {first, last, rotated, scratch.scores + q * a.span,
                  scratch.sums + q * (size + kLanes),
                  reinterpret_cast<Narrow*>(scratch.weights) + q * a.span};
    const int64_t turn = at[token] * a.dim;
    rotate(qkv + token * width + head * a.dim, cos + turn, sin + turn, a.dim, rotated);
    std::fill(rotated + a.dim, rotated + size, Narrow{});
  }
  keys += h * a.dim;
  values += h * a.dim;
#if defined(__AVX512BF16__)
  if constexpr (std::is_same_v<Narrow, Bf16>) attend_tile(a, table, keys, values, queries, count);
  else
#endif
  attend_tile(a, table, keys, values, queries, count, scratch.wide);
  for (int64_t q = 0; q < count; ++q) {
    const int64_t token = (start + q) / group, head = h * group + (start + q) % group;
    T* own = out + (token * a.q_heads + head) * a.dim;
    const float total = queries[q].sum[size];
    for (int64_t i = 0; i < a.dim; ++i) own[i] = narrow<T>(queries[q].sum[i] / total);
  }
}

// Queries that are taken together: all that fit, but two parts if there are few for the threads.
inline int64_t tile_size(const Attention& a, int64_t threads) {
  const int64_t queries = a.q_heads / a.kv_heads * a.steps;
  const int64_t tiles = a.batch * a.kv_heads * ((queries + kTile - 1) / kTile);
  if (queries > kTile || queries < 4 || threads < 2 || tiles >= 4 * threads) return kTile;
  return (queries + 1) / 2;
}

inline int64_t tiles_per_head(const Attention& a, int64_t tile) {
  return (a.q_heads / a.kv_heads * a.steps + tile - 1) / tile;
}

// Attends for one tile of the batch * kv_heads * tiles_per_head() there are.
template <class T>
void attend_one(const Attention& a, int64_t tile, int64_t index, const T* qkv, const T* cos,
                const T* sin, const T* keys, const T* values, T* out) {
  const int64_t tiles = tiles_per_head(a, tile), row = index / (a.kv_heads * tiles);
  const int64_t h = index / tiles % a.kv_heads, start = index % tiles * tile;
  const int64_t width = (a.q_heads + 2 * a.kv_heads) * a.dim, token = a.first_token(row);
  const int64_t count = std::min(tile, a.q_heads / a.kv_heads * a.steps - start);
  const auto some = [&](auto* attend) {
    attend(a, qkv + token * width, cos, sin, a.positions + row * a.steps,
           a.tables + a.rows[row] * a.columns, keys, values, h, start, count,
           out + token * a.q_heads * a.dim);
  };
#if defined(__AVX512BF16__)
  if (std::is_same_v<T, Bf16> && a.dim % 32 == 0 && a.dim <= 256) return some(attend_some<T, T>);
#endif
  some(attend_some<T, float>);
}

}  // namespace
