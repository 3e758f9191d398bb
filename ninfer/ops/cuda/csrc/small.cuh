// Products of 1 to 16 tokens with packed weights: the time is that of reading the weights once.
//
// 4,470 GB/s are 34 GB/s for each of 132 SMs: a unit of 16 x 64 NVFP4 weights every 135 cycles of each of the four
// schedulers, which issue about 85 instructions for it, half of them in a pipe that takes one every other cycle. So
// products have warps of their own, four for a scheduler, which hide each other's latencies; one more copies weights
// into a ring in shared memory, which runs ahead across tiles and starts before the kernels ahead in the stream have
// ended, since weights depend on nothing; another adds sums and writes results. For one or two tokens two blocks fit
// a multiprocessor, so that the next kernel's ring fills while this one ends.
//
// K is cut into SLICES = CLUSTER x WARPS slices, which have a unit each in every turn: of 16 slices slice s has unit
// 16 t + s in turn t; 32 slices are two halves of K, each cut so. A warp keeps its slice of x in shared memory, in
// the order in which lanes read it, and goes over all tiles of its cluster. The sums of a tile meet in the shared
// memory of one block of the cluster, in turn, and are always added in the same order: what a column gets depends
// neither on the other columns nor on how many there are, nor on how slices are divided among a cluster's blocks.
//
// A norm of x in front of the product: x goes into it times the gains, and the sums are multiplied by 1 / rms, which
// the warps of a cluster find from their slices meanwhile.
//
// Compile with FORMAT (a decoder), TOKEN_TILES (of 8), WARPS, CLUSTER (blocks), TURNS and LEAST_TURNS (units of the
// longest slice and of the shortest), COPY_TURNS (in one copy), RING_COPIES, PACE (copies on their way at a time),
// SUM_BUFFERS, LIVE (lanes of a row's four that have tokens: 1 for up to two tokens, 2 for four, else 4), SM_BLOCKS
// (that share a multiprocessor), NORM (of x; 1: gains in bf16, 2: in float32; else 0).
#pragma once
#include "barriers.cuh"
#include "formats_b.cuh"

// compute-sanitizer's racecheck credits an arrival at a barrier with the arriving thread's writes only, not with those
// of a warp that has synchronized before; for it (tests/ops/cuda/tiny.py) every lane arrives.
#ifndef EVERY_LANE
#define EVERY_LANE 0
#endif

struct Params {
    const u8* weights;
    const float* row_scales;  // or null: 1
    const int* row_map;       // or null: row r goes to column first + r
    const u16* x;             // [tokens, columns] bf16
    const u16* residual;      // as out, or null
    void* out;                // [tokens, out_stride]: bf16, or float32 in modes LOGITS and RAW
    const void* gain;         // [columns]
    u16* normed;              // [tokens, columns] or null: the normed x
    int tokens, columns;
    int rows, first;  // of the segment; with SWIGLU of its outputs
    u32 out_stride;
    int tiles, units, mode;
    float unit_offset, eps;  // added to gains, to mean squares
};

// RAW: float32 that are not rounded.
enum Mode { PLAIN = 0, SWIGLU = 1, LOGITS = 2, RAW = 3 };

typedef FORMAT Format;
typedef Decoder<Format, TOKEN_TILES, LIVE == 1> Decode;
static const int NT = TOKEN_TILES, STAGES = RING_COPIES, BUFFERS = SUM_BUFFERS, SLICES = CLUSTER * WARPS;
static const int ARRIVING = EVERY_LANE ? 32 : 1;  // lanes of a warp
static const int UB = Format::UNIT_BYTES, PRODUCER = WARPS, ADDER = WARPS + 1, THREADS = 32 * (WARPS + 2);
static const int COPIES = (TURNS + COPY_TURNS - 1) / COPY_TURNS, PIECE = WARPS * UB;
static const int HALF = 16 * TURNS;  // units of the first half of K
static_assert(SLICES % 16 == 0 && 16 % WARPS == 0, "slices are divided so that sums have one order");
// Vectors of 8 columns of a slice, for each lane; tokens whose vectors a lane loads at a time.
static const int VECTORS = (TURNS * 8 + 31) / 32, AT_ONCE = LIVE == 1 || SM_BLOCKS == 2 ? 2 : 4;
static_assert(Format::UNIT_COLUMNS == 64, "a lane has 16 columns of a unit");

