// Products of 1 to 64 tokens with packed weights: the time is that of reading the weights once.
//
// 4,470 GB/s are 34 GB/s for each of 132 SMs: a unit of 16 x 64 NVFP4 weights every 120 cycles of each of the four
// schedulers, which issue about 75 instructions for it. A weight is read once and depends on nothing, so each
// warp has copies under way into a ring of its own in shared memory, which run ahead across tiles and start
// before the kernels ahead in the stream have ended.
//
// K is cut into `groups` x WARPS slices of units. A block belongs to one group, its warps have a slice each and
// keep that of x in registers, as B fragments. The blocks of a group share the tiles evenly. A
// tile's sums of the warps meet in shared memory, those of the groups in `partial`, always added in the same
// order: what a column gets depends neither on the other columns nor on how many there are.
//
// Compile with FORMAT (a decoder), TOKEN_TILES (of 8), SLICE_UNITS (of the longest slice), BLOCK_WARPS, COPY_UNITS
// (units of a copy), RING_COPIES (under way for each warp), SUM_BUFFERS (sums under way), SM_BLOCKS (that share a
// multiprocessor), NORM (of x, TOKEN_TILES being 1; 1: gains in bf16, 2: in
// float32; else 0).
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
    const void* gain;         // [columns]
    u16* normed;              // [tokens, columns] or null: the normed x
    float* partial;           // [tiles, NT, groups, 32, 4]
    u32* counters;            // [tiles, NT], zeros, and left so
    int tokens, columns;
    int rows, first;  // of the segment; with SWIGLU of its outputs
    u32 out_stride;
    int tiles, units, groups, mode, unit_offset;
    float eps;
};

// RAW: float32 that are not rounded.
enum Mode { PLAIN = 0, SWIGLU = 1, LOGITS = 2, RAW = 3 };

typedef FORMAT Format;
static const int NT = TOKEN_TILES, KU = SLICE_UNITS, WARPS = BLOCK_WARPS, CHUNK = COPY_UNITS;
static const int STAGES = RING_COPIES, BUFFERS = SUM_BUFFERS;
static const int UC = Format::UNIT_COLUMNS, UB = Format::UNIT_BYTES, XR = UC / 8;
static const int MOST_SLICES = 16 * WARPS;
static const int CHUNKS = (KU + CHUNK - 1) / CHUNK;

// Shared memory: rings, sums, barriers, what norms need.
static const int RING = STAGES * CHUNK * UB;
struct Sum {
    float v[4];
};
typedef float Squares[MOST_SLICES][8];
struct Shared {
    alignas(128) u8 ring[WARPS][RING];
    alignas(16) Sum sums[BUFFERS][NT][WARPS][32];
    u64 full[WARPS][STAGES];
    u64 summed[BUFFERS], freed[BUFFERS];
#if NORM
    Squares squares;
#endif
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

// x of a unit: the lane's columns of one token, zeros if it is not `there`. Rows are multiples of 8 columns.
DEVICE void load_x(const Params& p, int token, int unit, int q, bool there, u32 (&r)[XR]) {
    const u16* row = p.x + (u64)token * p.columns;
#pragma unroll
    for (int b = 0; b < UC / 64; ++b) {
        const int first = unit * UC + 64 * b;
        if (Format::ORDER == 0) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int c = first + 16 * q + 8 * i;
                Vec4 v = {0, 0, 0, 0};
                if (there && c < p.columns) v = *reinterpret_cast<const Vec4*>(row + c);
                r[8 * b + 4 * i] = v.x, r[8 * b + 4 * i + 1] = v.y, r[8 * b + 4 * i + 2] = v.z, r[8 * b + 4 * i + 3] = v.w;
            }
        } else {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int c = first + 16 * j + 4 * q;
                uint2 v = make_uint2(0, 0);
                if (there && c < p.columns) v = *reinterpret_cast<const uint2*>(row + c);
                r[8 * b + 2 * j] = v.x, r[8 * b + 2 * j + 1] = v.y;
            }
        }
    }
}

#if NORM
// The column at which register i of a lane's x begins.
DEVICE int column_of(int unit, int q, int i) {
    const int b = i / 8, k = i % 8;
    return unit * UC + 64 * b + (Format::ORDER == 0 ? 16 * q + 2 * k : 16 * (k / 2) + 4 * q + 2 * (k % 2));
}

