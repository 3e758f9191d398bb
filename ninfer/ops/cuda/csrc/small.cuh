// Products of 1 to 64 tokens with packed weights: the time is that of reading the weights once.
//
// 4,470 GB/s are 34 GB/s for each of 132 SMs: a unit of 16 x 64 NVFP4 weights every 120 cycles of each of the four
// schedulers, which issue about 75 instructions for it. A weight is read once and depends on nothing, so each
// warp has copies under way into a ring of its own in shared memory, which run ahead across tiles and start
// before the kernels ahead in the stream have ended.
//
// K is cut into GROUPS x WARPS slices of units. A block belongs to one group, its warps have a slice each; for
// NT == 1 the slice of x stays in registers, as B fragments. The blocks of a group share the tiles evenly. A
// tile's sums of the warps meet in shared memory, those of the groups in `partial`, always added in the same
// order: what a column gets depends neither on the other columns nor on how many there are.
//
// Compile with FORMAT (a decoder), TOKEN_TILES (of 8), SLICE_UNITS (of the longest slice), BLOCK_WARPS, COPY_UNITS
// (units of a copy), RING_COPIES (under way for each warp), SUM_BUFFERS (sums under way), SM_BLOCKS (that share a
// multiprocessor).
#pragma once
#include "barriers.cuh"
#include "formats_b.cuh"

struct Params {
    const u8* weights;
    const float* row_scales;  // or null: 1
    const int* row_map;       // or null: row r goes to column first + r
    const u16* x;             // [tokens, columns] bf16
    const u16* residual;      // as out, or null
    void* out;                // [tokens, out_stride]: bf16, or float32 in mode LOGITS
    const void* gain;         // [columns], or null: no norm
    u16* normed;              // [tokens, columns] or null: the normed x
    float* partial;           // [tiles, NT, groups, 32, 4]
    u32* counters;            // [tiles, NT], zeros, and left so
    int tokens, columns;
    int rows, first;  // of the segment; with SWIGLU of its outputs
    u32 out_stride;
    int tiles, units, groups, mode, unit_offset, gain_float;
    float eps;
};

// RAW: float32 that are not rounded.
enum Mode { PLAIN = 0, SWIGLU = 1, LOGITS = 2, RAW = 3 };

typedef FORMAT Format;
static const int NT = TOKEN_TILES, KU = SLICE_UNITS, WARPS = BLOCK_WARPS, CHUNK = COPY_UNITS;
static const int STAGES = RING_COPIES, BUFFERS = SUM_BUFFERS;
static const int UC = Format::UNIT_COLUMNS, UB = Format::UNIT_BYTES, XR = UC / 8;
static const int CHUNKS = (KU + CHUNK - 1) / CHUNK;

// Shared memory: rings, sums, barriers, what norms need.
static const int RING = STAGES * CHUNK * UB;
struct Sum {
    float v[4];
};
struct Shared {
    alignas(128) u8 ring[WARPS][RING];
    alignas(16) Sum sums[BUFFERS][NT][WARPS][32];
    u64 full[WARPS][STAGES];
    u64 summed[BUFFERS], freed[BUFFERS];
    float squares[8][WARPS];
};

// A warp's stream of weights: for each of its tiles, the units of its slice, CHUNK at a time.
struct Stream {
    const u8* next;
    int tiles_left, units_left, units, skip, stage;
    u8* ring;
    u64* full;
    u64 policy;

    DEVICE void begin(const u8* start, int tiles, int slice_units, int row_units, u8* r, u64* f) {
        next = start, tiles_left = slice_units ? tiles : 0, units_left = units = slice_units;
        skip = (row_units - slice_units) * UB, stage = 0, ring = r, full = f;
#if __CUDA_ARCH__ >= 900
        policy = streaming_policy();
#endif
    }

    // Start the next copy, if there is one, into the next place of the ring.
    DEVICE void advance(int lane) {
        if (tiles_left > 0) {
            const int taken = min(units_left, CHUNK), bytes = taken * UB;
            u8* to = ring + stage * (CHUNK * UB);
#if __CUDA_ARCH__ >= 900
            if (lane == 0) bulk_copy(to, next, bytes, full + stage, policy);
#else
            for (int i = 16 * lane; i < bytes; i += 512) async_copy16(to + i, next + i);
#endif
            next += bytes;
            units_left -= taken;
            if (units_left == 0) {
                units_left = units, next += skip;
                --tiles_left;
            }
        }
#if __CUDA_ARCH__ < 900
        async_commit();
#endif
        if (++stage == STAGES) stage = 0;
    }
};

