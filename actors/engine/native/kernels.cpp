// Operations of a decoder layer on CPUs.
//
// A token's result is computed by the same instructions in the same order in every batch, so its
// bits do not depend on the batch. Rounding follows transformers' modules: what they round to the
// model's dtype is rounded here, sums are float32. Only products use threads. Plain C entry points.

#include "attention.h"
#include "layers.h"
#include "products.h"
#include "tokens.h"

#define PACELINE_KERNELS(NAME, T)                                                              \
  extern "C" int64_t packed_size_##NAME(int64_t in, int64_t out) {                             \
    return (out + kOutputs - 1) / kOutputs * packed_block<T>(in);                              \
  }                                                                                            \
  extern "C" void pack_##NAME(const void* weight, int64_t in, int64_t out, void* packed) {     \
    pack(static_cast<const T*>(weight), in, out, static_cast<T*>(packed));                     \
  }                                                                                            \
  extern "C" void multiply_##NAME(const void* x, const void* packed, const void* bias,         \
                                  int64_t rows, int64_t in, int64_t out, int64_t threads,      \
                                  void* y) {                                                   \
    multiply<T>({x, packed, bias, y, rows, in, out, 0}, static_cast<int>(threads));            \
  }                                                                                            \
  extern "C" void add_norm_##NAME(void* x, const void* delta, const void* weight, float eps,   \
                                  int64_t n, int64_t size, void* out) {                        \
    add_norm(static_cast<T*>(x), static_cast<const T*>(delta), static_cast<const T*>(weight),  \
             eps, n, size, static_cast<T*>(out));                                              \
  }                                                                                            \
  extern "C" void silu_mul_##NAME(const void* gate_up, int64_t n, int64_t size, void* out) {   \
    silu_mul(static_cast<const T*>(gate_up), n, size, static_cast<T*>(out));                   \
  }                                                                                            \
  extern "C" void attend_##NAME(const Attention* a, const void* qkv, const void* cos,          \
                                const void* sin, const int64_t* rows, const int64_t* positions, \
                                const int32_t* tables, void* keys, void* values,               \
                                float* scratch, void* out) {                                   \
    attend(*a, static_cast<const T*>(qkv), static_cast<const T*>(cos),                         \
           static_cast<const T*>(sin), rows, positions, tables, static_cast<T*>(keys),         \
           static_cast<T*>(values), scratch, static_cast<T*>(out));                            \
  }                                                                                            \
  extern "C" void top_one_##NAME(const void* logits, int64_t n, int64_t size, int64_t* ids,    \
                                 float* probs) {                                               \
    top_one(static_cast<const T*>(logits), n, size, ids, probs);                               \
  }                                                                                            \
  extern "C" void top_k_##NAME(const void* logits, int64_t n, int64_t size, int64_t k,         \
                               int64_t* ids, float* values, float* logsumexp) {                \
    top_k(static_cast<const T*>(logits), n, size, k, ids, values, logsumexp);                  \
  }                                                                                            \
  extern "C" void accept_##NAME(const void* logits, int64_t batch, int64_t k, int64_t vocab,   \
                                const int64_t* drafts, const int64_t* drafted,                 \
                                int64_t* accepted, int64_t* final_tokens) {                    \
    accept(static_cast<const T*>(logits), batch, k, vocab, drafts, drafted, accepted,          \
           final_tokens);                                                                      \
  }

PACELINE_KERNELS(bfloat16, Bf16)
PACELINE_KERNELS(float32, float)
