// From logits to tokens.
#pragma once

#include "numbers.h"

namespace {

// Of each of n rows: the first index of its largest entry and, where asked for, its softmax there.
template <class T>
void top_one(const T* logits, int64_t n, int64_t size, int64_t* ids, float* probs) {
  for (int64_t row = 0; row < n; ++row, logits += size) {
    float largest = -std::numeric_limits<float>::infinity();
#pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < size; ++i) largest = std::max(largest, widen(logits[i]));
    int64_t at = 0;
    while (at + 1 < size && widen(logits[at]) != largest) ++at;
    ids[row] = at;
    if (probs == nullptr) continue;
    float total = 0.0f;
#pragma omp simd reduction(+ : total)
    for (int64_t i = 0; i < size; ++i) total += exponential(widen(logits[i]) - largest);
    probs[row] = 1.0f / total;
  }
}

// Of each of n rows: its k largest entries, descending, equal ones in their order, and the log of
// the sum of exponentials of the whole row.
template <class T>
void top_k(const T* logits, int64_t n, int64_t size, int64_t k, int64_t* ids, float* values,
           float* logsumexp) {
  constexpr int64_t block = 64;
  for (int64_t row = 0; row < n; ++row, logits += size, ids += k, values += k) {
    int64_t held = 0;
    for (int64_t start = 0; start < size; start += block) {
      const int64_t end = std::min(size, start + block);
      float largest = -std::numeric_limits<float>::infinity();
#pragma omp simd reduction(max : largest)
      for (int64_t i = start; i < end; ++i) largest = std::max(largest, widen(logits[i]));
      if (held == k && !(largest > values[k - 1])) continue;
      for (int64_t i = start; i < end; ++i) {
        const float value = widen(logits[i]);
        if (held == k && !(value > values[k - 1])) continue;
        int64_t at = held < k ? held++ : k - 1;
        for (; at > 0 && values[at - 1] < value; --at) {
          values[at] = values[at - 1];
          ids[at] = ids[at - 1];
        }
        values[at] = value;
        ids[at] = i;
      }
    }
    float total = 0.0f;
#pragma omp simd reduction(+ : total)
    for (int64_t i = 0; i < size; ++i) total += exponential(widen(logits[i]) - values[0]);
    logsumexp[row] = values[0] + std::log(total);
  }
}

// Greedy verification of B rows of k drafted tokens: how many are the target's own from the first
// on, and the target's token after those.
template <class T>
void accept(const T* logits, int64_t batch, int64_t k, int64_t vocab, const int64_t* drafts,
            const int64_t* drafted, int64_t* accepted, int64_t* final_tokens) {
  for (int64_t row = 0; row < batch; ++row, logits += (k + 1) * vocab, drafts += k) {
    int64_t taken = 0, token;
    for (;; ++taken) {
      top_one(logits + taken * vocab, 1, vocab, &token, nullptr);
      if (taken >= drafted[row] || drafts[taken] != token) break;
    }
    accepted[row] = taken;
    final_tokens[row] = token;
  }
}

}  // namespace