struct Shared {
    alignas(128) u8 ring[STAGES][COPY_TURNS * PIECE];
    alignas(16) float4 sums[BUFFERS][NT][SLICES][8 * LIVE];
#if NORM
    float squares[SLICES][8 * NT];  // sums of x^2 over a slice
    u64 squared;
#endif
    u64 full[STAGES], empty[STAGES];  // parts of the ring
    u64 summed[BUFFERS];              // all of a tile's sums are here
    u64 freed[CLUSTER][BUFFERS];      // a block of the cluster can take sums again
};
// Behind it what a decoder has prepared of x, [turn][warp][Decode::BYTES]; then x, [turn][warp][token][64]: of each
// token first the first 8 of the 16 columns of each lane, then the others; for odd tokens the other way round, so that
// two tokens' are in different banks.

// The tiles of a cluster.
struct Tiles {
    int begin, end;
    DEVICE Tiles(const Params& p) {
        const int place = blockIdx.x / CLUSTER, places = gridDim.x / CLUSTER;
        begin = p.tiles * place / places, end = p.tiles * (place + 1) / places;
    }
};

// The first unit of a slice, and of how many units.
DEVICE int unit_of(int slice) { return slice / 16 * HALF + slice % 16; }
DEVICE int turns_of(const Params& p, int slice) {
    const int first = unit_of(slice), end = slice < 16 && SLICES > 16 ? min(HALF, p.units) : p.units;
    return max(0, end - first + 15) / 16;
}

// Of the sums of the j-th tile that a block of the cluster adds up: which buffer, and the parity of its round.
DEVICE int buffer_of(int j) { return j % BUFFERS; }
DEVICE u32 parity_of(int j) { return j / BUFFERS & 1; }

#if NORM
// Eight gains, as they are stored.
struct Gains {
#if NORM == 1
    Vec4 raw;
    DEVICE void load(const Params& p, int c) { raw = *reinterpret_cast<const Vec4*>((const u16*)p.gain + c); }
    DEVICE void pair(int i, float& a, float& b) const {
        const u32 w = i == 0 ? raw.x : i == 1 ? raw.y : i == 2 ? raw.z : raw.w;
        a = low_bf16(w), b = high_bf16(w);
    }
#else
    float4 raw[2];
    DEVICE void load(const Params& p, int c) {
        raw[0] = *reinterpret_cast<const float4*>((const float*)p.gain + c);
        raw[1] = *reinterpret_cast<const float4*>((const float*)p.gain + c + 4);
    }
    DEVICE void pair(int i, float& a, float& b) const {
        a = i % 2 ? raw[i / 2].z : raw[i / 2].x, b = i % 2 ? raw[i / 2].w : raw[i / 2].y;
    }
#endif
    DEVICE u32 times(const Params& p, int i, u32 x, float f) const {
        float a, b;
        pair(i, a, b);
        return pack_bf16x2(low_bf16(x) * f * (a + p.unit_offset), high_bf16(x) * f * (b + p.unit_offset));
    }
    // x f gains.
    DEVICE Vec4 times(const Params& p, Vec4 v, float f) const {
        return {times(p, 0, v.x, f), times(p, 1, v.y, f), times(p, 2, v.z, f), times(p, 3, v.w, f)};
    }
};

DEVICE void add_squares(u32 x, float& even, float& odd) {
    const float a = low_bf16(x), b = high_bf16(x);
    even = fmaf(a, a, even), odd = fmaf(b, b, odd);
}

