// Products of bfloat16 by tiles (AMX): 16 rows by 32 columns of 16 outputs at once.
//
// Every element of y is a chain of sums over groups of 32 columns in ascending order; within a group the
// processor sums even and odd columns apart. That holds for one row as for many, so bits depend on a
// row alone here too, and not on whether the weight is read as codes.
#pragma once

#include "codes.h"

namespace {

#if PACELINE_TILES

constexpr int64_t kTileRows = 16;  // at most
constexpr int64_t kTileBytes = 1024;

// Rows in tiles of `size`, as even as can be: the last one may repeat rows of the one before.
struct TiledRows {
  int64_t tiles, size;

  explicit TiledRows(int64_t rows)
      : tiles((rows + kTileRows - 1) / kTileRows), size((rows + tiles - 1) / tiles) {}

  int64_t first(int64_t tile, int64_t rows) const { return std::min(tile * size, rows - size); }
};

// What the processor is told of its eight tiles.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};  // of a row
  uint8_t rows[16] = {};

  void set(int from, int to, int64_t rows_, int64_t bytes_) {
    std::fill(rows + from, rows + to, static_cast<uint8_t>(rows_));
    std::fill(bytes + from, bytes + to, static_cast<uint16_t>(bytes_));
  }
};

// GCC does not know that loading a tile reads memory, nor that storing it writes.
inline void uses_memory() { asm volatile("" ::: "memory"); }

inline void transpose(__m512i (&m)[16]) {  // of 16 words each
  __m512i t[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i)
    t[i] = i % 2 == 0 ? _mm512_unpacklo_epi32(m[i], m[i + 1]) : _mm512_unpackhi_epi32(m[i - 1], m[i]);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    const int pair = i / 4 * 4 + i % 4 / 2;
    m[i] = i % 2 == 0 ? _mm512_unpacklo_epi64(t[pair], t[pair + 2])
                      : _mm512_unpackhi_epi64(t[pair], t[pair + 2]);
  }
  // m[4 i + j] has, of rows 4 i to 4 i + 3, columns j, 4 + j, 8 + j and 12 + j.
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    t[j] = _mm512_shuffle_i32x4(m[j], m[4 + j], 0x88);
    t[4 + j] = _mm512_shuffle_i32x4(m[j], m[4 + j], 0xdd);
    t[8 + j] = _mm512_shuffle_i32x4(m[8 + j], m[12 + j], 0x88);
    t[12 + j] = _mm512_shuffle_i32x4(m[8 + j], m[12 + j], 0xdd);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    m[j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0x88);
    m[4 + j] = _mm512_shuffle_i32x4(t[4 + j], t[12 + j], 0x88);
    m[8 + j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0xdd);
    m[12 + j] = _mm512_shuffle_i32x4(t[4 + j], t[12 + j], 0xdd);
  }
}

// Tile by tile and group by group 16 pairs of columns, of each the tile's rows side by side: of a lone row
// what it is, padded.
template <>
struct InputLayout<Bf16> {
  static int64_t groups(const Product& p) { return (p.weight.in + kGroup - 1) / kGroup; }

  static int64_t lines(const Product& p) {
    if (p.rows == 1 && p.weight.in % kGroup == 0) return 0;
    return (parts(p) * tile_bytes(p) + 63) / 64;
  }

  static int64_t parts(const Product& p) { return TiledRows(p.rows).tiles; }
  static int64_t pair_bytes(const Product& p) { return 4 * TiledRows(p.rows).size; }
  static int64_t tile_bytes(const Product& p) { return groups(p) * 16 * pair_bytes(p); }

