// Attention of few columns over pages: one key head, one split of its keys, NT tiles of 8 rows (columns times
// query heads) by a block of four warps.
//
// Tiles of KEYS keys travel through a ring of STAGES buffers in shared memory. Of each tile a warp multiplies
// a quarter of the keys with all rows, the warps agree on each row's maximum, put the weights into shared
// memory, and each multiplies all of them with its quarter of the dimensions of the values. Rows are the N
// side of that product (`mma` with the values as A), so that 8 rows waste nothing.
//
// Queries are kept as two parts in rows 0..7 and 8..15 of one `mma`, 16 bits or more in all: int8 keys are
// multiplied as they are. Scales of int8 and FP8 values are folded into the weights.
//
// Defines: D, K_CODE, V_CODE (0 plain, 1 int8, 2 FP8, 3 NVFP4), K_TURNED, V_TURNED, NT, KEYS (32 or 64),
// STAGES, BLOCKS (of a multiprocessor). Here is no header: NVRTC needs none.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef unsigned long long u64;

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
constexpr int Q_AT = STAGES * STAGE, P_AT = Q_AT + Q_TILES * STEPS * 512, M_AT = P_AT + NT * PAIRS * 256;
constexpr int R_AT = M_AT + NT * 8 * 16, C_AT = R_AT + NT * 8 * 4;  // row factors, columns; in all + 256
constexpr float LOWEST = -1e30f;
constexpr float SHIFT = V_CODE == PLAIN ? 0.0f : 8.0f;  // weights up to 2^8 keep small ones out of subnormals
constexpr float Q_LIMIT = 32512.0f;
constexpr float V_UNIT = V_CODE == FP8 ? 256.0f : V_CODE == NVFP4 ? 128.0f : 1.0f;
constexpr float K_UNIT = K_CODE == FP8 ? 256.0f : K_CODE == NVFP4 ? 128.0f : 1.0f;

