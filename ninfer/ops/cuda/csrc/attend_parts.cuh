// What the kernels of `attend_few.cuh` are made of: sizes, instructions, codes of keys and values, copies of tiles.
#pragma once
#include "barriers.cuh"

#define PLAIN 0
#define INT8 1
#define FP8 2
#define NVFP4 3

__host__ __device__ constexpr int code_bytes(int code) { return code == PLAIN ? 2 * D : code == NVFP4 ? D / 2 : D; }
__host__ __device__ constexpr int scale_bytes(int code) {
  return code == INT8 ? 2 * (D / 64) : code == NVFP4 ? D / 16 : code == FP8 ? 2 : 0;
}
// Bytes kept of a key's scales: single halves travel as the word that holds them.
__host__ __device__ constexpr int kept_scales(int code) { return scale_bytes(code) == 2 ? 4 : scale_bytes(code); }

constexpr int KB = code_bytes(K_CODE), VB = code_bytes(V_CODE);
constexpr int KS = kept_scales(K_CODE), VS = kept_scales(V_CODE);
constexpr int V_AT = KEYS * KB, KS_AT = V_AT + KEYS * VB, VS_AT = KS_AT + KEYS * KS;
constexpr int STAGE = VS_AT + KEYS * VS;
constexpr int STEPS = K_CODE == INT8 ? D / 32 : D / 16;       // of the product with keys
constexpr int Q_TILES = K_CODE == PLAIN ? (NT + 1) / 2 : NT;  // a plain `mma` holds two tiles of rows
constexpr int OCTETS = KEYS / 32;                             // of keys for each warp
constexpr int FRAGMENTS = D / 64;                             // of 16 dimensions for each warp
constexpr int CHUNKS = VB / 64;                               // of 16 bytes of a value for each warp
constexpr int PAIRS = KEYS / 16;
constexpr int P_UNIT = V_CODE == PLAIN ? 16 : 8;  // bytes of a lane's weights of 16 keys
// Shared memory: rings, queries, weights, maxima, factors of rows, ranges of columns.
constexpr int Q_AT = GROUPS * STAGES * STAGE, P_AT = Q_AT + Q_TILES * STEPS * 512;
constexpr int P_BYTES = NT * PAIRS * 32 * P_UNIT, M_AT = P_AT + GROUPS * P_BYTES, M_BYTES = NT * 8 * 16;
constexpr int R_AT = M_AT + GROUPS * M_BYTES, C_AT = R_AT + NT * 8 * 4;
constexpr int PER_PAGE = 64 / KEYS;
static_assert(C_AT + 256 == SHARED);
constexpr float LOWEST = -1e30f;
constexpr float SHIFT = V_CODE == PLAIN ? 0.0f : 8.0f;  // weights up to 2^8 keep small ones out of subnormals
constexpr float Q_LIMIT = 32512.0f;
constexpr float V_UNIT = V_CODE == FP8 ? 256.0f : V_CODE == NVFP4 ? 128.0f : 1.0f;
constexpr float K_UNIT = K_CODE == FP8 ? 256.0f : K_CODE == NVFP4 ? 128.0f : 1.0f;
constexpr float TURN = D == 256 ? 0.0625f : D == 64 ? 0.125f : 0.08838834764831845f;

template <int BYTES>
DEVICE void copy_async(u32 to, const void* from, bool there) {
  int size = there ? BYTES : 0;
  if constexpr (BYTES == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(size) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(to), "l"(from), "r"(size), "n"(BYTES)
                 : "memory");
}
DEVICE void matrices4(u32 (&r)[4], u32 a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(a) : "memory");
}
DEVICE void matrices4_turned(u32 (&r)[4], u32 a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(a) : "memory");
}
DEVICE void matrices2_turned(u32 (&r)[4], u32 a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
               : "=r"(r[0]), "=r"(r[1]) : "r"(a) : "memory");
}
DEVICE void multiply_int8(int (&d)[4], const uint4& a, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]) : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}
DEVICE void first_int8(int (&d)[4], const uint4& a, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1), "r"(0));
}
DEVICE void multiply_half(float (&d)[4], const uint4& a, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}
DEVICE float exp2_(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEVICE u32 two_halves(float low, float high) {
  u32 d;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}
DEVICE float half_to_float(u16 h) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
  return f;
}
DEVICE u32 times(u32 a, u32 b) {
  u32 d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
DEVICE u32 minus(u32 a, u32 b) {
  u32 d;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
DEVICE u32 smaller(u32 a, u32 b) {
  u32 d;
  asm("min.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

// Where 16-byte chunk `c` of row `r` stands, so that 8 rows' chunks of one column lie in different banks.
template <int ROW>
DEVICE int swizzled(int r, int c) {
  if constexpr (ROW >= 128) return c ^ (r & 7);
  else if constexpr (ROW == 64) return c ^ (r >> 1 & 3);
  else return c ^ (r >> 2 & 1);
}

// Bytes 0 and 2, and bytes 1 and 3, of four int8 as halves, exactly: 1024 + 128 + x has x in its last bits.
DEVICE void int8_to_half(u32 x, u32& even, u32& odd) {
  u32 u = x ^ 0x80808080u;
  even = minus(__byte_perm(u, 0x64646464u, 0x4240), 0x64806480u);
  odd = minus(__byte_perm(u, 0x64646464u, 0x4341), 0x64806480u);
}
// The same of E4M3 codes, times 2^-8.
DEVICE void fp8_to_half(u32 x, u32& even, u32& odd) {
  even = ((x << 8) & 0x80008000u) | ((x << 7) & 0x3f803f80u);
  odd = (x & 0x80008000u) | ((x >> 1) & 0x3f803f80u);
}
// Nibble I of both 16-bit parts of E2M1 codes, times 2^-14; times a scale of below, a number times 2^-7, exactly.
template <int I>
DEVICE u32 nvfp4_to_half(u32 x) {
  u32 sign = I < 3 ? x << (12 - 4 * I) : x;
  u32 rest = 4 * I <= 9 ? x << (9 - 4 * I) : x >> (4 * I - 9);
  return (sign & 0x80008000u) | (rest & 0x0e000e00u);
}
// A pair of E4M3 scales (bits 0..6 and 16..22) as halves, times 2^7.
DEVICE u32 scales_to_half(u32 pair) { return times(pair << 7, 0x78007800u); }

// Copy a tile's codes; `from` is the thread's own chunk of the first keys.
template <int ROW, bool WHOLE>
DEVICE void fetch_codes(u32 to, const u8* from, int present, int thread) {
  constexpr int OF_ROW = ROW / 16, AT_ONCE = 128 / OF_ROW;
  const int first = thread / OF_ROW, chunk = thread % OF_ROW;
#pragma unroll
  for (int i = 0; i < KEYS / AT_ONCE; i++) {
    int key = first + AT_ONCE * i;
    copy_async<16>(to + key * ROW + 16 * swizzled<ROW>(key, chunk), from + i * (AT_ONCE * HEADS * ROW),
                   WHOLE || key < present);
  }
}
template <int CODE>
DEVICE void fetch_scales(u32 to, const u8* plane, u64 vector, int present, int key) {
  constexpr int BYTES = scale_bytes(CODE);
  u64 at = (vector + key * HEADS) * BYTES;
  if constexpr (BYTES == 2) copy_async<4>(to + 4 * key, plane + (at & ~3ull), key < present);
  else copy_async<BYTES>(to + BYTES * key, plane + at, key < present);
}
