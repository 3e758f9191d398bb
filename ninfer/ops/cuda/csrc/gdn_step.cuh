// The gated delta rule column by column, for up to 16 columns of a request the whole mixer in one launch.
//
// A state's 16 rows belong to a block (GROUP value heads of one key head), STRIPS blocks share a key head and form
// a cluster: they exchange partial control products and sums of squares, and nobody writes a history before all
// of them have read it. LANES threads share a row; each holds four floats of every 4 * LANES.
//
// Compiled with DK, GROUP, STRIPS (rows of a value head / 16), LANES (8 or 16), TAPS (1 to 4), HIDDEN (of 4),
// RESIDENT (blocks of a multiprocessor).
// Everything that a state depends on is written as explicit operations, and both kernels call the same functions:
// a fold has the bits of the call whose columns it repeats.
#pragma once
#include "barriers.cuh"

#if __CUDA_ARCH__ >= 900

#define ROWS 16
#define THREADS (ROWS * LANES)
#define WARPS (THREADS / 32)
#define PIECES (DK / (4 * LANES))
#define BATCH 16
#define VALUES (GROUP * ROWS)
#define PRODUCTS (2 * GROUP)
#define PAST (TAPS - 1)
#define FULL 0xffffffffu
// Requests whose blocks run at the same time, about.
#define AHEAD 3

struct Params {
    const u16 *qkv, *k, *v, *z, *h, *a, *b, *weight, *norm;
    u16 *conv_states, *out, *conv_records, *k_records, *v_records;
    const float *a_log, *dt_bias, *g, *beta;
    float *states, *g_records, *beta_records;
    const int *order, *sources, *targets, *counts;
    // Strides in elements. `first`: the first column of a request that is run; `record_rows`: of a request.
    int q_stride, k_stride, v_stride, z_stride, h_stride, columns, first, record_rows, key_heads, slots;
    float eps;
};

struct Shared {
    alignas(16) float queries[BATCH][DK], keys[BATCH][DK], values[BATCH][VALUES], shown[BATCH][VALUES];
    float warp_products[WARPS][BATCH][PRODUCTS];
    float products[STRIPS][BATCH][PRODUCTS];  // written by all blocks of the cluster
    float squares[STRIPS][BATCH][GROUP];      // the same
    u64 products_here, squares_here;
    float dots[BATCH], alpha[BATCH][GROUP], strength[BATCH][GROUP];
    int places[GROUP];
};

DEVICE float bf16(u16 x) { return __uint_as_float((u32)x << 16); }
DEVICE float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

DEVICE u32 load32(const u16* p) { return *reinterpret_cast<const u32*>(p); }
DEVICE void store32(u16* p, u32 x) { *reinterpret_cast<u32*>(p) = x; }

DEVICE float warp_sum(float x) {
#pragma unroll
    for (int offset = 16; offset; offset >>= 1) x = __fadd_rn(x, __shfl_xor_sync(FULL, x, offset));
    return x;
}

// Keys and queries of `count` columns to unit length, queries also by 1 / sqrt(DK), and their products. A warp does
// a column.
DEVICE void normalize(Shared& s, int count) {
    const int lane = threadIdx.x & 31;
#pragma unroll 1
    for (int t = threadIdx.x >> 5; t < count; t += WARPS) {
        float q[DK / 32], k[DK / 32], qq = 0.0f, kk = 0.0f, qk = 0.0f;
#pragma unroll
        for (int i = 0; i < DK / 32; i++) {
            q[i] = s.queries[t][32 * i + lane];
            k[i] = s.keys[t][32 * i + lane];
            qq = __fmaf_rn(q[i], q[i], qq);
            kk = __fmaf_rn(k[i], k[i], kk);
            qk = __fmaf_rn(q[i], k[i], qk);
        }
        qq = warp_sum(qq), kk = warp_sum(kk), qk = warp_sum(qk);
        const float unit_k = __frsqrt_rn(__fadd_rn(kk, 1e-6f));
        const float unit_q = __fmul_rn(__frsqrt_rn(__fadd_rn(qq, 1e-6f)), __frsqrt_rn((float)DK));
#pragma unroll
        for (int i = 0; i < DK / 32; i++) {
            s.queries[t][32 * i + lane] = __fmul_rn(q[i], unit_q);
            s.keys[t][32 * i + lane] = __fmul_rn(k[i], unit_k);
        }
        if (lane == 0) s.dots[t] = __fmul_rn(qk, __fmul_rn(unit_q, unit_k));
    }
}