// Registers of 64 columns from `column` on, of one token's x.
DEVICE void load_x(const u16* row, int column, int columns, int q, u32* r) {
    const int at = column + (Format::ORDER == 0 ? 16 * q : 4 * q);
    if ((columns & 7) == 0) {
        if (Format::ORDER == 0) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                Vec4 v = {0, 0, 0, 0};
                if (at + 8 * i < columns) v = *reinterpret_cast<const Vec4*>(row + at + 8 * i);
                r[4 * i] = v.x, r[4 * i + 1] = v.y, r[4 * i + 2] = v.z, r[4 * i + 3] = v.w;
            }
        } else {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                uint2 v = {0, 0};
                if (at + 16 * j < columns) v = *reinterpret_cast<const uint2*>(row + at + 16 * j);
                r[2 * j] = v.x, r[2 * j + 1] = v.y;
            }
        }
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int c = Format::ORDER == 0 ? at + 2 * i : at + 16 * (i / 2) + 2 * (i % 2);
            r[i] = (c < columns ? row[c] : 0) | (c + 1 < columns ? (u32)row[c + 1] << 16 : 0);
        }
    }
}

// Which column register i of 64 columns from `column` on begins at.
DEVICE int column_of(int column, int q, int i) {
    return Format::ORDER == 0 ? column + 16 * q + 2 * i : column + 16 * (i / 2) + 4 * q + 2 * (i % 2);
}

// Sum of squares of this thread's columns of one token; the same for every T.
DEVICE float squares_of(const u16* row, int columns, int thread, int threads) {
    float sum = 0;
    if ((columns & 7) == 0) {
        for (int c = 8 * thread; c < columns; c += 8 * threads) {
            const Vec4 v = *reinterpret_cast<const Vec4*>(row + c);
            const u32 w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float a = low_bf16(w[i]), b = high_bf16(w[i]);
                sum = fmaf(a, a, sum), sum = fmaf(b, b, sum);
            }
        }
    } else {
        for (int c = thread; c < columns; c += threads) {
            const float a = __uint_as_float((u32)row[c] << 16);
            sum = fmaf(a, a, sum);
        }
    }
#pragma unroll
    for (int d = 16; d; d >>= 1) sum += __shfl_xor_sync(~0u, sum, d);
    return sum;
}

DEVICE float gain_at(const Params& p, int c) {
    const float g = p.gain_float ? ((const float*)p.gain)[c] : __uint_as_float((u32)((const u16*)p.gain)[c] << 16);
    return p.unit_offset ? 1.0f + g : g;
}

DEVICE float normal(float x, float factor, const Params& p, int c) {
    return c < p.columns ? x * factor * gain_at(p, c) : 0;
}

// 1 / rms of up to 8 tokens from `token` on, summed by the whole block; the result is token + lane / 4's.
template <int W>
DEVICE float factor_of(const Params& p, int token, float (*squares)[W], int lane, int warp) {
    for (int t = 0; t < 8 && token + t < p.tokens; ++t) {
        const float sum = squares_of(p.x + (u64)(token + t) * p.columns, p.columns, threadIdx.x, 32 * W);
        if (lane == 0) squares[t][warp] = sum;
    }
    __syncthreads();
    float total = 0;
    if (token + lane / 4 < p.tokens) {
#pragma unroll
        for (int w = 0; w < W; ++w) total += squares[lane / 4][w];
    }
    return rsqrtf(total / p.columns + p.eps);
}

// One sum of a row and a token, to where it belongs.
DEVICE void put(const Params& p, int row, int token, float sum, float scale) {
    if (row >= p.rows || token >= p.tokens) return;
    const int column = p.row_map ? p.row_map[row] : p.first + row;
    if ((u32)column >= p.out_stride) return;
    const u64 at = (u64)token * p.out_stride + column;
    float value = __fmul_rn(sum, scale);
    if (p.residual) value = __fadd_rn(value, __uint_as_float((u32)p.residual[at] << 16));
    const u16 rounded = to_bf16(value);
    if (p.mode == LOGITS)
        ((float*)p.out)[at] = __uint_as_float((u32)rounded << 16);
    else if (p.mode == RAW)
        ((float*)p.out)[at] = value;
    else
        ((u16*)p.out)[at] = rounded;
}

