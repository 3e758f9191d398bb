// Products of 1 to 16 tokens with packed weights: the time is that of reading the weights once.
//
// 4,470 GB/s are 34 GB/s for each of 132 SMs: a unit of 16 x 64 NVFP4 weights every 120 cycles of each of the four
// schedulers, which issue about 80 instructions for it. So products have warps of their own, eight in a block; a
// ninth copies weights into a ring in shared memory, which runs ahead across tiles and starts before the kernels
// ahead in the stream have ended, since weights depend on nothing; a tenth adds sums and writes results. Two
// blocks fit a multiprocessor, so that the next kernel's ring fills while this one ends.
//
// K is cut into `passes` x CLUSTER x 8 slices of units. A warp keeps its slice of x in registers, as B fragments, and
// goes over all tiles of its cluster; then it takes the slice of the next pass. The sums of a tile meet in the shared
// memory of one block of the cluster, in turn, and are always added in the same order: what a column gets depends
// neither on the other columns nor on how many there are.
//
// A norm of x in front of the product: x goes into it times the gains, and the sums are multiplied by 1 / rms, which
// the warps of a cluster find from their slices meanwhile.
//
// Compile with FORMAT (a decoder), TOKEN_TILES (of 8), SLICE_UNITS (of the longest slice), COPY_UNITS (of a warp in one
// copy), RING_COPIES, SUM_BUFFERS, CLUSTER (1 or 2 blocks), TOTALS (tiles of a block between passes; 0: there is one
// pass), SM_BLOCKS (that share a multiprocessor), NORM (of x; 1: gains in bf16, 2: in float32; else 0).
#pragma once
#include "barriers.cuh"
#include "formats_b.cuh"

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
    int tiles, units, passes, mode, unit_offset;
    float eps;
};

// RAW: float32 that are not rounded.
enum Mode { PLAIN = 0, SWIGLU = 1, LOGITS = 2, RAW = 3 };

typedef FORMAT Format;
static const int NT = TOKEN_TILES, KU = SLICE_UNITS, CHUNK = COPY_UNITS, STAGES = RING_COPIES, BUFFERS = SUM_BUFFERS;
static const int UC = Format::UNIT_COLUMNS, UB = Format::UNIT_BYTES, XR = UC / 8;
static const int WARPS = 8, PRODUCER = 8, ADDER = 9, THREADS = 320;
static const int CHUNKS = (KU + CHUNK - 1) / CHUNK;
static const int STAGE_BYTES = WARPS * CHUNK * UB;

#if NORM == 1
typedef u16 Gain;
#else
typedef float Gain;
#endif

struct Shared {
    alignas(128) u8 ring[STAGES][STAGE_BYTES];
    alignas(16) float4 sums[BUFFERS][NT][CLUSTER * WARPS][32];
#if TOTALS
    float4 totals[TOTALS][NT][32];
#endif
#if NORM
    alignas(16) Gain gains[WARPS][KU * UC];
    float squares[CLUSTER * WARPS][8 * NT];  // sums of x^2 over a warp's slices, of the whole cluster
    u64 squared;
#endif
    u64 full[STAGES], empty[STAGES];  // parts of the ring
    u64 summed[BUFFERS];              // all of a tile's sums are here
    u64 freed[CLUSTER][BUFFERS];      // a block of the cluster can take sums again
};

// Which units of K a warp or a block has in a pass.
struct Slice {
    int begin, units;
    DEVICE Slice(const Params& p, int first, int count) {
        const int slices = p.passes * CLUSTER * WARPS;
        begin = p.units * first / slices;
        units = p.units * (first + count) / slices - begin;
    }
};