struct State {
    float4 x[GROUP][PIECES];
};

DEVICE float4* state_row(float* states, int slot, int key_head, int key_heads, int rank, int head) {
    const int row = rank * ROWS + threadIdx.x / LANES;
    const long long place = (long long)slot * key_heads * GROUP + key_head * GROUP + head;
    return reinterpret_cast<float4*>(states + (place * (STRIPS * ROWS) + row) * DK) + threadIdx.x % LANES;
}

DEVICE void load_state(State& state, float* states, int slot, int key_head, int key_heads, int rank) {
#pragma unroll
    for (int j = 0; j < GROUP; j++) {
        const float4* row = state_row(states, slot < 0 ? 0 : slot, key_head, key_heads, rank, j);
#pragma unroll
        for (int i = 0; i < PIECES; i++)
            state.x[j][i] = slot < 0 ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : __ldcs(row + LANES * i);
    }
}

DEVICE void store_state(const State& state, float* states, int slot, int key_head, int key_heads, int rank) {
#pragma unroll
    for (int j = 0; j < GROUP; j++) {
        float4* row = state_row(states, slot, key_head, key_heads, rank, j);
#pragma unroll
        for (int i = 0; i < PIECES; i++) __stcs(row + LANES * i, state.x[j][i]);
    }
}

// A hint: the block's rows of a state into the L2 cache. `slot` may be of the past, and is only trusted to be one.
DEVICE void prefetch_state(const Params& p, int request, int key_head, int rank) {
    if (threadIdx.x < GROUP && request < gridDim.y) {
        const int slot = *(const volatile int*)(p.sources + request);
        if (0 <= slot && slot < p.slots) {
            const long long place = (long long)slot * p.key_heads * GROUP + key_head * GROUP + threadIdx.x;
            const float* rows = p.states + (place * (STRIPS * ROWS) + rank * ROWS) * DK;
            asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(rows), "n"(ROWS * DK * 4) : "memory");
        }
    }
}

DEVICE void add_products(float& sum, float4 a, float4 b) {
    sum = __fmaf_rn(a.x, b.x, sum);
    sum = __fmaf_rn(a.y, b.y, sum);
    sum = __fmaf_rn(a.z, b.z, sum);
    sum = __fmaf_rn(a.w, b.w, sum);
}

DEVICE float grown(float s, float alpha, float u, float k) { return __fmaf_rn(u, k, __fmul_rn(alpha, s)); }