// 1 / rms of a token, once all squares are there.
DEVICE float factor_of(const Params& p, const Shared& shared, int token) {
    float sum = 0;
#pragma unroll
    for (int s = 0; s < SLICES; ++s) sum += shared.squares[s][token];
    return rsqrtf(sum / p.columns + p.eps);
}

// A block's share of the normed rows, by one warp: each lane's first vector is loaded ahead.
struct Share {
    int begin, count;
    Gains gains;
    Vec4 x;

    DEVICE u64 place(const Params& p, int i) const { return (u64)(i / count) * p.columns + 8 * (begin + i % count); }
    DEVICE bool has(const Params& p, int i) const { return p.normed && i < p.tokens * count; }

    // What nobody writes.
    DEVICE Share(const Params& p, int lane) {
        const int vectors = p.columns / 8;
        begin = vectors * blockIdx.x / gridDim.x, count = vectors * (blockIdx.x + 1) / gridDim.x - begin;
        gains = {};
        if (has(p, lane)) gains.load(p, 8 * (begin + lane % count));
    }
    DEVICE void load(const Params& p, int lane) {
        x = {0, 0, 0, 0};
        if (has(p, lane)) x = *reinterpret_cast<const Vec4*>(p.x + place(p, lane));
    }
    DEVICE void store(const Params& p, const Shared& shared, int lane) {
        for (int i = lane; has(p, i); i += 32) {
            const u64 at = place(p, i);
            if (i != lane) gains.load(p, 8 * (begin + i % count)), x = *reinterpret_cast<const Vec4*>(p.x + at);
            *reinterpret_cast<Vec4*>(p.normed + at) = gains.times(p, x, factor_of(p, shared, i / count));
        }
    }
};
#endif

// Where a vector of 8 columns of a token belongs: lane q's 16 columns are two vectors. In STEPPED order these are two
// halves of two vectors of x.
DEVICE void store_x(u8* token_row, int token, int v, Vec4 x) {
    const int swap = (token & 1) * 64;
    if (Format::ORDER == 0) {
        *reinterpret_cast<Vec4*>(token_row + (((v & 1) * 64 + (v >> 1) * 16) ^ swap)) = x;
    } else {  // columns 8 v .. 8 v + 3 are step v / 2 of lane 2 (v % 2), the others of the next
        const int j = v >> 1, q = 2 * (v & 1), at = ((j >> 1) * 64 + q * 16 + (j & 1) * 8) ^ swap;
        *reinterpret_cast<uint2*>(token_row + at) = make_uint2(x.x, x.y);
        *reinterpret_cast<uint2*>(token_row + at + 16) = make_uint2(x.z, x.w);
    }
}

// A warp's slice of x, times the gains of a norm, into its place; the sums of squares to the adders of the cluster.
DEVICE void load_x(const Params& p, Shared& shared, u8* prepared, u8* places, int slice, int turns, int lane) {
    int columns[VECTORS];
#if NORM
    Gains gains[VECTORS] = {};
#endif
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int n = 32 * i + lane, c = (unit_of(slice) + (n >> 3) * 16) * 64 + 8 * (n & 7);
        columns[i] = n < 8 * turns && c < p.columns ? c : -1;
#if NORM
        gains[i] = {};
        if (columns[i] >= 0) gains[i].load(p, c);
#endif
    }
    wait_for_previous();
    for (int first = 0; first < p.tokens; first += AT_ONCE) {
        Vec4 v[AT_ONCE][VECTORS];
#pragma unroll
        for (int t = 0; t < AT_ONCE; ++t)
#pragma unroll
            for (int i = 0; i < VECTORS; ++i) {
                v[t][i] = {0, 0, 0, 0};
                if (columns[i] >= 0 && first + t < p.tokens)
                    v[t][i] = *reinterpret_cast<const Vec4*>(p.x + (u64)(first + t) * p.columns + columns[i]);
            }
#if NORM
        float even[AT_ONCE] = {}, odd[AT_ONCE] = {};
#endif
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const int n = 32 * i + lane;
#pragma unroll
            for (int t = 0; t < AT_ONCE; ++t) {
                const int token = first + t;
                if (token >= p.tokens) break;
                Vec4 x = v[t][i];
#if NORM
                add_squares(x.x, even[t], odd[t]), add_squares(x.y, even[t], odd[t]);
                add_squares(x.z, even[t], odd[t]), add_squares(x.w, even[t], odd[t]);
                x = gains[i].times(p, x, 1);
#endif
                Decode::prepare(x, prepared + (n >> 3) * WARPS * Decode::BYTES, token, n & 7, n < 8 * turns);
                if (n < 8 * turns) store_x(places + ((n >> 3) * WARPS * p.tokens + token) * 128, token, n & 7, x);
            }
        }
