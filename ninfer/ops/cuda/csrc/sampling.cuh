// Draws, log-probabilities and counts of tokens; see choose.py.
//
// A score and its id are one 64-bit key: above, an integer that orders as the score does (WORTHLESS for a NaN,
// FORBIDDEN for what takes no part, both below minus infinity); below, the id backwards: the larger of two keys
// has the higher score, or the lower id among equals.
//
// A block finds the best 20 of 2,048 scores, or of 20 from each tile, the same way. Each thread's best number is
// sorted within its warp. As five threads of each of four warps, or twenty of one, have something at least as
// good, the least fifth and the greatest twentieth are bounds that 20 numbers reach and few more do: these few are
// gathered in shared memory, in any order, and one warp sorts them, 32 at a time.
#include "common.cuh"
#include "barriers.cuh"

typedef long long s64;

#define BEST 20
#define TILE 2048
#define THREADS 128
#define WARPS 4
#define PER_THREAD 16
#define ALL 0xffffffffu
#define FORBIDDEN (-2147483647 - 1)
#define WORTHLESS (-2147483647)
#define LOWEST (-9223372036854775807LL - 1)

DEVICE int order_of(float x) {
    int bits = __float_as_int(x == 0.0f ? 0.0f : x);
    return x == x ? bits ^ ((bits >> 31) & 0x7fffffff) : WORTHLESS;
}

DEVICE float score_of(int order) { return __int_as_float(order ^ ((order >> 31) & 0x7fffffff)); }

DEVICE s64 key_of(int order, int id) { return ((s64)order << 32) | (u32)(id ^ 0x7fffffff); }

DEVICE int order_in(s64 key) { return (int)(key >> 32); }

DEVICE int id_in(s64 key) { return (int)(key & 0x7fffffff) ^ 0x7fffffff; }

template <typename T>
DEVICE T larger(T a, T b) { return a > b ? a : b; }

template <typename T>
DEVICE T smaller(T a, T b) { return a < b ? a : b; }

// One number of each lane, the largest to lane 0.
template <typename T>
DEVICE T sorted(T v, int lane) {
#pragma unroll
    for (int size = 2; size <= 32; size *= 2)
#pragma unroll
        for (int stride = size / 2; stride > 0; stride /= 2) {
            T other = __shfl_xor_sync(ALL, v, stride);
            bool up = ((lane & stride) == 0) == ((lane & size) == 0);
            v = up ? larger(v, other) : smaller(v, other);
        }
    return v;
}

// The 32 best of two sorted lists, sorted.
template <typename T>
DEVICE T merged(T a, T b, int lane) {
    T v = larger(a, __shfl_sync(ALL, b, 31 - lane));
#pragma unroll
    for (int stride = 16; stride > 0; stride /= 2) {
        T other = __shfl_xor_sync(ALL, v, stride);
        v = (lane & stride) == 0 ? larger(v, other) : smaller(v, other);
    }
    return v;
}

template <typename T>
DEVICE T warp_best(T v) {
#pragma unroll
    for (int stride = 16; stride > 0; stride /= 2) v = larger(v, __shfl_xor_sync(ALL, v, stride));
    return v;
}

template <typename T>
DEVICE T warp_sum(T v) {
#pragma unroll
    for (int stride = 16; stride > 0; stride /= 2) v += __shfl_xor_sync(ALL, v, stride);
    return v;
}

// The best or the sum of all threads, known to each. `kept` is used by one call only.
template <typename T>
DEVICE T block_best(T v, T (&kept)[WARPS]) {
    v = warp_best(v);
    if (threadIdx.x % 32 == 0) kept[threadIdx.x / 32] = v;
    __syncthreads();
    return larger(larger(kept[0], kept[1]), larger(kept[2], kept[3]));
}

template <typename T>
DEVICE T block_sum(T v, T (&kept)[WARPS]) {
    v = warp_sum(v);
    if (threadIdx.x % 32 == 0) kept[threadIdx.x / 32] = v;
    __syncthreads();
    return (kept[0] + kept[1]) + (kept[2] + kept[3]);
}

// Shared by a search for the best.
template <typename T>
struct Bounds {
    T fifth[WARPS], twentieth[WARPS];
    int count;
};

// A number that at least 20 numbers of the block reach, from the best of each thread.
template <typename T>
DEVICE T bound_of(T best, Bounds<T>& bounds) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    T v = sorted(best, lane);
    if (lane == 4) bounds.fifth[warp] = v;
    if (lane == 19) bounds.twentieth[warp] = v;
    if (threadIdx.x == 0) bounds.count = 0;
    __syncthreads();
    T low = bounds.fifth[0], high = bounds.twentieth[0];
