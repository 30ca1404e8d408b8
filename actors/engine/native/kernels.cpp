// Decoder layers and selection of tokens on CPUs.
//
// A token's result is computed by the same instructions in the same order in every batch, so its
// bits do not depend on the batch. Rounding follows transformers' modules: what they round to the
// model's dtype is rounded here, sums are float32. Plain C entry points.

#include "rollout.h"
#include "suffixes.h"

extern "C" int64_t packed_codes_size(int64_t in, int64_t out, int64_t bits) {
  return coded_size(in, out, bits);
}
extern "C" bool pack_weight_codes(const void* weight, const void* codes, const void* scales,
                                  const void* mins, int64_t in, int64_t out, int64_t bits,
                                  void* packed) {
  return pack_codes(static_cast<const Bf16*>(weight), static_cast<const uint8_t*>(codes),
                    static_cast<const uint16_t*>(scales), static_cast<const uint16_t*>(mins), in,
                    out, bits, packed);
}
extern "C" int64_t forward_work_size(const Forward* f) { return work_size(*f); }
extern "C" int64_t model_memory_size(const Forward* f) { return model_work_size(*f); }

#define PACELINE_KERNELS(NAME, T)                                                              \
  extern "C" int64_t packed_size_##NAME(int64_t in, int64_t out) {                             \
    return (out + kOutputs - 1) / kOutputs * packed_block<T>(in);                              \
  }                                                                                            \
  extern "C" void pack_##NAME(const void* weight, int64_t in, int64_t out, void* packed) {     \
    pack(static_cast<const T*>(weight), in, out, static_cast<T*>(packed));                     \
  }                                                                                            \
  extern "C" void multiply_##NAME(const void* x, const Weight* weight, int64_t rows,           \
                                  int64_t threads, void* y) {                                  \
    const Product product{x, y, rows, *weight};                                                \
    multiply<T>(&product, 1, threads);                                                         \
  }                                                                                            \
  extern "C" void forward_##NAME(const Forward* f) { LayerRun<T>(*f).run(); }                  \
  extern "C" bool model_##NAME(const Model* m) { return run_model<T>(*m); }                    \
  extern "C" void rollout_##NAME(const Rollout* r) { RolloutRun<T>(*r).run(); }                \
  extern "C" void attend_##NAME(const Attention* a, int64_t threads, const void* qkv,            \
                                const void* cos, const void* sin, void* keys, void* values,    \
                                void* out) {                                                   \
    attend(*a, threads, static_cast<const T*>(qkv), static_cast<const T*>(cos),                \
           static_cast<const T*>(sin), static_cast<T*>(keys), static_cast<T*>(values),         \
           static_cast<T*>(out));                                                              \
  }                                                                                            \
  extern "C" void add_norm_##NAME(void* x, const void* delta, const void* weight, float eps,   \
                                  int64_t n, int64_t size, void* out) {                        \
    for (int64_t i = 0; i < n; ++i)                                                            \
      add_norm(static_cast<T*>(x) + i * size,                                                  \
               delta == nullptr ? nullptr : static_cast<const T*>(delta) + i * size,           \
               static_cast<const T*>(weight), eps, size, static_cast<T*>(out) + i * size);     \
  }                                                                                            \
  extern "C" void top_one_##NAME(const void* logits, int64_t n, int64_t size, int64_t* ids,    \
                                 float* probs) {                                               \
    top_one(static_cast<const T*>(logits), n, size, ids, probs);                               \
  }                                                                                            \
  extern "C" void read_states_##NAME(void* cache, const int32_t* tables, int64_t columns,        \
                                     int64_t block_size, int64_t size, const int64_t* rows,    \
                                     const int64_t* positions, int64_t batch, int64_t steps,   \
                                     void* out) {                                              \
    const PagedStates<T> paged{static_cast<T*>(cache), tables, columns, block_size, size,      \
                               rows, positions, batch, steps};                                 \
    paged.read(static_cast<T*>(out));                                                          \
  }                                                                                            \
  extern "C" void write_states_##NAME(void* cache, const int32_t* tables, int64_t columns,       \
                                      int64_t block_size, int64_t size, const int64_t* rows,   \
                                      const int64_t* positions, int64_t batch, int64_t steps,  \
                                      const void* states) {                                    \
    const PagedStates<T> paged{static_cast<T*>(cache), tables, columns, block_size, size,      \
                               rows, positions, batch, steps};                                 \
    paged.write(static_cast<const T*>(states));                                                \
  }                                                                                            \
  extern "C" void have_finite_blocks_##NAME(const void* const* parts, const int64_t* sizes,      \
                                            int64_t n, const int64_t* blocks, int64_t count,   \
                                            int64_t threads, bool* finite) {                   \
    each(count, threads, [&](int64_t i) {                                                      \
      finite[i] = true;                                                                        \
      for (int64_t p = 0; p < n && finite[i]; ++p)                                             \
        finite[i] = all_finite(static_cast<const T*>(parts[p]) + blocks[i] * sizes[p], sizes[p]); \
    });                                                                                        \
  }                                                                                            \
  extern "C" bool have_distributions_##NAME(const void* logits, int64_t n, int64_t size,         \
                                            int64_t threads) {                                 \
    std::atomic<bool> all{true};                                                               \
    each(n, threads, [&](int64_t i) {                                                          \
      if (!has_distribution(static_cast<const T*>(logits) + i * size, size)) all = false;      \
    });                                                                                        \
    return all;                                                                                \
  }                                                                                            \
  extern "C" void top_k_##NAME(const void* const* rows, int64_t n, int64_t size, int64_t k,    \
                               int64_t threads, int64_t* ids, float* values,                   \
                               float* logsumexp) {                                             \
    each(n, threads, [&](int64_t i) {                                                          \
      top_k(static_cast<const T*>(rows[i]), size, k, ids + i * k, values + i * k,              \
            logsumexp + i);                                                                    \
    });                                                                                        \
  }                                                                                            \
  extern "C" void keep_top_##NAME(const void* logits, int64_t n, int64_t size, int64_t k,        \
                                  const float* temperatures, const float* top_p,               \
                                  const int64_t* top_k, const float* min_p, int64_t threads,   \
                                  int64_t* ids, float* probs, bool* more) {                    \
    each(n, threads, [&](int64_t i) {                                                          \
      more[i] = keep_top(static_cast<const T*>(logits) + i * size, size, k, temperatures[i],   \
                         top_p[i], top_k[i], min_p[i], ids + i * k, probs + i * k);            \
    });                                                                                        \
  }                                                                                            \
  extern "C" void softmax_at_##NAME(const void* logits, const int64_t* rows, int64_t n,          \
                                    int64_t size, const float* temperatures, int64_t threads,  \
                                    float* probs) {                                            \
    each(n, threads, [&](int64_t i) {                                                          \
      softmax_at(static_cast<const T*>(logits) + rows[i] * size, size, temperatures[i],        \
                 probs + rows[i] * size);                                                      \
    });                                                                                        \
  }                                                                                            \
  extern "C" void accept_##NAME(const void* logits, int64_t batch, int64_t k, int64_t vocab,   \
                                const int64_t* drafts, const int64_t* drafted,                 \
                                int64_t threads, int64_t* accepted, int64_t* final_tokens) {   \
    each(batch, threads, [&](int64_t i) {                                                      \
      accepted[i] = accept(static_cast<const T*>(logits) + i * (k + 1) * vocab, vocab,         \
                           drafts + i * k, drafted[i], final_tokens + i);                      \
    });                                                                                        \
  }