  static void lay_out(const Product& p, int64_t tile, Line* lines) {
    const TiledRows rows(p.rows);
    const int64_t in = p.weight.in, pitch = pair_bytes(p);
    const Bf16* x = static_cast<const Bf16*>(p.x) + rows.first(tile, p.rows) * in;
    char* to = lines->bytes + tile * tile_bytes(p);
    for (int64_t k = 0; k < in; k += kGroup) {
      const __mmask32 inside = in - k >= kGroup ? ~0u : (1u << (in - k)) - 1;
      __m512i m[16] = {};
      for (int64_t r = 0; r < rows.size; ++r) m[r] = _mm512_maskz_loadu_epi16(inside, x + r * in + k);
      transpose(m);
      const auto own = static_cast<__mmask16>((1u << rows.size) - 1);
      for (int pair = 0; pair < 16; ++pair, to += pitch) _mm512_mask_storeu_epi32(to, own, m[pair]);
    }
  }
};

// The weights of a group of columns of a block, as pack() lays them.
struct PackedGroups {
  const char* packed;
  int64_t stride;  // bytes of a block

  const void* at(int64_t group, int b) const {
    const char* own = packed + b * stride + group * kTileBytes;
    for (int64_t line = 0; line < kTileBytes; line += 64)
      __builtin_prefetch(own + 2 * kTileBytes + line);
    return own;
  }
};

// The same from codes, decoded into a buffer that stays in the cache: of all groups if they are needed
// again, of a few otherwise.
template <int Bits, int B>
struct CodedGroups {
  const Group<Bits>* own;
  int64_t groups;  // of a block
  char* buffer;
  bool kept;

  const void* at(int64_t group, int b) const {
    constexpr int64_t few = 4, ahead = 12;  // the next blocks follow
    const Group<Bits>* from = own + b * groups + group;
    const Group<Bits>* next = from + ahead + (group + ahead < groups ? 0 : (B - 1) * groups);
    for (int64_t line = 0; line < static_cast<int64_t>(sizeof(Group<Bits>)); line += 64)
      __builtin_prefetch(reinterpret_cast<const char*>(next) + line);
    char* to = buffer + (kept ? b * groups + group : b * few + group % few) * kTileBytes;
    decode_group(*from, reinterpret_cast<Bf16*>(to));
    return to;
  }
};