#if NORM
#pragma unroll
        for (int t = 0; t < AT_ONCE; ++t) {
            const int token = first + t;
            if (token >= p.tokens) break;
            float sum = even[t] + odd[t];
#pragma unroll
            for (int d = 16; d; d >>= 1) sum += __shfl_xor_sync(~0u, sum, d);
            float* place = &shared.squares[slice][token];
#if CLUSTER > 1
            if (lane < CLUSTER) send_remote(remote_address(place, lane), remote_address(&shared.squared, lane), sum);
#else
            if (lane == 0) *place = sum;
#endif
        }
#endif
    }
    __syncwarp();
#if NORM && CLUSTER == 1
    if (lane == 0) barrier_arrive(&shared.squared);
#endif
}

// Which sums of a tile a lane of warp ADDER holds. For up to two tokens one: of row `lane % 8`, token `lane / 8 % 2`,
// or of the row 8 behind. Else what a lane of a product holds: rows r and r + 8 of tokens 2 q and 2 q + 1 of a tile.
static const int HELD = LIVE == 1 ? 1 : 2;  // rows, and tokens of a token tile
DEVICE int held_row(int lane) { return LIVE == 1 ? lane % 8 : lane >> 2; }
DEVICE int held_half(int lane, int h) { return LIVE == 1 ? lane >> 4 : h; }
DEVICE int held_token(int lane, int nt, int i) { return LIVE == 1 ? lane >> 3 & 1 : 8 * nt + 2 * (lane & 3) + i; }

// Where they go, and what is multiplied with and added to them; loaded a tile ahead.
struct Target {
    float scales[HELD];
    int columns[HELD];  // -1: nowhere
    u16 added[NT][HELD][HELD];

    DEVICE void load(const Params& p, int tile, int lane) {
#pragma unroll
        for (int h = 0; h < HELD; ++h) {
            const int packed = 16 * tile + held_row(lane) + 8 * held_half(lane, h);
            const int row = p.mode == SWIGLU ? 8 * tile + held_row(lane) : packed;
            scales[h] = p.row_scales ? p.row_scales[packed] : Decode::FACTOR;
            const int column = row >= p.rows ? -1 : p.row_map ? p.row_map[row] : p.first + row;
            columns[h] = (u32)column < p.out_stride ? column : -1;
            if (p.residual)
#pragma unroll
                for (int nt = 0; nt < NT; ++nt)
#pragma unroll
                    for (int i = 0; i < HELD; ++i) {
                        const int token = held_token(lane, nt, i);
                        const bool there = columns[h] >= 0 && token < p.tokens;
                        added[nt][h][i] = there ? p.residual[(u64)token * p.out_stride + columns[h]] : 0;
                    }
        }
    }

