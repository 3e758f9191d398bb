// Attention of few columns over pages: one key head, one split of its keys, NT tiles of 8 rows (columns times
// query heads) by a block of GROUPS times four warps.
//
// Each group takes every GROUPS-th tile of KEYS keys, which travel through its ring of STAGES buffers in shared
// memory. Of a tile a warp multiplies a quarter of the keys with all rows, the warps agree on each row's maximum,
// put the weights into shared memory, and each multiplies all of them with its quarter of the dimensions of the
// values. Rows are the N side of that product (`mma` with the values as A), so that 8 rows waste nothing. At the
// end the groups' results are folded.
//
// Queries are kept as two parts in rows 0..7 and 8..15 of one `mma`, 16 bits or more in all: int8 keys are
// multiplied as they are. Scales of int8 and FP8 values are folded into the weights. Weights of plain values are
// two bf16 parts.
//
// Defines: D, HEADS, GROUP (query heads of a key head), K_CODE, V_CODE (0 plain, 1 int8, 2 FP8, 3 NVFP4),
// K_TURNED, V_TURNED, TARGET (most splits), NT, GROUPS, KEYS (32 or 64), STAGES, BLOCKS (of a
// multiprocessor), SHARED (bytes).
#include "attend_merge.cuh"
#include "attend_queries.cuh"