// The state through `count` columns; what they show, rounded to bf16, goes to `shown`.
DEVICE void run(State& state, Shared& s, int count) {
    const int lane = threadIdx.x % LANES, row = threadIdx.x / LANES;
#pragma unroll 1
    for (int t = 0; t < count; t++) {
        float4 k[PIECES], q[PIECES];
#pragma unroll
        for (int i = 0; i < PIECES; i++) {
            k[i] = reinterpret_cast<const float4*>(s.keys[t])[LANES * i + lane];
            q[i] = reinterpret_cast<const float4*>(s.queries[t])[LANES * i + lane];
        }
        float dk[GROUP], dq[GROUP];
#pragma unroll
        for (int j = 0; j < GROUP; j++) {
            dk[j] = dq[j] = 0.0f;
#pragma unroll
            for (int i = 0; i < PIECES; i++) {
                add_products(dk[j], state.x[j][i], k[i]);
                add_products(dq[j], state.x[j][i], q[i]);
            }
        }
        // The lower half of a row's lanes sums over dk, the upper over dq; then they swap.
        const bool upper = lane & (LANES / 2);
#pragma unroll
        for (int j = 0; j < GROUP; j++) {
            const float other = __shfl_xor_sync(FULL, upper ? dk[j] : dq[j], LANES / 2);
            float sum = __fadd_rn(upper ? dq[j] : dk[j], other);
#pragma unroll
            for (int offset = LANES / 4; offset; offset >>= 1)
                sum = __fadd_rn(sum, __shfl_xor_sync(FULL, sum, offset));
            const float swapped = __shfl_xor_sync(FULL, sum, LANES / 2);
            dk[j] = upper ? swapped : sum;
            dq[j] = upper ? sum : swapped;
        }
#pragma unroll
        for (int j = 0; j < GROUP; j++) {
            const float alpha = s.alpha[t][j];
            const float error = __fmaf_rn(-alpha, dk[j], s.values[t][j * ROWS + row]);
            const float u = __fmul_rn(s.strength[t][j], error);
            if (lane == 0)
                s.shown[t][j * ROWS + row] = bf16(to_bf16(__fmaf_rn(u, s.dots[t], __fmul_rn(alpha, dq[j]))));
#pragma unroll
            for (int i = 0; i < PIECES; i++) {
                float4& x = state.x[j][i];
                x.x = grown(x.x, alpha, u, k[i].x);
                x.y = grown(x.y, alpha, u, k[i].y);
                x.z = grown(x.z, alpha, u, k[i].z);
                x.w = grown(x.w, alpha, u, k[i].w);
            }
        }
    }
}

// Columns from `first` on (with `counts` that many from the first) of a request: outputs if wanted, the state into
// its target or the columns into records.
DEVICE void columns(Shared& s, const Params& p) {
    const int rank = blockIdx.x % STRIPS, key_head = blockIdx.x / STRIPS, request = blockIdx.y;
    const int heads = p.key_heads * GROUP;
    const int source = p.sources[request], target = p.k_records ? 0 : p.targets[request];
    const int end = p.counts ? min(p.columns, p.counts[request]) : p.columns;
    State state;
    load_state(state, p.states, source, key_head, p.key_heads, rank);
    if (end <= p.first) return;
#pragma unroll 1
    for (int base = p.first; base < end; base += BATCH) {
        const int count = min(BATCH, end - base);
        __syncthreads();  // the last batch is through
#pragma unroll 1
        for (int i = threadIdx.x; i < count * (DK / 2); i += THREADS) {
            const int t = i / (DK / 2), c = i % (DK / 2) * 2;
            const long long column = (long long)request * p.columns + base + t;
            const u32 k = load32(p.k + column * p.k_stride + key_head * DK + c);
            const u32 q = p.qkv ? load32(p.qkv + column * p.q_stride + key_head * DK + c) : k;
            s.keys[t][c] = low_bf16(k), s.keys[t][c + 1] = high_bf16(k);
            s.queries[t][c] = low_bf16(q), s.queries[t][c + 1] = high_bf16(q);
            if (p.k_records && rank == 0) {
                const long long at = (long long)request * p.record_rows + base + t;
                store32(p.k_records + (at * p.key_heads + key_head) * DK + c, k);
            }
        }
#pragma unroll 1
        for (int i = threadIdx.x; i < count * VALUES; i += THREADS) {
            const int t = i / VALUES, c = i % VALUES;
            const int head = key_head * GROUP + c / ROWS, place = rank * ROWS + c % ROWS;
            const long long column = (long long)request * p.columns + base + t;
            const u16 value = p.v[column * p.v_stride + head * (STRIPS * ROWS) + place];
            s.values[t][c] = bf16(value);
            if (p.v_records) {
                const long long at = (long long)request * p.record_rows + base + t;
                p.v_records[(at * heads + head) * (STRIPS * ROWS) + place] = value;
            }
        }
#pragma unroll 1
        for (int i = threadIdx.x; i < count * GROUP; i += THREADS) {
            const int t = i / GROUP, head = key_head * GROUP + i % GROUP;
            const long long column = (long long)request * p.columns + base + t;
            const float g = p.g[column * heads + head], beta = p.beta[column * heads + head];
            s.alpha[t][i % GROUP] = expf(g);
            s.strength[t][i % GROUP] = beta;
            if (p.g_records && rank == 0) {
                const long long at = ((long long)request * p.record_rows + base + t) * heads + head;
                p.g_records[at] = g;
                p.beta_records[at] = beta;
            }
        }
        __syncthreads();
        normalize(s, count);
        __syncthreads();
        run(state, s, count);
        if (p.out) {
            __syncthreads();
#pragma unroll 1
            for (int i = threadIdx.x; i < count * (VALUES / 2); i += THREADS) {
                const int t = i / (VALUES / 2), c = i % (VALUES / 2) * 2;
                const long long column = (long long)request * p.columns + base + t;
                const int head = key_head * GROUP + c / ROWS;
                u16* place = p.out + (column * heads + head) * (STRIPS * ROWS) + rank * ROWS + c % ROWS;
                store32(place, pack_bf16x2(s.shown[t][c], s.shown[t][c + 1]));
            }
        }
    }
    if (!p.k_records) store_state(state, p.states, target, key_head, p.key_heads, rank);
}

