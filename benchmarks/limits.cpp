// What a core can do at most: products in registers, and reading memory from end to end.
#include <cstdint>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {
constexpr int kChains = 16;  // more than one product's latency
typedef float Floats __attribute__((vector_size(64)));
typedef uint64_t Words __attribute__((vector_size(64), aligned(8)));
}  // namespace

extern "C" {

// Multiplies and adds `rounds` times in every chain; returns the floating point operations.
// `value` is two bfloat16 numbers where the processor has their dot product, else a float.
int64_t multiply_add(int64_t rounds, uint32_t value, float* out) {
  Floats sums[kChains];
  for (int c = 0; c < kChains; ++c) sums[c] = Floats{} + static_cast<float>(c);  // none is another
#if defined(__AVX512BF16__)
  constexpr int64_t each = 4 * 16;
  const __m512bh x = (__m512bh)_mm512_set1_epi32(static_cast<int>(value));
  for (int64_t i = 0; i < rounds; ++i)
#pragma GCC unroll 16
    for (auto& sum : sums) sum = (Floats)_mm512_dpbf16_ps((__m512)sum, x, x);
#else
  constexpr int64_t each = 2 * 16;
  const Floats x = Floats{} + static_cast<float>(value);
  for (int64_t i = 0; i < rounds; ++i)
#pragma GCC unroll 16
    for (auto& sum : sums) sum += x * x;
#endif
  for (const auto& sum : sums) *out += sum[0];
  return rounds * kChains * each;
}

// Sums `count` parts of 64 bytes.
uint64_t read_all(const void* from, int64_t count) {
  const Words* words = static_cast<const Words*>(from);
  Words sums[4] = {};
  for (int64_t i = 0; i + 4 <= count; i += 4)
    for (int j = 0; j < 4; ++j) sums[j] += words[i + j];
  const Words all = sums[0] + sums[1] + sums[2] + sums[3];
  return all[0] + all[7];
}
}
