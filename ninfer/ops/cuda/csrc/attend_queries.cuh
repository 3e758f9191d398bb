// Queries of `attend_few.cuh` as operands in shared memory.
#pragma once
#include "attend_parts.cuh"

// The prepared queries as operands: see the layouts of `mma` and of the codes in registers. E dimensions of a row.
DEVICE u32 packed_bytes(int a, int b, int c, int d) {
  return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}
template <int E>
DEVICE void put_query(u8* shared, int row, int dim, const float (&x)[E]) {
  const int tile = row >> 3, r = row & 7;
  if constexpr (K_CODE == PLAIN) {
#pragma unroll
    for (int e = 0; e < E; e += 2) {
      int k = (dim + e) & 15;
      u8* at = shared + Q_AT + (((tile >> 1) * STEPS + (dim + e) / 16) * 32 + r * 4 + (k & 7) / 2) * 16 + (k / 8) * 8 +
               (tile & 1) * 4;
      *(u32*)at = __byte_perm(__float_as_uint(x[e]), __float_as_uint(x[e + 1]), 0x7632);
    }
  } else if constexpr (K_CODE == INT8) {
    int high[E], low[E];
#pragma unroll
    for (int e = 0; e < E; e++) {
      int code = __float2int_rn(x[e]);
      high[e] = (code + 128) >> 8;
      low[e] = code - (high[e] << 8);
    }
#pragma unroll
    for (int e = 0; e < E; e += 4) {
      int k = (dim + e) & 31;
      u8* at = shared + Q_AT + ((tile * STEPS + (dim + e) / 32) * 32 + r * 4 + (k & 15) / 4) * 16 + (k / 16) * 8 + (k & 3);
      if constexpr (E >= 4) {
        *(uint2*)at = make_uint2(packed_bytes(high[e], high[e + 1], high[e + 2], high[e + 3]),
                                 packed_bytes(low[e], low[e + 1], low[e + 2], low[e + 3]));
      } else {
        at[0] = (u8)high[0];
        at[1] = (u8)high[1];
        at[4] = (u8)low[0];
        at[5] = (u8)low[1];
      }
    }
  } else {
    u32 high[E], low[E];
#pragma unroll
    for (int e = 0; e < E; e++) {
      high[e] = two_halves(x[e], 0.0f);
      low[e] = two_halves((x[e] - half_to_float((u16)high[e])) * 2048.0f, 0.0f);
    }
    // Which other dimension shares a register, and how many make two steps of a `mma` operand.
    constexpr int APART = K_CODE == FP8 ? 2 : 4, UNIT = K_CODE == FP8 ? 4 : 8;
    if constexpr (E >= UNIT) {
#pragma unroll
      for (int e = 0; e < E; e += UNIT)
#pragma unroll
        for (int i = 0; i < UNIT / 4; i++) {
          const int a = e + 2 * i, b = a + 1, at_dim = dim + e;
          const int step = K_CODE == FP8 ? at_dim / 16 : at_dim / 32 * 2 + i;
          const int lane = K_CODE == FP8 ? (at_dim & 15) / 4 : (at_dim & 31) / 8;
          *(uint4*)(shared + Q_AT + ((tile * STEPS + step) * 32 + r * 4 + lane) * 16) =
              make_uint4(high[a] | high[a + APART] << 16, low[a] | low[a + APART] << 16, high[b] | high[b + APART] << 16,
                         low[b] | low[b + APART] << 16);
        }
    } else {
#pragma unroll
      for (int e = 0; e < E; e++) {
        const int at_dim = dim + e, in_unit = at_dim & (UNIT - 1);
        const int step = K_CODE == FP8 ? at_dim / 16 : at_dim / 32 * 2 + ((in_unit & 3) >> 1);
        const int lane = K_CODE == FP8 ? (at_dim & 15) / 4 : (at_dim & 31) / 8;
        u8* at = shared + Q_AT + ((tile * STEPS + step) * 32 + r * 4 + lane) * 16 + (in_unit & 1) * 8 + in_unit / APART * 2;
        *(u16*)at = (u16)high[e];
        *(u16*)(at + 4) = (u16)low[e];
      }
    }
  }
}

// One row: read, turn, scale to the integers or halves of `put_query`; returns what undoes the scaling.
DEVICE float prepare_row(u8* shared, int row, const u16* q, bool used, int lane) {
  constexpr int E = D / 32;
  float x[E];
  __align__(16) u32 pairs[E / 2] = {};
  if (used) {
    const u16* from = q + E * lane;
    if constexpr (E == 8) *(uint4*)pairs = *(const uint4*)from;
    else if constexpr (E == 4) *(uint2*)pairs = *(const uint2*)from;
    else pairs[0] = *(const u32*)from;
  }
#pragma unroll
  for (int i = 0; i < E; i += 2) {
    x[i] = low_bf16(pairs[i / 2]);
    x[i + 1] = high_bf16(pairs[i / 2]);
  }
  float unit = 1.0f;
  if (K_CODE != PLAIN && used) {
    if constexpr (K_TURNED) {
#pragma unroll
      for (int stride = 1; stride < E; stride *= 2)
#pragma unroll
        for (int i = 0; i < E; i++)
          if (!(i & stride)) {
            float a = x[i], b = x[i + stride];
            x[i] = a + b;
            x[i + stride] = a - b;
          }
#pragma unroll
      for (int stride = 1; stride < 32; stride *= 2)
#pragma unroll
        for (int i = 0; i < E; i++) {
          float other = __shfl_xor_sync(~0u, x[i], stride);
          x[i] = lane & stride ? other - x[i] : x[i] + other;
        }
    }
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < E; i++) most = fmaxf(most, fabsf(x[i]));
#pragma unroll
    for (int stride = 1; stride < 32; stride *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, stride));
    float limit = K_CODE == INT8 ? Q_LIMIT : 1.0f, up = most > 0.0f ? limit / most : 0.0f;
    unit = most / limit * (K_TURNED ? TURN : 1.0f);
#pragma unroll
    for (int i = 0; i < E; i++) x[i] *= up;
  }
  put_query<E>(shared, row, E * lane, x);
  return unit;
}
