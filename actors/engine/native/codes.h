// Products with weights that are read as the codes of a quantized checkpoint.
//
// A code q of 4 or 8 bits stands for the weight bf16(scale * q + min), scale and min in float16 for
// 32 columns of an output. Decoding in registers gives the bits of the bfloat16 weights, which
// pack_codes() checks, from a third to a half of their bytes; the sums are those of products.h.
#pragma once

#include <vector>

#include "products.h"

// Where vectors have 8 lanes or more; decoding with fewer was not tried.
#if defined(__AVX512BF16__) || (defined(__AVX2__) && defined(__FMA__) && defined(__F16C__))
#include <immintrin.h>
#define PACELINE_CODES 1
#endif

namespace {

constexpr int64_t kGroup = 32;  // columns of a scale

#if PACELINE_CODES

// 16 outputs' weights of 32 columns. Codes of 8 bits have 128 added, and no min.
template <int Bits>
struct Group {
  uint16_t scale[kOutputs], min[Bits == 4 ? kOutputs : 0];
  uint32_t codes[Bits][16];
};

// Float16 numbers of a vector of outputs.
inline Vector half(const uint16_t* from) {
#if defined(__AVX512F__)
  return (Vector)_mm512_cvtph_ps(load<__m256i>(from));
#else
  return (Vector)_mm256_cvtph_ps(load<__m128i>(from));
#endif
}

// Where the code of a group's output and column lies.
struct CodePlace {
  int64_t line, word, shift;
};

#if defined(__AVX512BF16__)

// A code is shifted to where, as mantissa under this exponent, it reads kBase + code.
template <int Bits>
struct Shifted {
  static constexpr int kAt = Bits == 4 ? 16 : 15;
  static constexpr float kBase = Bits == 4 ? 128.0f : 256.0f;
  static constexpr int kExponent = Bits == 4 ? 0x43000000 : 0x43800000;

  // The V-th code of every word.
  template <int V>
  static __m512 one(__m512i words) {
    constexpr int shift = kAt - V * Bits;
    if constexpr (shift > 0) words = _mm512_slli_epi32(words, shift);
    if constexpr (shift < 0) words = _mm512_srli_epi32(words, -shift);
    const __m512i mask = _mm512_set1_epi32(((1 << Bits) - 1) << kAt);
    return _mm512_castsi512_ps(
        _mm512_ternarylogic_epi32(words, mask, _mm512_set1_epi32(kExponent), 0xEA));  // & then |
  }
};

#endif

#if PACELINE_TILES

// Of 4 bits a line has the codes of four outputs: halves of words are columns, from the low bits on.
// Of 8 bits it has those of two: words are columns, and 16 more in the next 8 bits.
template <int Bits>
inline CodePlace code_place(int64_t output, int64_t column) {
  if constexpr (Bits == 4) return {output / 4, column / 2, column % 2 * 16 + output % 4 * 4};
  return {output / 2, column % 16, output % 2 * 16 + column / 16 * 8};
}

// Numbers of 16 outputs, to be spread over vectors one by one: from memory, since shuffles would take
// the unit that decoding needs most.
class Spread {
 public:
  explicit Spread(__m512 numbers) {
    _mm512_store_ps(numbers_, numbers);
    asm volatile("" : "+m"(numbers_));
  }
  __m512 of(int output) const { return _mm512_set1_ps(numbers_[output]); }