// Grid (STRIPS * key heads, requests).
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) gdn_columns(const __grid_constant__ Params p) {
    __shared__ Shared s;
    const int rank = blockIdx.x % STRIPS, key_head = blockIdx.x / STRIPS;
    prefetch_state(p, blockIdx.y, key_head, rank);
    allow_next();
    wait_for_previous();
    prefetch_state(p, blockIdx.y + AHEAD, key_head, rank);
    columns(s, p);
}

struct FoldedLayer {
    const u16 *k, *v, *conv_records;
    const float *g, *beta;
    float* states;
    u16* conv_states;
};

struct FoldParams {
    FoldedLayer layers[LAYERS];
    const int *sources, *targets, *counts;
    int columns, key_heads, slots;
};

// States and histories of several layers through the first `counts` of their recorded columns. Grid (STRIPS * key
// heads, requests, layers).
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) gdn_fold(const __grid_constant__ FoldParams fold) {
    __shared__ Shared s;
    const FoldedLayer& layer = fold.layers[blockIdx.z];
    const int heads = fold.key_heads * GROUP, request = blockIdx.y;
    Params p = {};
    p.k = layer.k, p.v = layer.v, p.g = layer.g, p.beta = layer.beta, p.states = layer.states;
    p.sources = fold.sources, p.targets = fold.targets, p.counts = fold.counts;
    p.k_stride = fold.key_heads * DK, p.v_stride = heads * (STRIPS * ROWS);
    p.columns = fold.columns, p.key_heads = fold.key_heads, p.slots = fold.slots;
    allow_next();
    wait_for_previous();
    const int channels = 2 * fold.key_heads * DK + heads * (STRIPS * ROWS);
    const int source = p.sources[request], target = p.targets[request];
    const int count = min(p.columns, p.counts[request]);
    const int channel = 2 * (blockIdx.x * THREADS + threadIdx.x);
    if (count > 0 && channel < channels) {
        u32 kept[3];
#pragma unroll
        for (int j = 0; j < PAST; j++) {
            const int row = j + count - PAST;
            kept[j] = row >= 0 ? load32(layer.conv_records + ((long long)request * p.columns + row) * channels + channel)
                      : source >= 0
                          ? load32(layer.conv_states + ((long long)source * PAST + row + PAST) * channels + channel)
                          : 0;
        }
#pragma unroll
        for (int j = 0; j < PAST; j++)
            store32(layer.conv_states + ((long long)target * PAST + j) * channels + channel, kept[j]);
    }
    columns(s, p);
}