// The tiles of a cluster, in batches whose totals fit: for each batch all passes, for each pass all tiles.
struct Batches {
    int begin, end, size;
    DEVICE Batches(const Params& p) {
        const int place = blockIdx.x / CLUSTER, places = gridDim.x / CLUSTER;
        begin = p.tiles * place / places, end = p.tiles * (place + 1) / places;
        size = TOTALS ? TOTALS * CLUSTER : end - begin;
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
// The gains of a warp's slice, which depend on no kernel ahead.
DEVICE void load_gains(const Params& p, const Slice& slice, int lane, Gain (&gains)[KU * UC]) {
    __syncwarp();
    for (int i = lane; i < slice.units * UC; i += 32) {
        const int c = slice.begin * UC + i;
        gains[i] = c < p.columns ? ((const Gain*)p.gain)[c] : (Gain)0;
    }
    __syncwarp();
}

// Four gains.
DEVICE float4 gains_at(const Params& p, const Gain* at) {
#if NORM == 1
    const uint2 g = *(const uint2*)at;
    float4 v = make_float4(low_bf16(g.x), high_bf16(g.x), low_bf16(g.y), high_bf16(g.y));
#else
    float4 v = *(const float4*)at;
#endif
    if (p.unit_offset) v.x += 1, v.y += 1, v.z += 1, v.w += 1;
    return v;
}

DEVICE void add_squares(const u32 (&x)[XR], float& even, float& odd) {
#pragma unroll
    for (int i = 0; i < XR; ++i) {
        const float a = low_bf16(x[i]), b = high_bf16(x[i]);
        even = fmaf(a, a, even), odd = fmaf(b, b, odd);
    }
}

// x of a unit times the gains.
DEVICE void scale_x(const Params& p, int q, const Gain* gains, u32 (&x)[XR]) {
#pragma unroll
    for (int i = 0; i < XR; i += 2) {
        const float4 g = gains_at(p, gains + 64 * (i / 8) + (Format::ORDER == 0 ? 16 * q + 2 * (i % 8) : 16 * (i % 8 / 2) + 4 * q));
        x[i] = pack_bf16x2(low_bf16(x[i]) * g.x, high_bf16(x[i]) * g.y);
        x[i + 1] = pack_bf16x2(low_bf16(x[i + 1]) * g.z, high_bf16(x[i + 1]) * g.w);
    }
}

// A lane's sums of squares of its token (of each tile) to the adders of the cluster.
DEVICE void send_squares(Shared& shared, int rank, int warp, int lane, const float (&even)[NT], const float (&odd)[NT]) {
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
        float sum = even[nt] + odd[nt];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        float* place = &shared.squares[rank * WARPS + warp][8 * nt + lane / 4];
#if CLUSTER > 1
        if (lane % 4 < CLUSTER) send_remote(remote_address(place, lane % 4), remote_address(&shared.squared, lane % 4), sum);
#else
        if (lane % 4 == 0) *place = sum;
#endif
    }
#if CLUSTER == 1
    __syncwarp();
    if (lane == 0) barrier_arrive(&shared.squared);
#endif
}

// 1 / rms of a token, once all squares are there.
DEVICE float factor_of(const Params& p, const Shared& shared, int token) {
    float sum = 0;
#pragma unroll
    for (int w = 0; w < CLUSTER * WARPS; ++w) sum += shared.squares[w][token];
    return rsqrtf(sum / p.columns + p.eps);
}

// This block's share of the normed rows, by one warp.
DEVICE void store_normed(const Params& p, const Shared& shared, int lane) {
    const int vectors = p.columns / 8, begin = vectors * blockIdx.x / gridDim.x;
    const int share = vectors * (blockIdx.x + 1) / gridDim.x - begin;
    for (int i = lane; i < p.tokens * share; i += 32) {
        const int token = i / share, c = 8 * (begin + i % share);
        const u64 at = (u64)token * p.columns + c;
        const Vec4 v = *reinterpret_cast<const Vec4*>(p.x + at);
        const float4 g = gains_at(p, (const Gain*)p.gain + c), h = gains_at(p, (const Gain*)p.gain + c + 4);
        const float f = factor_of(p, shared, token);
        *reinterpret_cast<Vec4*>(p.normed + at) = {pack_bf16x2(low_bf16(v.x) * f * g.x, high_bf16(v.x) * f * g.y),
                                                   pack_bf16x2(low_bf16(v.y) * f * g.z, high_bf16(v.y) * f * g.w),
                                                   pack_bf16x2(low_bf16(v.z) * f * h.x, high_bf16(v.z) * f * h.y),
                                                   pack_bf16x2(low_bf16(v.w) * f * h.z, high_bf16(v.w) * f * h.w)};
    }
}
#endif

// Where a lane's sums of a tile go, and what is added to them; loaded ahead of the sums.
struct Target {
    float scales[2];
    int columns[2];  // -1: nowhere
    float added[NT][4];