    // s[h][i], of token tile nt; `factors` of its tokens.
    DEVICE void put(const Params& p, int nt, int lane, const float (&s)[HELD][HELD], const float (&factors)[HELD]) const {
        float v[HELD][HELD];
#pragma unroll
        for (int h = 0; h < HELD; ++h)
#pragma unroll
            for (int i = 0; i < HELD; ++i) {
                v[h][i] = __fmul_rn(s[h][i], scales[h]);
                if (NORM) v[h][i] = __fmul_rn(v[h][i], factors[i]);
            }
        if (p.mode == SWIGLU) {
#pragma unroll
            for (int i = 0; i < HELD; ++i) {
                const float up = LIVE == 1 ? __shfl_down_sync(~0u, v[0][i], 16) : v[HELD - 1][i];
                v[0][i] = __fdividef(v[0][i], 1 + __expf(-v[0][i])) * up;
            }
        }
#pragma unroll
        for (int h = 0; h < HELD; ++h) {
            if (columns[h] < 0 || (p.mode == SWIGLU && held_half(lane, h))) continue;
#pragma unroll
            for (int i = 0; i < HELD; ++i) {
                const int token = held_token(lane, nt, i);
                if (token >= p.tokens) continue;
                const u64 at = (u64)token * p.out_stride + columns[h];
                float value = v[h][i];
                if (p.residual) value = __fadd_rn(value, __uint_as_float((u32)added[nt][h][i] << 16));
                const u16 rounded = to_bf16(value);
                if (p.mode < LOGITS)
                    ((u16*)p.out)[at] = rounded;
                else
                    ((float*)p.out)[at] = p.mode == RAW ? value : __uint_as_float((u32)rounded << 16);
            }
        }
    }
};