#define UNITS (HIDDEN / 4)
#define TURNS ((UNITS + STRIPS * THREADS - 1) / (STRIPS * THREADS))

// Sums over the lanes of a warp of up to eight values: lane l gets that of value l / 4.
DEVICE float folded(const float (&x)[PRODUCTS]) {
    const int lane = threadIdx.x & 31;
    float y[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float low = i < PRODUCTS ? x[i < PRODUCTS ? i : 0] : 0.0f;
        const float high = i + 4 < PRODUCTS ? x[i + 4 < PRODUCTS ? i + 4 : 0] : 0.0f;
        const float sent = __shfl_xor_sync(FULL, lane & 16 ? low : high, 16);
        y[i] = (lane & 16 ? high : low) + sent;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float sent = __shfl_xor_sync(FULL, lane & 8 ? y[i] : y[i + 2], 8);
        y[i] = (lane & 8 ? y[i + 2] : y[i]) + sent;
    }
    const float sent = __shfl_xor_sync(FULL, lane & 4 ? y[0] : y[1], 4);
    y[0] = (lane & 4 ? y[1] : y[0]) + sent;
    y[0] += __shfl_xor_sync(FULL, y[0], 2);
    return y[0] + __shfl_xor_sync(FULL, y[0], 1);
}

DEVICE void controls(float a, float b, float a_log, float bias, float& g, float& beta) {
    const float x = a + bias;
    g = __fmul_rn(-expf(a_log), fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))));
    beta = __fdiv_rn(1.0f, 1.0f + expf(-b));
}

// One column of two neighbouring channels: raw in, convolved and rounded out; the history moves on.
DEVICE u32 convolve(u32 (&past)[3], u32 fresh, const u32 (&w)[4]) {
    float low = low_bf16(w[0]) * low_bf16(past[0]), high = high_bf16(w[0]) * high_bf16(past[0]);
    low = fmaf(low_bf16(w[1]), low_bf16(past[1]), low), high = fmaf(high_bf16(w[1]), high_bf16(past[1]), high);
    low = fmaf(low_bf16(w[2]), low_bf16(past[2]), low), high = fmaf(high_bf16(w[2]), high_bf16(past[2]), high);
    low = fmaf(low_bf16(w[3]), low_bf16(fresh), low), high = fmaf(high_bf16(w[3]), high_bf16(fresh), high);
    past[0] = past[1], past[1] = past[2], past[2] = fresh;
    return pack_bf16x2(silu(low), silu(high));
}

#define PAIRS (DK + VALUES / 2)
#define CONV_TURNS ((PAIRS + THREADS - 1) / THREADS)
#define OUT_TURNS ((BATCH * VALUES / 2 + THREADS - 1) / THREADS)

// A hint like `prefetch_state`: the history of a thread's channels.
DEVICE void prefetch_history(const Params& p, int request, int channels, const int (&channel)[CONV_TURNS]) {
    const int slot = *(const volatile int*)(p.sources + request);
    if (slot < 0 || slot >= p.slots) return;
#pragma unroll
    for (int i = 0; i < CONV_TURNS; i++)
        if (channel[i] >= 0 && channel[i] % 16 == 0)
#pragma unroll
            for (int j = 0; j < PAST; j++)
                asm volatile("prefetch.global.L2 [%0];" ::"l"(p.conv_states + ((long long)slot * PAST + j) * channels +
                                                              channel[i]));
}

