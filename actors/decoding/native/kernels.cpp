// The small operations of a decoder layer on CPUs, between the matrix products.
//
// Every token's result is computed by the same instructions in the same order whatever stands
// beside it in the batch: alone, with seven others, one token or nine at a time, the bits are the
// same. Rounding follows transformers' modules: what they round to the model's dtype is rounded
// here, sums are float32. No threads, no state, no dependency: plain C entry points.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace {

struct Bf16 {
  uint16_t bits;
};

inline float widen(float x) { return x; }
inline float widen(Bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

template <class T>
inline T narrow(float x);
template <>
inline float narrow<float>(float x) {
  return x;
}
template <>
inline Bf16 narrow<Bf16>(float x) {  // to nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet = (bits >> 16) | 0x40u;
  return {static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded)};
}
template <class T>
inline float rounded(float x) {
  return widen(narrow<T>(x));
}

// exp for x <= 0 or small, relative error about 2e-7; branch-free, so that loops of it vectorise.
inline float exponential(float x) {
  x = std::max(x, -87.0f);
  const float n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float y = 1.9875691500e-4f;
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  const int32_t power = (static_cast<int32_t>(n) + 127) << 23;
  float scale;
  std::memcpy(&scale, &power, sizeof scale);
  return y * scale;
}

// x += delta; out = x / rms(x) * weight, over n rows of `size`.
template <class T>
void add_norm(T* x, const T* delta, const T* weight, float eps, int64_t n, int64_t size, T* out) {
  for (int64_t row = 0; row < n; ++row, x += size, out += size) {
    if (delta != nullptr) {
      for (int64_t i = 0; i < size; ++i) x[i] = narrow<T>(widen(x[i]) + widen(delta[i]));
      delta += size;
    }
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < size; ++i) sum += widen(x[i]) * widen(x[i]);
    const float scale = 1.0f / std::sqrt(sum / static_cast<float>(size) + eps);
    for (int64_t i = 0; i < size; ++i)
      out[i] = narrow<T>(rounded<T>(widen(x[i]) * scale) * widen(weight[i]));
  }
}

// out = silu(gate) * up; gate and up stand side by side in rows of 2 * size.
template <class T>
void silu_mul(const T* gate_up, int64_t n, int64_t size, T* out) {
  for (int64_t row = 0; row < n; ++row, gate_up += 2 * size, out += size) {
    for (int64_t i = 0; i < size; ++i) {
      const float gate = widen(gate_up[i]);
      // exponential() is made for arguments that do not overflow.
      const float silu = gate / (1.0f + exponential(std::min(-gate, 80.0f)));
      out[i] = narrow<T>(rounded<T>(silu) * widen(gate_up[size + i]));
    }
  }
}

// Rotary embedding of one head by tables whose sine has the sign of the rotated half.
template <class T>
void rotate(const T* in, const T* cos, const T* sin, int64_t dim, float* out) {
  const int64_t half = dim / 2;
  for (int64_t i = 0; i < dim; ++i) {
    const float other = widen(in[i < half ? i + half : i - half]);
    out[i] = rounded<T>(rounded<T>(widen(in[i]) * widen(cos[i])) +
                        rounded<T>(other * widen(sin[i])));
  }
}

struct Attention {
  int64_t batch, steps, q_heads, kv_heads, dim, capacity, window;
  float scale;
};

// One query head over the positions first..last of its row.
template <class T>
void attend_head(const Attention& a, const float* query, const float* keys, const float* values,
                 int64_t first, int64_t last, float* scores, float* sum_values, T* out) {
  float largest = -std::numeric_limits<float>::infinity();
  for (int64_t s = first; s <= last; ++s) {
    const float* key = keys + s * a.dim;
    float dot = 0.0f;
#pragma omp simd reduction(+ : dot)
    for (int64_t i = 0; i < a.dim; ++i) dot += query[i] * key[i];
    scores[s - first] = dot * a.scale;
    largest = std::max(largest, scores[s - first]);
  }
  float total = 0.0f;
  for (int64_t s = 0; s <= last - first; ++s) scores[s] = exponential(scores[s] - largest);
#pragma omp simd reduction(+ : total)
  for (int64_t s = 0; s <= last - first; ++s) total += scores[s];
  std::fill(sum_values, sum_values + a.dim, 0.0f);
  for (int64_t s = first; s <= last; ++s) {
    const float weight = scores[s - first];
    const float* value = values + s * a.dim;
#pragma omp simd
    for (int64_t i = 0; i < a.dim; ++i) sum_values[i] += weight * value[i];
  }
  for (int64_t i = 0; i < a.dim; ++i) out[i] = narrow<T>(sum_values[i] / total);
}

// Rotates queries and keys, stores keys and values, attends. See native.py for the shapes.
template <class T>
void attend(const Attention& a, const T* qkv, const T* cos, const T* sin, const int64_t* rows,
            const int64_t* positions, float* keys, float* values, float* scratch, T* out) {
  const int64_t width = (a.q_heads + 2 * a.kv_heads) * a.dim, row_size = a.kv_heads * a.capacity * a.dim;
  for (int64_t token = 0; token < a.batch * a.steps; ++token) {
    const int64_t at = positions[token];
    const T* key = qkv + token * width + a.q_heads * a.dim;
    const T* value = key + a.kv_heads * a.dim;
    for (int64_t h = 0; h < a.kv_heads; ++h) {
      const int64_t offset = rows[token / a.steps] * row_size + (h * a.capacity + at) * a.dim;
      rotate(key + h * a.dim, cos + at * a.dim, sin + at * a.dim, a.dim, keys + offset);
      for (int64_t i = 0; i < a.dim; ++i) values[offset + i] = widen(value[h * a.dim + i]);
    }
  }
  float *query = scratch, *sum_values = scratch + a.dim, *scores = scratch + 2 * a.dim;
  const int64_t group = a.q_heads / a.kv_heads;
  for (int64_t token = 0; token < a.batch * a.steps; ++token) {
    const int64_t at = positions[token];
    const int64_t first = a.window > 0 ? std::max<int64_t>(0, at - a.window + 1) : 0;
    for (int64_t h = 0; h < a.q_heads; ++h) {
      const int64_t offset = rows[token / a.steps] * row_size + h / group * a.capacity * a.dim;
      rotate(qkv + token * width + h * a.dim, cos + at * a.dim, sin + at * a.dim, a.dim, query);
      attend_head(a, query, keys + offset, values + offset, first, at, scores, sum_values,
                  out + (token * a.q_heads + h) * a.dim);
    }
  }
}

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

#define PACELINE_KERNELS(NAME, T)                                                              \
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
                                float* keys, float* values, float* scratch, void* out) {       \
    attend(*a, static_cast<const T*>(qkv), static_cast<const T*>(cos),                         \
           static_cast<const T*>(sin), rows, positions, keys, values, scratch,                 \
           static_cast<T*>(out));                                                              \
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