 private:
  alignas(64) float numbers_[kOutputs];
};

// Decodes a group into the layout of products.h: 32 columns of one output after another. Those of 4
// bits are looked up in a table of two outputs' 16 weights each.
inline void decode_group(const Group<4>& group, Bf16* out) {
  const __m512 codes = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i code = _mm512_set1_epi16(15), second = _mm512_set1_epi16(16);
  const Spread scale(half(group.scale)), min(half(group.min));
#pragma GCC unroll 8
  for (int n = 0; n < kOutputs; n += 2) {
    const __m512i words = _mm512_loadu_si512(group.codes[n / 4]);
    const auto weights = [&](int output) __attribute__((always_inline)) {
      return _mm512_fmadd_ps(codes, scale.of(output), min.of(output));
    };
    const auto table = (__m512i)_mm512_cvtne2ps_pbh(weights(n + 1), weights(n));
    const __m512i first = _mm512_srli_epi16(words, n % 4 * 4), next = _mm512_srli_epi16(words, n % 4 * 4 + 4);
    const __m512i a = _mm512_and_si512(first, code);
    const __m512i b = _mm512_ternarylogic_epi32(next, code, second, 0xEA);  // & then |
    _mm512_storeu_si512(out + n * kGroup, _mm512_permutexvar_epi16(a, table));
    _mm512_storeu_si512(out + (n + 1) * kGroup, _mm512_permutexvar_epi16(b, table));
  }
}

inline void decode_group(const Group<8>& group, Bf16* out) {
  const __m512 s = half(group.scale);
  Spread scale(s), offset(_mm512_mul_ps(s, _mm512_set1_ps(-Shifted<8>::kBase - 128.0f)));
#pragma GCC unroll 8
  for (int j = 0; j < 8; ++j) {
    const __m512i words = _mm512_loadu_si512(group.codes[j]);
    const auto put = [&](int n, __m512 low, __m512 high) __attribute__((always_inline)) {
      const __m512 by = scale.of(n), plus = offset.of(n);
      const auto pair = _mm512_cvtne2ps_pbh(_mm512_fmadd_ps(high, by, plus), _mm512_fmadd_ps(low, by, plus));
      _mm512_storeu_si512(out + n * kGroup, (__m512i)pair);
    };
    put(2 * j, Shifted<8>::one<0>(words), Shifted<8>::one<1>(words));
    put(2 * j + 1, Shifted<8>::one<2>(words), Shifted<8>::one<3>(words));
  }
}

#else

#if defined(__AVX512BF16__)

// A word has the v-th code, counted from its low bits, of output word / 2 + 8 * (v % 2) and of column
// v / 2 * 2 + word % 2 of the line's.
template <int Bits>
inline CodePlace code_place(int64_t output, int64_t column) {
  const int64_t inside = column % (32 / Bits);
  return {column / (32 / Bits), output % 8 * 2 + inside % 2, (inside / 2 * 2 + output / 8) * Bits};
}

using CodedStep = Step<Bf16>;  // takes what a Decoder makes
inline Words packed_pairs(Pairs weights) { return weights; }

// Of a group all 16 outputs, which are its only part.
template <int Bits>
struct Decoder {
  __m512 scale[2], offset[2];

  void read(const Group<Bits>& group, int) {
    constexpr float base = Shifted<Bits>::kBase;
    const __m512 s = half(group.scale);
    __m512 m;
    if constexpr (Bits == 4) m = _mm512_fnmadd_ps(s, _mm512_set1_ps(base), half(group.min));
    else m = _mm512_mul_ps(s, _mm512_set1_ps(-base - 128.0f));
    const __m512i twice = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
    for (int i = 0; i < 2; ++i) {
      const __m512i lanes = _mm512_add_epi32(twice, _mm512_set1_epi32(8 * i));
      scale[i] = _mm512_permutexvar_ps(lanes, s);
      offset[i] = _mm512_permutexvar_ps(lanes, m);
    }
  }

  template <int V>
  __m512 one(Words words) const {
    const __m512 code = Shifted<Bits>::template one<V>((__m512i)words);
    return _mm512_fmadd_ps(code, scale[V % 2], offset[V % 2]);
  }