__device__ __forceinline__ u32 shared_address(const void* p) {
  u32 a;
  asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }" : "=r"(a) : "l"(p));
  return a;
}
template <int BYTES>
__device__ __forceinline__ void copy_async(u32 to, const void* from, bool there) {
  int size = there ? BYTES : 0;
  if constexpr (BYTES == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(size) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(to), "l"(from), "r"(size), "n"(BYTES)
                 : "memory");
}
__device__ __forceinline__ void matrices4(u32 (&r)[4], u32 a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(a) : "memory");
}
__device__ __forceinline__ void matrices4_turned(u32 (&r)[4], u32 a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(a) : "memory");
}
__device__ __forceinline__ void matrices2_turned(u32 (&r)[4], u32 a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
               : "=r"(r[0]), "=r"(r[1]) : "r"(a) : "memory");
}
__device__ __forceinline__ void multiply_int8(int (&d)[4], const uint4& a, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]) : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void multiply_half(float (&d)[4], const uint4& a, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void multiply_bf16(float (&d)[4], const uint4& a, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}
__device__ __forceinline__ float exp2_(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ u32 two_halves(float low, float high) {
  u32 d;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}
__device__ __forceinline__ u32 two_bf16(float low, float high) {
  u32 d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}
__device__ __forceinline__ float half_to_float(u16 h) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
  return f;
}
__device__ __forceinline__ u32 times(u32 a, u32 b) {
  u32 d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ __forceinline__ u32 minus(u32 a, u32 b) {
  u32 d;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ __forceinline__ u32 smaller(u32 a, u32 b) {
  u32 d;
  asm("min.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ __forceinline__ float bits_to_float(u32 b) { return __uint_as_float(b); }
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Where 16-byte chunk `c` of row `r` stands, so that 8 rows' chunks of one column lie in different banks.
template <int ROW>
__device__ __forceinline__ int swizzled(int r, int c) {
  if constexpr (ROW >= 128) return c ^ (r & 7);
  else if constexpr (ROW == 64) return c ^ (r >> 1 & 3);
  else return c ^ (r >> 2 & 1);
}

// Bytes 0 and 2, and bytes 1 and 3, of four int8 as halves, exactly: 1024 + 128 + x has x in its last bits.
__device__ __forceinline__ void int8_to_half(u32 x, u32& even, u32& odd) {
  u32 u = x ^ 0x80808080u;
  even = minus(__byte_perm(u, 0x64646464u, 0x4240), 0x64806480u);
  odd = minus(__byte_perm(u, 0x64646464u, 0x4341), 0x64806480u);
}
// The same of E4M3 codes, times 2^-8.
__device__ __forceinline__ void fp8_to_half(u32 x, u32& even, u32& odd) {
  even = ((x << 8) & 0x80008000u) | ((x << 7) & 0x3f803f80u);
  odd = (x & 0x80008000u) | ((x >> 1) & 0x3f803f80u);
}
// Nibble I of both 16-bit parts of E2M1 codes, times 2^-14; times a scale of below, a number times 2^-7, exactly.
template <int I>
__device__ __forceinline__ u32 nvfp4_to_half(u32 x) {
  u32 sign = I < 3 ? x << (12 - 4 * I) : x;
  u32 rest = 4 * I <= 9 ? x << (9 - 4 * I) : x >> (4 * I - 9);
  return (sign & 0x80008000u) | (rest & 0x0e000e00u);
}
// A pair of E4M3 scales (bits 0..6 and 16..22) as halves, times 2^7.
__device__ __forceinline__ u32 scales_to_half(u32 pair) { return times(pair << 7, 0x78007800u); }

template <int ROW>
__device__ __forceinline__ void fetch_codes(u32 to, const u8* from, u64 vector_stride, int begin, int limit, int thread) {
  constexpr int CHUNKS_OF_ROW = ROW / 16;
#pragma unroll
  for (int i = 0; i < KEYS * CHUNKS_OF_ROW / 128; i++) {
    int index = thread + 128 * i, key = index / CHUNKS_OF_ROW, chunk = index % CHUNKS_OF_ROW;
    copy_async<16>(to + key * ROW + 16 * swizzled<ROW>(key, chunk), from + key * vector_stride + 16 * chunk,
                   begin + key < limit);
  }
}
template <int CODE>
__device__ __forceinline__ void fetch_scales(u32 to, const u8* plane, u64 vector, int heads, int begin, int limit, int key) {
  constexpr int BYTES = scale_bytes(CODE);
  u64 at = (vector + (u64)key * heads) * BYTES;
  if constexpr (BYTES == 2) copy_async<4>(to + 4 * key, plane + (at & ~3ull), begin + key < limit);
  else copy_async<BYTES>(to + BYTES * key, plane + at, begin + key < limit);
}

// The prepared queries as operands: see the layouts of `mma` and of the codes in registers.
__device__ __forceinline__ void put_query(u8* shared, int row, int dim, float x) {
  int tile = row >> 3, r = row & 7;
  if constexpr (K_CODE == INT8) {
    int code = __float2int_rn(x), high = (code + 128) >> 8, low = code - (high << 8), k = dim & 31;
    u8* at = shared + Q_AT + ((tile * STEPS + dim / 32) * 32 + r * 4 + (k & 15) / 4) * 16 + (k / 16) * 8 + (k & 3);
    at[0] = (u8)high;
    at[4] = (u8)low;
  } else if constexpr (K_CODE == PLAIN) {
    int k = dim & 15;
    u8* at = shared + Q_AT + (((tile >> 1) * STEPS + dim / 16) * 32 + r * 4 + (k & 7) / 2) * 16 + (k / 8) * 8 +
             (tile & 1) * 4 + (k & 1) * 2;
    *(u16*)at = (u16)(__float_as_uint(x) >> 16);
  } else {
    int step, lane, word, part;
    if constexpr (K_CODE == FP8) {
      step = dim / 16; lane = (dim & 15) / 4; word = dim & 1; part = (dim & 3) >> 1;
    } else {
      int e = dim & 7;
      step = dim / 32 * 2 + ((e & 3) >> 1); lane = (dim & 31) / 8; word = e & 1; part = e >> 2;
    }
    u32 high = two_halves(x, 0.0f);
    u32 low = two_halves((x - half_to_float((u16)high)) * 2048.0f, 0.0f);
    u8* at = shared + Q_AT + ((tile * STEPS + step) * 32 + r * 4 + lane) * 16 + word * 8 + part * 2;
    *(u16*)at = (u16)high;
    *(u16*)(at + 4) = (u16)low;
  }
}

// One row: read, turn, scale to the integers or halves of `put_query`; returns what undoes the scaling.
__device__ __forceinline__ float prepare_row(u8* shared, int row, const u16* q, bool used, int lane) {
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
    x[i] = bits_to_float(pairs[i / 2] << 16);
    x[i + 1] = bits_to_float(pairs[i / 2] & 0xffff0000u);
  }
  float unit = 1.0f;
  if constexpr (K_CODE != PLAIN) {
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
    unit = most / limit * (K_TURNED ? (D == 256 ? 0.0625f : D == 64 ? 0.125f : 0.08838834764831845f) : 1.0f);
#pragma unroll
    for (int i = 0; i < E; i++) x[i] *= up;
  }
#pragma unroll
  for (int i = 0; i < E; i++) put_query(shared, row, E * lane + i, x[i]);
  return unit;
}

extern "C" __global__ void __launch_bounds__(128, BLOCKS)
attend_split(const u16* q, int q_stride, const u8* k, const u8* k_scales, const u8* v, const u8* v_scales,
             const int* table, int table_stride, const int* positions, float* sums, float* tops, float factor,
             int target, int splits, int columns, int tile_columns, int heads, int group) {
  extern __shared__ __align__(128) u8 shared[];
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, quad = lane & 3, octet_row = lane >> 2;
  const int head = blockIdx.x % heads, block_column = blockIdx.x / heads * tile_columns;
  const int split = blockIdx.y, request = blockIdx.z;
  const int used_columns = min(tile_columns, columns - block_column), used_rows = used_columns * group;
  const int first_t = request * columns + block_column;
  wait_for_previous();
  let_next_start();

  int begin = 0, end = 0;
  if (lane < used_columns) {
    int length = max(positions[first_t + lane] + 1, 0);
    int run = ((length + 63) / 64 + target - 1) / target * 64;
    begin = split * run;
    end = min(length, begin + run);
  }
  bool some = begin < end;
  const int first = (int)__reduce_min_sync(~0u, some ? begin : 0x7fffffff);
  const int last = (int)__reduce_max_sync(~0u, some ? end : 0);
  if (last == 0) return;
  // Tiles between these belong to all columns.
  const int all_from = (int)__reduce_max_sync(~0u, lane < used_columns ? begin : 0);
  const int all_to = (int)__reduce_min_sync(~0u, lane < used_columns ? end : 0x7fffffff);
  int2* ranges = (int2*)(shared + C_AT);
  if (warp == 0) ranges[lane] = make_int2(begin, end);

  const u32 base = shared_address(shared);
  const int* row_of_table = table + (long long)request * table_stride;
  const int tile_first = first / KEYS, tile_end = (last + KEYS - 1) / KEYS;
  constexpr int PER_PAGE = 64 / KEYS;
  auto page_of = [&](int tile) { return tile < tile_end ? row_of_table[tile / PER_PAGE] : 0; };
  auto fetch = [&](int tile, int page, int slot) {
    if (tile < tile_end) {
      u64 vector = ((u64)page * 64 + tile % PER_PAGE * KEYS) * heads + head;
      u32 to = base + slot * STAGE;
      int at = tile * KEYS;
      fetch_codes<KB>(to, k + vector * KB, (u64)heads * KB, at, last, thread);
      if constexpr (KS > 0)
        if (thread < KEYS) fetch_scales<K_CODE>(to + KS_AT, k_scales, vector, heads, at, last, thread);
      fetch_codes<VB>(to + V_AT, v + vector * VB, (u64)heads * VB, at, last, thread);
      if constexpr (VS > 0)
        if (thread >= 128 - KEYS)
          fetch_scales<V_CODE>(to + VS_AT, v_scales, vector, heads, at, last, thread - (128 - KEYS));
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  int ahead[STAGES];
#pragma unroll
  for (int i = 0; i < STAGES; i++) ahead[i] = page_of(tile_first + i);
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) fetch(tile_first + i, ahead[i], i);
  int next_page = ahead[STAGES - 1];

  // Queries, while the first keys are on the way.
  float* factors = (float*)(shared + R_AT);
  for (int row = warp; row < (K_CODE == PLAIN ? Q_TILES * 16 : NT * 8); row += 4) {
    bool used = row < used_rows;
    const u16* from = q + (long long)(first_t + row / group) * q_stride + (head * group + row % group) * D;
    float unit = prepare_row(shared, row, from, used, lane);
    if (lane == 0 && row < NT * 8) factors[row] = unit * factor * K_UNIT;
  }

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
  uint4 kept_query[NT == 1 ? STEPS : 1];
  const uint4* queries = (const uint4*)(shared + Q_AT) + lane;
  if constexpr (NT == 1) {
#pragma unroll
    for (int i = 0; i < STEPS; i++) kept_query[i] = queries[32 * i];
  }
  auto query = [&](int tile, int step) { return NT == 1 ? kept_query[NT == 1 ? step : 0] : queries[32 * (tile * STEPS + step)]; };

  int slot = 0;
  for (int tile = tile_first; tile < tile_end; tile++) {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
    __syncthreads();
    {
      int free_slot = slot == 0 ? STAGES - 1 : slot - 1;
      fetch(tile + STAGES - 1, next_page, free_slot);
      next_page = page_of(tile + STAGES);
    }
    const u8* stage = shared + slot * STAGE;
    const u32 stage_address = base + slot * STAGE;

    // Scores of this warp's keys: rows `octet_row` of each tile, keys 2 quad and 2 quad + 1 of each octet.
    float score[NT][OCTETS][2];
#pragma unroll
    for (int o = 0; o < OCTETS; o++) {
      const int octet = (warp * OCTETS + o) * 8, mine = octet + (lane & 7), pair = octet + 2 * quad;
      const u32 row_address = stage_address + mine * KB;
      const int matrix = lane >> 3;
      if constexpr (K_CODE == INT8) {
        float scale[2][D / 64];
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
          for (int g = 0; g < D / 64; g++) {
            const u8* at = stage + KS_AT + (pair + i) * KS + 2 * g;
            if constexpr (KS == 4 && D == 64) at += 2 * (((tile * KEYS + pair + i) * heads + head) & 1);
            scale[i][g] = half_to_float(*(const u16*)at);
          }
#pragma unroll
        for (int t = 0; t < NT; t++) score[t][o][0] = score[t][o][1] = 0.0f;
#pragma unroll
        for (int g = 0; g < D / 64; g++) {
          u32 keys[4];
          matrices4(keys, row_address + 16 * swizzled<KB>(mine, 4 * g + matrix));
#pragma unroll
          for (int t = 0; t < NT; t++) {
            int sum[4] = {0, 0, 0, 0};
            multiply_int8(sum, query(t, 2 * g), keys[0], keys[1]);
            multiply_int8(sum, query(t, 2 * g + 1), keys[2], keys[3]);
            score[t][o][0] += (float)(sum[0] * 256 + sum[2]) * scale[0][g];
            score[t][o][1] += (float)(sum[1] * 256 + sum[3]) * scale[1][g];
          }
        }
      } else if constexpr (K_CODE == PLAIN) {
        float sum[Q_TILES][4];
#pragma unroll
        for (int t = 0; t < Q_TILES; t++)
#pragma unroll
          for (int i = 0; i < 4; i++) sum[t][i] = 0.0f;
#pragma unroll
        for (int g = 0; g < STEPS / 2; g++) {
          u32 keys[4];
          matrices4(keys, row_address + 16 * swizzled<KB>(mine, 4 * g + matrix));
#pragma unroll
          for (int t = 0; t < Q_TILES; t++) {
            multiply_bf16(sum[t], query(t, 2 * g), keys[0], keys[1]);
            multiply_bf16(sum[t], query(t, 2 * g + 1), keys[2], keys[3]);
          }
        }
#pragma unroll
        for (int t = 0; t < NT; t++) {
          score[t][o][0] = sum[t / 2][t % 2 * 2];
          score[t][o][1] = sum[t / 2][t % 2 * 2 + 1];
        }
      } else {
        float sum[NT][4];
#pragma unroll
        for (int t = 0; t < NT; t++)
#pragma unroll
          for (int i = 0; i < 4; i++) sum[t][i] = 0.0f;
        constexpr int LOADS = KB / 64;
#pragma unroll
        for (int g = 0; g < LOADS; g++) {
          u32 keys[4];
          matrices4(keys, row_address + 16 * swizzled<KB>(mine, 4 * g + matrix));
#pragma unroll
          for (int i = 0; i < 4; i++) {
            const int chunk = 4 * g + i;
            if constexpr (K_CODE == FP8) {
              u32 even, odd;
              fp8_to_half(keys[i], even, odd);
#pragma unroll
              for (int t = 0; t < NT; t++) multiply_half(sum[t], query(t, chunk), even, odd);
            } else {
              u32 s = stage[KS_AT + (octet + octet_row) * KS + 2 * chunk + (quad >> 1)];
              s = scales_to_half(s | s << 16);
              u32 a = times(nvfp4_to_half<0>(keys[i]), s), b = times(nvfp4_to_half<1>(keys[i]), s);
              u32 c = times(nvfp4_to_half<2>(keys[i]), s), d = times(nvfp4_to_half<3>(keys[i]), s);
#pragma unroll
              for (int t = 0; t < NT; t++) {
                multiply_half(sum[t], query(t, 2 * chunk), a, b);
                multiply_half(sum[t], query(t, 2 * chunk + 1), c, d);
              }
            }
          }
        }
        float scale[2] = {1.0f, 1.0f};
        if constexpr (K_CODE == FP8) {
#pragma unroll
          for (int i = 0; i < 2; i++) {
            int odd = ((tile * KEYS + pair + i) * heads + head) & 1;
            scale[i] = half_to_float(*(const u16*)(stage + KS_AT + 4 * (pair + i) + 2 * odd));
          }
        }
#pragma unroll
        for (int t = 0; t < NT; t++)
#pragma unroll
          for (int i = 0; i < 2; i++) score[t][o][i] = (sum[t][i] + sum[t][i + 2] * (1.0f / 2048.0f)) * scale[i];
      }
    }
    const bool whole = tile * KEYS >= all_from && (tile + 1) * KEYS <= all_to;
    float* tops_of_warps = (float*)(shared + M_AT);
#pragma unroll
    for (int t = 0; t < NT; t++) {
      int2 range = make_int2(0, 0);
      if (!whole) range = ranges[min((8 * t + octet_row) / group, 31)];
      float most = LOWEST;
#pragma unroll
      for (int o = 0; o < OCTETS; o++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          int key = tile * KEYS + (warp * OCTETS + o) * 8 + 2 * quad + i;
          float x = score[t][o][i] * row_factor[t];
          if (!whole && !(key >= range.x && key < range.y)) x = -__int_as_float(0x7f800000);
          score[t][o][i] = x;
          most = fmaxf(most, x);
        }
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
      if (quad == 0) tops_of_warps[(8 * t + octet_row) * 4 + warp] = most;
    }
    __syncthreads();
    // Weights, relative to the maximum of all keys so far.
    float shrink[NT];
    bool shrinks = false;
#pragma unroll
    for (int t = 0; t < NT; t++) {
      float4 of_warps = *(const float4*)(tops_of_warps + (8 * t + octet_row) * 4);
      float now = fmaxf(fmaxf(fmaxf(of_warps.x, of_warps.y), fmaxf(of_warps.z, of_warps.w)), top[t]);
      shrink[t] = exp2_(top[t] - now);
      shrinks |= now != top[t];
      top[t] = now;
      float more = 0.0f;
      u32 weights[OCTETS];
#pragma unroll
      for (int o = 0; o < OCTETS; o++) {
        float a = exp2_(score[t][o][0] - (now - SHIFT)), b = exp2_(score[t][o][1] - (now - SHIFT));
        if constexpr (V_CODE == PLAIN) {
          weights[o] = two_bf16(a, b);
          a = bits_to_float(weights[o] << 16);
          b = bits_to_float(weights[o] & 0xffff0000u);
        } else {
          weights[o] = two_halves(a, b);
        }
        more += a + b;
      }
      mass[t] = mass[t] * shrink[t] + more;
      u8* at = shared + P_AT + (t * PAIRS * 32 + lane) * 8;
      if constexpr (OCTETS == 2) *(uint2*)(at + warp * 256) = make_uint2(weights[0], weights[1]);
      else *(u32*)(at + warp / 2 * 256 + warp % 2 * 4) = weights[0];
    }
    __syncthreads();
    if (__any_sync(~0u, shrinks)) {
#pragma unroll
      for (int t = 0; t < NT; t++) {
        float a = __shfl_sync(~0u, shrink[t], 8 * quad), b = __shfl_sync(~0u, shrink[t], 8 * quad + 4);
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
      uint2 weights[NT];
#pragma unroll
      for (int t = 0; t < NT; t++) weights[t] = *(const uint2*)(shared + P_AT + ((t * PAIRS + j) * 32 + lane) * 8);
      const int pair = 16 * j + 2 * quad;
      if constexpr (V_CODE == INT8 || V_CODE == FP8) {
        u32 scale[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
          u32 parts[2];
#pragma unroll
          for (int i = 0; i < 2; i++) {
            int key = pair + 8 * h + i;
            const u8* at = stage + VS_AT + key * VS;
            if constexpr (scale_bytes(V_CODE) == 2) at += 2 * (((tile * KEYS + key) * heads + head) & 1);
            else at += 2 * (warp * (D / 4) / 64);
            parts[i] = *(const u16*)at;
          }
          scale[h] = parts[0] | parts[1] << 16;
        }
#pragma unroll
        for (int t = 0; t < NT; t++) {
          weights[t].x = smaller(times(weights[t].x, scale[0]), 0x7bff7bffu);
          weights[t].y = smaller(times(weights[t].y, scale[1]), 0x7bff7bffu);
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
#pragma unroll
          for (int t = 0; t < NT; t++)
            multiply_bf16(total[t][f], make_uint4(x[0], x[1], x[2], x[3]), weights[t].x, weights[t].y);
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
              u32 scale[2];
              const int of = ((warp * CHUNKS + c + e) * 2 + (lane >> 4));
#pragma unroll
              for (int h = 0; h < 2; h++) {
                const u8* at = stage + VS_AT + (pair + 8 * h) * VS + of;
                scale[h] = scales_to_half((u32)at[0] | (u32)at[VS] << 16);
              }
              u32 y[2][4];
#pragma unroll
              for (int h = 0; h < 2; h++) {
                y[h][0] = times(nvfp4_to_half<0>(x[2 * e + h]), scale[h]);
                y[h][1] = times(nvfp4_to_half<1>(x[2 * e + h]), scale[h]);
                y[h][2] = times(nvfp4_to_half<2>(x[2 * e + h]), scale[h]);
                y[h][3] = times(nvfp4_to_half<3>(x[2 * e + h]), scale[h]);
              }
#pragma unroll
              for (int t = 0; t < NT; t++) {
                multiply_half(total[t][2 * (c + e)], make_uint4(y[0][0], y[0][1], y[1][0], y[1][1]), weights[t].x, weights[t].y);
                multiply_half(total[t][2 * (c + e) + 1], make_uint4(y[0][2], y[0][3], y[1][2], y[1][3]), weights[t].x, weights[t].y);
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
  float* masses = (float*)(shared + M_AT);
  __syncthreads();
#pragma unroll
  for (int t = 0; t < NT; t++) {
    float x = mass[t];
    x += __shfl_xor_sync(~0u, x, 1);
    x += __shfl_xor_sync(~0u, x, 2);
    if (quad == 0) masses[(8 * t + octet_row) * 4 + warp] = x;
  }
  __syncthreads();
  const int q_heads = heads * group;
  auto place_of = [&](int row) {
    return ((long long)(first_t + row / group) * q_heads + head * group + row % group) * splits + split;
  };
  auto present = [&](int row) {
    if (row >= used_rows) return false;
    int2 range = ranges[row / group];
    return range.x < range.y;
  };
#pragma unroll
  for (int t = 0; t < NT; t++) {
    int row = 8 * t + octet_row;
    if (warp == t % 4 && quad == 0 && present(row)) {
      const float* m = masses + row * 4;
      *(float2*)(tops + 2 * place_of(row)) = make_float2(top[t], m[0] + m[1] + m[2] + m[3]);
    }
#pragma unroll
    for (int side = 0; side < 2; side++) {
      row = 8 * t + 2 * quad + side;
      if (!present(row)) continue;
      float* to = sums + place_of(row) * D + warp * (D / 4);
#pragma unroll
      for (int f = 0; f < FRAGMENTS; f++) {
        float a = total[t][f][side] * V_UNIT, b = total[t][f][side + 2] * V_UNIT;
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

// Fold the splits of one column and head in ascending order; D threads.
extern "C" __global__ void __launch_bounds__(D)
attend_merge(const float* sums, const float* tops, const int* positions, const u16* gate, int gate_stride, u16* out,
             int target, int splits, int q_heads) {
  __shared__ float weights[1056];
  __shared__ float turned[D];
  const int thread = threadIdx.x, lane = thread % 32, t = blockIdx.x / q_heads, head = blockIdx.x % q_heads;
  wait_for_previous();
  float g = 0.0f;
  if (gate != nullptr) g = bits_to_float((u32)gate[(long long)t * gate_stride + head * D + thread] << 16);
  const int length = max(positions[t] + 1, 0), pages = (length + 63) / 64;
  const int per_split = max((pages + target - 1) / target, 1), count = (pages + per_split - 1) / per_split;
  const long long place = (long long)blockIdx.x * splits;
  const float2* ends = (const float2*)tops + place;
  float most = LOWEST;
  for (int i = lane; i < count; i += 32) most = fmaxf(most, ends[i].x);
#pragma unroll
  for (int stride = 1; stride < 32; stride *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, stride));
  float mass = 0.0f;
  for (int i = lane; i < count; i += 32) mass += exp2_(ends[i].x - most) * ends[i].y;
#pragma unroll
  for (int stride = 1; stride < 32; stride *= 2) mass += __shfl_xor_sync(~0u, mass, stride);
  for (int i = thread; i < count; i += D) weights[i] = exp2_(ends[i].x - most);
  __syncthreads();
  const float* from = sums + place * D + thread;
  float total = 0.0f;
  constexpr int AT_ONCE = 16;
  for (int start = 0; start < count; start += AT_ONCE) {
    float x[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) x[i] = start + i < count ? from[(long long)(start + i) * D] : 0.0f;
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++)
      if (start + i < count) total += weights[start + i] * x[i];
  }
  total = count > 0 ? total / mass : 0.0f;
  if constexpr (V_TURNED) {
    for (int stride = 1; stride < 32; stride *= 2) {
      float other = __shfl_xor_sync(~0u, total, stride);
      total = lane & stride ? other - total : total + other;
    }
    for (int stride = 32; stride < D; stride *= 2) {
      turned[thread] = total;
      __syncthreads();
      float other = turned[thread ^ stride];
      total = thread & stride ? other - total : total + other;
      __syncthreads();
    }
    total *= D == 256 ? 0.0625f : D == 64 ? 0.125f : 0.08838834764831845f;
  }
  u32 result = two_bf16(total, 0.0f) & 0xffff;
  if (gate != nullptr) result = two_bf16(bits_to_float(result << 16) / (1.0f + __expf(-g)), 0.0f) & 0xffff;
  out[(long long)blockIdx.x * D + thread] = (u16)result;
}
