// Selection of tokens from logits.
#pragma once

#include <functional>
#include <vector>

#include "numbers.h"

namespace {

// The largest of the entries, NaNs aside, -inf if there is none. By lanes: GCC does not vectorise the
// maximum of a whole row.
template <class T>
float largest_of(const T* values, int64_t count) {
  constexpr int64_t kAtOnce = 64;
  float most[kAtOnce];
  std::fill_n(most, kAtOnce, -std::numeric_limits<float>::infinity());
  int64_t at = 0;
  for (; at + kAtOnce <= count; at += kAtOnce) {
#pragma omp simd
    for (int64_t i = 0; i < kAtOnce; ++i) {
      const float value = widen(values[at + i]);
      most[i] = value > most[i] ? value : most[i];
    }
  }
  for (; at < count; ++at) most[0] = std::max(most[0], widen(values[at]));
  return *std::max_element(most, most + kAtOnce);
}

// Sums exp((x - largest) * scale) over a row. By lanes, or else the order, and so the bits, would depend
// on T: the logits of a batch become float32 as soon as one row needs them so.
template <class T>
float total(const T* logits, int64_t size, float largest, float scale) {
  constexpr int64_t kAtOnce = 64;
  float sums[kAtOnce] = {}, sum = 0.0f;
  int64_t at = 0;
  for (; at + kAtOnce <= size; at += kAtOnce) {
#pragma omp simd
    for (int64_t i = 0; i < kAtOnce; ++i)
      sums[i] += exponential((widen(logits[at + i]) - largest) * scale);
  }
  for (; at < size; ++at) sums[0] += exponential((widen(logits[at]) - largest) * scale);
  for (int64_t i = 0; i < kAtOnce; ++i) sum += sums[i];
  return sum;
}

// Finds the first index of the largest entry of n rows and, if `probs` is given, its softmax.
template <class T>
void top_one(const T* logits, int64_t n, int64_t size, int64_t* ids, float* probs) {
  constexpr int64_t kBlock = 512;
  for (int64_t row = 0; row < n; ++row, logits += size) {
    const float largest = largest_of(logits, size);
    int64_t at = 0;
    while (at + kBlock < size && largest_of(logits + at, kBlock) != largest) at += kBlock;
    while (at + 1 < size && widen(logits[at]) != largest) ++at;
    ids[row] = at;
    if (probs != nullptr) probs[row] = 1.0f / total(logits, size, largest, 1.0f);
  }
}

// Whether n rows of logits each give a distribution: no NaN, no +inf, and something but -inf.
template <class T>
bool have_distributions(const T* logits, int64_t n, int64_t size) {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  for (int64_t row = 0; row < n; ++row, logits += size) {
    int32_t broken = 0, some = 0;
#pragma omp simd reduction(| : broken, some)
    for (int64_t i = 0; i < size; ++i) {
      const float x = widen(logits[i]);
      broken |= !(x < infinity);
      some |= x > -infinity;
    }
    if (broken || !some) return false;
  }
  return true;
}

// Finds the k largest entries of a row, descending, equal ones in order.
template <class T>
void select(const T* logits, int64_t size, int64_t k, int64_t* ids, float* values) {
  int64_t block = 64;
  while (block > 16 && size < 2 * k * block) block /= 2;
  const int64_t blocks = (size + block - 1) / block;
  // The k-th largest of the blocks' maxima bounds the k-th largest entry from below: few blocks
  // are then looked at.
  std::vector<float> maxima(blocks);
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t end = std::min(size, (b + 1) * block);
    float largest = -std::numeric_limits<float>::infinity();
#pragma omp simd reduction(max : largest)
    for (int64_t i = b * block; i < end; ++i) largest = std::max(largest, widen(logits[i]));
    maxima[b] = largest;
  }
  float bound = -std::numeric_limits<float>::infinity();
  if (blocks >= k) {
    std::vector<float> sorted = maxima;
    std::nth_element(sorted.begin(), sorted.begin() + k - 1, sorted.end(), std::greater<float>());
    bound = sorted[k - 1];
  }
  int64_t held = 0;
  for (int64_t b = 0; b < blocks; ++b) {
    if (maxima[b] < bound || (held == k && !(maxima[b] > values[k - 1]))) continue;
    const int64_t end = std::min(size, (b + 1) * block);
    for (int64_t i = b * block; i < end; ++i) {
      const float value = widen(logits[i]);
      if (value < bound || (held == k && !(value > values[k - 1]))) continue;
      int64_t at = held < k ? held++ : k - 1;
      for (; at > 0 && values[at - 1] < value; --at) {
        values[at] = values[at - 1];
        ids[at] = ids[at - 1];
      }
      values[at] = value;
      ids[at] = i;
    }
  }
}

// Finds the k largest entries of a row as `select`, and its logsumexp.
template <class T>
void top_k(const T* logits, int64_t size, int64_t k, int64_t* ids, float* values,
           float* logsumexp) {
  select(logits, size, k, ids, values);
  *logsumexp = values[0] + std::log(total(logits, size, values[0], 1.0f));
}

// Finds the k largest entries of a row as `select`, and their softmax at a temperature.
template <class T>
void top_probs(const T* logits, int64_t size, int64_t k, float temperature, int64_t* ids,
               float* probs) {
  select(logits, size, k, ids, probs);
  const float largest = probs[0], sum = total(logits, size, largest, 1.0f / temperature);
  // Not exponential(), which is not 0 for a forbidden token; in doubles, since floats round an
  // exponent of 80 by 1e-5.
  for (int64_t i = 0; i < k; ++i)
    probs[i] = std::exp((double{probs[i]} - largest) / temperature) / sum;
}