  // The P-th pair of columns of a line.
  template <int P>
  Pairs pair(Words words) const {
    return (Pairs)(__m512i)_mm512_cvtne2ps_pbh(one<2 * P + 1>(words), one<2 * P>(words));
  }
};

#else

// A word has codes of one output, from the low bits on.
template <int Bits>
inline CodePlace code_place(int64_t output, int64_t column) {
  return {column / (32 / Bits), output, column % (32 / Bits) * Bits};
}

// Takes what a Decoder makes: two columns' weights as floats.
struct CodedStep : Step<Bf16> {
  struct Weights {
    Vector turns[2];
  };
  template <int Turn>
  static inline Vector part(const Weights& w) { return w.turns[Turn]; }
};
inline Words packed_pairs(const CodedStep::Weights& w) {
  return ((Words)w.turns[0] >> 16) | (Words)w.turns[1];
}

// To nearest, ties to even, by a float's own rounding, for |x| in 2^-126 .. 2^111 and 0: x - 2^16 x cannot
// hold what lies below x's eighth bit, and with 2^16 x added again the rest of x is left. By additions or by
// multiplications: a processor that has units for each is fastest with as many of both.
template <bool ByMultiplying>
inline Vector as_bfloat16(Vector x) {
  if constexpr (ByMultiplying) {
    Vector rest = x * -65535.0f;
    asm("" : "+v"(rest));  // or the compiler would multiply and add exactly
    return x * 65536.0f + rest;
  } else {
    const Vector large = (Vector)((Words)x + (16u << 23));
    return x - large + large;
  }
}

// Of a group a vector of outputs, its part.
template <int Bits>
struct Decoder {
  typedef int32_t Integers __attribute__((vector_size(4 * kLanes)));
  static constexpr int kCodes = 32 / Bits;  // in a word
  Vector scale[kCodes], min;                // scale for a code where it lies in its word

  void read(const Group<Bits>& group, int part) {
    const Vector s = half(group.scale + part * kLanes);
#pragma GCC unroll 8
    for (int v = 0; v < kCodes; ++v)
      scale[v] = v + 1 < kCodes ? s / static_cast<float>(1u << (v * Bits)) : s;
    if constexpr (Bits == 4) min = half(group.min + part * kLanes);
    else min = s * -128.0f;
  }

  template <int V>
  Vector one(Words words) const {
    if constexpr (V + 1 == kCodes) words >>= V * Bits;  // it has the sign's bit
    else words &= ((1u << Bits) - 1) << (V * Bits);
    return as_bfloat16<V % 2 == 0>(__builtin_convertvector((Integers)words, Vector) * scale[V] + min);
  }