#pragma unroll
    for (int i = 1; i < WARPS; i++) {
        low = smaller(low, bounds.fifth[i]);
        high = larger(high, bounds.twentieth[i]);
    }
    return larger(low, high);
}

// The 32 best of `count` keys, sorted; by one warp.
DEVICE s64 best_of(const s64* keys, int count, int lane) {
    s64 v = sorted(lane < count ? keys[lane] : LOWEST, lane);
    for (int start = 32; start < count; start += 32)
        v = merged(v, sorted(start + lane < count ? keys[start + lane] : LOWEST, lane), lane);
    return v;
}

// The id of a thread's number k.
DEVICE int id_of(int tile, int k) {
    return tile * TILE + (threadIdx.x / 32) * (TILE / WARPS) + k * 32 + threadIdx.x % 32;
}

// The best 20 keys of a tile to `out`.
DEVICE void store_best(const int (&order)[PER_THREAD], int tile, s64* out, Bounds<int>& bounds, s64* keys) {
    int best = order[0];
#pragma unroll
    for (int k = 1; k < PER_THREAD; k++) best = larger(best, order[k]);
    int bound = larger(bound_of(best, bounds), WORTHLESS);
#pragma unroll
    for (int k = 0; k < PER_THREAD; k++)
        if (order[k] >= bound) keys[atomicAdd(&bounds.count, 1)] = key_of(order[k], id_of(tile, k));
    __syncthreads();
    if (threadIdx.x < 32) {
        s64 v = best_of(keys, bounds.count, threadIdx.x);
        if (threadIdx.x < BEST) out[threadIdx.x] = v;
    }
}

// The best 20 of all tiles' keys (`tiles` times 20, sorted), in the first lanes of warp 0.
DEVICE s64 gathered_best(const s64* lists, int tiles, Bounds<s64>& bounds, s64* keys) {
    s64 first[4];
    int own = threadIdx.x;
#pragma unroll
    for (int j = 0; j < 4; j++) first[j] = own < tiles ? lists[own * BEST + j] : LOWEST;
    s64 best = first[0];
    for (int tile = own + THREADS; tile < tiles; tile += THREADS) best = larger(best, lists[tile * BEST]);
    s64 bound = larger(bound_of(best, bounds), LOWEST + 1);
#pragma unroll
    for (int j = 0; j < 4; j++)
        if (first[j] >= bound) keys[atomicAdd(&bounds.count, 1)] = first[j];
    for (int tile = own; tile < tiles; tile += THREADS) {
        int j = tile == own ? 4 : 0;
        if (tile == own && first[3] < bound) continue;
        for (; j < BEST; j++) {
            s64 key = lists[tile * BEST + j];
            if (key < bound) break;
            keys[atomicAdd(&bounds.count, 1)] = key;
        }
    }
    __syncthreads();
    return threadIdx.x < 32 ? best_of(keys, bounds.count, threadIdx.x) : LOWEST;
}

struct Draws {
    const float* scores;
    const int *counts, *masks;
    const double *temperature, *top_p, *min_p, *presence, *frequency;
    const int* top_k;
    const s64* seed;
    const int *position, *purpose, *count_rows, *mask_row;
    s64* lists;
    int* out;
    int size, tiles, words, masks_given;
};

// Is one key enough?
DEVICE bool only_best(const Draws& d, int row) { return !(d.temperature[row] > 0.0) || d.top_k[row] == 1; }