DEVICE void put_swiglu(const Params& p, int row, int token, float gate, float up) {
    if (row >= p.rows || token >= p.tokens) return;
    const int column = p.row_map ? p.row_map[row] : p.first + row;
    if ((u32)column >= p.out_stride) return;
    ((u16*)p.out)[(u64)token * p.out_stride + column] = to_bf16(gate / (1 + __expf(-gate)) * up);
}

DEVICE void finish(const Params& p, int tile, int token, int lane, const float (&s)[4]) {
    const int r = lane >> 2, t = token + 2 * (lane & 3);
    float top = 1, bottom = 1;
    if (p.row_scales) top = p.row_scales[16 * tile + r], bottom = p.row_scales[16 * tile + r + 8];
    if (p.mode == SWIGLU) {
        put_swiglu(p, 8 * tile + r, t, __fmul_rn(s[0], top), __fmul_rn(s[2], bottom));
        put_swiglu(p, 8 * tile + r, t + 1, __fmul_rn(s[1], top), __fmul_rn(s[3], bottom));
    } else {
        put(p, 16 * tile + r, t, s[0], top);
        put(p, 16 * tile + r, t + 1, s[1], top);
        put(p, 16 * tile + r + 8, t, s[2], bottom);
        put(p, 16 * tile + r + 8, t + 1, s[3], bottom);
    }
}

// The sums of all groups, in the last block that has one for this tile: true there.
DEVICE bool add_groups(const Params& p, int tile, int nt, int group, int lane, float (&s)[4]) {
    const int place = tile * NT + nt;
    float4* all = (float4*)p.partial + (u64)place * p.groups * 32 + lane;
    __stcg(all + group * 32, make_float4(s[0], s[1], s[2], s[3]));
    __threadfence();
    __syncwarp();
    u32 before = 0;
    if (lane == 0) before = atomicInc(p.counters + place, p.groups - 1);
    before = __shfl_sync(~0u, before, 0);
    if (before != p.groups - 1) return false;
    __threadfence();
    s[0] = s[1] = s[2] = s[3] = 0;
    for (int g = 0; g < p.groups; ++g) {
        const float4 v = __ldcg(all + g * 32);
        s[0] += v.x, s[1] += v.y, s[2] += v.z, s[3] += v.w;
    }
    return true;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, SM_BLOCKS) small_linear(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) u8 memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int group = blockIdx.x % p.groups, place = blockIdx.x / p.groups, places = gridDim.x / p.groups;
    const int tile0 = (int)((u64)p.tiles * place / places), tile1 = (int)((u64)p.tiles * (place + 1) / places);
    const int slices = p.groups * WARPS, slice = group * WARPS + warp;
    const int unit0 = p.units * slice / slices, units = p.units * (slice + 1) / slices - unit0;

    if (lane < STAGES) barrier_init(&shared.full[warp][lane], 1);
    if (warp == 0 && lane < BUFFERS) {
        barrier_init(&shared.summed[lane], WARPS);
        barrier_init(&shared.freed[lane], NT);
    }
    barrier_init_fence();
    __syncwarp();
    Stream stream;
    stream.begin(p.weights + ((u64)tile0 * p.units + unit0) * UB, tile1 - tile0, units, p.units, shared.ring[warp],
                 shared.full[warp]);
    for (int i = 0; i < STAGES; ++i) stream.advance(lane);
    allow_next();
    __syncthreads();
    wait_for_previous();

    const int q = lane & 3;
#if TOKEN_TILES == 1
    u32 x[KU][1][XR];
    {
        const int token = lane >> 2;
        const u16* row = p.x + (u64)token * p.columns;
#pragma unroll
        for (int u = 0; u < KU; ++u)
#pragma unroll
            for (int b = 0; b < UC / 64; ++b) {
                const bool there = token < p.tokens && u < units;
                if (there) load_x(row, (unit0 + u) * UC + 64 * b, p.columns, q, &x[u][0][8 * b]);
                else
#pragma unroll
                    for (int i = 0; i < 8; ++i) x[u][0][8 * b + i] = 0;
            }
        if (p.gain) {
            const float factor = factor_of<WARPS>(p, 0, shared.squares, lane, warp);
#pragma unroll
            for (int u = 0; u < KU; ++u)
#pragma unroll
                for (int i = 0; i < XR; ++i) {
                    const int c = column_of((unit0 + u) * UC + 64 * (i / 8), q, i % 8);
                    if (u < units) {
                        const u32 v = x[u][0][i];
                        x[u][0][i] = pack_bf16x2(normal(low_bf16(v), factor, p, c), normal(high_bf16(v), factor, p, c + 1));
                        if (p.normed && place == 0 && token < p.tokens) {
                            u16* to = p.normed + (u64)token * p.columns + c;
                            if (c < p.columns) to[0] = (u16)x[u][0][i];
                            if (c + 1 < p.columns) to[1] = (u16)(x[u][0][i] >> 16);
                        }
                    }
                }
        }
    }