    DEVICE Target(const Params& p, int tile, int lane) {
        const int r = lane >> 2, t = 2 * (lane & 3);
        const int rows[2] = {p.mode == SWIGLU ? 8 * tile + r : 16 * tile + r, 16 * tile + r + 8};
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            scales[h] = p.row_scales ? p.row_scales[16 * tile + r + 8 * h] : 1;
            const int column = rows[h] >= p.rows ? -1 : p.row_map ? p.row_map[rows[h]] : p.first + rows[h];
            columns[h] = (u32)column < p.out_stride ? column : -1;
#pragma unroll
            for (int nt = 0; nt < NT; ++nt)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int token = 8 * nt + t + i;
                    u16 v = 0;
                    if (p.residual && columns[h] >= 0 && token < p.tokens)
                        v = p.residual[(u64)token * p.out_stride + columns[h]];
                    added[nt][2 * h + i] = __uint_as_float((u32)v << 16);
                }
        }
    }

    // `factors`: of the lane's two tokens.
    DEVICE void put(const Params& p, int nt, int lane, const float (&s)[4], const float (&factors)[2]) {
        float v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            v[i] = __fmul_rn(s[i], scales[i >> 1]);
            if (NORM) v[i] = __fmul_rn(v[i], factors[i & 1]);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int token = 8 * nt + 2 * (lane & 3) + (i & 1), column = columns[i >> 1];
            if (token >= p.tokens || column < 0 || (p.mode == SWIGLU && i > 1)) continue;
            const u64 at = (u64)token * p.out_stride + column;
            float value = v[i];
            if (p.mode == SWIGLU)
                value = __fdividef(value, 1 + __expf(-value)) * v[(i + 2) & 3];
            else if (p.residual)
                value = __fadd_rn(value, added[nt][i]);
            const u16 rounded = to_bf16(value);
            if (p.mode < LOGITS)
                ((u16*)p.out)[at] = rounded;
            else
                ((float*)p.out)[at] = p.mode == RAW ? value : __uint_as_float((u32)rounded << 16);
        }
    }
};

// A copy of weights into the ring: CHUNKS == 1: of all warps' parts at once, since they stand together; else lane w
// copies for warp w.
struct Copy {
    const u8* from;
    int units;
};

// All copies of a block in the order in which they are used, from number `begin` on, until `f` says no.
template <class F>
DEVICE void walk(const Params& p, const Batches& all, int rank, int lane, int begin, F f) {
    int i = 0;
    for (int batch = all.begin; batch < all.end; batch += all.size)
        for (int pass = 0; pass < p.passes; ++pass) {
            const int first = (pass * CLUSTER + rank) * WARPS;
            const Slice slice = CHUNKS == 1 ? Slice(p, first, WARPS) : Slice(p, first + lane % WARPS, 1);
            const int last = min(batch + all.size, all.end);
            for (int tile = batch; tile < last; ++tile) {
                const u8* row = p.weights + (u64)tile * p.units * UB + slice.begin * UB;
                for (int c = 0; c < CHUNKS; ++c, ++i) {
                    if (i < begin) continue;
                    const int units = CHUNKS == 1 ? slice.units : max(0, min(CHUNK, slice.units - c * CHUNK));
                    if (!f(i, Copy{row + c * CHUNK * UB, units})) return;
                }
            }
        }
}

// Warp PRODUCER: weights into the ring.
DEVICE void produce(const Params& p, Shared& shared, const Batches& all, int rank, int lane) {
    int stage = 0;
    u32 parity = 1;  // the ring is empty at first
#if __CUDA_ARCH__ >= 900
    const u64 policy = streaming_policy();
#endif
    walk(p, all, rank, lane, 0, [&](int i, Copy copy) {
        u8* to = shared.ring[stage] + (CHUNKS == 1 ? 0 : lane % WARPS * CHUNK * UB);
#if __CUDA_ARCH__ >= 900
        barrier_wait(&shared.empty[stage], parity);
        if (CHUNKS == 1) {
            if (lane == 0) {
                barrier_expect(&shared.full[stage], copy.units * UB);
                if (copy.units) bulk_copy(to, copy.from, copy.units * UB, &shared.full[stage], policy);
            }
        } else {
            int all_units = lane < WARPS ? copy.units : 0;
#pragma unroll
            for (int d = 4; d; d >>= 1) all_units += __shfl_xor_sync(~0u, all_units, d);
            if (lane == 0) barrier_expect(&shared.full[stage], all_units * UB);
            __syncwarp();
            if (lane < WARPS && copy.units) bulk_copy(to, copy.from, copy.units * UB, &shared.full[stage], policy);
        }
#else
        barrier_wait(&shared.empty[stage], parity);
        if (CHUNKS == 1)
            for (int b = 16 * lane; b < copy.units * UB; b += 512) async_copy16(to + b, copy.from + b);
        else
            for (int b = 16 * (lane / WARPS); b < copy.units * UB; b += 64) async_copy16(to + b, copy.from + b);
        async_arrive(&shared.full[stage]);
#endif
        if (++stage == STAGES) stage = 0, parity ^= 1;
        return true;
    });
}