// The mixer for up to BATCH columns of a request. Grid (STRIPS * key heads, requests), clusters of STRIPS.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) gdn_mix(const __grid_constant__ Params p) {
    __shared__ Shared s;
    const int rank = blockIdx.x % STRIPS, key_head = blockIdx.x / STRIPS, request = blockIdx.y;
    const int tid = threadIdx.x, heads = p.key_heads * GROUP, width = STRIPS * ROWS;
    const int keys = p.key_heads * DK, channels = 2 * keys + heads * width, count = p.columns;
    if (tid == 0) {
        barrier_init(&s.products_here, 1);
        barrier_init(&s.squares_here, 1);
        barrier_init_fence();
        barrier_expect(&s.products_here, STRIPS * PRODUCTS * 4 * count);
        barrier_expect(&s.squares_here, STRIPS * GROUP * 4 * count);
    }
    __syncthreads();
    cluster_arrive();

    // What nobody writes: control projections, filters, gains, where heads go.
    const int unit = tid / 4 * (4 * STRIPS) + rank * 4 + tid % 4;
    const bool multiplies = tid / 32 * (32 * STRIPS) + rank * 4 < UNITS;
    uint2 rows[TURNS][PRODUCTS];
#pragma unroll
    for (int i = 0; i < TURNS; i++)
#pragma unroll
        for (int j = 0; j < PRODUCTS; j++) {
            const int place = unit + i * STRIPS * THREADS;
            const u16* row = (j < GROUP ? p.a : p.b) + (long long)(key_head * GROUP + j % GROUP) * HIDDEN;
            rows[i][j] = place < UNITS ? reinterpret_cast<const uint2*>(row)[place] : make_uint2(0, 0);
        }
    int channel[CONV_TURNS];
    u32 weight[CONV_TURNS][4];
#pragma unroll
    for (int i = 0; i < CONV_TURNS; i++) {
        // From the last thread on: the first ones have control products to do.
        const int pair = THREADS - 1 - tid + i * THREADS;
        const int v = 2 * (pair - DK);
        channel[i] = pair >= PAIRS ? -1
                     : pair < DK / 2 ? key_head * DK + 2 * pair
                     : pair < DK     ? keys + key_head * DK + 2 * pair - DK
                                     : 2 * keys + (key_head * GROUP + v / ROWS) * width + rank * ROWS + v % ROWS;
#pragma unroll
        for (int j = 0; j < 4; j++)
            weight[i][j] = j >= 4 - TAPS && channel[i] >= 0
                               ? load32(p.weight + (j - 4 + TAPS) * channels + channel[i])
                               : 0;
    }
    u32 gains[OUT_TURNS];
#pragma unroll
    for (int i = 0; i < OUT_TURNS; i++) gains[i] = load32(p.norm + rank * ROWS + (tid + i * THREADS) % (ROWS / 2) * 2);
    if (p.order) {
        for (int i = tid; i < heads; i += THREADS) {
            const int j = p.order[i] - key_head * GROUP;
            if (0 <= j && j < GROUP) s.places[j] = i;
        }
    } else if (tid < GROUP) {
        s.places[tid] = key_head * GROUP + tid;
    }
    // One thread for each column and head, from the last one on: the first ones sum and normalize.
    const int control = THREADS - 1 - tid, control_head = key_head * GROUP + control % GROUP;
    const float a_log = p.a_log[control_head], dt_bias = p.dt_bias[control_head];
    prefetch_state(p, request, key_head, rank);
    prefetch_history(p, request, channels, channel);
    // A product behind fills its ring meanwhile: it must be so large that no two blocks of it share a multiprocessor.
    allow_next();
    wait_for_previous();
    // What a later wave of blocks will read.
    prefetch_state(p, request + AHEAD, key_head, rank);

    const int source = p.sources[request], target = p.targets[request];
    const long long first = (long long)request * count, record = (long long)request * p.record_rows;
    // What needs no slot is on the way before the slot is known.
    uint2 x[4][TURNS];
    auto load_columns = [&](int base) {
#pragma unroll
        for (int t = 0; t < 4; t++) {
            const uint2* column = reinterpret_cast<const uint2*>(p.h + (first + base + t) * p.h_stride);
#pragma unroll
            for (int i = 0; i < TURNS; i++) {
                const int place = unit + i * STRIPS * THREADS;
                x[t][i] = base + t < count && place < UNITS ? column[place] : make_uint2(0, 0);
            }
        }
    };
    load_columns(0);
    u32 fresh[CONV_TURNS][4];
    auto load_fresh = [&](int i, int base) {
#pragma unroll
        for (int t = 0; t < 4; t++)
            fresh[i][t] = channel[i] >= 0 && base + t < count
                              ? load32(p.qkv + (first + base + t) * p.q_stride + channel[i])
                              : 0;
    };
