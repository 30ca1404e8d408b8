// Greedy drafting with EAGLE drafts: all steps of a round in one call.
#pragma once

#include <utility>

#include "forward.h"
#include "tokens.h"

namespace {

// What one draft has beside its trunk.
struct RolloutDraft {
  Weight fuse;               // [hidden, 2 * hidden]
  const void* norm;          // [hidden]
  Weight head;               // [tokens of the draft's vocabulary, hidden], or [tokens, rank]
  const int64_t* vocabulary;  // [tokens], ids
  float eps;
  // If there is a basis, the head reads states in it: its logits are guesses, see most_probable().
  Weight basis;      // [rank, hidden]
  const void* rows;  // [vocabulary of the target, hidden], the exact head
};

constexpr float kSlack = 3.0f;    // below the best guess a token is out of the question
constexpr int64_t kGuesses = 256;  // with an exact logit, at most

template <class T>
float dot(const T* a, const T* b, int64_t size) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < size; ++i) sum += widen(a[i]) * widen(b[i]);
  return sum;
}

// The most probable token by the exact logits of those that guesses put near the top, and its
// probability among them: not finite if the guesses are not.
template <class T>
void most_probable(const RolloutDraft& draft, const T* guesses, const T* state, int64_t* index,
                   float* prob) {
  constexpr int64_t block = 64;
  const int64_t size = draft.head.out, hidden = draft.basis.in;
  const float largest = largest_of(guesses, size);
  float logits[kGuesses], best = -std::numeric_limits<float>::infinity(), total = 0.0f;
  int64_t count = 0;
  *index = 0;
  for (int64_t start = 0; start < size && count < kGuesses; start += block) {
    const int64_t end = std::min(size, start + block);
    float here = -std::numeric_limits<float>::infinity();
#pragma omp simd reduction(max : here)
    for (int64_t i = start; i < end; ++i) here = std::max(here, widen(guesses[i]));
    if (!(here > largest - kSlack)) continue;
    for (int64_t i = start; i < end && count < kGuesses; ++i) {
      if (!(widen(guesses[i]) > largest - kSlack)) continue;
      const T* row = static_cast<const T*>(draft.rows) + draft.vocabulary[i] * hidden;
      const float logit = logits[count++] = dot(row, state, hidden);
      if (logit > best) best = logit, *index = i;
    }
  }
  for (int64_t i = 0; i < count; ++i) total += exponential(logits[i] - best);
  *prob = count == 0 ? std::numeric_limits<float>::quiet_NaN() : 1.0f / total;
}

struct Rollout {
  Forward forward;  // of the first step; x, memory and out are made here
  const RolloutDraft* const* drafts;  // [experts]
  const void* embedding;              // [vocabulary, hidden]
  const int64_t* token_ids;           // [batch, steps of the first forward]
  const void* before;                 // [batch, steps of the first forward, hidden]
  int64_t most, capacity, bins;       // tokens to draft; positions of a row; of probabilities
  const int64_t* limits;              // [batch], 1 .. most
  const float *least, *acceptance;    // [batch], [batch, bins]
  int64_t *ids, *counts;              // [batch, most], [batch]
  float* probs;                       // [batch, most]
};

template <class T>
class RolloutRun {
 public:
  explicit RolloutRun(const Rollout& r)
      : r_(r), f_(r.forward), rows_(f_.experts * f_.tokens / f_.attention.steps) {
    const Attention& a = f_.attention;
    for (int64_t e = 0; e < f_.experts; ++e) widest_ = std::max(widest_, r.drafts[e]->head.out);
    rank_ = r.drafts[0]->basis.packed == nullptr ? 0 : r.drafts[0]->basis.out;
    memory_.resize(work_size(f_) + f_.experts * f_.tokens * 4 * f_.hidden +
                   rows_ * (f_.hidden + rank_ + widest_));
    T* at = memory_.data();
    const auto take = [&](int64_t size) { return std::exchange(at, at + size); };
    f_.memory = take(work_size(f_));
    f_.x = take(f_.experts * f_.tokens * f_.hidden);
    f_.out = take(f_.experts * f_.tokens * f_.hidden);
    inputs_ = take(f_.experts * f_.tokens * 2 * f_.hidden);
    last_ = take(rows_ * f_.hidden);
    projected_ = take(rows_ * rank_);
    logits_ = take(rows_ * widest_);
    positions_.resize(a.batch);
    for (int64_t b = 0; b < a.batch; ++b)
      positions_[b] = a.positions[b * a.steps + a.steps - 1];
    reach_.assign(a.batch, 1.0f);
    ended_.assign(a.batch, false);
    std::fill(r.counts, r.counts + a.batch, 0);
  }