// Gains of two columns.
DEVICE float2 gains(const Params& p, int column) {
    float2 g = make_float2(0, 0);
    if (column < p.columns) {
#if NORM == 1
        const u32 both = *(const u32*)((const u16*)p.gain + column);
        g = make_float2(low_bf16(both), high_bf16(both));
#else
        g = *(const float2*)((const float*)p.gain + column);
#endif
        if (p.unit_offset) g.x += 1, g.y += 1;
    }
    return g;
}

DEVICE float squares_of(const u32 (&r)[XR], float sum) {
#pragma unroll
    for (int i = 0; i < XR; ++i) {
        const float a = low_bf16(r[i]), b = high_bf16(r[i]);
        sum = fmaf(a, a, sum), sum = fmaf(b, b, sum);
    }
    return sum;
}

// The norm of token `token` on a block's slices x; where slices of K begin and the order of sums are the
// product's, whatever T is.
DEVICE void norm_x(const Params& p, int token, int group, u32 (&x)[KU][1][XR], bool store, Squares& squares) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, q = lane & 3;
    const int slices = p.groups * WARPS;
    const bool there = token < p.tokens;
    for (int g = 0; g < p.groups; ++g) {
        const int slice = g * WARPS + warp;
        const int unit0 = p.units * slice / slices, units = p.units * (slice + 1) / slices - unit0;
        float sum = 0;
#pragma unroll
        for (int u = 0; u < KU; ++u) {
            if (g == group) {
                sum = squares_of(x[u][0], sum);
            } else {
                u32 r[XR];
                load_x(p, token, unit0 + u, q, there && u < units, r);
                sum = squares_of(r, sum);
            }
        }
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        if (q == 0) squares[slice][lane >> 2] = sum;
    }
    __syncthreads();
    float total = 0;
    for (int s = 0; s < slices; ++s) total += squares[s][lane >> 2];
    const float factor = rsqrtf(total / p.columns + p.eps);
    const int slice = group * WARPS + warp;
    const int unit0 = p.units * slice / slices, units = p.units * (slice + 1) / slices - unit0;
#pragma unroll
    for (int u = 0; u < KU; ++u)
#pragma unroll
        for (int i = 0; i < XR; ++i) {
            const int c = column_of(unit0 + u, q, i);
            const float2 gain = u < units ? gains(p, c) : make_float2(0, 0);
            const u32 v = x[u][0][i];
            x[u][0][i] = pack_bf16x2(low_bf16(v) * factor * gain.x, high_bf16(v) * factor * gain.y);
            if (store && there && u < units && c < p.columns)
                *(u32*)(p.normed + (u64)token * p.columns + c) = x[u][0][i];
        }
}
#endif

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
    ((u16*)p.out)[(u64)token * p.out_stride + column] = to_bf16(__fdividef(gate, 1 + __expf(-gate)) * up);
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
    __syncwarp();
    u32 before = 0;
    if (lane == 0) before = count_up(p.counters + place, p.groups - 1);
    before = __shfl_sync(~0u, before, 0);
    if (before != p.groups - 1) return false;
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
    const int tile0 = p.tiles * place / places, tile1 = p.tiles * (place + 1) / places;  // far below 2^31
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

    const int q = lane & 3, token = lane >> 2;
    u32 x[KU][NT][XR];
#pragma unroll
    for (int u = 0; u < KU; ++u)
#pragma unroll
        for (int nt = 0; nt < NT; ++nt)
            load_x(p, 8 * nt + token, unit0 + u, q, 8 * nt + token < p.tokens && u < units, x[u][nt]);
#if NORM
    norm_x(p, token, group, x, p.normed && place == 0, shared.squares);
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
                        Format::unit<NT>(chunk + k * UB, lane, x[u], acc);
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

#if NORM
// The norm alone, for more than 8 tokens, in the same arithmetic: a block for 8 tokens of each group.
extern "C" __global__ void __launch_bounds__(32 * WARPS) norm_rows(const __grid_constant__ Params p) {
    __shared__ Squares squares;
    allow_next();
    wait_for_previous();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = blockIdx.x % p.groups;
    const int token = 8 * (blockIdx.x / p.groups) + (lane >> 2);
    const int slices = p.groups * WARPS, slice = group * WARPS + warp;
    const int unit0 = p.units * slice / slices, units = p.units * (slice + 1) / slices - unit0;
    u32 x[KU][1][XR];
#pragma unroll
    for (int u = 0; u < KU; ++u) load_x(p, token, unit0 + u, lane & 3, token < p.tokens && u < units, x[u][0]);
    norm_x(p, token, group, x, true, squares);
}
#endif