PACELINE_KERNELS(bfloat16, Bf16)
PACELINE_KERNELS(float32, float)

extern "C" void gumbel_max_rows(const float* probs, const int64_t* tokens, int64_t n, int64_t size,
                                const int64_t* keys, int64_t threads, int64_t* columns) {
  each(n, threads, [&](int64_t i) {
    const int64_t* own = tokens == nullptr ? nullptr : tokens + i * size;
    columns[i] = gumbel_max(probs + i * size, own, size, keys[i]);
  });
}

extern "C" void sample_rows(float* probs, const int64_t* ids, int64_t n, int64_t steps, int64_t size,
                            const int64_t* drafts, const int64_t* drafted, const int64_t* support,
                            const float* q, int64_t width, const double* uniform, int64_t threads,
                            int64_t* accepted, int64_t* final_tokens) {
  each(n, threads, [&](int64_t i) {
    const int64_t first = i * (steps + 1) * size, draft = i * steps;
    const SampledRow row{probs + first, ids == nullptr ? nullptr : ids + first, size,
                         drafts + draft, drafted[i], support + draft * width, q + draft * width,
                         width, uniform + i * (steps + 1)};
    accepted[i] = row.run(steps, final_tokens + i);
  });
}

extern "C" void* suffixes_new(int64_t limit) { return new Suffixes(limit); }
extern "C" void suffixes_free(void* s) { delete static_cast<Suffixes*>(s); }
extern "C" void suffixes_append(void* s, const int32_t* tokens, int64_t n) {
  static_cast<Suffixes*>(s)->append(tokens, n);
}
extern "C" void suffixes_set_limit(void* s, int64_t limit) {
  static_cast<Suffixes*>(s)->set_limit(limit);
}
extern "C" void suffixes_erase(void* s, int64_t start, int64_t stop) {
  static_cast<Suffixes*>(s)->erase(start, stop);
}
extern "C" void suffixes_sizes(const void* s, int64_t* sizes) {
  const auto* own = static_cast<const Suffixes*>(s);
  sizes[0] = own->tail(), sizes[1] = own->end(), sizes[2] = own->capacity();
}
extern "C" void suffixes_find(const void* s, const void* context, int64_t most, void* found) {
  static_cast<const Suffixes*>(s)->find(*static_cast<const Suffixes*>(context), most,
                                        static_cast<Suffixes::Found*>(found));
}
