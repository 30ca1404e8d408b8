// What a core can do at most: products in registers, and reading memory from end to end.
#include "numbers.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {
constexpr int kChains = 12;  // more than one product's latency, in registers
typedef uint64_t Line __attribute__((vector_size(64), aligned(8)));

// Calls add(sum) `rounds` times in every chain; returns the operations, `each` of a call.
template <class Add>
int64_t in_chains(int64_t rounds, int64_t each, float* out, const Add& add) {
  Vector sums[kChains];
  for (int c = 0; c < kChains; ++c) sums[c] = Vector{} + static_cast<float>(c);  // none is another
  for (int64_t i = 0; i < rounds; ++i)
#pragma GCC unroll 12
    for (auto& sum : sums) add(sum);
  for (const auto& sum : sums) *out += sum[0];
  return rounds * kChains * each;
}
}  // namespace

extern "C" {

// Multiplies floats and adds `rounds` times in every chain; returns the operations.
int64_t multiply_add(int64_t rounds, float x, float* out) {
  const Vector wide = Vector{} + x;
  return in_chains(rounds, 2 * kLanes, out, [&](Vector& sum) { sum = sum * wide + wide; });
}

// The same with dot products of two bfloat16 numbers; 0 where the processor has none.
int64_t dot_products(int64_t rounds, float x, float* out) {
#if defined(__AVX512BF16__)
  const __m512bh pairs = _mm512_cvtne2ps_pbh(_mm512_set1_ps(x), _mm512_set1_ps(x));
  return in_chains(rounds, 4 * 16, out, [&](Vector& sum) {
    sum = (Vector)_mm512_dpbf16_ps((__m512)sum, pairs, pairs);
  });
#else
  return 0;
#endif
}

// The same by tiles of bfloat16; 0 where the processor has none or the system does not let it.
int64_t tile_products(int64_t rounds, float, float* out) {
#if defined(TILES) && defined(__AMX_BF16__)
  struct alignas(64) {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16};
  } shapes;
  alignas(64) float sums[16 * 16] = {};
  _tile_loadconfig(&shapes);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  for (int64_t i = 0; i < rounds; ++i) {
    _tile_dpbf16ps(0, 4, 5);
    _tile_dpbf16ps(1, 4, 5);
    _tile_dpbf16ps(2, 4, 5);
    _tile_dpbf16ps(3, 4, 5);
  }
  _tile_stored(0, sums, 64);
  _tile_release();
  *out += sums[0];
  return rounds * 4 * 2 * 16 * 16 * 32;
#else
  return 0;
#endif
}

// Sums `count` parts of 64 bytes.
uint64_t read_all(const void* from, int64_t count) {
  const Line* words = static_cast<const Line*>(from);
  Line sums[4] = {};
  for (int64_t i = 0; i + 4 <= count; i += 4)
    for (int j = 0; j < 4; ++j) sums[j] += words[i + j];
  const Line all = sums[0] + sums[1] + sums[2] + sums[3];
  return all[0] + all[7];
}
}
