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
__device__ __forceinline__ void first_int8(int (&d)[4], const uint4& a, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1), "r"(0));
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

// Copy a tile's codes; `from` is the thread's own chunk of the first keys.
template <int ROW, bool WHOLE>
__device__ __forceinline__ void fetch_codes(u32 to, const u8* from, int present, int thread) {
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
__device__ __forceinline__ void fetch_scales(u32 to, const u8* plane, u64 vector, int present, int key) {
  constexpr int BYTES = scale_bytes(CODE);
  u64 at = (vector + key * HEADS) * BYTES;
  if constexpr (BYTES == 2) copy_async<4>(to + 4 * key, plane + (at & ~3ull), key < present);
  else copy_async<BYTES>(to + BYTES * key, plane + at, key < present);
}

// The prepared queries as operands: see the layouts of `mma` and of the codes in registers. E dimensions of a row.
__device__ __forceinline__ u32 packed_bytes(int a, int b, int c, int d) {
  return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}
template <int E>
__device__ __forceinline__ void put_query(u8* shared, int row, int dim, const float (&x)[E]) {
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
  wait_for_previous();
  let_next_start();

  const int likely_page = row_of_table[split];  // of short contexts, whose splits are single pages
  int begin = 0, end = 0;
  if (lane < used_columns) {
    int length = max(positions[first_t + lane] + 1, 0);
    int run = ((length + 63) / 64 + TARGET - 1) / TARGET * 64;
    begin = split * run;
    end = min(length, begin + run);
  }
  const bool some = begin < end;
  const int first = __reduce_min_sync(~0u, some ? begin : 0x7fffffff);
  const int last = __reduce_max_sync(~0u, some ? end : 0);
  if (last == 0) return;

  const u32 base = shared_address(shared) + group * (STAGES * STAGE);
  const u8* ring = shared + group * (STAGES * STAGE);
  const int tile_end = (last + KEYS - 1) / KEYS;
  int tile_first = first / KEYS;
  if (GROUPS == 2) tile_first += (tile_first & 1) ^ group;
  const u8* k_thread = k + (thread / (KB / 16) * HEADS + head) * KB + thread % (KB / 16) * 16;
  const u8* v_thread = v + (thread / (VB / 16) * HEADS + head) * VB + thread % (VB / 16) * 16;
  auto page_of = [&](int tile) {
    int page = tile / PER_PAGE;
    return tile >= tile_end ? 0 : page == split ? likely_page : row_of_table[page];
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
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) fetch(tile_first + i * GROUPS, ahead[i], i);
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
            multiply_bf16(sum[t][o], a, keys[o][0], keys[o][1]);
            multiply_bf16(sum[t][o], b, keys[o][2], keys[o][3]);
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
          weights[o] = two_bf16(a, b);
          rest[o] = two_bf16(a - bits_to_float(weights[o] << 16), b - bits_to_float(weights[o] & 0xffff0000u));
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
            multiply_bf16(total[t][f], a, weights[t].x, weights[t].y);
            multiply_bf16(total[t][f], a, weights[t].z, weights[t].w);
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

// Fold the splits of one column and head in ascending order, eight at a time, a slice of dimensions a block. Where
// values are rotated the slice is all.
constexpr int SLICE = V_TURNED ? D : 64, MERGERS = V_TURNED ? 512 : 256;
constexpr int ACROSS = SLICE / 4, EIGHTS = (TARGET + 7) / 8;

extern "C" __global__ void __launch_bounds__(MERGERS)
attend_merge(const float* sums, const float* tops, const int* positions, const u16* gate, int gate_stride, u16* out,
             int splits) {
  constexpr int Q_HEADS = HEADS * GROUP;
  __shared__ float weights[EIGHTS * 8];
  __shared__ __align__(16) float eights[EIGHTS][SLICE];
  __shared__ float turned[SLICE];
  const int thread = threadIdx.x, lane = thread % 32;
  const int place = blockIdx.x, t = place / Q_HEADS, head = place % Q_HEADS, slice = blockIdx.y * SLICE;
  // These were there before the splits' kernel began.
  int position;
  asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(position) : "l"(positions + t));
  u16 g = 0;
  if (gate != nullptr && thread < SLICE)
    asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(g) : "l"(gate + (long long)t * gate_stride + head * D + slice + thread));
  const int length = max(position + 1, 0), pages = (length + 63) / 64;
  const int per_split = max((pages + TARGET - 1) / TARGET, 1), count = (pages + per_split - 1) / per_split;
  const float4* from = (const float4*)(sums + (long long)place * splits * D + slice) + thread % ACROSS;
  const float2* ends = (const float2*)tops + (long long)place * splits;
  wait_for_previous();
  float mass = 0.0f, most = LOWEST;
  bool known = false;
  int eight = thread / ACROSS;
  do {
    float4 x[8];
#pragma unroll
    for (int i = 0; i < 8; i++)
      x[i] = 8 * eight + i < count ? from[(8 * eight + i) * (D / 4)] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (!known) {
      // Each warp finds the maximum and the mass.
      constexpr int OF_LANE = (TARGET + 31) / 32;
      float2 end[OF_LANE];
#pragma unroll
      for (int i = 0; i < OF_LANE; i++) end[i] = lane + 32 * i < count ? ends[lane + 32 * i] : make_float2(LOWEST, 0.0f);
#pragma unroll
      for (int i = 0; i < OF_LANE; i++) most = fmaxf(most, end[i].x);
#pragma unroll
      for (int stride = 1; stride < 32; stride *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, stride));
#pragma unroll
      for (int i = 0; i < OF_LANE; i++) {
        const float weight = exp2_(end[i].x - most);
        mass += weight * end[i].y;
        if (thread < 32 && lane + 32 * i < EIGHTS * 8) weights[lane + 32 * i] = weight;
      }
#pragma unroll
      for (int stride = 1; stride < 32; stride *= 2) mass += __shfl_xor_sync(~0u, mass, stride);
      known = true;
      __syncthreads();
    }
    if (eight < EIGHTS) {
      float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const float weight = weights[8 * eight + i];
        sum.x += weight * x[i].x;
        sum.y += weight * x[i].y;
        sum.z += weight * x[i].z;
        sum.w += weight * x[i].w;
      }
      *(float4*)&eights[eight][thread % ACROSS * 4] = sum;
    }
    eight += MERGERS / ACROSS;
  } while (8 * eight < count);
  __syncthreads();
  float total = 0.0f;
  if (thread < SLICE)
    for (int i = 0; 8 * i < count; i++) total += eights[i][thread];
  total = count > 0 ? total / mass : 0.0f;
  if constexpr (V_TURNED) {
    for (int stride = 1; stride < 32; stride *= 2) {
      const float other = __shfl_xor_sync(~0u, total, stride);
      total = lane & stride ? other - total : total + other;
    }
    for (int stride = 32; stride < D; stride *= 2) {
      if (thread < SLICE) turned[thread] = total;
      __syncthreads();
      const float other = thread < SLICE ? turned[thread ^ stride] : 0.0f;
      total = thread & stride ? other - total : total + other;
      __syncthreads();
    }
    total *= TURN;
  }
  if (thread >= SLICE) return;
  u32 result = two_bf16(total, 0.0f) & 0xffff;
  if (gate != nullptr) result = two_bf16(bits_to_float(result << 16) / (1.0f + __expf(-bits_to_float((u32)g << 16))), 0.0f) & 0xffff;
  out[(long long)place * D + slice + thread] = (u16)result;
}

// Reached on an H200, 2026-11-30, D 256, 24 and 4 heads, B 1, split and merge and gate, us at 85,000 keys and share of
// 4,470 GB/s, T 1 | T 4: bf16 85.4 (91 %) | 92.8 (84 %), int8 49.4 (81 %) | 56.9 (71 %), fp8 50.2 (78 %) | 65.3 (60 %),
// nvfp4 49.3 (44 %) | 67.3 (33 %), k8v4 47.7 (64 %) | 66.6 (46 %). int8 at 128 keys 4.8 | 8.0, at 1,000 keys 6.1, at
// 8,192 keys 11.8 | 16.3. `python -m bench.ops.attention`.