#pragma unroll
    for (int i = 0; i < CONV_TURNS; i++) load_fresh(i, 0);
    u32 gates[OUT_TURNS];
#pragma unroll
    for (int i = 0; i < OUT_TURNS; i++) {
        const int at = tid + i * THREADS, t = at / (VALUES / 2), c = at % (VALUES / 2) * 2;
        const int row = rank * ROWS + c % ROWS;
        gates[i] = t < count ? load32(p.z + (first + t) * p.z_stride + (key_head * GROUP + c / ROWS) * width + row) : 0;
    }
    u32 past[CONV_TURNS][3];
#pragma unroll
    for (int i = 0; i < CONV_TURNS; i++)
#pragma unroll
        for (int j = 0; j < 3; j++)
            past[i][j] = j >= 3 - PAST && channel[i] >= 0 && source >= 0
                             ? load32(p.conv_states + ((long long)source * PAST + j - 3 + PAST) * channels + channel[i])
                             : 0;

    if (multiplies) {  // of whole warps
#pragma unroll 1
        for (int base = 0; base < count; base += 4) {
            if (base) load_columns(base);
#pragma unroll
            for (int t = 0; t < 4; t++) {
                if (base + t >= count) break;
                float sums[PRODUCTS];
#pragma unroll
                for (int j = 0; j < PRODUCTS; j++) sums[j] = 0.0f;
#pragma unroll
                for (int i = 0; i < TURNS; i++)
#pragma unroll
                    for (int j = 0; j < PRODUCTS; j++) {
                        sums[j] = __fmaf_rn(low_bf16(rows[i][j].x), low_bf16(x[t][i].x), sums[j]);
                        sums[j] = __fmaf_rn(high_bf16(rows[i][j].x), high_bf16(x[t][i].x), sums[j]);
                        sums[j] = __fmaf_rn(low_bf16(rows[i][j].y), low_bf16(x[t][i].y), sums[j]);
                        sums[j] = __fmaf_rn(high_bf16(rows[i][j].y), high_bf16(x[t][i].y), sums[j]);
                    }
                const float sum = folded(sums);
                const int j = tid % 32 / 4;
                if (tid % 4 == 0 && j < PRODUCTS) s.warp_products[tid / 32][base + t][j] = sum;
            }
        }
    } else {
        for (int i = tid % 32; i < count * PRODUCTS; i += 32) s.warp_products[tid / 32][i / PRODUCTS][i % PRODUCTS] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < CONV_TURNS; i++) {
        if (channel[i] < 0) continue;
        const int pair = THREADS - 1 - tid + i * THREADS;
        float* place = pair < DK / 2 ? s.queries[0] + 2 * pair
                       : pair < DK   ? s.keys[0] + 2 * pair - DK
                                     : s.values[0] + 2 * (pair - DK);
        const int step = pair < DK ? DK : VALUES;
#pragma unroll 1
        for (int base = 0; base < count; base += 4) {
            if (base) load_fresh(i, base);
#pragma unroll
            for (int t = 0; t < 4; t++) {
                if (base + t >= count) break;
                const u32 done = convolve(past[i], fresh[i][t], weight[i]);
                place[(base + t) * step] = low_bf16(done), place[(base + t) * step + 1] = high_bf16(done);
                if (p.k_records && (pair >= DK || rank == 0)) {
                    const long long at = record + base + t;
                    store32(p.conv_records + at * channels + channel[i], fresh[i][t]);
                    if (pair >= DK)
                        store32(p.v_records + at * heads * width + channel[i] - 2 * keys, done);
                    else if (pair >= DK / 2)
                        store32(p.k_records + at * keys + channel[i] - keys, done);
                }
            }
        }
    }
    __syncthreads();
    // Not earlier, for want of registers; the prefetch has brought it near.
    State state;
    load_state(state, p.states, source, key_head, p.key_heads, rank);
    cluster_wait();