// The softmax of a row at a temperature. Sums blocks by vectors of floats, whatever T is: see `total`.
template <class T>
void softmax_at(const T* logits, int64_t size, float temperature, float* probs) {
  constexpr int64_t kBlock = 512;
  const float largest = largest_of(logits, size), scale = 1.0f / temperature;
  const Vector least = Vector{} - 87.0f;
  double whole = 0.0;
  for (int64_t start = 0; start < size; start += kBlock) {
    Vector sums = {};
    each_vector(std::min(kBlock, size - start), [&](int64_t i, auto lanes) {
      const Vector x = (load_floats(logits + start + i, lanes) - largest) * scale;
      Vector y = x < least ? Vector{} : exponential(x);  // which is not 0 for a forbidden token
      for (int64_t lane = lanes; lane < kLanes; ++lane) y[lane] = 0.0f;
      sums += y;
      store(y, lanes, probs + start + i);
    });
    whole += sum_of(sums);
  }
  const float share = static_cast<float>(1.0 / whole);
  each_vector(size, [&](int64_t i, auto lanes) {
    store(load_floats(probs + i, lanes) * share, lanes, probs + i);
  });
}

// Draws one of `size` columns by p - q where that is positive or, if it is nowhere, by p: the first at
// which the sum from the first one on, in doubles, exceeds `uniform`, in [0, 1), of the whole. A column
// without weight is never drawn; NaNs draw the last one.
//
// q is given at `taken` columns, of which some may be the same. p is changed meanwhile.
inline int64_t draw(float* p, int64_t size, const int64_t* columns, const float* q, int64_t taken,
                    double uniform) {
  constexpr int64_t kBlock = 512;
  std::vector<float> held(taken);
  for (int64_t i = 0; i < taken; ++i) held[i] = p[columns[i]], p[columns[i]] -= q[i];
  for (int64_t i = 0; i < taken; ++i) p[columns[i]] = std::max(p[columns[i]], 0.0f);
  std::vector<double> sums((size + kBlock - 1) / kBlock);
  double whole = 0.0;
  for (int64_t start = 0; start < size; start += kBlock) {
    const int64_t count = std::min(kBlock, size - start);
    double sum = 0.0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; ++i) sum += p[start + i];
    whole += sums[start / kBlock] = sum;
  }
  const bool empty = whole <= 0.0;
  const double at = std::min(uniform * whole, std::nextafter(whole, 0.0));
  // The block in which the sum exceeds it or, however sums round, the last one with any weight.
  int64_t block = -1, drawn = size - 1;
  double before = 0.0, reached = 0.0;
  for (size_t b = 0; b < sums.size() && (block < 0 || reached <= at); ++b) {
    if (!(sums[b] > 0.0)) continue;
    block = b, before = reached, reached += sums[b];
  }
  if (block >= 0)
    for (int64_t i = block * kBlock; i < std::min((block + 1) * kBlock, size) && before <= at; ++i)
      if (p[i] > 0.0f) before += p[i], drawn = i;
  for (int64_t i = taken - 1; i >= 0; --i) p[columns[i]] = held[i];
  return empty && taken > 0 ? draw(p, size, columns, q, 0, uniform) : drawn;
}

// The column of the largest log p + G, where G is the Gumbel noise of `token` in gumbel.py: that of the
// largest p / -log u. Most columns are smaller even with 1 - u, which is at most -log u.
inline int64_t gumbel_max(const float* probs, const int64_t* tokens, int64_t size, uint64_t key) {
  constexpr int64_t kBlock = 64;
  constexpr double kUnit = 0x1p-53, kRounding = 1.0 - 1e-12;
  double best = 0.0, uniform[kBlock];
  int64_t at = 0;
  for (int64_t start = 0; start < size; start += kBlock) {
    const int64_t count = std::min(kBlock, size - start);
    int32_t hopeful = 0;
#pragma omp simd reduction(| : hopeful)
    for (int64_t i = 0; i < count; ++i) {
      const uint64_t token = tokens == nullptr ? start + i : tokens[start + i];
      uint64_t bits = key + (token + 1) * 0x9E3779B97F4A7C15u;
      bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9u;
      bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBu;
      bits = (bits ^ (bits >> 31)) >> 11;
      uniform[i] = std::min((static_cast<double>(bits) + 0.5) * kUnit, 1.0 - kUnit);
      hopeful |= probs[start + i] >= (1.0 - uniform[i]) * best * kRounding;
    }
    if (!hopeful) continue;
    for (int64_t i = 0; i < count; ++i) {
      if (probs[start + i] < (1.0 - uniform[i]) * best * kRounding) continue;
      const double ratio = probs[start + i] / -std::log(uniform[i]);
      if (ratio > best) best = ratio, at = start + i;
    }
  }
  return at;
}

// Verifies the draft tokens of one row greedily: returns how many are accepted, and finds the target's
// next token.
template <class T>
int64_t accept(const T* logits, int64_t vocab, const int64_t* drafts, int64_t drafted,
               int64_t* final_token) {
  for (int64_t taken = 0;; ++taken) {
    top_one(logits + taken * vocab, 1, vocab, final_token, nullptr);
    if (taken >= drafted || drafts[taken] != *final_token) return taken;
  }
}

}  // namespace
