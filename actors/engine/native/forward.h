// Decoder layers in one call: a call from Python for every operation costs as much as the operation.
#pragma once

#include "attention.h"
#include "threads.h"
#include "tiles.h"

namespace {

// Calls f(0) .. f(count - 1), on several threads.
template <class F>
void each(int64_t count, int64_t threads_, const F& f) {
  const auto call = [](const void* job, int64_t i) { (*static_cast<const F*>(job))(i); };
  threads().run(call, &f, count, static_cast<int>(threads_));
}

// The same where each call is short: several are taken at a time, as many as leave eight turns a thread.
template <class F>
void each_of_many(int64_t count, int64_t threads_, const F& f) {
  const int64_t size = std::max<int64_t>(1, count / (8 * std::max<int64_t>(1, threads_)));
  each((count + size - 1) / size, threads_, [&](int64_t part) {
    for (int64_t i = part * size; i < std::min(count, (part + 1) * size); ++i) f(i);
  });
}

// Products of one shape with several weights.
template <class T>
void multiply(const Product* products, int64_t count, int64_t threads_) {
  const Weight& first = products[0].weight;
  const int64_t all = all_blocks(first);
  if (products[0].rows == 0 || all == 0) return;
  // Memory that the thread's next call reuses.
  thread_local std::vector<Line> memory;
  using Layout = InputLayout<T>;
  const int64_t lines = Layout::lines(products[0]), parts = Layout::parts(products[0]);
  if (static_cast<int64_t>(memory.size()) < count * lines) memory.resize(count * lines);
  Line* laid_out = memory.data();  // a worker's own memory is another
  if (lines != 0)
    each(count * parts, threads_, [&](int64_t i) {
      Layout::lay_out(products[i / parts], i % parts, laid_out + i / parts * lines);
    });
  // Eight chunks a thread, or of 8 blocks if that is fewer; as many for each thread where tiles allow.
  const auto up = [](int64_t n, int64_t step) { return (n + step - 1) / step * step; };
  const int64_t workers = std::max<int64_t>(1, threads_);
  const int64_t share = std::max<int64_t>(8, all / (8 * workers));
  const int64_t wanted = up((all + share - 1) / share, workers);
  const int64_t blocks = up((all + wanted - 1) / wanted, first.bits != 0 ? 2 : 8);
  const int64_t chunks = (all + blocks - 1) / blocks;
  each(count * chunks, threads_, [&](int64_t i) {
    const int64_t from = i % chunks * blocks;
    Product p = products[i / chunks];
    if (lines != 0) p.x = laid_out + i / chunks * lines;
    multiply_part<T>(p, from, std::min(all, from + blocks));
  });
}

// Rotates queries and keys, stores the new keys and values, attends: qkv [batch, steps, width] to out
// [batch, steps, q_heads * dim].
template <class T>
void attend(const Attention& a, int64_t threads_, const T* qkv, const T* cos, const T* sin, T* keys,
            T* values, T* out) {
  const std::vector<Run> runs = runs_of(a);
  constexpr int64_t kStored = 16;  // tokens that one thread stores, since they share cache lines
  int64_t longest = 0;
  for (const Run& run : runs) longest = std::max(longest, run.tokens);
  const int64_t parts = (longest + kStored - 1) / kStored;
  each(static_cast<int64_t>(runs.size()) * parts, threads_, [&](int64_t i) {
    const Run& run = runs[i / parts];
    const int64_t from = i % parts * kStored;
    for (int64_t token = from; token < std::min(run.tokens, from + kStored); ++token)
      store_token(a, run.row * a.steps + token, qkv, cos, sin, keys, values);
  });
  const std::vector<Tile> tiles = tiles_of(a, runs, threads_, is_paired<T>(a));
  each(static_cast<int64_t>(tiles.size()), threads_, [&](int64_t i) {
    attend_one<T>(a, tiles[i], qkv, cos, sin, keys, values, out);
  });
}

struct LayerWeights {
  Weight qkv, output, gate_up, down;
  const void *before_attention, *before_mlp;  // norms, [hidden]
  const void *queries, *keys;                 // norms of the heads, [dim] or null
  float eps;
};

struct LayerCache {
  void *keys, *values;  // of all blocks
  int64_t window;       // 0 for none
};

struct Forward {
  Attention attention;
  int64_t experts, tokens, layers, hidden, intermediate, threads;  // `tokens` of each expert
  const LayerWeights* const* weights;  // [experts][layers]
  const LayerCache* caches;            // [layers]
  const void *cos, *sin;               // [capacity, dim]
  void *x, *memory;  // [experts * tokens, hidden], changed; work_size() elements
  void* out;         // [experts * tokens, hidden], of the last layer's MLP, not yet added to x
};

inline int64_t work_size(const Forward& f) {
  const Attention& a = f.attention;
  const int64_t heads = 2 * (a.q_heads + a.kv_heads) * a.dim;
  return f.experts * f.tokens * (f.hidden + heads + 3 * f.intermediate);
}

template <class T>
class LayerRun {
 public:
  explicit LayerRun(const Forward& f) : f_(f), a_(f.attention), n_(f.experts * f.tokens) {
    width_ = (a_.q_heads + 2 * a_.kv_heads) * a_.dim;
    normed_ = static_cast<T*>(f.memory);
    qkv_ = normed_ + n_ * f.hidden;
    mixed_ = qkv_ + n_ * width_;
    gate_up_ = mixed_ + n_ * a_.q_heads * a_.dim;
    active_ = gate_up_ + n_ * 2 * f.intermediate;
  }

