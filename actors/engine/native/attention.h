// Attention over the paged KV cache.
//
// A block of the cache holds one head after another, so that a head is read in one stretch: position
// by position, or in pairs of bfloat16 (see store_token()).
#pragma once

#include <vector>

#include "layers.h"
#include "tiles.h"

namespace {

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

// Adds lanes at a distance; the sums of `b` come beside those of `a`.
template <int Distance>
inline Vector folded(Vector a, Vector b) {
  Lanes low, high;
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    low[i] = (i & Distance) != 0 ? kLanes + (i ^ Distance) : i;
    high[i] = (i & Distance) != 0 ? kLanes + i : (i ^ Distance);
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

constexpr int64_t kTile = 16;      // queries that share a widened block
constexpr int64_t kAhead = 16384;  // bytes to prefetch ahead
#if PACELINE_TILES
constexpr int64_t kHeads = 1;  // key/value heads that are taken together; by tiles more was not timed
#else
constexpr int64_t kHeads = 4;
#endif
constexpr int64_t kQueries = 2 * kTile;  // of all these heads at most

inline int64_t padded(int64_t dim) { return (dim + kLanes - 1) / kLanes * kLanes; }

// Widens one head of `count` positions of a block to rows of padded(dim) floats, zeros behind dim.
template <class T>
void widen_block(const Attention& a, const T* block, int64_t count, float* out) {
  const int64_t size = padded(a.dim);
  for (int64_t p = 0; p < count; ++p, block += a.dim, out += size) {
    for (int64_t i = 0; i < a.dim; ++i) out[i] = widen(block[i]);
    for (int64_t i = a.dim; i < size; ++i) out[i] = 0.0f;
  }
}

// Prefetches what `heads` neighbouring heads have of the block that is read kAhead bytes after the i-th,
// since blocks are scattered. They read the keys of `count` blocks, then their values; the next heads
// follow. Into the second cache, to which more reads may be under way than to the first.
// Always inlined: otherwise GCC drops the calls as having no effect.
template <class T>
__attribute__((always_inline)) inline void prefetch(const Attention& a, const int32_t* blocks,
                                                    int64_t count, const T* keys, const T* values,
                                                    int64_t heads, int64_t i) {
  const int64_t part = a.block_size * a.dim, line = 64 / sizeof(T), size = heads * part;
  const int64_t read = i + std::max<int64_t>(1, kAhead / (size * static_cast<int64_t>(sizeof(T))));
  const int64_t at = blocks[read % count] * a.kv_heads * part;
  const T* from = read < count ? keys + at : read < 2 * count ? values + at : keys + at + size;
  for (int64_t d = 0; d < size; d += line) __builtin_prefetch(from + d, 0, 2);
}

// Dot products of a query with the keys of kLanes positions.
inline Vector products(const float* query, const float* keys, int64_t size) {
  Vector sums[kLanes] = {};
  for (int64_t i = 0; i < size; i += kLanes) {
    const Vector q = load<Vector>(query + i);
#pragma GCC unroll 16
    for (int p = 0; p < kLanes; ++p) sums[p] += q * load<Vector>(keys + p * size + i);
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
    for (int i = 0; i < N; ++i) sums[i] += weights[p] * load<Vector>(values + p * size + i * kLanes);
  }
  std::memcpy(sum, sums, sizeof sums);
}

// Exponentiates scores in place; returns the sum to divide by.
inline float softmax(float* scores, int64_t count) {
  float largest = scores[0];
  Vector most = largest + Vector{};
  int64_t at = 0;
  for (; at + kLanes <= count; at += kLanes) {
    const Vector own = load<Vector>(scores + at);
    most = own > most ? own : most;
  }
  for (int i = 0; i < kLanes; ++i) largest = std::max(largest, most[i]);
  for (; at < count; ++at) largest = std::max(largest, scores[at]);
  Vector total = {};
  each_vector(count, [&](int64_t s, auto lanes) {
    store(exponential(load_floats(scores + s, lanes) - largest), lanes, scores + s);
    total += load_floats(scores + s, lanes);
  });
  return sum_of(total);
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
    prefetch(a, table + begin, reads, keys, values, 1, column - begin);
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
    prefetch(a, table + begin, reads, keys, values, 1, reads + column - begin);
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

// The same for bfloat16 where vectors have 8 lanes or more, by pairs as products.h takes them: of two
// columns for a score, and of two positions, whose weights are rounded to bfloat16 as transformers'
// modules do, for a sum. A query's bits do not depend on the others. Sums that were inlined would not
// stay in registers.
constexpr int64_t kAtOnce = 4;                        // queries
constexpr int kChains = kLanes == 16 ? 2 : 1;         // of a score: registers have room for as many
constexpr int kColumnsAtOnce = kLanes == 16 ? 4 : 2;  // vectors of a sum, likewise
using PairStep = Step<Bf16>;
using PairInput = PairStep::Input;

// Scores of Q queries with a tile of 16 keys.
template <int Q>
__attribute__((noinline)) void score_pairs(const Bf16* keys, int64_t pairs,
                                           const Query<PairInput>* queries, int64_t at) {
  const PairInput* rotated[Q];
  for (int q = 0; q < Q; ++q) rotated[q] = queries[q].rotated;
  Vector sums[kChains][Q][kParts] = {};
  for (int64_t j = 0; j < pairs; j += kChains)
#pragma GCC unroll 2
    for (int i = 0; i < kChains; ++i) {
      Pairs own[kParts];
#pragma GCC unroll 2
      for (int n = 0; n < kParts; ++n) own[n] = load<Pairs>(keys + 32 * (j + i) + 2 * kLanes * n);
      add_step<PairStep>(sums[i], own, rotated, 2 * (j + i));
    }
  for (int q = 0; q < Q; ++q)
    for (int n = 0; n < kParts; ++n) {
      Vector sum = sums[0][q][n];
      if constexpr (kChains == 2) sum += sums[1][q][n];
      std::memcpy(queries[q].scores + at + kLanes * n, &sum, sizeof sum);
    }
}

// Adds weighted values of pairs of positions to the sums of Q queries, N vectors of columns.
template <int Q, int N>
__attribute__((noinline)) void add_pairs(const Query<PairInput>* queries, int64_t at,
                                         const Bf16* values, int64_t dim, int64_t pairs,
                                         int64_t column) {
  const PairInput* weights[Q];
  Vector sums[Q][N];
  for (int q = 0; q < Q; ++q) {
    weights[q] = queries[q].weights + at;
    for (int n = 0; n < N; ++n) sums[q][n] = load<Vector>(queries[q].sum + column + n * kLanes);
  }
  values += 2 * column;
  for (int64_t p = 0; p < pairs; ++p, values += 2 * dim) {
    Pairs own[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) own[n] = load<Pairs>(values + 2 * kLanes * n);
    add_step<PairStep>(sums, own, weights, 2 * p);
  }
  for (int q = 0; q < Q; ++q)
    for (int n = 0; n < N; ++n)
      std::memcpy(queries[q].sum + column + n * kLanes, &sums[q][n], sizeof sums[q][n]);
}

// Adds one pair that a query sees, or the first of it, which is its last.
inline void add_last(const Attention& a, const Query<PairInput>& query, int64_t at,
                     const Bf16* values) {
  if (at > query.last) return;
  const bool both = at < query.last;
  const PairInput weights[2] = {query.weights[at], both ? query.weights[at + 1] : PairInput{}};
  for (int64_t d = 0; d < a.dim; d += kLanes) {
    Vector sums[1][1] = {{load<Vector>(query.sum + d)}};
    const Pairs own[1] = {load<Pairs>(values + 2 * d) & (both ? ~0u : 0xffffu)};
    add_step<PairStep>(sums, own, {weights}, 0);
    std::memcpy(query.sum + d, sums, sizeof sums);
  }
}

// Calls f(first query, number of them as a constant) for groups of queries.
template <class F>
void each_group(int64_t count, const F& f) {
  int64_t q = 0;
  for (; q + kAtOnce <= count; q += kAtOnce) f(q, std::integral_constant<int, kAtOnce>{});
  switch (count - q) {
    case 1: return f(q, std::integral_constant<int, 1>{});
    case 2: return f(q, std::integral_constant<int, 2>{});
    case 3: return f(q, std::integral_constant<int, 3>{});
  }
}

#if PACELINE_TILES

// By tiles: queries are the rows. Of values 16 positions at a time that a query sees, the rest by pairs.
constexpr int64_t kPositions = 16;

inline TileShapes attention_shapes(int64_t queries) {
  TileShapes shapes;
  shapes.set(0, 5, queries, 64);              // sums 0 to 3, and columns of queries
  shapes.set(5, 6, 16, 64);                   // keys
  shapes.set(6, 7, queries, 2 * kPositions);  // weights
  shapes.set(7, 8, kPositions / 2, 64);       // values
  return shapes;
}

// Scores of all queries with a tile of 16 keys.
inline void score_tile(const Attention& a, const Bf16* keys, const Query<PairInput>* queries, int64_t at) {
  const int64_t pitch = a.dim * static_cast<int64_t>(sizeof(Bf16));
  uses_memory();
  _tile_zero(0);
  for (int64_t d = 0; d < a.dim; d += 32) {
    _tile_loadd(4, queries[0].rotated + d, pitch);
    _tile_loadd(5, keys + d * kPositions, 64);
    _tile_dpbf16ps(0, 4, 5);
  }
  _tile_stored(0, queries[0].scores + at, a.span * static_cast<int64_t>(sizeof(float)));
  uses_memory();
}

// Weighted sums of 16 * N columns of values over the positions begin .. end - 1, by whole tiles. Queries
// see all before `shared`; a tile that a query does not see whole has weights of zero for it.
template <int N, class Ahead>
void add_tiles(const Attention& a, const int32_t* table, const Bf16* values,
               const Query<PairInput>* queries, int64_t count, int64_t begin, int64_t shared,
               int64_t end, int64_t column, const Ahead& ahead) {
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (N == 4) _tile_zero(2);
  if constexpr (N == 4) _tile_zero(3);
  for (int64_t at = begin; at + kPositions <= end; at += kPositions) {
    if (column == 0 && at % a.block_size == 0) ahead(at / a.block_size);
    const int64_t block = table[at / a.block_size] * a.block_size * a.kv_heads;
    const Bf16* own = values + (block + at % a.block_size) * a.dim + 2 * column;
    const int64_t pitch = 2 * a.dim * static_cast<int64_t>(sizeof(Bf16));
    const Bf16* weights = queries[0].weights + at;
    int64_t line = a.span * static_cast<int64_t>(sizeof(Bf16));
    Bf16 whole[kTile][kPositions];
    if (at + kPositions > shared) {
      for (int64_t q = 0; q < count; ++q) {
        const bool sees = at + kPositions <= queries[q].last + 1;
        for (int64_t p = 0; p < kPositions; ++p) whole[q][p] = sees ? queries[q].weights[at + p] : Bf16{};
      }
      weights = whole[0], line = sizeof whole[0];
    }
    uses_memory();
    _tile_loadd(6, weights, line);
    _tile_loadd(7, own, pitch);
    _tile_dpbf16ps(0, 6, 7);
    _tile_loadd(7, own + 32, pitch);
    _tile_dpbf16ps(1, 6, 7);
    if constexpr (N == 4) {
      _tile_loadd(7, own + 64, pitch);
      _tile_dpbf16ps(2, 6, 7);
      _tile_loadd(7, own + 96, pitch);
      _tile_dpbf16ps(3, 6, 7);
    }
  }
  float* sums = queries[0].sum + column;
  const int64_t line = (a.dim + kLanes) * static_cast<int64_t>(sizeof(float));
  _tile_stored(0, sums, line);
  _tile_stored(1, sums + 16, line);
  if constexpr (N == 4) _tile_stored(2, sums + 32, line);
  if constexpr (N == 4) _tile_stored(3, sums + 48, line);
  uses_memory();
}

// Adds the pairs from `at` on that a query sees.
inline void add_rest(const Attention& a, const Query<PairInput>& query, int64_t at, const Bf16* values) {
  const int64_t pairs = (query.last + 1 - at) / 2;
  int64_t d = 0;
  for (; d + 64 <= a.dim; d += 64) add_pairs<1, 4>(&query, at, values, a.dim, pairs, d);
  if (d < a.dim) add_pairs<1, 2>(&query, at, values, a.dim, pairs, d);
  add_last(a, query, at + 2 * pairs, values + 2 * pairs * a.dim);
}

#endif

// For `heads` neighbouring heads with `count` queries each, the same tokens' of every head.
inline void attend_tile_by_pairs(const Attention& a, const int32_t* table, const Bf16* keys,
                                 const Bf16* values, Query<PairInput>* queries, int64_t heads,
                                 int64_t count) {
  const int64_t part = a.block_size * a.dim, block = a.kv_heads * part;
  int64_t first = queries[0].first, last = queries[0].last, all = queries[0].last;
  for (int64_t q = 1; q < count; ++q) {
    first = std::min(first, queries[q].first);
    last = std::max(last, queries[q].last);
    all = std::min(all, queries[q].last);
  }
  const int64_t begin = first / a.block_size, end = last / a.block_size + 1;
#if PACELINE_TILES
  const TileShapes shapes = attention_shapes(count);
  _tile_loadconfig(&shapes);
#endif
  for (int64_t column = begin; column < end; ++column) {
    prefetch(a, table + begin, end - begin, keys, values, heads, column - begin);
    for (int64_t h = 0; h < heads; ++h) {
      const Bf16* own = keys + table[column] * block + h * part;
      for (int64_t p = 0; p < a.block_size; p += 16) {
        const int64_t at = column * a.block_size + p;
        if (at > last) break;
#if PACELINE_TILES
        score_tile(a, own + p * a.dim, queries + h * count, at);
#else
        each_group(count, [&](int64_t q, auto some) {
          score_pairs<some.value>(own + p * a.dim, a.dim / 2, queries + h * count + q, at);
        });
#endif
      }
    }
  }
  for (int64_t q = 0; q < heads * count; ++q) {
    const Query<PairInput>& own = queries[q];
    for (int64_t p = own.first; p <= own.last; ++p) own.scores[p] *= a.scale;
    const float total = softmax(own.scores + own.first, own.last + 1 - own.first);
    std::fill(own.weights + begin * a.block_size, own.weights + own.first, PairInput{});
    for (int64_t p = own.first; p <= own.last; ++p)
      own.weights[p] = PairStep::input(own.scores[p]);
    std::fill(own.sum, own.sum + a.dim, 0.0f);
    own.sum[a.dim] = total;  // padded(dim) is dim
  }
  const auto ahead = [&](int64_t column) __attribute__((always_inline)) {  // of the values
    prefetch(a, table + begin, end - begin, keys, values, heads, end - begin + column - begin);
  };
#if PACELINE_TILES
  const int64_t start = begin * a.block_size;
  int64_t d = 0;
  for (; d + 64 <= a.dim; d += 64)
    add_tiles<4>(a, table, values, queries, count, start, all + 1, last + 1, d, ahead);
  if (d < a.dim) add_tiles<2>(a, table, values, queries, count, start, all + 1, last + 1, d, ahead);
  _tile_release();
  for (int64_t q = 0; q < count; ++q) {
    const int64_t at = std::max((queries[q].last + 1) / kPositions * kPositions, start);
    if (at <= queries[q].last)
      add_rest(a, queries[q], at,
               values + table[at / a.block_size] * block + at % a.block_size * a.dim);
  }
#else
  // Pairs that every query sees; beyond them a query must not read what it does not see.
  const int64_t shared = (all + 1) / 2 * 2;
  for (int64_t column = begin; column < end; ++column) {
    const int64_t start = column * a.block_size, stop = std::min(start + a.block_size, last + 1);
    const int64_t pairs = std::max<int64_t>(0, std::min(stop, shared) - start) / 2;
    ahead(column);
    for (int64_t h = 0; h < heads; ++h) {
      const Bf16* own = values + table[column] * block + h * part;
      Query<PairInput>* mine = queries + h * count;
      each_group(count, [&](int64_t q, auto some) {
        constexpr int64_t whole = kColumnsAtOnce * kLanes;
        int64_t d = 0;
        for (; d + whole <= a.dim; d += whole)
          add_pairs<some.value, kColumnsAtOnce>(mine + q, start, own, a.dim, pairs, d);
        if (d < a.dim) add_pairs<some.value, 2>(mine + q, start, own, a.dim, pairs, d);
      });
      for (int64_t at = start + 2 * pairs; at < stop; at += 2)
        for (int64_t q = 0; q < count; ++q) add_last(a, mine[q], at, own + (at - start) * a.dim);
    }
  }
#endif
}

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

// Whether no number is NaN or infinite.
template <class T>
bool all_finite(const T* values, int64_t size) {
  int32_t broken = 0;
#pragma omp simd reduction(| : broken)
  for (int64_t i = 0; i < size; ++i) {
    const float x = widen(values[i]);
    broken |= !(x - x == 0.0f);  // NaN else
  }
  return !broken;
}

constexpr int64_t kMostPaired = 256;

template <class T>
constexpr bool kMayPair = std::is_same_v<T, Bf16> && kLanes >= 8;

// Whether heads are attended to by pairs.
template <class T>
inline bool is_paired(const Attention& a) {
  return kMayPair<T> && a.dim % 32 == 0 && a.dim <= kMostPaired;
}

// Rotates and stores the new keys of one token of batch * steps, stores its new values. A pair is two
// columns of a key, those of 16 positions side by side, or the values of two positions in a column.
template <class T>
void store_token(const Attention& a, int64_t index, const T* qkv, const T* cos, const T* sin,
                 T* keys, T* values) {
  const int64_t width = (a.q_heads + 2 * a.kv_heads) * a.dim, at = a.positions[index];
  const int64_t row = index / a.steps, token = a.first_token(row) + index % a.steps;
  const int64_t block = a.tables[a.rows[row] * a.columns + at / a.block_size];
  const int64_t part = a.block_size * a.dim, inside = at % a.block_size;
  const T* key = qkv + token * width + a.q_heads * a.dim;
  const T* value = key + a.kv_heads * a.dim;
  keys += block * a.kv_heads * part;
  values += block * a.kv_heads * part;
  for (int64_t h = 0; h < a.kv_heads; ++h, keys += part, values += part, key += a.dim, value += a.dim) {
    if (!is_paired<T>(a)) {
      rotate(key, cos + at * a.dim, sin + at * a.dim, a.dim, keys + inside * a.dim);
      std::memcpy(values + inside * a.dim, value, a.dim * sizeof(T));
      continue;
    }
    T turned[kMostPaired];
    rotate(key, cos + at * a.dim, sin + at * a.dim, a.dim, turned);
    T* to = keys + inside / 16 * 16 * a.dim + inside % 16 * 2;
    for (int64_t d = 0; d < a.dim; d += 2) std::memcpy(to + d / 2 * 32, turned + d, 2 * sizeof(T));
    T* pair = values + inside / 2 * 2 * a.dim + inside % 2;
    for (int64_t d = 0; d < a.dim; ++d) pair[2 * d] = value[d];
  }
}

// Buffers of a tile of queries, parts of one allocation of the thread's.
struct Scratch {
  float *rotated, *sums, *wide, *scores, *weights;

  Scratch(const Attention& a, int64_t queries) {
    thread_local std::vector<float> memory;
    const int64_t size = padded(a.dim);
    const size_t all = queries * (2 * size + kLanes + 2 * a.span) + a.block_size * size;
    if (memory.size() < all) memory.resize(all);
    rotated = memory.data();
    sums = rotated + queries * size;
    wide = sums + queries * (size + kLanes);
    scores = wide + a.block_size * size;
    weights = scores + queries * a.span;
  }
};

// Attends for queries start .. start + count - 1 of a row's key/value heads h .. h + heads - 1.
template <class T, bool Paired>
void attend_some(const Attention& a, const T* qkv, const T* cos, const T* sin, const int64_t* at,
                 const int32_t* table, const T* keys, const T* values, int64_t h, int64_t heads,
                 int64_t start, int64_t count, T* out) {
  using Input = std::conditional_t<Paired, PairInput, float>;
  const int64_t all = heads * count;
  const Scratch scratch(a, all);
  const int64_t width = (a.q_heads + 2 * a.kv_heads) * a.dim, size = padded(a.dim);
  const int64_t group = a.q_heads / a.kv_heads;
  Query<Input> queries[kQueries];
  const auto token_of = [&](int64_t i) { return (start + i % count) / group; };
  const auto head_of = [&](int64_t i) { return (h + i / count) * group + (start + i % count) % group; };
  for (int64_t q = 0; q < all; ++q) {
    const int64_t token = token_of(q), head = head_of(q);
    const int64_t last = std::min(at[token], a.span - 1);  // only padding exceeds the span
    const int64_t first = a.window > 0 ? std::max<int64_t>(0, last - a.window + 1) : 0;
    Input* rotated = reinterpret_cast<Input*>(scratch.rotated) + q * size;
    queries[q] = {first, last, rotated, scratch.scores + q * a.span,
                  scratch.sums + q * (size + kLanes),
                  reinterpret_cast<Input*>(scratch.weights) + q * a.span};
    const int64_t turn = at[token] * a.dim;
    rotate(qkv + token * width + head * a.dim, cos + turn, sin + turn, a.dim, rotated);
    std::fill(rotated + a.dim, rotated + size, Input{});
  }
  keys += h * a.block_size * a.dim;
  values += h * a.block_size * a.dim;
  if constexpr (Paired) attend_tile_by_pairs(a, table, keys, values, queries, heads, count);
  else attend_tile(a, table, keys, values, queries, count, scratch.wide);  // of one head
  for (int64_t q = 0; q < all; ++q) {
    T* own = out + (token_of(q) * a.q_heads + head_of(q)) * a.dim;
    const float total = queries[q].sum[size];
    for (int64_t i = 0; i < a.dim; ++i) own[i] = narrow<T>(queries[q].sum[i] / total);
  }
}

// Consecutive tokens of one row of the cache, from `row` of the batch on: its own, or as many rows of
// one token.
struct Run {
  int64_t row, tokens;
};

inline std::vector<Run> runs_of(const Attention& a) {
  std::vector<Run> runs;
  runs.reserve(a.batch);
  const bool joins = a.steps == 1 && a.slots == nullptr;
  for (int64_t row = 0; row < a.batch; ++row) {
    if (joins && row > 0 && a.rows[row] == a.rows[row - 1]) ++runs.back().tokens;
    else runs.push_back({row, a.steps});
  }
  return runs;
}

// Queries start .. start + count - 1 of a run for each of some key/value heads, which are taken together.
struct Tile {
  Run run;
  int64_t head, heads, start, count;
};

// All tiles: as many queries as fit, but half of a head's if there are few for the threads. Of few
// queries several heads `together`, since what neighbours have in a block is read faster at once; but not
// of a run that is much of the work, or one thread would have all of it.
inline std::vector<Tile> tiles_of(const Attention& a, const std::vector<Run>& runs, int64_t threads,
                                  bool together) {
  const int64_t group = a.q_heads / a.kv_heads;
  const auto length = [&](const Run& run) { return a.positions[run.row * a.steps + run.tokens - 1] + 1; };
  int64_t fewest = 0, work = 0;
  for (const Run& run : runs) {
    fewest += (group * run.tokens + kTile - 1) / kTile * a.kv_heads;
    work += length(run);
  }
  std::vector<Tile> tiles;
  tiles.reserve(2 * fewest);
  for (const Run& run : runs) {
    const int64_t queries = group * run.tokens;
    const bool halves = threads > 1 && fewest < 4 * threads && queries >= 4 && queries <= kTile;
    const int64_t size = halves ? (queries + 1) / 2 : kTile;
    const bool small = together && queries <= kTile && 2 * threads * length(run) <= work;
    const int64_t most = small ? std::min(kHeads, kQueries / queries) : 1;
    for (int64_t head = 0; head < a.kv_heads; head += most)
      for (int64_t start = 0; start < queries; start += size)
        tiles.push_back({run, head, std::min(most, a.kv_heads - head), start,
                         std::min(size, queries - start)});
  }
  return tiles;
}

template <class T>
void attend_one(const Attention& a, const Tile& tile, const T* qkv, const T* cos, const T* sin,
                const T* keys, const T* values, T* out) {
  const int64_t width = (a.q_heads + 2 * a.kv_heads) * a.dim, row = tile.run.row;
  const int64_t token = a.first_token(row);
  const auto some = [&](auto* attend) {
    attend(a, qkv + token * width, cos, sin, a.positions + row * a.steps,
           a.tables + a.rows[row] * a.columns, keys, values, tile.head, tile.heads, tile.start,
           tile.count, out + token * a.q_heads * a.dim);
  };
  if constexpr (kMayPair<T>)
    if (is_paired<T>(a)) return some(attend_some<T, true>);
  some(attend_some<T, false>);
}

}  // namespace