// R tiles of rows, from `tile` on, by B blocks.
template <int R, int B, class Groups>
__attribute__((noinline)) void multiply_tiles(const Product& p, TiledRows rows, int64_t tile,
                                              int64_t block, const Groups& weights) {
  const int64_t groups = InputLayout<Bf16>::groups(p);
  const int64_t tile_bytes = InputLayout<Bf16>::tile_bytes(p), pitch = InputLayout<Bf16>::pair_bytes(p);
  const char* x = static_cast<const char*>(p.x) + tile * tile_bytes;
  _tile_zero(0);
  if constexpr (B == 2) _tile_zero(1);
  if constexpr (R == 2) _tile_zero(2);
  if constexpr (R == 2 && B == 2) _tile_zero(3);
  const void* w[B];
  for (int64_t g = 0; g < groups; ++g, x += 16 * pitch) {
    for (int b = 0; b < B; ++b) w[b] = weights.at(g, b);
    uses_memory();
    _tile_loadd(6, x, pitch);
    if constexpr (R == 2) _tile_loadd(7, x + tile_bytes, pitch);
    _tile_loadd(4, w[0], 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (R == 2) _tile_dpbf16ps(2, 4, 7);
    if constexpr (B == 2) _tile_loadd(5, w[1], 64);
    if constexpr (B == 2) _tile_dpbf16ps(1, 5, 6);
    if constexpr (R == 2 && B == 2) _tile_dpbf16ps(3, 5, 7);
  }
  __m512i sums[2][2][16];
  const int64_t line = rows.size == 1 ? 4 : 64;  // a lone row's outputs side by side
  _tile_stored(0, sums[0][0], line);
  if constexpr (B == 2) _tile_stored(1, sums[0][1], line);
  if constexpr (R == 2) _tile_stored(2, sums[1][0], line);
  if constexpr (R == 2 && B == 2) _tile_stored(3, sums[1][1], line);
  uses_memory();
  const int64_t n = block * kOutputs, out = p.weight.out;
  const bool together = B == 2 && n + 2 * kOutputs <= out && p.weight.bias == nullptr;
  for (int r = 0; r < R; ++r) {
    if (rows.size > 1)
      for (int b = 0; b < B; ++b) transpose(sums[r][b]);
    const int64_t first = rows.first(tile + r, p.rows);
    for (int64_t i = 0; i < rows.size; ++i)
      if (together) {
        const auto both = _mm512_cvtne2ps_pbh((__m512)sums[r][1][i], (__m512)sums[r][0][i]);
        _mm512_storeu_si512(static_cast<Bf16*>(p.y) + (first + i) * out + n, (__m512i)both);
      } else {
        for (int b = 0; b < B; ++b)
          store_outputs<Bf16>(p, first + i, n + b * kOutputs, (Vector)sums[r][b][i]);
      }
  }
}

// All rows by B blocks: the first tiles of rows by `first` weights, which leave them to `others`.
template <int B, class First, class Others>
void multiply_rows(const Product& p, int64_t block, const First& first, const Others& others) {
  const TiledRows rows(p.rows);
  const auto some = [&](int64_t tile, const auto& weights) {
    if (tile + 2 <= rows.tiles) multiply_tiles<2, B>(p, rows, tile, block, weights);
    else multiply_tiles<1, B>(p, rows, tile, block, weights);
  };
  some(0, first);
  for (int64_t tile = 2; tile < rows.tiles; tile += 2) some(tile, others);
}

template <int Bits, int B>
void multiply_some(const Product& p, int64_t block) {
  const int64_t stride = packed_block<Bf16>(p.weight.in) * static_cast<int64_t>(sizeof(Bf16));
  if constexpr (Bits == 0) {
    const PackedGroups packed{static_cast<const char*>(p.weight.packed) + block * stride, stride};
    multiply_rows<B>(p, block, packed, packed);
  } else {
    thread_local std::vector<Line> memory;
    const auto lines = static_cast<size_t>(std::max(B * stride, 8 * kTileBytes) / 64);
    if (memory.size() < lines) memory.resize(lines);
    char* buffer = memory.data()->bytes;
    const int64_t groups = p.weight.in / kGroup;
    const auto* own = static_cast<const Group<Bits>*>(p.weight.packed) + block * groups;
    const CodedGroups<Bits, B> first{own, groups, buffer, p.rows > 2 * kTileRows};
    multiply_rows<B>(p, block, first, PackedGroups{buffer, stride});
  }
}

template <int Bits>
void multiply_by_tiles(const Product& p, int64_t from, int64_t to) {
  TileShapes shapes;
  shapes.set(0, 4, 16, InputLayout<Bf16>::pair_bytes(p));  // sums
  shapes.set(4, 6, 16, 64);                                // weights
  shapes.set(6, 8, 16, InputLayout<Bf16>::pair_bytes(p));  // rows
  _tile_loadconfig(&shapes);
  for (; from + 2 <= to; from += 2) multiply_some<Bits, 2>(p, from);
  if (from < to) multiply_some<Bits, 1>(p, from);
  _tile_release();
}

#endif

// Computes the outputs of blocks from .. to - 1; rows are in their InputLayout.
template <class T>
void multiply_part(const Product& p, int64_t from, int64_t to) {
#if PACELINE_TILES
  if constexpr (std::is_same_v<T, Bf16>) {
    if (p.weight.bits == 4) multiply_by_tiles<4>(p, from, to);
    else if (p.weight.bits == 8) multiply_by_tiles<8>(p, from, to);
    else multiply_by_tiles<0>(p, from, to);
  } else {
    multiply_blocks<T>(p, from, to);
  }
#else
  if constexpr (std::is_same_v<T, Bf16>)
    if (p.weight.bits != 0) return multiply_codes(p, from, to);
  multiply_blocks<T>(p, from, to);
#endif
}

}  // namespace