#pragma unroll 1
    for (int i = tid; i < count * PRODUCTS * STRIPS; i += THREADS) {
        const int t = i / STRIPS / PRODUCTS, j = i / STRIPS % PRODUCTS;
        float sum = 0.0f;
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++) sum += s.warp_products[warp][t][j];
        send_remote(remote_address(&s.products[rank][t][j], i % STRIPS), remote_address(&s.products_here, i % STRIPS), sum);
    }
    normalize(s, count);
    if (control < count * GROUP) {
        const int t = control / GROUP, j = control % GROUP;
        barrier_wait(&s.products_here, 0);
        float a = 0.0f, b = 0.0f, g, beta;
#pragma unroll
        for (int block = 0; block < STRIPS; block++) {
            a += s.products[block][t][j];
            b += s.products[block][t][j + GROUP];
        }
        controls(a, b, a_log, dt_bias, g, beta);
        s.alpha[t][j] = expf(g);
        s.strength[t][j] = beta;
        if (p.k_records && rank == 0) {
            p.g_records[(record + t) * heads + control_head] = g;
            p.beta_records[(record + t) * heads + control_head] = beta;
        }
    }
    float scales[OUT_TURNS][2];
#pragma unroll
    for (int i = 0; i < OUT_TURNS; i++) {
        scales[i][0] = low_bf16(gains[i]) * silu(low_bf16(gates[i]));
        scales[i][1] = high_bf16(gains[i]) * silu(high_bf16(gates[i]));
    }
    __syncthreads();
    run(state, s, count);
    __syncthreads();
#pragma unroll 1
    for (int i = tid; i < count * GROUP * STRIPS; i += THREADS) {
        const int t = i / STRIPS / GROUP, j = i / STRIPS % GROUP;
        float sum = 0.0f;
#pragma unroll
        for (int row = 0; row < ROWS; row++) sum = fmaf(s.shown[t][j * ROWS + row], s.shown[t][j * ROWS + row], sum);
        send_remote(remote_address(&s.squares[rank][t][j], i % STRIPS), remote_address(&s.squares_here, i % STRIPS), sum);
    }
    if (!p.k_records) store_state(state, p.states, target, key_head, p.key_heads, rank);
    barrier_wait(&s.squares_here, 0);
#pragma unroll
    for (int i = 0; i < OUT_TURNS; i++) {
        const int at = tid + i * THREADS, t = at / (VALUES / 2), c = at % (VALUES / 2) * 2;
        if (t >= count) break;
        const int j = c / ROWS, row = rank * ROWS + c % ROWS;
        float sum = 0.0f;
#pragma unroll
        for (int block = 0; block < STRIPS; block++) sum += s.squares[block][t][j];
        const float inverse = __frsqrt_rn(sum / width + p.eps);
        const float low = s.shown[t][c] * inverse * scales[i][0], high = s.shown[t][c + 1] * inverse * scales[i][1];
        store32(p.out + (first + t) * heads * width + s.places[j] * width + row, pack_bf16x2(low, high));
    }
    // Every block has read the old history, or it would not have sent its squares.
    if (!p.k_records && PAST > 0) {
#pragma unroll
        for (int i = 0; i < CONV_TURNS; i++) {
            const int pair = THREADS - 1 - tid + i * THREADS;
            if (channel[i] >= 0 && (pair >= DK || rank == 0))
#pragma unroll
                for (int j = 3 - PAST; j < 3; j++)
                    store32(p.conv_states + ((long long)target * PAST + j - 3 + PAST) * channels + channel[i], past[i][j]);
        }
    }
}
#endif