// Warp PRODUCER: weights into the ring, in the order in which they are used. All that is asked for at a time delays
// whoever asks for x next, so that a large ring is not filled at once.
DEVICE void produce(const Params& p, Shared& shared, const Tiles& tiles, int rank, int lane) {
    const int own = unit_of(rank * WARPS), end = SLICES > 16 && rank * WARPS < 16 ? min(HALF, p.units) : p.units;
    int stage = 0, asked = 0;
    u32 parity = 1;  // the ring is empty at first
#if __CUDA_ARCH__ >= 900
    if (lane) return;
    const u64 policy = streaming_policy();
#endif
    for (int tile = tiles.begin; tile < tiles.end; ++tile) {
        const u8* row = p.weights + (u64)tile * p.units * UB;
#pragma unroll
        for (int turn = 0; turn < TURNS; turn += COPY_TURNS) {
            // The units of a turn stand together, and are the block's if it has all slices of a half.
            const int begin = own + 16 * turn, turns = min(COPY_TURNS, TURNS - turn);
            const int pieces = WARPS == 16 ? 1 : turns, width = WARPS == 16 ? 16 * turns : WARPS;
            barrier_wait(&shared.empty[stage], parity);
#if __CUDA_ARCH__ >= 900
            if (PACE < STAGES && asked++ >= PACE) {
                const bool wraps = stage < PACE;
                barrier_wait(&shared.full[wraps ? stage - PACE + STAGES : stage - PACE], wraps ? parity : parity ^ 1);
            }
            int all = 0;
#pragma unroll
            for (int k = 0; k < pieces; ++k) all += max(0, min(width, end - begin - 16 * k)) * UB;
            barrier_expect(&shared.full[stage], all);
#pragma unroll
            for (int k = 0; k < pieces; ++k) {
                const int bytes = max(0, min(width, end - begin - 16 * k)) * UB;
                if (bytes)
                    bulk_copy(shared.ring[stage] + k * PIECE, row + (begin + 16 * k) * UB, bytes, &shared.full[stage], policy);
            }
#else
            for (int k = 0; k < pieces; ++k) {
                const int bytes = max(0, min(width, end - begin - 16 * k)) * UB;
                for (int b = 16 * lane; b < bytes; b += 512)
                    async_copy16(shared.ring[stage] + k * PIECE + b, row + (begin + 16 * k) * UB + b);
            }
            async_arrive(&shared.full[stage]);
#endif
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
    }
}

// Warps 0 .. WARPS - 1: products.
DEVICE void multiply(const Params& p, Shared& shared, u8* area, const Tiles& tiles, int rank, int warp, int lane) {
    const int slice = rank * WARPS + warp, turns = turns_of(p, slice);
    u8 *prepared = area + warp * Decode::BYTES, *places = area + TURNS * WARPS * Decode::BYTES + warp * p.tokens * 128;
    load_x(p, shared, prepared, places, slice, turns, lane);
    prepared += Decode::place(lane);
    const u8 *mine[NT], *others[NT];  // the lane's token of each tile; of columns without a token sums go nowhere
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
        const int token = min(8 * nt + (lane >> 2), p.tokens - 1);
        const int at = 16 * (lane & 3) + (token & 1) * 64;
        mine[nt] = places + token * 128 + at, others[nt] = places + token * 128 + (at ^ 64);
    }
    const int turn_bytes = WARPS * p.tokens * 128;
    int stage = 0, count = 0;
    u32 parity = 0;
    for (int tile = tiles.begin; tile < tiles.end; ++tile, ++count) {
        float acc[2][NT][4];  // of even and odd turns: products of one need not wait for the other
#pragma unroll
        for (int nt = 0; nt < NT; ++nt)
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[0][nt][i] = acc[1][nt][i] = 0;
#pragma unroll
        for (int c = 0; c < COPIES; ++c) {
            barrier_wait(&shared.full[stage], parity);
            const u8* units = shared.ring[stage] + warp * UB;
#pragma unroll
            for (int k = 0; k < COPY_TURNS; ++k) {
                const int turn = c * COPY_TURNS + k;
                if (turn < TURNS && (turn < LEAST_TURNS || turn < turns)) {
                    u32 x[NT][8];
#pragma unroll
                    for (int nt = 0; nt < NT; ++nt) {
                        const Vec4 v = load_shared16(mine[nt] + turn * turn_bytes);
                        const Vec4 w = load_shared16(others[nt] + turn * turn_bytes);
                        x[nt][0] = v.x, x[nt][1] = v.y, x[nt][2] = v.z, x[nt][3] = v.w;
                        x[nt][4] = w.x, x[nt][5] = w.y, x[nt][6] = w.z, x[nt][7] = w.w;
                    }
                    Decode::unit(units + k * PIECE, lane, x, acc[turn & 1], prepared + turn * WARPS * Decode::BYTES);
                }
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(&shared.empty[stage]);
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
        const int owner = count % CLUSTER, j = count / CLUSTER, buffer = buffer_of(j), live = (lane >> 2) * LIVE + (lane & 3);
        barrier_wait(&shared.freed[owner][buffer], parity_of(j) ^ 1);
#if CLUSTER > 1
        const u32 summed = remote_address(&shared.summed[buffer], owner);
        const u32 sums = remote_address(&shared.sums[buffer][0][slice][live], owner);
#endif
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) {
            const float4 v = make_float4(acc[0][nt][0] + acc[1][nt][0], acc[0][nt][1] + acc[1][nt][1],
                                         acc[0][nt][2] + acc[1][nt][2], acc[0][nt][3] + acc[1][nt][3]);
            if ((lane & 3) < LIVE) {
#if CLUSTER > 1
                send_remote(sums + nt * (SLICES * 8 * LIVE * 16), summed, v.x, v.y, v.z, v.w);
#else
                shared.sums[buffer][nt][slice][live] = v;
#endif
            }
        }
#if CLUSTER == 1
        __syncwarp();
        if (lane < ARRIVING) barrier_arrive(&shared.summed[buffer]);
#endif
    }
}

// Warp ADDER: the sums of the block's tiles, and what becomes of them. A tile takes it as long as its instructions
// take one after the other, and while it is behind, products wait for its buffers: so it does as little as it can.
DEVICE void add(const Params& p, Shared& shared, const Tiles& tiles, int rank, int lane) {
    float factors[NT][HELD] = {};
    Target next;
    int tile = tiles.begin + rank;
    if (p.row_scales)
        for (int t = tile + CLUSTER * lane; t < tiles.end; t += 32 * CLUSTER)
            asm volatile("prefetch.global.L2 [%0];" ::"l"(p.row_scales + 16 * t));
#if NORM
    Share normed(p, lane);
#if CLUSTER > 1
    if (lane == 0) barrier_expect(&shared.squared, SLICES * p.tokens * 4);
#endif
#endif
    wait_for_previous();
    if (tile < tiles.end) next.load(p, tile, lane);
#if NORM
    normed.load(p, lane);
    barrier_wait(&shared.squared, 0);
#pragma unroll
    for (int nt = 0; nt < NT; ++nt)
#pragma unroll
        for (int i = 0; i < HELD; ++i) factors[nt][i] = factor_of(p, shared, held_token(lane, nt, i));
    normed.store(p, shared, lane);
#endif
    for (int j = 0; tile < tiles.end; tile += CLUSTER, ++j) {
        const int buffer = buffer_of(j);
        const Target target = next;
        if (tile + CLUSTER < tiles.end) next.load(p, tile + CLUSTER, lane);
#if CLUSTER > 1
        if (lane == 0) barrier_expect(&shared.summed[buffer], SLICES * NT * 8 * LIVE * 16);
#endif
        barrier_wait(&shared.summed[buffer], parity_of(j));
        float s[NT][HELD][HELD];
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) {
            const float4* sums = &shared.sums[buffer][nt][0][held_row(lane) * LIVE + (LIVE == 1 ? 0 : (lane & 3) % LIVE)];
#if LIVE == 1
            const float* one = reinterpret_cast<const float*>(sums) + 2 * held_half(lane, 0) + held_token(lane, 0, 0);
            float sum = 0;
#pragma unroll
            for (int w = 0; w < SLICES; ++w) sum += one[w * 8 * LIVE * 4];
            s[nt][0][0] = sum;
#else
            float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
            for (int w = 0; w < SLICES; ++w) {
                const float4 v = sums[w * 8 * LIVE];
                sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
            }
            s[nt][0][0] = sum.x, s[nt][0][1] = sum.y, s[nt][1][0] = sum.z, s[nt][1][1] = sum.w;
#endif
        }
        __syncwarp();
#if CLUSTER > 1
        if (lane < CLUSTER) arrive_remote(remote_address(&shared.freed[rank][buffer], lane));
#else
        if (lane < ARRIVING) barrier_arrive(&shared.freed[0][buffer]);
#endif
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) target.put(p, nt, lane, s[nt], factors[nt]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, SM_BLOCKS) small_linear(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) u8 memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
#if CLUSTER > 1
    const int rank = cluster_rank();
#else
    const int rank = 0;
#endif
    if (threadIdx.x < STAGES) {
#if __CUDA_ARCH__ >= 900
        barrier_init(&shared.full[threadIdx.x], 1);
#else
        barrier_init(&shared.full[threadIdx.x], 32);
#endif
        barrier_init(&shared.empty[threadIdx.x], WARPS);
    }
    if (threadIdx.x < BUFFERS) {
        barrier_init(&shared.summed[threadIdx.x], CLUSTER > 1 ? 1 : WARPS * ARRIVING);
        for (int r = 0; r < CLUSTER; ++r) barrier_init(&shared.freed[r][threadIdx.x], CLUSTER > 1 ? 1 : ARRIVING);
    }
#if NORM
    if (threadIdx.x == 0) barrier_init(&shared.squared, CLUSTER > 1 ? 1 : WARPS);
#endif
    barrier_init_fence();
    __syncthreads();
    allow_next();
    const Tiles tiles(p);
#if CLUSTER > 1
    cluster_arrive();
    if (warp != PRODUCER) cluster_wait();
#endif
    if (warp < WARPS) multiply(p, shared, memory + (sizeof(Shared) + 127) / 128 * 128, tiles, rank, warp, lane);
    else if (warp == PRODUCER) produce(p, shared, tiles, rank, lane);
    else add(p, shared, tiles, rank, lane);
#if CLUSTER > 1
    // Nobody leaves while others may still write to its memory.
    __syncwarp();
    if (warp == PRODUCER) cluster_wait();
    cluster_arrive();
    cluster_wait();
#endif
    if (warp == PRODUCER) wait_for_previous();
}
