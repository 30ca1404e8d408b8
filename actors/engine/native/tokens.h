// Selection of tokens from logits.
#pragma once

#include <functional>
#include <numeric>
#include <tuple>
#include <utility>
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

// Whether a row of logits gives a distribution: no NaN, no +inf, and something but -inf.
template <class T>
bool has_distribution(const T* logits, int64_t size) {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  int32_t broken = 0, some = 0;
#pragma omp simd reduction(| : broken, some)
  for (int64_t i = 0; i < size; ++i) {
    const float x = widen(logits[i]);
    broken |= !(x < infinity);
    some |= x > -infinity;
  }
  return !broken && some;
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

// Keeps of a row's `k` most probable tokens what top_k, top_p and min_p keep, see keep_mask in
// sampling.py, which is the first of them: ids ascending, the last one again where fewer are kept, and
// probabilities that sum to 1, zeros there. Returns whether more than k may have to be kept.
template <class T>
bool keep_top(const T* logits, int64_t size, int64_t k, float temperature, float top_p, int64_t top_k,
              float min_p, int64_t* ids, float* probs) {
  top_probs(logits, size, k, temperature, ids, probs);
  const int64_t within = std::min(top_k, k);
  const double all = top_k > k ? 1.0 : std::accumulate(probs, probs + within, 0.0);
  double sum = probs[0];
  int64_t kept = 1;
  // top_p = 1 keeps everything, however the sum rounds.
  while (kept < within && (top_p >= 1.0f || sum / all < top_p) && probs[kept] >= min_p * probs[0])
    sum += probs[kept++];
  const bool more = top_k > k && ((kept == k && probs[k - 1] > 0.0f) || top_k < size);
  std::vector<std::pair<int64_t, float>> ordered(kept);
  for (int64_t i = 0; i < kept; ++i) ordered[i] = {ids[i], static_cast<float>(probs[i] / sum)};
  std::sort(ordered.begin(), ordered.end());  // so a draw takes the same token as from all of them
  for (int64_t i = 0; i < kept; ++i) std::tie(ids[i], probs[i]) = ordered[i];
  std::fill(ids + kept, ids + k, ids[kept - 1]);
  std::fill(probs + kept, probs + k, 0.0f);
  return more;
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

// Draws one of `size` columns by weight: the first at which the sum from the first one on, in doubles,
// exceeds `uniform`, in [0, 1), of the whole. A column without weight is never drawn; if there is none
// with any, it is -1. NaNs draw the last one.
inline int64_t draw(const float* weights, int64_t size, double uniform) {
  constexpr int64_t kBlock = 512;
  std::vector<double> sums((size + kBlock - 1) / kBlock);
  double whole = 0.0;
  for (int64_t start = 0; start < size; start += kBlock) {
    const int64_t count = std::min(kBlock, size - start);
    double sum = 0.0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; ++i) sum += weights[start + i];
    whole += sums[start / kBlock] = sum;
  }
  if (whole <= 0.0) return -1;
  const double at = std::min(uniform * whole, std::nextafter(whole, 0.0));
  // The block in which the sum exceeds it or, however sums round, the last one with any weight.
  int64_t block = -1, drawn = size - 1;
  double before = 0.0, reached = 0.0;
  for (size_t b = 0; b < sums.size() && (block < 0 || reached <= at); ++b) {
    if (!(sums[b] > 0.0)) continue;
    block = b, before = reached, reached += sums[b];
  }
  if (block < 0) return drawn;
  const int64_t end = std::min((block + 1) * kBlock, size);
  for (int64_t i = block * kBlock; i < end && before <= at; ++i)
    if (weights[i] > 0.0f) before += weights[i], drawn = i;
  return drawn;
}

// Speculative sampling of one row, see rejection_sampler.py.
struct SampledRow {
  float* probs;           // [steps + 1, size], of candidates; changed meanwhile
  const int64_t* ids;     // [steps + 1, size], ascending; null: all tokens
  int64_t size;
  const int64_t* drafts;  // [drafted]
  int64_t drafted;
  const int64_t* support;  // [drafted, width], what the draft drew from
  const float* q;          // and with which probabilities
  int64_t width;
  const double* uniform;  // [steps], and then one for the last draw

  // The column of a token, -1 if it is no candidate.
  int64_t column(int64_t step, int64_t token) const {
    if (ids == nullptr) return token;
    const int64_t *first = ids + step * size, *found = std::lower_bound(first, first + size, token);
    return found != first + size && *found == token ? found - first : -1;
  }

  bool accepts(int64_t step) const {
    const int64_t at = column(step, drafts[step]);
    const double p = at < 0 ? 0.0 : probs[step * size + at];
    float drafted_q = 0.0f;
    for (int64_t i = step * width; i < (step + 1) * width; ++i)
      if (support[i] == drafts[step]) drafted_q += q[i];
    // q = 0 cannot be drafted, and must not be divided by.
    return p >= drafted_q ? p > 0.0 : uniform[step] < p / drafted_q;
  }

  // Draws by max(0, p - q) after a rejection, or by p if that is 0 everywhere.
  int64_t recover(int64_t step, double at) const {
    float* p = probs + step * size;
    std::vector<std::pair<int64_t, float>> held;  // a token may be there several times
    for (int64_t i = step * width; i < (step + 1) * width; ++i) {
      const int64_t own = column(step, support[i]);
      if (own < 0) continue;
      held.emplace_back(own, p[own]);
      p[own] -= q[i];
    }
    for (const auto& [own, before] : held) p[own] = std::max(p[own], 0.0f);
    const int64_t drawn = draw(p, size, at);
    for (auto one = held.rbegin(); one != held.rend(); ++one) p[one->first] = one->second;
    return drawn < 0 ? draw(p, size, at) : drawn;
  }

  // Returns how many drafts are accepted, and finds the token behind them.
  int64_t run(int64_t steps, int64_t* final_token) const {
    int64_t accepted = 0;
    while (accepted < drafted && accepts(accepted)) ++accepted;
    const int64_t drawn = accepted < drafted ? recover(accepted, uniform[steps])
                                             : draw(probs + accepted * size, size, uniform[steps]);
    const int64_t at = std::max(drawn, int64_t{0});
    *final_token = ids == nullptr ? at : ids[accepted * size + at];
    return accepted;
  }
};

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