#endif

    int stage = 0, buffer = 0;
    u32 parity = 0, turn = 0;
    for (int tile = tile0; tile < tile1; ++tile) {
        float acc[NT][4];
#pragma unroll
        for (int nt = 0; nt < NT; ++nt)
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[nt][i] = 0;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            if (c * CHUNK < units) {
#if __CUDA_ARCH__ >= 900
                barrier_wait(&shared.full[warp][stage], parity);
#else
                async_wait<STAGES - 1>();
                __syncwarp();
#endif
                const u8* chunk = shared.ring[warp] + stage * (CHUNK * UB);
#pragma unroll
                for (int k = 0; k < CHUNK; ++k) {
                    const int u = c * CHUNK + k;
                    if (u < KU && (u < KU - 1 || u < units)) {
#if TOKEN_TILES == 1
                        Format::unit<NT>(chunk + k * UB, lane, x[u], acc);
#else
                        u32 xs[NT][XR];
#pragma unroll
                        for (int nt = 0; nt < NT; ++nt)
#pragma unroll
                            for (int b = 0; b < UC / 64; ++b) {
                                const int token = 8 * nt + (lane >> 2);
                                if (token < p.tokens)
                                    load_x(p.x + (u64)token * p.columns, (unit0 + u) * UC + 64 * b, p.columns, q,
                                           &xs[nt][8 * b]);
                                else
#pragma unroll
                                    for (int i = 0; i < 8; ++i) xs[nt][8 * b + i] = 0;
                            }
                        Format::unit<NT>(chunk + k * UB, lane, xs, acc);
#endif
                    }
                }
                __syncwarp();
                stream.advance(lane);
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
        }

        barrier_wait(&shared.freed[buffer], turn ^ 1);
#pragma unroll
        for (int nt = 0; nt < NT; ++nt)
            *(float4*)&shared.sums[buffer][nt][warp][lane] = make_float4(acc[nt][0], acc[nt][1], acc[nt][2], acc[nt][3]);
        __syncwarp();
        if (lane == 0) barrier_arrive(&shared.summed[buffer]);
        // Warps take turns in adding; with several token tiles, each has its own warp.
        const int mine = (warp + WARPS - (tile - tile0) % WARPS) % WARPS;
        for (int nt = mine; nt < NT; nt += WARPS) {
            if (nt == mine) barrier_wait(&shared.summed[buffer], turn);
            float s[4] = {0, 0, 0, 0};
#pragma unroll
            for (int w = 0; w < WARPS; ++w) {
                const float4 v = *(const float4*)&shared.sums[buffer][nt][w][lane];
                s[0] += v.x, s[1] += v.y, s[2] += v.z, s[3] += v.w;
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(&shared.freed[buffer]);
            if (p.groups == 1 || add_groups(p, tile, nt, group, lane, s)) finish(p, tile, 8 * nt, lane, s);
        }
        if (++buffer == BUFFERS) buffer = 0, turn ^= 1;
    }
#if __CUDA_ARCH__ < 900
    async_wait<0>();
#endif
}

// The norm alone, for more than 8 tokens, in the same arithmetic: one block of 32 WARPS threads a token.
extern "C" __global__ void __launch_bounds__(32 * WARPS) norm_rows(const __grid_constant__ Params p) {
    __shared__ float squares[1][WARPS];
    allow_next();
    wait_for_previous();
    const u16* row = p.x + (u64)blockIdx.x * p.columns;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const float sum = squares_of(row, p.columns, threadIdx.x, 32 * WARPS);
    if (lane == 0) squares[0][warp] = sum;
    __syncthreads();
    float total = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) total += squares[0][w];
    const float factor = rsqrtf(total / p.columns + p.eps);
    for (int c = threadIdx.x; c < p.columns; c += 32 * WARPS)
        p.normed[(u64)blockIdx.x * p.columns + c] = to_bf16(normal(__uint_as_float((u32)row[c] << 16), factor, p, c));
}