extern "C" __global__ void __launch_bounds__(THREADS) draw_tiles(const Draws d) {
    __shared__ s64 keys[TILE];
    __shared__ Bounds<int> bounds;
    __shared__ s64 kept[WARPS];
    wait_for_previous();
    allow_next();
    int tile = blockIdx.x, row = blockIdx.y, mask_row = d.mask_row[row];
    if (d.purpose[row] < 0 || mask_row >= d.masks_given) return;
    const float* scores = d.scores + (s64)row * d.size;
    int order[PER_THREAD];
    float x[PER_THREAD];
#pragma unroll
    for (int k = 0; k < PER_THREAD; k++) {
        int id = id_of(tile, k);
        x[k] = id < d.size ? scores[id] : 0.0f;
    }
    float presence = (float)d.presence[row], frequency = (float)d.frequency[row];
    if (d.count_rows[row] >= 0 && (presence != 0.0f || frequency != 0.0f)) {
        const int* counts = d.counts + (s64)d.count_rows[row] * d.size;
#pragma unroll
        for (int k = 0; k < PER_THREAD; k++) {
            int id = id_of(tile, k), c = id < d.size ? counts[id] : 0;
            // Rounded after each step, as on the CPU.
            float often = __fmul_rn(frequency, (float)c), once = c > 0 ? presence : 0.0f;
            x[k] = __fsub_rn(x[k], __fadd_rn(once, often));
        }
    }
#pragma unroll
    for (int k = 0; k < PER_THREAD; k++) order[k] = id_of(tile, k) < d.size ? order_of(x[k]) : FORBIDDEN;
    if (mask_row >= 0) {
        const int* mask = d.masks + (s64)mask_row * d.words;
#pragma unroll
        for (int k = 0; k < PER_THREAD; k++) {
            int id = id_of(tile, k);
            int word = id < d.size ? mask[id >> 5] : 0;
            if (!(word >> (id & 31) & 1)) order[k] = FORBIDDEN;
        }
    }
    s64* out = d.lists + ((s64)row * d.tiles + tile) * BEST;
    if (only_best(d, row)) {
        s64 best = LOWEST;
#pragma unroll
        for (int k = 0; k < PER_THREAD; k++) best = larger(best, key_of(order[k], id_of(tile, k)));
        best = block_best(best, kept);
        if (threadIdx.x == 0) *out = best;
    } else {
        store_best(order, tile, out, bounds, keys);
    }
}

// SplitMix64.
DEVICE u64 mix(u64 x) {
    x += 0x9E3779B97F4A7C15ULL;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
    return x ^ (x >> 31);
}

DEVICE double uniform(u64 seed, u32 position, u32 purpose) {
    u64 key = mix(seed ^ (u64)position * 0xD1B54A32D192ED03ULL);
    key = mix(key ^ (u64)purpose << 21);
    return (double)(key >> 40) * 0x1p-24;
}

// Which of the found scores (descending, one a lane) is drawn.
DEVICE int pick(float x, int found, const Draws& d, int row, int lane) {
    double best = __shfl_sync(ALL, x, 0), temperature = d.temperature[row];
    double weight = lane < found ? exp(((double)x - best) / temperature) : 0.0;
    double total = 0.0, reached = 0.0;
#pragma unroll
    for (int i = 0; i < BEST; i++) {  // in order: that of additions decides the last bit
        total += __shfl_sync(ALL, weight, i);
        if (lane == i) reached = total;
    }
    double first = __shfl_sync(ALL, weight, 0), top_p = d.top_p[row];
    u32 tail = __ballot_sync(ALL, lane > 0 && weight < d.min_p[row] * first);
    u32 full = __ballot_sync(ALL, lane < BEST && top_p < 1.0 && reached >= top_p * total);
    int kept = found;
    if (tail) kept = smaller(kept, __ffs(tail) - 1);
    if (full) kept = smaller(kept, __ffs(full));
    double goal = uniform(d.seed[row], d.position[row], d.purpose[row]) * __shfl_sync(ALL, reached, kept - 1);
    u32 past = __ballot_sync(ALL, lane < kept - 1 && reached > goal);
    return past ? __ffs(past) - 1 : kept - 1;
}

extern "C" __global__ void __launch_bounds__(THREADS) draw_rows(const Draws d) {
    extern __shared__ s64 keys[];
    __shared__ Bounds<s64> bounds;
    __shared__ s64 kept[WARPS];
    wait_for_previous();
    allow_next();
    int row = blockIdx.x, lane = threadIdx.x;
    if (d.purpose[row] < 0 || d.mask_row[row] >= d.masks_given) {
        if (lane == 0) d.out[row] = d.purpose[row] < 0 ? -2 : -3;
        return;
    }
    const s64* lists = d.lists + (s64)row * d.tiles * BEST;
    s64 best = LOWEST;
    bool greedy = only_best(d, row);
    if (greedy) {
        for (int tile = lane; tile < d.tiles; tile += THREADS) best = larger(best, lists[tile * BEST]);
        best = block_best(best, kept);
    } else {
        best = gathered_best(lists, d.tiles, bounds, keys);
    }
    if (lane >= 32) return;
    s64 top = __shfl_sync(ALL, best, 0);
    float x = score_of(order_in(top));
    int drawn = id_in(top);
    if (order_in(top) == FORBIDDEN) {
        drawn = -3;
    } else if (order_in(top) == WORTHLESS || x - x != 0.0f) {
        drawn = -1;
    } else if (!greedy) {
        int n = d.top_k[row];
        n = smaller(n < 1 || n > BEST ? BEST : n, d.size);
        int found = __popc(__ballot_sync(ALL, lane < n && order_in(best) > WORTHLESS));
        drawn = id_in(__shfl_sync(ALL, best, pick(score_of(order_in(best)), found, d, row, lane)));
    }
    if (lane == 0) d.out[row] = drawn;
}