// A place among buffers that come round.
struct Turn {
    int at = 0;
    u32 parity = 0;
    DEVICE void next(int places) {
        if (++at == places) at = 0, parity ^= 1;
    }
};

// Warps 0 .. 7: products.
DEVICE void multiply(const Params& p, Shared& shared, const Batches& all, int rank, int warp, int lane) {
    const int q = lane & 3, token = lane >> 2;
    Turn ring, turns[CLUSTER];
#if NORM
    load_gains(p, Slice(p, rank * WARPS + warp, 1), lane, shared.gains[warp]);
    float even[NT] = {}, odd[NT] = {};
#endif
    wait_for_previous();
    for (int batch = all.begin; batch < all.end; batch += all.size)
        for (int pass = 0; pass < p.passes; ++pass) {
            const int first = (pass * CLUSTER + rank) * WARPS;
            const Slice slice(p, first + warp, 1);
            const int offset = (CHUNKS == 1 ? slice.begin - Slice(p, first, 1).begin : warp * CHUNK) * UB;
            u32 x[KU][NT][XR];
#pragma unroll
            for (int u = 0; u < KU; ++u)
#pragma unroll
                for (int nt = 0; nt < NT; ++nt)
                    load_x(p, 8 * nt + token, slice.begin + u, q, 8 * nt + token < p.tokens && u < slice.units, x[u][nt]);
#if NORM
            if (pass > 0 || batch > all.begin) load_gains(p, slice, lane, shared.gains[warp]);
#pragma unroll
            for (int nt = 0; nt < NT; ++nt)
#pragma unroll
                for (int u = 0; u < KU; ++u) {
                    add_squares(x[u][nt], even[nt], odd[nt]);
                    if (u < slice.units) scale_x(p, q, shared.gains[warp] + u * UC, x[u][nt]);
                }
            if (batch == all.begin && pass == p.passes - 1) send_squares(shared, rank, warp, lane, even, odd);
#endif
            const int last = min(batch + all.size, all.end);
            for (int tile = batch; tile < last; ++tile) {
                float acc[2][NT][4];  // of even and odd units: products of one need not wait for the other
#pragma unroll
                for (int nt = 0; nt < NT; ++nt)
#pragma unroll
                    for (int i = 0; i < 4; ++i) acc[0][nt][i] = acc[1][nt][i] = 0;
#pragma unroll
                for (int c = 0; c < CHUNKS; ++c) {
                    barrier_wait(&shared.full[ring.at], ring.parity);
                    const u8* chunk = shared.ring[ring.at] + offset;
#pragma unroll
                    for (int k = 0; k < CHUNK; ++k) {
                        const int u = c * CHUNK + k;
                        if (u < KU && (u < KU - 1 || u < slice.units))
                            Format::unit<NT>(chunk + k * UB, lane, x[u], acc[u & 1]);
                    }
                    __syncwarp();
                    if (lane == 0) barrier_arrive(&shared.empty[ring.at]);
                    ring.next(STAGES);
                }
                const int owner = CLUSTER == 1 ? 0 : (tile - batch) % CLUSTER;
                Turn turn = turns[0];
#if CLUSTER > 1
                if (owner) turn = turns[1];
                barrier_wait(&shared.freed[owner][turn.at], turn.parity ^ 1);
                const u32 summed = remote_address(&shared.summed[turn.at], owner);
                const u32 sums = remote_address(&shared.sums[turn.at][0][rank * WARPS + warp][lane], owner);
#pragma unroll
                for (int nt = 0; nt < NT; ++nt)
                    send_remote(sums + nt * (CLUSTER * WARPS * 512), summed, acc[0][nt][0] + acc[1][nt][0],
                                 acc[0][nt][1] + acc[1][nt][1], acc[0][nt][2] + acc[1][nt][2],
                                 acc[0][nt][3] + acc[1][nt][3]);
#else
                barrier_wait(&shared.freed[0][turn.at], turn.parity ^ 1);
#pragma unroll
                for (int nt = 0; nt < NT; ++nt)
                    shared.sums[turn.at][nt][warp][lane] =
                        make_float4(acc[0][nt][0] + acc[1][nt][0], acc[0][nt][1] + acc[1][nt][1],
                                    acc[0][nt][2] + acc[1][nt][2], acc[0][nt][3] + acc[1][nt][3]);
                __syncwarp();
                if (lane == 0) barrier_arrive(&shared.summed[turn.at]);
#endif
                turn.next(BUFFERS);
                if (CLUSTER == 1 || owner == 0) turns[0] = turn;
#if CLUSTER > 1
                else turns[1] = turn;
#endif
            }
        }
}

