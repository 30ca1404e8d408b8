// Attention over the paged KV cache.
#pragma once

#include <vector>

#include "layers.h"

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

struct Query {
  int64_t first, last;  // visible positions
  float *rotated, *scores, *sum;
};

// Attends for up to kTile queries of one row and key/value head.
template <class T>
void attend_tile(const Attention& a, const int32_t* table, const T* keys, const T* values,
                 Query* queries, int64_t count, float* wide) {
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
    const Query& own = queries[q];
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
  float *rotated, *sums, *wide, *scores;

  explicit Scratch(const Attention& a) {
    thread_local std::vector<float> memory;
    const int64_t size = padded(a.dim);
    memory.resize(kTile * (2 * size + kLanes + a.span) + a.block_size * size);
    rotated = memory.data();
    sums = rotated + kTile * size;
    wide = sums + kTile * (size + kLanes);
    scores = wide + a.block_size * size;
  }
};

// Attends for queries start .. start + count - 1 of a row's key/value head `h`.
template <class T>
void attend_some(const Attention& a, const T* qkv, const T* cos, const T* sin, const int64_t* at,
                 const int32_t* table, const T* keys, const T* values, const Scratch& scratch,
                 int64_t h, int64_t start, int64_t count, T* out) {
  const int64_t width = (a.q_heads + 2 * a.kv_heads) * a.dim, size = padded(a.dim);
  const int64_t group = a.q_heads / a.kv_heads;
  Query queries[kTile];
  for (int64_t q = 0; q < count; ++q) {
    const int64_t token = (start + q) / group, head = h * group + (start + q) % group;
    const int64_t last = std::min(at[token], a.span - 1);  // only padding exceeds the span
    const int64_t first = a.window > 0 ? std::max<int64_t>(0, last - a.window + 1) : 0;
    float* rotated = scratch.rotated + q * size;
    queries[q] = {first, last, rotated, scratch.scores + q * a.span,
                  scratch.sums + q * (size + kLanes)};
    const int64_t turn = at[token] * a.dim;
    rotate(qkv + token * width + head * a.dim, cos + turn, sin + turn, a.dim, rotated);
    std::fill(rotated + a.dim, rotated + size, 0.0f);
  }
  attend_tile(a, table, keys + h * a.dim, values + h * a.dim, queries, count, scratch.wide);
  for (int64_t q = 0; q < count; ++q) {
    const int64_t token = (start + q) / group, head = h * group + (start + q) % group;
    T* own = out + (token * a.q_heads + head) * a.dim;
    for (int64_t i = 0; i < a.dim; ++i) own[i] = narrow<T>(queries[q].sum[i] / queries[q].sum[size]);
  }
}

inline int64_t tiles_per_head(const Attention& a) {
  return (a.q_heads / a.kv_heads * a.steps + kTile - 1) / kTile;
}

// Attends for one tile of the batch * kv_heads * tiles_per_head() there are.
template <class T>
void attend_one(const Attention& a, int64_t index, const T* qkv, const T* cos, const T* sin,
                const T* keys, const T* values, T* out) {
  const int64_t tiles = tiles_per_head(a), row = index / (a.kv_heads * tiles);
  const int64_t h = index / tiles % a.kv_heads, start = index % tiles * kTile;
  const int64_t width = (a.q_heads + 2 * a.kv_heads) * a.dim, token = a.first_token(row);
  const int64_t count = std::min(kTile, a.q_heads / a.kv_heads * a.steps - start);
  attend_some(a, qkv + token * width, cos, sin, a.positions + row * a.steps,
              a.tables + a.rows[row] * a.columns, keys, values, Scratch(a), h, start, count,
              out + token * a.q_heads * a.dim);
}

}  // namespace