struct Reports {
    const float* scores;
    const int *tokens, *wanted;
    s64* lists;
    int* tops;
    float* sums;
    float* logprob;
    int* top_ids;
    float* top_logprobs;
    int size, tiles;
};

extern "C" __global__ void __launch_bounds__(THREADS) report_tiles(const Reports r) {
    __shared__ s64 keys[TILE];
    __shared__ Bounds<int> bounds;
    __shared__ int most[WARPS];
    __shared__ float sums[WARPS];
    wait_for_previous();
    allow_next();
    int tile = blockIdx.x, row = blockIdx.y;
    if (r.tokens[row] < 0 || r.wanted[row] < 0) return;
    const float* scores = r.scores + (s64)row * r.size;
    int order[PER_THREAD];
#pragma unroll
    for (int k = 0; k < PER_THREAD; k++) {
        int id = id_of(tile, k);
        order[k] = id < r.size ? order_of(scores[id]) : FORBIDDEN;
    }
    int best = order[0];
#pragma unroll
    for (int k = 1; k < PER_THREAD; k++) best = larger(best, order[k]);
    best = block_best(best, most);
    float top = score_of(best), sum = 0.0f;
#pragma unroll
    for (int k = 0; k < PER_THREAD; k++)
        // Where a difference is no number, or far below, a term counts as e^-87.
        if (order[k] > WORTHLESS) sum += expf(fmaxf(score_of(order[k]) - top, -87.0f));
    sum = block_sum(sum, sums);
    s64 at = (s64)row * r.tiles + tile;
    if (threadIdx.x == 0) {
        r.tops[at] = best;
        r.sums[at] = sum;
    }
    if (r.wanted[row] > 0) store_best(order, tile, r.lists + at * BEST, bounds, keys);
}

extern "C" __global__ void __launch_bounds__(THREADS) report_rows(const Reports r) {
    extern __shared__ s64 keys[];
    __shared__ Bounds<s64> bounds;
    __shared__ int most[WARPS];
    __shared__ double sums[WARPS];
    wait_for_previous();
    allow_next();
    int row = blockIdx.x, lane = threadIdx.x, token = r.tokens[row], wanted = r.wanted[row];
    if (token < 0 || wanted < 0) return;
    s64 begin = (s64)row * r.tiles;
    int top = FORBIDDEN;
    for (int tile = lane; tile < r.tiles; tile += THREADS) top = larger(top, r.tops[begin + tile]);
    top = block_best(top, most);
    double best = top > WORTHLESS ? score_of(top) : __int_as_float(0x7fffffff), mass = 0.0;
    for (int tile = lane; tile < r.tiles; tile += THREADS) {
        int order = r.tops[begin + tile];
        // Equal infinities have no difference.
        double share = order == top ? 1.0 : exp((double)score_of(order) - best);
        if (order > WORTHLESS) mass += share * r.sums[begin + tile];
    }
    double normalizer = log(block_sum(mass, sums));
    if (lane == 0) r.logprob[row] = (float)((double)r.scores[(s64)row * r.size + token] - best - normalizer);
    if (wanted == 0) return;
    s64 key = gathered_best(r.lists + begin * BEST, r.tiles, bounds, keys);
    if (lane < smaller(smaller(wanted, BEST), r.size)) {
        bool number = order_in(key) > WORTHLESS;
        double value = (double)score_of(order_in(key)) - best - normalizer;
        r.top_ids[row * BEST + lane] = number ? id_in(key) : -1;
        r.top_logprobs[row * BEST + lane] = number ? (float)value : __int_as_float(0xff800000);
    }
}

extern "C" __global__ void count(const int* tokens, const int* rows, int* counts, int total, int size) {
    wait_for_previous();
    allow_next();
    int b = blockIdx.x * THREADS + threadIdx.x;
    if (b < total && tokens[b] >= 0 && rows[b] >= 0) atomicAdd(counts + (s64)rows[b] * size + tokens[b], 1);
}

extern "C" __global__ void clear(const int* rows, int* counts, int size) {
    wait_for_previous();
    allow_next();
    int row = rows[blockIdx.y];
    if (row < 0) return;
#pragma unroll
    for (int k = 0; k < PER_THREAD; k++) {
        int id = id_of(blockIdx.x, k);
        if (id < size) counts[(s64)row * size + id] = 0;
    }
}