// Warp ADDER: the sums of the block's tiles, and what becomes of them.
DEVICE void add(const Params& p, Shared& shared, const Batches& all, int rank, int lane) {
    Turn turn;
    float factors[NT][2];
#if NORM && CLUSTER > 1
    if (lane == 0) barrier_expect(&shared.squared, CLUSTER * WARPS * 8 * NT * 4);
#endif
    wait_for_previous();
#if NORM
    bool known = false;
    const auto find_factors = [&] {
        if (known) return;
        known = true;
        barrier_wait(&shared.squared, 0);
#pragma unroll
        for (int i = 0; i < 2 * NT; ++i)
            factors[i / 2][i % 2] = factor_of(p, shared, 8 * (i / 2) + 2 * (lane % 4) + i % 2);
        if (p.normed) store_normed(p, shared, lane);
    };
#endif
    for (int batch = all.begin; batch < all.end; batch += all.size)
        for (int pass = 0; pass < p.passes; ++pass) {
            const int last = min(batch + all.size, all.end);
            for (int tile = batch + rank; tile < last; tile += CLUSTER) {
                Target target(p, tile, lane);
#if CLUSTER > 1
                if (lane == 0) barrier_expect(&shared.summed[turn.at], CLUSTER * WARPS * NT * 512);
#endif
                barrier_wait(&shared.summed[turn.at], turn.parity);
                float s[NT][4];
#pragma unroll
                for (int nt = 0; nt < NT; ++nt) {
                    s[nt][0] = s[nt][1] = s[nt][2] = s[nt][3] = 0;
#pragma unroll
                    for (int w = 0; w < CLUSTER * WARPS; ++w) {
                        const float4 v = shared.sums[turn.at][nt][w][lane];
                        s[nt][0] += v.x, s[nt][1] += v.y, s[nt][2] += v.z, s[nt][3] += v.w;
                    }
                }
                __syncwarp();
                if (lane < CLUSTER) {
#if CLUSTER > 1
                    arrive_remote(remote_address(&shared.freed[rank][turn.at], lane));
#else
                    barrier_arrive(&shared.freed[0][turn.at]);
#endif
                }
                turn.next(BUFFERS);
#if NORM
                if (pass == p.passes - 1) find_factors();
#endif
#pragma unroll
                for (int nt = 0; nt < NT; ++nt) {
#if TOTALS
                    float4& total = shared.totals[(tile - batch) / CLUSTER][nt][lane];
                    if (pass > 0)
                        s[nt][0] += total.x, s[nt][1] += total.y, s[nt][2] += total.z, s[nt][3] += total.w;
                    if (pass < p.passes - 1) {
                        total = make_float4(s[nt][0], s[nt][1], s[nt][2], s[nt][3]);
                        continue;
                    }
#endif
                    target.put(p, nt, lane, s[nt], factors[nt]);
                }
            }
        }
#if NORM
    find_factors();  // a block without tiles is sent squares, too, and stores its share
#endif
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
        barrier_init(&shared.summed[threadIdx.x], CLUSTER > 1 ? 1 : WARPS);
        for (int r = 0; r < CLUSTER; ++r) barrier_init(&shared.freed[r][threadIdx.x], 1);
    }
#if NORM
    if (threadIdx.x == 0) barrier_init(&shared.squared, CLUSTER > 1 ? 1 : WARPS);
#endif
    barrier_init_fence();
    __syncthreads();
    allow_next();
    const Batches all(p);
#if CLUSTER > 1
    cluster_arrive();
    if (warp != PRODUCER) cluster_wait();
#endif
    if (warp < WARPS) multiply(p, shared, all, rank, warp, lane);
    else if (warp == PRODUCER) produce(p, shared, all, rank, lane);
    else add(p, shared, all, rank, lane);
#if CLUSTER > 1
    // Nobody leaves while others may still write to its memory.
    __syncwarp();
    if (warp == PRODUCER) cluster_wait();
    cluster_arrive();
    cluster_wait();
#endif
    if (warp == PRODUCER) wait_for_previous();
}
