// Index of token sequences: finds the longest match of a suffix and how it went on.
//
// Tokens lie in a ring; the oldest are overwritten. Positions with the same last n tokens are
// chained, the latest first (as in LZ77), for a few n; a search walks the longest chain there is and
// compares the tokens themselves.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include <string.h>

namespace {

class Suffixes {
 public:
  static constexpr int32_t kSeparator = -1;
  static constexpr int64_t kLongest = 32;     // tokens that are compared
  static constexpr int64_t kCandidates = 48;  // positions of a chain that are looked at
  static constexpr int64_t kMost = 32;        // tokens of a continuation
  static constexpr int64_t kOrders = 3;

  // The most frequent continuation behind the longest match. Per token: how many of the matches
  // that agree so far go on with it, and how many go on at all.
  struct Found {
    int32_t length = 0, count = 0;
    int32_t tokens[kMost], votes[kMost], voters[kMost];
  };

  explicit Suffixes(int64_t limit) : limit_(limit) { resize(std::min(limit, kFirst)); }
  ~Suffixes() { resize(0); }  // which blanks the tokens

  int64_t end() const { return end_; }
  int64_t tail() const { return tail_; }
  int64_t capacity() const { return static_cast<int64_t>(tokens_.size()); }

  void append(const int32_t* tokens, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      if (end_ - tail_ == capacity()) {
        if (capacity() < limit_) resize(2 * capacity());
        else ++tail_;
      }
      put(tokens[i]);
    }
  }

  // Holds at most `limit` tokens, a power of two, from now on: the latest.
  void set_limit(int64_t limit) {
    limit_ = limit;
    if (capacity() > limit) resize(limit);
  }

  // Overwrites the tokens of positions start..stop-1, as far as they are there.
  void erase(int64_t start, int64_t stop) {
    for (int64_t p = std::max(start, tail_); p < std::min(stop, end_); ++p) at(p) = kSeparator;
  }

  // Matches the last tokens of `context`, perhaps of this index itself.
  void find(const Suffixes& context, int64_t most, Found* found) const {
    int32_t query[kLongest];
    int64_t known = 0;
    for (int64_t p = context.end_ - 1; known < kLongest && p >= context.tail_; --p) {
      const int32_t token = context.at(p);
      if (token == kSeparator) break;
      query[known++] = token;
    }
    found->length = found->count = 0;
    int64_t places[kCandidates], held = 0;
    for (int64_t order = kOrders - 1; order >= 0 && held == 0; --order)
      if (kOrder[order] <= known) held = longest(order, query, known, places, &found->length);
    if (held > 0) vote(places, held, std::min(most, kMost), &context == this, found);
  }

 private:
  static constexpr int64_t kOrder[kOrders] = {2, 4, 8};
  static constexpr int64_t kFirst = 1024;

  int32_t& at(int64_t p) { return tokens_[p & mask_]; }
  int32_t at(int64_t p) const { return tokens_[p & mask_]; }

  // Of the last `order` tokens, the latest first.
  template <class Token>
  uint64_t hash(int64_t order, Token token) const {
    uint64_t sum = 0;
    for (int64_t i = 0; i < kOrder[order]; ++i)
      sum = (sum ^ static_cast<uint32_t>(token(i))) * 0x9E3779B97F4A7C15u;
    return (sum >> 32) & mask_;
  }

  void put(int32_t token) {
    const int64_t p = end_++;
    at(p) = token;
    run_ = token == kSeparator ? 0 : run_ + 1;
    for (int64_t order = 0; order < kOrders && kOrder[order] <= run_; ++order) {
      int32_t& head = heads_[order][hash(order, [&](int64_t i) { return at(p - i); })];
      before_[order][p & mask_] = head;
      head = static_cast<int32_t>(p);
    }
  }

  void resize(int64_t capacity) {
    std::vector<int32_t> old(capacity, kSeparator);
    old.swap(tokens_);
    const int64_t mask = std::exchange(mask_, capacity - 1), stop = end_;
    for (int64_t order = 0; order < kOrders; ++order) {  // not assign(), which frees nothing
      heads_[order] = std::vector<int32_t>(capacity, -1);
      before_[order] = std::vector<int32_t>(capacity, -1);
    }
    tail_ = end_ = std::max(tail_, end_ - capacity);
    run_ = 0;
    while (end_ < stop) put(old[end_ & mask]);
    if (stop > 0) explicit_bzero(old.data(), old.size() * sizeof old[0]);  // freed memory is blank
  }

  // Gathers the positions of a chain with the longest match, the latest first; returns how many.
  int64_t longest(int64_t order, const int32_t* query, int64_t known, int64_t* places,
                  int32_t* length) const {
    int64_t held = 0, looked = 0;
    int64_t p = heads_[order][hash(order, [&](int64_t i) { return query[i]; })];
    for (; p >= tail_ && looked < kCandidates; ++looked) {
      int64_t own = 0;
      while (own < known && p - own >= tail_ && at(p - own) == query[own]) ++own;
      const bool goes_on = p + 1 < end_ && at(p + 1) != kSeparator;
      if (own >= kOrder[order] && goes_on && own >= *length) {
        if (own > *length) held = 0;
        *length = static_cast<int32_t>(own);
        places[held++] = p;
      }
      const int64_t next = before_[order][p & mask_];
      if (next >= p) break;
      p = next;
    }
    return held;
  }

  // `own`: what a match goes on with may lie behind the end, among the tokens found so far.
  void vote(int64_t* places, int64_t held, int64_t most, bool own, Found* found) const {
    for (int64_t step = 0; step < most && held > 0; ++step) {
      int32_t seen[kCandidates], votes[kCandidates];
      int64_t kinds = 0, voters = 0;
      const auto next = [&](int64_t place) {
        const int64_t p = place + 1 + step;
        if (p < end_) return at(p);
        return own ? found->tokens[p - end_] : kSeparator;
      };
      for (int64_t i = 0; i < held; ++i) {
        const int32_t token = next(places[i]);
        if (token == kSeparator) continue;
        ++voters;
        int64_t kind = 0;
        while (kind < kinds && seen[kind] != token) ++kind;
        if (kind == kinds) seen[kind] = token, votes[kinds++] = 0;
        ++votes[kind];
      }
      if (voters == 0) return;
      const int64_t best = std::max_element(votes, votes + kinds) - votes;  // the first of several
      found->tokens[step] = seen[best];
      found->votes[step] = votes[best];
      found->voters[step] = static_cast<int32_t>(voters);
      found->count = static_cast<int32_t>(step + 1);
      int64_t kept = 0;
      for (int64_t i = 0; i < held; ++i)
        if (next(places[i]) == seen[best]) places[kept++] = places[i];
      held = kept;
    }
  }

  int64_t limit_, mask_ = 0, end_ = 0, tail_ = 0, run_ = 0;
  std::vector<int32_t> tokens_, heads_[kOrders], before_[kOrders];
};

}  // namespace