  // The P-th pair of columns of a line.
  template <int P>
  CodedStep::Weights pair(Words words) const {
    return {{one<2 * P>(words), one<2 * P + 1>(words)}};
  }
};

#endif

// Calls take(P) for every pair of columns of a line, as a constant.
template <int Bits, class F>
__attribute__((always_inline)) inline void each_pair(const F& take) {
  take(std::integral_constant<int, 0>{});
  take(std::integral_constant<int, 1>{});
  if constexpr (Bits == 4) {
    take(std::integral_constant<int, 2>{});
    take(std::integral_constant<int, 3>{});
  }
}

// Decodes a group into the layout of products.h.
template <int Bits>
inline void decode_group(const Group<Bits>& group, Bf16* out) {
  for (int part = 0; part < kParts; ++part) {
    Bf16* to = out + part * 2 * kLanes;
    Decoder<Bits> decoder;
    decoder.read(group, part);
#pragma GCC unroll 8
    for (int j = 0; j < Bits; ++j) {
      const auto words = load<Words>(group.codes[j] + part * kLanes);
      each_pair<Bits>([&](auto pair) __attribute__((always_inline)) {
        const Words pairs = packed_pairs(decoder.template pair<pair.value>(words));
        std::memcpy(to, &pairs, sizeof pairs);
        to += 2 * kOutputs;
      });
    }
  }
}

#endif

template <int Bits>
void decode_block(const Weight& weight, int64_t block, Bf16* out) {
  const int64_t groups = weight.in / kGroup;
  const Group<Bits>* own = static_cast<const Group<Bits>*>(weight.packed) + block * groups;
  for (int64_t g = 0; g < groups; ++g) decode_group(own[g], out + g * kGroup * kOutputs);
}

inline bool is_zero(Bf16 x) { return (x.bits & 0x7fffu) == 0; }

// Packs codes; returns whether they decode to the weights.
template <int Bits>
bool pack_coded(const Bf16* weight, const uint8_t* codes, const uint16_t* scales,
                const uint16_t* mins, int64_t in, int64_t out, void* packed) {
  const int64_t groups = in / kGroup, blocks = (out + kOutputs - 1) / kOutputs;
  std::memset(packed, 0, blocks * groups * sizeof(Group<Bits>));
  auto* to = static_cast<Group<Bits>*>(packed);
  for (int64_t block = 0; block < blocks; ++block)
    for (int64_t g = 0; g < groups; ++g, ++to)
      for (int64_t lane = 0; lane < std::min<int64_t>(kOutputs, out - block * kOutputs); ++lane) {
        const int64_t row = block * kOutputs + lane;
        to->scale[lane] = scales[row * groups + g];
        if constexpr (Bits == 4) to->min[lane] = mins[row * groups + g];
        for (int64_t column = 0; column < kGroup; ++column) {
          const int64_t at = row * in + g * kGroup + column;
          const uint32_t code = Bits == 4 ? (codes[at / 2] >> (4 * (at % 2))) & 15u : codes[at];
          const CodePlace place = code_place<Bits>(lane, column);
          to->codes[place.line][place.word] |= code << place.shift;
        }
      }
  std::vector<Bf16> decoded(packed_block<Bf16>(in));
  const Weight own{packed, nullptr, in, out, Bits};
  for (int64_t block = 0; block < blocks; ++block) {
    decode_block<Bits>(own, block, decoded.data());
    for (int64_t lane = 0; lane < std::min<int64_t>(kOutputs, out - block * kOutputs); ++lane)
      for (int64_t k = 0; k < in; ++k) {
        const Bf16 found = decoded[packed_at<Bf16>(k, lane)];
        const Bf16 wanted = weight[(block * kOutputs + lane) * in + k];
        if (found.bits != wanted.bits && !(is_zero(found) && is_zero(wanted))) return false;
      }
  }
  return true;
}

inline int64_t coded_size(int64_t in, int64_t out, int64_t bits) {  // bytes
  const int64_t groups = in / kGroup * ((out + kOutputs - 1) / kOutputs);
  return groups * (bits == 4 ? sizeof(Group<4>) : sizeof(Group<8>));
}

inline bool pack_codes(const Bf16* weight, const uint8_t* codes, const uint16_t* scales,
                       const uint16_t* mins, int64_t in, int64_t out, int64_t bits, void* packed) {
  return bits == 4 ? pack_coded<4>(weight, codes, scales, mins, in, out, packed)
                   : pack_coded<8>(weight, codes, scales, mins, in, out, packed);
}

#if !PACELINE_TILES

// R rows by B blocks; the next blocks' codes are fetched meanwhile. With Keep the decoded weights go
// to `kept` too, laid out as pack() does.
template <int Bits, int R, int B, bool Keep>
__attribute__((noinline)) void coded_tile(const Product& p, int64_t block, Bf16* kept) {
  constexpr int kPairs = 16 / Bits;  // of columns, in a line
  constexpr int kVectors = B * kParts;
  const int64_t groups = p.weight.in / kGroup, stride = packed_block<Bf16>(p.weight.in);
  const Group<Bits>* own = static_cast<const Group<Bits>*>(p.weight.packed) + block * groups;
  const Rows<Bf16, R> rows(p, 0);
  int64_t column = 0;
  Vector sums[R][kVectors] = {};
  for (int64_t g = 0; g < groups; ++g) {
    Decoder<Bits> decoders[kVectors];
    for (int i = 0; i < kVectors; ++i) decoders[i].read(own[i / kParts * groups + g], i % kParts);
    for (int64_t line = 0; line < static_cast<int64_t>(sizeof(Group<Bits>)); line += 64)
      for (int b = 0; b < B; ++b)
        __builtin_prefetch(reinterpret_cast<const char*>(own + (B + b) * groups + g) + line);
#pragma GCC unroll 8
    for (int j = 0; j < Bits; ++j, column += 2 * kPairs) {
      Words words[kVectors];
      for (int i = 0; i < kVectors; ++i)
        words[i] = load<Words>(own[i / kParts * groups + g].codes[j] + i % kParts * kLanes);
      each_pair<Bits>([&](auto pair) __attribute__((always_inline)) {
        typename CodedStep::Weights w[kVectors];
#pragma GCC unroll 4
        for (int i = 0; i < kVectors; ++i) {
          w[i] = decoders[i].template pair<pair.value>(words[i]);
          if constexpr (Keep) {
            const Words pairs = packed_pairs(w[i]);
            std::memcpy(kept + i / kParts * stride + i % kParts * 2 * kLanes, &pairs, sizeof pairs);
          }
        }
        if constexpr (Keep) kept += 2 * kOutputs;
        add_step<CodedStep>(sums, w, rows.x, column + 2 * pair.value);
      });
    }
  }
  store<Bf16>(p, 0, R, block, sums);
}

// Calls take(count) for 1 to Most rows, as a constant.
template <int Most, class F>
inline void with_rows(int64_t count, const F& take) {
  if constexpr (Most > 1)
    if (count < Most) return with_rows<Most - 1>(count, take);
  take(std::integral_constant<int, Most>{});
}

// Of more than kMany rows at most so many decode: with vectors of 8 lanes more are slower, since sums and a
// Decoder do not fit in registers together.
constexpr int kDecoding = kLanes == 16 ? kMany : 2;

// All rows, in parts: the first decodes in registers and leaves the weights in the cache for the others,
// which are as even as can be.
template <int Bits, int B>
void coded_rows(const Product& p, int64_t block) {
  if (p.rows <= kMany)
    return with_rows<kMany>(p.rows, [&](auto r) { coded_tile<Bits, r.value, B, false>(p, block, nullptr); });
  thread_local std::vector<Bf16> kept;
  const int64_t size = packed_block<Bf16>(p.weight.in);
  kept.resize(B * size);
  const auto parts = [](int64_t rows) { return (rows + kMany - 1) / kMany; };
  const int64_t first = std::min<int64_t>(kDecoding, p.rows / parts(p.rows));
  with_rows<kDecoding>(first, [&](auto r) { coded_tile<Bits, r.value, B, true>(p, block, kept.data()); });
  Product decoded = p;
  // Where block 0 would lie.
  const auto begin = reinterpret_cast<uintptr_t>(kept.data()) - block * size * sizeof(Bf16);
  decoded.weight.packed = reinterpret_cast<const void*>(begin);
  const int64_t rest = p.rows - first, others = parts(rest);
  for (int64_t part = 0; part < others; ++part) {
    const int64_t row = first + rest * part / others, end = first + rest * (part + 1) / others;
    with_rows<kMany>(end - row, [&](auto r) { tile<Bf16, r.value, B>(decoded, row, block); });
  }
}

template <int Bits>
void multiply_coded_blocks(const Product& p, int64_t from, int64_t to) {
  constexpr int B = kLanes == 16 ? 2 : 1;
  for (; from + B <= to; from += B) coded_rows<Bits, B>(p, from);
  if (from < to) coded_rows<Bits, 1>(p, from);
}

inline void multiply_codes(const Product& p, int64_t from, int64_t to) {
  if (p.weight.bits == 4) multiply_coded_blocks<4>(p, from, to);
  else multiply_coded_blocks<8>(p, from, to);
}

#endif

#else

inline int64_t coded_size(int64_t, int64_t, int64_t) { return 0; }
inline bool pack_codes(const Bf16*, const uint8_t*, const uint16_t*, const uint16_t*, int64_t,
                       int64_t, int64_t, void*) {
  return false;
}
inline void multiply_codes(const Product&, int64_t, int64_t) {}

#endif

}  // namespace