  void run() {
    for (layer_ = 0; layer_ < f_.layers; ++layer_) {
      norm(layer_ == 0 ? nullptr : static_cast<const T*>(f_.out), &LayerWeights::before_attention);
      product(&LayerWeights::qkv, normed_, qkv_);
      attend_layer();
      product(&LayerWeights::output, mixed_, static_cast<T*>(f_.out));
      norm(static_cast<const T*>(f_.out), &LayerWeights::before_mlp);
      product(&LayerWeights::gate_up, normed_, gate_up_);
      activate();
      product(&LayerWeights::down, active_, static_cast<T*>(f_.out));
    }
  }

 private:
  const LayerWeights& weights(int64_t expert) const { return f_.weights[expert][layer_]; }

  // Adds `delta` to the residual stream and normalises it.
  void norm(const T* delta, const void* LayerWeights::* weight) {
    T* x = static_cast<T*>(f_.x);
    each_of_many(n_, f_.threads, [&](int64_t i) {
      const LayerWeights& own = weights(i / f_.tokens);
      const int64_t at = i * f_.hidden;
      add_norm(x + at, delta == nullptr ? nullptr : delta + at, static_cast<const T*>(own.*weight),
               own.eps, f_.hidden, normed_ + at);
    });
  }

  void product(Weight LayerWeights::* weight, const T* x, T* y) {
    products_.resize(f_.experts);
    for (int64_t e = 0; e < f_.experts; ++e) {
      const Weight& own = weights(e).*weight;
      products_[e] = {x + e * f_.tokens * own.in, y + e * f_.tokens * own.out, f_.tokens, own};
    }
    multiply<T>(products_.data(), f_.experts, f_.threads);
  }

  void attend_layer() {
    const LayerCache& cache = f_.caches[layer_];
    if (weights(0).queries != nullptr)
      each_of_many(n_, f_.threads, [&](int64_t i) { norm_heads(i); });
    a_.window = cache.window;
    attend(a_, f_.threads, qkv_, static_cast<const T*>(f_.cos), static_cast<const T*>(f_.sin),
           static_cast<T*>(cache.keys), static_cast<T*>(cache.values), mixed_);
  }

  void norm_heads(int64_t token) {
    const LayerWeights& own = weights(token / f_.tokens);
    T* head = qkv_ + token * width_;
    for (int64_t h = 0; h < a_.q_heads + a_.kv_heads; ++h, head += a_.dim) {
      const void* weight = h < a_.q_heads ? own.queries : own.keys;
      add_norm<T>(head, nullptr, static_cast<const T*>(weight), own.eps, a_.dim, head);
    }
  }

  void activate() {
    constexpr int64_t kPart = 512;
    const int64_t size = f_.intermediate, parts = (size + kPart - 1) / kPart;
    each_of_many(n_ * parts, f_.threads, [&](int64_t i) {
      const int64_t token = i / parts, from = i % parts * kPart;
      const T* gate = gate_up_ + token * 2 * size + from;
      silu_mul(gate, gate + size, std::min(kPart, size - from), active_ + token * size + from);
    });
  }

  const Forward& f_;
  Attention a_;
  int64_t n_, width_ = 0, layer_ = 0;
  T *normed_, *qkv_, *mixed_, *gate_up_, *active_;
  std::vector<Product> products_;
};

// From token ids to logits, of a single expert.
struct Model {
  Forward forward;  // x and out are made here, in memory of model_work_size() elements
  const void *embedding, *norm;  // [vocabulary, hidden], [hidden]
  Weight head;
  float eps;
  int64_t vocabulary;
  int64_t rows, keep;        // logits are of the first rows, and of their last tokens
  const int64_t* token_ids;  // [tokens]
  void *states, *logits;     // [tokens, hidden], after the norm; [rows * keep, head.out]
};

inline int64_t model_work_size(const Forward& f) { return work_size(f) + 3 * f.tokens * f.hidden; }

// Returns whether all ids are in the vocabulary; nothing is computed else.
template <class T>
bool run_model(const Model& m) {
  const int64_t tokens = m.forward.tokens, hidden = m.forward.hidden, steps = m.forward.attention.steps;
  for (int64_t i = 0; i < tokens; ++i)
    if (m.token_ids[i] < 0 || m.token_ids[i] >= m.vocabulary) return false;
  T* x = static_cast<T*>(m.forward.memory) + work_size(m.forward);
  T *out = x + tokens * hidden, *kept = out + tokens * hidden, *states = static_cast<T*>(m.states);
  Forward forward = m.forward;
  forward.x = x, forward.out = out;
  for (int64_t i = 0; i < tokens; ++i)
    std::memcpy(x + i * hidden, static_cast<const T*>(m.embedding) + m.token_ids[i] * hidden,
                hidden * sizeof(T));
  LayerRun<T>(forward).run();
  each_of_many(tokens, forward.threads, [&](int64_t i) {
    const int64_t at = i * hidden;
    add_norm(x + at, out + at, static_cast<const T*>(m.norm), m.eps, hidden, states + at);
  });
  if (m.rows == 0) return true;
  if (m.keep < steps)
    for (int64_t row = 0; row < m.rows; ++row)
      std::memcpy(kept + row * m.keep * hidden, states + ((row + 1) * steps - m.keep) * hidden,
                  m.keep * hidden * sizeof(T));
  const Product product{m.keep < steps ? kept : states, m.logits, m.rows * m.keep, m.head};
  multiply<T>(&product, 1, forward.threads);
  return true;
}

}  // namespace