  void run() {
    const int64_t first = f_.attention.steps;
    for (int64_t b = 0; b < f_.attention.batch; ++b)
      for (int64_t t = 0; t < first; ++t)
        input(f_.attention.first_token(b) + t, r_.token_ids[b * first + t],
              static_cast<const T*>(r_.before) + (b * first + t) * f_.hidden);
    for (int64_t step = 0;; ++step) {
      forward();
      pick(step);
      if (done()) break;
      next(step);
    }
    for (int64_t b = 0; b < f_.attention.batch; ++b)
      for (int64_t i = r_.counts[b]; i < r_.most; ++i)
        r_.ids[b * r_.most + i] = 0, r_.probs[b * r_.most + i] = 0.0f;
  }

 private:
  void input(int64_t token, int64_t id, const T* before) {
    T* to = inputs_ + token * 2 * f_.hidden;
    std::memcpy(to, static_cast<const T*>(r_.embedding) + id * f_.hidden, f_.hidden * sizeof(T));
    std::memcpy(to + f_.hidden, before, f_.hidden * sizeof(T));
  }

  // Products of every draft's weight with its `rows` of x; one product if the weight is the same.
  void product(Weight RolloutDraft::* weight, const T* x, int64_t rows, T* y, int64_t width) {
    const Weight& first = r_.drafts[0]->*weight;
    bool same = true;
    for (int64_t e = 1; e < f_.experts; ++e) same &= (r_.drafts[e]->*weight).packed == first.packed;
    for (int64_t e = 0; e < (same ? 1 : f_.experts); ++e) {
      const Weight& own = r_.drafts[e]->*weight;
      const int64_t all = same ? f_.experts * rows : rows;
      const Product product{x + e * rows * own.in, y + e * rows * width, all, own};
      multiply<T>(&product, 1, f_.threads);
    }
  }

  int64_t rows_of_draft() const { return rows_ / f_.experts; }
  int64_t slot(int64_t row) const {
    return f_.attention.slots == nullptr ? row : f_.attention.slots[row];
  }

  void forward() {
    const int64_t steps = f_.attention.steps, hidden = f_.hidden;
    product(&RolloutDraft::fuse, inputs_, f_.tokens, static_cast<T*>(f_.x), hidden);
    LayerRun<T>(f_).run();
    for (int64_t s = 0; s < rows_; ++s) {
      const RolloutDraft& own = *r_.drafts[s / rows_of_draft()];
      const int64_t at = (s * steps + steps - 1) * hidden;
      add_norm(static_cast<T*>(f_.x) + at, static_cast<const T*>(f_.out) + at,
               static_cast<const T*>(own.norm), own.eps, hidden, last_ + s * hidden);
    }
    if (rank_ != 0) product(&RolloutDraft::basis, last_, rows_of_draft(), projected_, rank_);
    product(&RolloutDraft::head, rank_ != 0 ? projected_ : last_, rows_of_draft(), logits_, widest_);
  }

  // The most probable token of every row. A row ends at its limit, or before a token with which the
  // expected acceptance of all that it drafted falls below its least.
  void pick(int64_t step) {
    each(f_.attention.batch, f_.threads, [&](int64_t b) {
      const int64_t expert = slot(b) / rows_of_draft(), row = slot(b) % rows_of_draft();
      const RolloutDraft& own = *r_.drafts[expert];
      const T* logits = logits_ + expert * rows_of_draft() * widest_ + row * own.head.out;
      float* prob = r_.probs + b * r_.most + step;
      int64_t index;
      if (rank_ == 0) top_one(logits, 1, own.head.out, &index, prob);
      else most_probable(own, logits, last_ + slot(b) * f_.hidden, &index, prob);
      r_.ids[b * r_.most + step] = own.vocabulary[index];
    });
    for (int64_t b = 0; b < f_.attention.batch; ++b) {
      if (ended_[b]) continue;
      const float at = r_.probs[b * r_.most + step] * r_.bins;  // may be NaN
      const int64_t bin = at > 0.0f ? std::min(static_cast<int64_t>(at), r_.bins - 1) : 0;
      reach_[b] *= r_.acceptance[b * r_.bins + bin];
      const bool stops = step > 0 && reach_[b] < r_.least[b];
      if (!stops) ++r_.counts[b];
      ended_[b] = stops || r_.counts[b] == r_.limits[b];
    }
  }

  bool done() const { return std::find(ended_.begin(), ended_.end(), false) == ended_.end(); }

  // Prepares a step of one token per row, the one that was picked.
  void next(int64_t step) {
    f_.tokens = rows_of_draft();
    f_.attention.steps = 1;
    f_.attention.positions = positions_.data();
    for (int64_t b = 0; b < f_.attention.batch; ++b) {
      positions_[b] = std::min(positions_[b] + 1, r_.capacity - 1);
      input(slot(b), r_.ids[b * r_.most + step], last_ + slot(b) * f_.hidden);
    }
  }

  const Rollout& r_;
  Forward f_;
  int64_t rows_, widest_ = 0, rank_ = 0;
  std::vector<T> memory_;
  std::vector<int64_t> positions_;
  std::vector<float> reach_;
  std::vector<bool> ended_;
  T *inputs_, *last_, *projected_, *logits_;
};

}  // namespace