extern "C" __global__ void __launch_bounds__(128 * GROUPS, BLOCKS)
attend_split(const u16* q, int q_stride, const u8* k, const u8* k_scales, const u8* v, const u8* v_scales,
             const int* table, int table_stride, const int* positions, float* sums, float* tops, float factor,
             int splits, int columns, int tile_columns) {
  extern __shared__ __align__(128) u8 shared[];
  const int group = threadIdx.x / 128, thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  const int quad = lane & 3, octet_row = lane >> 2;
  const int head = blockIdx.x % HEADS, block_column = blockIdx.x / HEADS * tile_columns;
  const int split = blockIdx.y, request = blockIdx.z;
  const int used_columns = min(tile_columns, columns - block_column), used_rows = used_columns * GROUP;
  const int first_t = request * columns + block_column;
  const int* row_of_table = table + (long long)request * table_stride;

  // Ahead of the wait: positions, the table, and keys before those of this call, which the kernel ahead may just be
  // writing. All that was complete before that kernel began (see `attend_few.py`).
  const int likely_page = __ldcg(row_of_table + split);  // of short contexts, whose splits are single pages
  int begin = 0, end = 0, fresh = 0x7fffffff;
  if (lane < columns) {
    const int position = __ldcg(positions + request * columns + lane);
    if (position >= 0) fresh = position;
  }
  fresh = __reduce_min_sync(~0u, fresh);
  if (lane < used_columns) {
    int length = max(__ldcg(positions + first_t + lane) + 1, 0);
    int run = ((length + 63) / 64 + TARGET - 1) / TARGET * 64;
    begin = split * run;
    end = min(length, begin + run);
  }
  const bool some = begin < end;
  const int first = __reduce_min_sync(~0u, some ? begin : 0x7fffffff);
  const int last = __reduce_max_sync(~0u, some ? end : 0);
  if (last == 0) {
    wait_for_previous();
    return;
  }

  const u32 base = shared_address(shared) + group * (STAGES * STAGE);
  const u8* ring = shared + group * (STAGES * STAGE);
  const int tile_end = (last + KEYS - 1) / KEYS;
  int tile_first = first / KEYS;
  if (GROUPS == 2) tile_first += (tile_first & 1) ^ group;
  const u8* k_thread = k + (thread / (KB / 16) * HEADS + head) * KB + thread % (KB / 16) * 16;
  const u8* v_thread = v + (thread / (VB / 16) * HEADS + head) * VB + thread % (VB / 16) * 16;
  auto page_of = [&](int tile) {
    int page = tile / PER_PAGE;
    return tile >= tile_end ? 0 : page == split ? likely_page : __ldcg(row_of_table + page);
  };
  auto fetch = [&](int tile, int page, int slot) {
    if (tile < tile_end) {
      const u64 vector = (u64)page * 64 + tile % PER_PAGE * KEYS;
      const u32 to = base + slot * STAGE;
      const int present = last - tile * KEYS;
      const u8 *from_k = k_thread + vector * (HEADS * KB), *from_v = v_thread + vector * (HEADS * VB);
      if (present >= KEYS) {
        fetch_codes<KB, true>(to, from_k, present, thread);
        fetch_codes<VB, true>(to + V_AT, from_v, present, thread);
      } else {
        fetch_codes<KB, false>(to, from_k, present, thread);
        fetch_codes<VB, false>(to + V_AT, from_v, present, thread);
      }
      if constexpr (KS > 0)
        if (thread < KEYS) fetch_scales<K_CODE>(to + KS_AT, k_scales, vector * HEADS + head, present, thread);
      if constexpr (VS > 0)
        if (thread >= 128 - KEYS)
          fetch_scales<V_CODE>(to + VS_AT, v_scales, vector * HEADS + head, present, thread - (128 - KEYS));
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  int ahead[STAGES];
#pragma unroll
  for (int i = 0; i < STAGES; i++) ahead[i] = page_of(tile_first + i * GROUPS);
  bool waited = false;
#pragma unroll
  for (int i = 0; i < STAGES; i++) {
    const int tile = tile_first + i * GROUPS;
    if (!waited && (i == STAGES - 1 || (tile < tile_end && (tile + 1) * KEYS > fresh))) {
      wait_for_previous();
      waited = true;
    }
    if (i < STAGES - 1) fetch(tile, ahead[i], i);
  }
  // Not earlier: the kernel behind reads what was complete before this one began, ahead of its wait.
  allow_next();
  int next_page = ahead[STAGES - 1];

  // Queries, while the first keys are on the way.
  float* factors = (float*)(shared + R_AT);
#pragma unroll 2
  for (int row = threadIdx.x / 32; row < (K_CODE == PLAIN ? Q_TILES * 16 : NT * 8); row += 4 * GROUPS) {
    const u16* from = q + (long long)(first_t + row / GROUP) * q_stride + (head * GROUP + row % GROUP) * D;
    float unit = prepare_row(shared, row, from, row < used_rows, lane);
    if (lane == 0 && row < NT * 8) factors[row] = unit * factor * K_UNIT;
  }
  int2* ranges = (int2*)(shared + C_AT);
  if (threadIdx.x < 32) ranges[lane] = make_int2(begin, end);
  // Tiles between these belong to all columns.
  const int all_from = __reduce_max_sync(~0u, lane < used_columns ? begin : 0);
  const int all_to = __reduce_min_sync(~0u, lane < used_columns ? end : 0x7fffffff);

  float total[NT][FRAGMENTS][4];
  float top[NT], mass[NT];
#pragma unroll
  for (int t = 0; t < NT; t++) {
    top[t] = LOWEST;
    mass[t] = 0.0f;
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
      for (int i = 0; i < 4; i++) total[t][f][i] = 0.0f;
  }
  __syncthreads();
  float row_factor[NT];
#pragma unroll
  for (int t = 0; t < NT; t++) row_factor[t] = factors[8 * t + octet_row];
  const uint4* queries = (const uint4*)(shared + Q_AT) + lane;
  uint4 kept_query[NT == 1 ? STEPS : 1];
  if constexpr (NT == 1) {
#pragma unroll
    for (int i = 0; i < STEPS; i++) kept_query[i] = queries[32 * i];
  }
  auto query = [&](int tile, int step) {
    return NT == 1 ? kept_query[NT == 1 ? step : 0] : queries[32 * (tile * STEPS + step)];
  };
  auto sync_group = [&]() { asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory"); };
  u8* weights_at = shared + P_AT + group * P_BYTES;
  float* tops_of_warps = (float*)(shared + M_AT + group * M_BYTES);

  int slot = 0;
  for (int tile = tile_first; tile < tile_end; tile += GROUPS) {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
    sync_group();
    fetch(tile + (STAGES - 1) * GROUPS, next_page, slot == 0 ? STAGES - 1 : slot - 1);
    next_page = page_of(tile + STAGES * GROUPS);
    const u8* stage = ring + slot * STAGE;
    const u32 stage_address = base + slot * STAGE;

    // Scores of this warp's keys: rows `octet_row` of each tile, keys 2 quad and 2 quad + 1 of each octet.
    float score[NT][OCTETS][2];
    const int own = warp * (8 * OCTETS), matrix = lane >> 3;
    if constexpr (K_CODE == INT8) {
      float scale[OCTETS][2][D / 64];
#pragma unroll
      for (int o = 0; o < OCTETS; o++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const int key = own + 8 * o + 2 * quad + i;
          const u8* at = stage + KS_AT + key * KS;
          u32 words[2];
          if constexpr (D == 256) *(uint2*)words = *(const uint2*)at;
          else if constexpr (D == 128) words[0] = *(const u32*)at;
          else words[0] = *(const u16*)(at + 2 * ((key * HEADS + head) & 1));
#pragma unroll
          for (int g = 0; g < D / 64; g++) scale[o][i][g] = half_to_float((u16)(words[g / 2] >> 16 * (g & 1)));
        }
#pragma unroll
      for (int g = 0; g < D / 64; g++) {
        u32 keys[OCTETS][4];
#pragma unroll
        for (int o = 0; o < OCTETS; o++) {
          const int mine = own + 8 * o + (lane & 7);
          matrices4(keys[o], stage_address + mine * KB + 16 * swizzled<KB>(mine, 4 * g + matrix));
        }
#pragma unroll
        for (int t = 0; t < NT; t++) {
          const uint4 a = query(t, 2 * g), b = query(t, 2 * g + 1);
#pragma unroll
          for (int o = 0; o < OCTETS; o++) {
            int sum[4];
            first_int8(sum, a, keys[o][0], keys[o][1]);
            multiply_int8(sum, b, keys[o][2], keys[o][3]);
            const float x = (float)(sum[0] * 256 + sum[2]), y = (float)(sum[1] * 256 + sum[3]);
            score[t][o][0] = g == 0 ? x * scale[o][0][g] : fmaf(x, scale[o][0][g], score[t][o][0]);
            score[t][o][1] = g == 0 ? y * scale[o][1][g] : fmaf(y, scale[o][1][g], score[t][o][1]);
          }
        }
      }
    } else if constexpr (K_CODE == PLAIN) {
      float sum[Q_TILES][OCTETS][4] = {};
#pragma unroll
      for (int g = 0; g < STEPS / 2; g++) {
        u32 keys[OCTETS][4];
#pragma unroll
        for (int o = 0; o < OCTETS; o++) {
          const int mine = own + 8 * o + (lane & 7);
          matrices4(keys[o], stage_address + mine * KB + 16 * swizzled<KB>(mine, 4 * g + matrix));
        }
#pragma unroll
        for (int t = 0; t < Q_TILES; t++) {
          const uint4 a = query(t, 2 * g), b = query(t, 2 * g + 1);
#pragma unroll
          for (int o = 0; o < OCTETS; o++) {
            mma(sum[t][o], a.x, a.y, a.z, a.w, keys[o][0], keys[o][1]);
            mma(sum[t][o], b.x, b.y, b.z, b.w, keys[o][2], keys[o][3]);
          }
        }
      }
#pragma unroll
      for (int t = 0; t < NT; t++)
#pragma unroll
        for (int o = 0; o < OCTETS; o++)
#pragma unroll
          for (int i = 0; i < 2; i++) score[t][o][i] = sum[t / 2][o][t % 2 * 2 + i];
    } else {
      float sum[NT][OCTETS][4] = {};
#pragma unroll
      for (int g = 0; g < KB / 64; g++) {
        u32 keys[OCTETS][4];
#pragma unroll
        for (int o = 0; o < OCTETS; o++) {
          const int mine = own + 8 * o + (lane & 7);
          matrices4(keys[o], stage_address + mine * KB + 16 * swizzled<KB>(mine, 4 * g + matrix));
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int chunk = 4 * g + i;
          u32 x[OCTETS][4];
#pragma unroll
          for (int o = 0; o < OCTETS; o++) {
            if constexpr (K_CODE == FP8) {
              fp8_to_half(keys[o][i], x[o][0], x[o][1]);
            } else {
              u32 s = stage[KS_AT + (own + 8 * o + octet_row) * KS + 2 * chunk + (quad >> 1)];
              s = scales_to_half(s | s << 16);
              x[o][0] = times(nvfp4_to_half<0>(keys[o][i]), s);
              x[o][1] = times(nvfp4_to_half<1>(keys[o][i]), s);
              x[o][2] = times(nvfp4_to_half<2>(keys[o][i]), s);
              x[o][3] = times(nvfp4_to_half<3>(keys[o][i]), s);
            }
          }
#pragma unroll
          for (int t = 0; t < NT; t++)
#pragma unroll
            for (int half = 0; half < (K_CODE == FP8 ? 1 : 2); half++) {
              const uint4 a = query(t, K_CODE == FP8 ? chunk : 2 * chunk + half);
#pragma unroll
              for (int o = 0; o < OCTETS; o++) multiply_half(sum[t][o], a, x[o][2 * half], x[o][2 * half + 1]);
            }
        }
      }
#pragma unroll
      for (int o = 0; o < OCTETS; o++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          float scale = 1.0f;
          if constexpr (K_CODE == FP8) {
            const int key = own + 8 * o + 2 * quad + i;
            scale = half_to_float(*(const u16*)(stage + KS_AT + 4 * key + 2 * ((key * HEADS + head) & 1)));
          }
#pragma unroll
          for (int t = 0; t < NT; t++) score[t][o][i] = (sum[t][o][i] + sum[t][o][i + 2] * (1.0f / 2048.0f)) * scale;
        }
    }
    const bool whole = tile * KEYS >= all_from && (tile + 1) * KEYS <= all_to;
#pragma unroll
    for (int t = 0; t < NT; t++)
#pragma unroll
      for (int o = 0; o < OCTETS; o++)
#pragma unroll
        for (int i = 0; i < 2; i++) score[t][o][i] *= row_factor[t];
    if (!whole) {
#pragma unroll
      for (int t = 0; t < NT; t++) {
        const int2 range = ranges[min((8 * t + octet_row) / GROUP, 31)];
#pragma unroll
        for (int o = 0; o < OCTETS; o++)
#pragma unroll
          for (int i = 0; i < 2; i++) {
            const int key = tile * KEYS + own + 8 * o + 2 * quad + i;
            if (!(key >= range.x && key < range.y)) score[t][o][i] = -__int_as_float(0x7f800000);
          }
      }
    }
#pragma unroll
    for (int t = 0; t < NT; t++) {
      float most = fmaxf(score[t][0][0], score[t][0][1]);
      if constexpr (OCTETS == 2) most = fmaxf(most, fmaxf(score[t][1][0], score[t][1][1]));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
      if (quad == 0) tops_of_warps[(8 * t + octet_row) * 4 + warp] = most;
    }
    sync_group();
    // Weights, relative to the maximum of all keys so far.
    float shrink[NT];
    bool shrinks = false;
#pragma unroll
    for (int t = 0; t < NT; t++) {
      const float4 of_warps = *(const float4*)(tops_of_warps + (8 * t + octet_row) * 4);
      const float now = fmaxf(fmaxf(fmaxf(of_warps.x, of_warps.y), fmaxf(of_warps.z, of_warps.w)), top[t]);
      shrink[t] = exp2_(top[t] - now);
      shrinks |= now != top[t];
      top[t] = now;
      float more = 0.0f;
      u32 weights[OCTETS], rest[OCTETS];
#pragma unroll
      for (int o = 0; o < OCTETS; o++) {
        const float a = exp2_(score[t][o][0] - (now - SHIFT)), b = exp2_(score[t][o][1] - (now - SHIFT));
        more += a + b;
        if constexpr (V_CODE == PLAIN) {
          weights[o] = pack_bf16x2(a, b);
          rest[o] = pack_bf16x2(a - low_bf16(weights[o]), b - high_bf16(weights[o]));
        } else {
          weights[o] = two_halves(a, b);
        }
      }
      mass[t] = fmaf(mass[t], shrink[t], more);
      u8* at = weights_at + (t * PAIRS * 32 + lane) * P_UNIT;
      if constexpr (OCTETS == 2) {
        at += warp * (32 * P_UNIT);
        if constexpr (V_CODE == PLAIN) *(uint4*)at = make_uint4(weights[0], weights[1], rest[0], rest[1]);
        else *(uint2*)at = make_uint2(weights[0], weights[1]);
      } else {
        at += warp / 2 * (32 * P_UNIT) + warp % 2 * 4;
        *(u32*)at = weights[0];
        if constexpr (V_CODE == PLAIN) *(u32*)(at + 8) = rest[0];
      }
    }
    sync_group();
    if (__any_sync(~0u, shrinks)) {
#pragma unroll
      for (int t = 0; t < NT; t++) {
        const float a = __shfl_sync(~0u, shrink[t], 8 * quad), b = __shfl_sync(~0u, shrink[t], 8 * quad + 4);
#pragma unroll
        for (int f = 0; f < FRAGMENTS; f++) {
          total[t][f][0] *= a;
          total[t][f][1] *= b;
          total[t][f][2] *= a;
          total[t][f][3] *= b;
        }
      }
    }
    // Values: this warp's dimensions, all keys.
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
      uint4 weights[NT];
#pragma unroll
      for (int t = 0; t < NT; t++) {
        const u8* at = weights_at + ((t * PAIRS + j) * 32 + lane) * P_UNIT;
        if constexpr (V_CODE == PLAIN) {
          weights[t] = *(const uint4*)at;
        } else {
          const uint2 two = *(const uint2*)at;
          weights[t].x = two.x;
          weights[t].y = two.y;
        }
      }
      const int pair = 16 * j + 2 * quad;
      if constexpr (V_CODE == INT8 || V_CODE == FP8) {
        u32 scale[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
          u32 parts[2];
#pragma unroll
          for (int i = 0; i < 2; i++) {
            const int key = pair + 8 * h + i;
            const u8* at = stage + VS_AT + key * VS;
            if constexpr (scale_bytes(V_CODE) == 2) at += 2 * ((key * HEADS + head) & 1);
            else at += 2 * (warp * (D / 4) / 64);
            parts[i] = *(const u16*)at;
          }
          scale[h] = smaller(__byte_perm(parts[0], parts[1], 0x5410), 0x5bff5bffu);  // below 256: no infinity
        }
#pragma unroll
        for (int t = 0; t < NT; t++) {
          weights[t].x = times(weights[t].x, scale[0]);
          weights[t].y = times(weights[t].y, scale[1]);
        }
      }
      // Lanes address 8 keys of a matrix: bit 3 and bit 4 of the lane choose the matrix.
      if constexpr (V_CODE == PLAIN) {
        const int key = 16 * j + (lane >> 4) * 8 + (lane & 7);
#pragma unroll
        for (int f = 0; f < FRAGMENTS; f++) {
          u32 x[4];
          matrices4_turned(x, stage_address + V_AT + key * VB +
                                  16 * swizzled<VB>(key, warp * CHUNKS + 2 * f + (lane >> 3 & 1)));
          const uint4 a = make_uint4(x[0], x[1], x[2], x[3]);
#pragma unroll
          for (int t = 0; t < NT; t++) {
            mma(total[t][f], a.x, a.y, a.z, a.w, weights[t].x, weights[t].y);
            mma(total[t][f], a.x, a.y, a.z, a.w, weights[t].z, weights[t].w);
          }
        }
      } else {
        const int key = 16 * j + (lane >> 3 & 1) * 8 + (lane & 7);
#pragma unroll
        for (int c = 0; c < CHUNKS; c += 2) {
          u32 x[4];
          if constexpr (CHUNKS == 1)
            matrices2_turned(x, stage_address + V_AT + key * VB + 16 * swizzled<VB>(key, warp));
          else
            matrices4_turned(x, stage_address + V_AT + key * VB +
                                    16 * swizzled<VB>(key, warp * CHUNKS + c + (lane >> 4)));
#pragma unroll
          for (int e = 0; e < (CHUNKS == 1 ? 1 : 2); e++) {
            if constexpr (V_CODE == NVFP4) {
              u32 y[2][4];
#pragma unroll
              for (int h = 0; h < 2; h++) {
                const u8* at = stage + VS_AT + (pair + 8 * h) * VS + (warp * CHUNKS + c + e) * 2 + (lane >> 4);
                const u32 scale = scales_to_half((u32)at[0] | (u32)at[VS] << 16);
                y[h][0] = times(nvfp4_to_half<0>(x[2 * e + h]), scale);
                y[h][1] = times(nvfp4_to_half<1>(x[2 * e + h]), scale);
                y[h][2] = times(nvfp4_to_half<2>(x[2 * e + h]), scale);
                y[h][3] = times(nvfp4_to_half<3>(x[2 * e + h]), scale);
              }
              const uint4 a = make_uint4(y[0][0], y[0][1], y[1][0], y[1][1]);
              const uint4 b = make_uint4(y[0][2], y[0][3], y[1][2], y[1][3]);
#pragma unroll
              for (int t = 0; t < NT; t++) {
                multiply_half(total[t][2 * (c + e)], a, weights[t].x, weights[t].y);
                multiply_half(total[t][2 * (c + e) + 1], b, weights[t].x, weights[t].y);
              }
            } else {
              u32 y[4];
              if constexpr (V_CODE == INT8) {
                int8_to_half(x[2 * e], y[0], y[1]);
                int8_to_half(x[2 * e + 1], y[2], y[3]);
              } else {
                fp8_to_half(x[2 * e], y[0], y[1]);
                fp8_to_half(x[2 * e + 1], y[2], y[3]);
              }
#pragma unroll
              for (int t = 0; t < NT; t++)
                multiply_half(total[t][c + e], make_uint4(y[0], y[1], y[2], y[3]), weights[t].x, weights[t].y);
            }
          }
        }
      }
    }
    slot = slot == STAGES - 1 ? 0 : slot + 1;
  }
  asm volatile("cp.async.wait_group 0;" ::: "memory");

  // The mass of a row: quads, then warps in order.
#pragma unroll
  for (int t = 0; t < NT; t++) {
    mass[t] += __shfl_xor_sync(~0u, mass[t], 1);
    mass[t] += __shfl_xor_sync(~0u, mass[t], 2);
  }
  sync_group();
#pragma unroll
  for (int t = 0; t < NT; t++)
    if (quad == 0) tops_of_warps[(8 * t + octet_row) * 4 + warp] = mass[t];
  sync_group();
#pragma unroll
  for (int t = 0; t < NT; t++) {
    const float4 of_warps = *(const float4*)(tops_of_warps + (8 * t + octet_row) * 4);
    mass[t] = of_warps.x + of_warps.y + of_warps.z + of_warps.w;
  }
  if constexpr (GROUPS == 2) {
    // The second group hands over through the rings, unless one of them had no tile at all.
    const int tiles = tile_end - first / KEYS;
    if (tiles == 1) {
      if (tile_first >= tile_end) return;
    } else {
      __syncthreads();
      float4* handed = (float4*)shared + thread;
      float2* ends = (float2*)(shared + NT * FRAGMENTS * 2048) + thread;
      if (group == 1) {
#pragma unroll
        for (int t = 0; t < NT; t++) {
          ends[128 * t] = make_float2(top[t], mass[t]);
#pragma unroll
          for (int f = 0; f < FRAGMENTS; f++)
            handed[128 * (t * FRAGMENTS + f)] = make_float4(total[t][f][0], total[t][f][1], total[t][f][2], total[t][f][3]);
        }
      }
      __syncthreads();
      if (group == 1) return;
#pragma unroll
      for (int t = 0; t < NT; t++) {
        const float2 other = ends[128 * t];
        const float now = fmaxf(top[t], other.x), mine = exp2_(top[t] - now), theirs = exp2_(other.x - now);
        top[t] = now;
        mass[t] = mass[t] * mine + other.y * theirs;
        const float a = __shfl_sync(~0u, mine, 8 * quad), b = __shfl_sync(~0u, mine, 8 * quad + 4);
        const float c = __shfl_sync(~0u, theirs, 8 * quad), d = __shfl_sync(~0u, theirs, 8 * quad + 4);
#pragma unroll
        for (int f = 0; f < FRAGMENTS; f++) {
          const float4 x = handed[128 * (t * FRAGMENTS + f)];
          total[t][f][0] = total[t][f][0] * a + x.x * c;
          total[t][f][1] = total[t][f][1] * b + x.y * d;
          total[t][f][2] = total[t][f][2] * a + x.z * c;
          total[t][f][3] = total[t][f][3] * b + x.w * d;
        }
      }
    }
  }
  auto place_of = [&](int row) {
    return ((long long)(first_t + row / GROUP) * (HEADS * GROUP) + head * GROUP + row % GROUP) * splits + split;
  };
  auto present = [&](int row) {
    if (row >= used_rows) return false;
    const int2 range = ranges[row / GROUP];
    return range.x < range.y;
  };
#pragma unroll
  for (int t = 0; t < NT; t++) {
    int row = 8 * t + octet_row;
    if (warp == t % 4 && quad == 0 && present(row)) *(float2*)(tops + 2 * place_of(row)) = make_float2(top[t], mass[t]);
#pragma unroll
    for (int side = 0; side < 2; side++) {
      row = 8 * t + 2 * quad + side;
      if (!present(row)) continue;
      float* to = sums + place_of(row) * D + warp * (D / 4);
#pragma unroll
      for (int f = 0; f < FRAGMENTS; f++) {
        const float a = total[t][f][side] * V_UNIT, b = total[t][f][side + 2] * V_UNIT;
        if constexpr (V_CODE == PLAIN) {
          to[16 * f + octet_row] = a;
          to[16 * f + 8 + octet_row] = b;
        } else if constexpr (V_CODE == NVFP4) {
          *(float2*)(to + f / 2 * 32 + 4 * octet_row + 2 * (f & 1)) = make_float2(a, b);
        } else {
          *(float2*)(to + 16 * f + 2 * octet_row) = make_float2(a, b);
        }
      }
    }
  }
}

// Reached on an H200, 2026-11-30, D 256, 24 and 4 heads, B 1, split and merge and gate, us at 85,000 keys and share of
// 4,470 GB/s, T 1 | T 4: bf16 85.4 (91 %) | 92.8 (84 %), int8 49.4 (81 %) | 56.9 (71 %), fp8 50.2 (78 %) | 65.3 (60 %),
// nvfp4 49.3 (44 %) | 67.3 (33 %), k8v4 47.7 (64 %) | 66.6 (46 %). int8 at 128 keys 4.8 | 8.0, at 1,000 keys 6.1, at
// 8,192 keys 11.8 | 16.3. `python -m bench.ops.attention`.
