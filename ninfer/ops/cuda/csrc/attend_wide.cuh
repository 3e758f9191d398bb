// Attention of many columns on Hopper: 128 rows a block, one warpgroup that copies, two that compute 64 rows each.
//
// Keys and values come as images of shared memory: tiles of 64 keys of a head, 32 KB each, of which 64 dimensions
// of all keys stand together (8 KB, 128 bytes a key) and the 16-byte chunk c of key n stands at c ^ (n & 7). So a
// tile is one bulk copy. Scores of tile j + 1 are computed while the values of tile j are added up, and a row's
// softmax runs beside the products.
//
// Roofline: 4 x 128 x 64 x 256 operations a tile, 2,048 clocks of the matrix units; shared memory gives 1,536
// clocks' worth of operands meanwhile.
#include "barriers.cuh"

#if __CUDA_ARCH__ >= 900

#define WIDTH 256
#define KEYS 64
#define ROWS 128
#define TILE_BYTES (KEYS * WIDTH * 2)
#define PART_BYTES (KEYS * 128)
#define STAGES 2

struct Shared {
    u8 queries[ROWS * WIDTH * 2];
    u8 keys[STAGES][TILE_BYTES];
    u8 values[STAGES][TILE_BYTES];
    u64 keys_full[STAGES], keys_empty[STAGES], values_full[STAGES], values_empty[STAGES];
};

DEVICE void multiply_scores(float (&s)[KEYS / 2], u64 queries, u64 keys, int add) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %34, 0; "
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "
        "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, %32, %33, p, 1, 1, 0, 0; }"
        : "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3]), "+f"(s[4]), "+f"(s[5]), "+f"(s[6]), "+f"(s[7]),
          "+f"(s[8]), "+f"(s[9]), "+f"(s[10]), "+f"(s[11]), "+f"(s[12]), "+f"(s[13]), "+f"(s[14]), "+f"(s[15]),
          "+f"(s[16]), "+f"(s[17]), "+f"(s[18]), "+f"(s[19]), "+f"(s[20]), "+f"(s[21]), "+f"(s[22]), "+f"(s[23]),
          "+f"(s[24]), "+f"(s[25]), "+f"(s[26]), "+f"(s[27]), "+f"(s[28]), "+f"(s[29]), "+f"(s[30]), "+f"(s[31])
        : "l"(queries), "l"(keys), "r"(add));
}

DEVICE void add_values(float (&o)[WIDTH / 2], u32 a0, u32 a1, u32 a2, u32 a3, u64 values) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "
        "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, "
        "%36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, "
        "%53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, "
        "%70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, "
        "%87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, "
        "%103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, "
        "%117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
        "}, {%128, %129, %130, %131}, %132, 1, 1, 1, 1;"
        : "+f"(o[0]), "+f"(o[1]), "+f"(o[2]), "+f"(o[3]), "+f"(o[4]), "+f"(o[5]), "+f"(o[6]), "+f"(o[7]),
          "+f"(o[8]), "+f"(o[9]), "+f"(o[10]), "+f"(o[11]), "+f"(o[12]), "+f"(o[13]), "+f"(o[14]), "+f"(o[15]),
          "+f"(o[16]), "+f"(o[17]), "+f"(o[18]), "+f"(o[19]), "+f"(o[20]), "+f"(o[21]), "+f"(o[22]), "+f"(o[23]),
          "+f"(o[24]), "+f"(o[25]), "+f"(o[26]), "+f"(o[27]), "+f"(o[28]), "+f"(o[29]), "+f"(o[30]), "+f"(o[31]),
          "+f"(o[32]), "+f"(o[33]), "+f"(o[34]), "+f"(o[35]), "+f"(o[36]), "+f"(o[37]), "+f"(o[38]), "+f"(o[39]),
          "+f"(o[40]), "+f"(o[41]), "+f"(o[42]), "+f"(o[43]), "+f"(o[44]), "+f"(o[45]), "+f"(o[46]), "+f"(o[47]),
          "+f"(o[48]), "+f"(o[49]), "+f"(o[50]), "+f"(o[51]), "+f"(o[52]), "+f"(o[53]), "+f"(o[54]), "+f"(o[55]),
          "+f"(o[56]), "+f"(o[57]), "+f"(o[58]), "+f"(o[59]), "+f"(o[60]), "+f"(o[61]), "+f"(o[62]), "+f"(o[63]),
          "+f"(o[64]), "+f"(o[65]), "+f"(o[66]), "+f"(o[67]), "+f"(o[68]), "+f"(o[69]), "+f"(o[70]), "+f"(o[71]),
          "+f"(o[72]), "+f"(o[73]), "+f"(o[74]), "+f"(o[75]), "+f"(o[76]), "+f"(o[77]), "+f"(o[78]), "+f"(o[79]),
          "+f"(o[80]), "+f"(o[81]), "+f"(o[82]), "+f"(o[83]), "+f"(o[84]), "+f"(o[85]), "+f"(o[86]), "+f"(o[87]),
          "+f"(o[88]), "+f"(o[89]), "+f"(o[90]), "+f"(o[91]), "+f"(o[92]), "+f"(o[93]), "+f"(o[94]), "+f"(o[95]),
          "+f"(o[96]), "+f"(o[97]), "+f"(o[98]), "+f"(o[99]), "+f"(o[100]), "+f"(o[101]), "+f"(o[102]), "+f"(o[103]),
          "+f"(o[104]), "+f"(o[105]), "+f"(o[106]), "+f"(o[107]), "+f"(o[108]), "+f"(o[109]), "+f"(o[110]), "+f"(o[111]),
          "+f"(o[112]), "+f"(o[113]), "+f"(o[114]), "+f"(o[115]), "+f"(o[116]), "+f"(o[117]), "+f"(o[118]), "+f"(o[119]),
          "+f"(o[120]), "+f"(o[121]), "+f"(o[122]), "+f"(o[123]), "+f"(o[124]), "+f"(o[125]), "+f"(o[126]), "+f"(o[127])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(values));
}

DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// All but the last `LEFT` groups of products have ended.
template <int LEFT>
DEVICE void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// Registers may be touched by products under way; keeps the compiler from moving their uses.
template <int N>
DEVICE void pin(float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(x[i])::"memory");
}

// Of an image in shared memory, chunks of 128 bytes swizzled: `leading` and `stride` in bytes.
DEVICE u64 descriptor(const void* image, u32 leading, u32 stride) {
    const u64 address = (shared_address(image) & 0x3ffff) >> 4;
    return address | (u64)(leading >> 4) << 16 | (u64)(stride >> 4) << 32 | 1ull << 62;
}

DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

DEVICE float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

DEVICE void issue_scores(float (&s)[KEYS / 2], u64 queries, const u8* keys) {
    const u64 k = descriptor(keys, 16, 1024);
    products_begin();
#pragma unroll
    for (int part = 0; part < WIDTH / 64; part++)
#pragma unroll
        for (int step = 0; step < 4; step++)
            multiply_scores(s, queries + (part * 8192 + step * 32) / 16, k + (part * PART_BYTES + step * 32) / 16,
                            part + step > 0);
    products_commit();
}

DEVICE void issue_values(float (&o)[WIDTH / 2], const u32 (&p)[KEYS / 4], const u8* values) {
    const u64 v = descriptor(values, PART_BYTES, 1024);
    products_begin();
#pragma unroll
    for (int step = 0; step < KEYS / 16; step++)
        add_values(o, p[4 * step], p[4 * step + 1], p[4 * step + 2], p[4 * step + 3], v + step * 2048 / 16);
    products_commit();
}

struct Row {
    float top, mass;  // of a quad's row; `mass` is this lane's part
};

// Weights from scores, in place; what the sums so far shrink by. Keys are numbered from `first` on.
template <bool MASKED>
DEVICE void soften(float (&s)[KEYS / 2], Row (&row)[2], float (&shrink)[2], const int (&position)[2], int first,
                   float scale) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float top = __int_as_float(0xff800000);
#pragma unroll
        for (int i = 0; i < KEYS / 8; i++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                float& x = s[4 * i + 2 * half + j];
                if (MASKED && first + 8 * i + j > position[half]) x = __int_as_float(0xff800000);
                top = fmaxf(top, x);
            }
        top = fmaxf(row[half].top, quad_max(top) * scale);
        shrink[half] = exp2_fast(row[half].top - top);
        row[half].top = top;
        float mass = 0;
#pragma unroll
        for (int i = 0; i < KEYS / 8; i++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                float& x = s[4 * i + 2 * half + j];
                x = exp2_fast(x * scale - top);
                mass += x;
            }
        row[half].mass = row[half].mass * shrink[half] + mass;
    }
}

DEVICE void pack(u32 (&p)[KEYS / 4], const float (&s)[KEYS / 2]) {
#pragma unroll
    for (int i = 0; i < KEYS / 4; i++) p[i] = pack_bf16x2(s[2 * i], s[2 * i + 1]);
}

DEVICE void shrink_sums(float (&o)[WIDTH / 2], const float (&shrink)[2]) {
#pragma unroll
    for (int i = 0; i < WIDTH / 2; i++) o[i] *= shrink[i / 2 % 2];
}

DEVICE void warp_arrive(u64* barrier) {
    __syncwarp();
    if ((threadIdx.x & 31) == 0) barrier_arrive(barrier);
}

// Arguments as those of the kernel in Triton: keys `base .. end` of one request, of which `keys` and `values` hold
// images [tile][head]; `split` keys a block, or 0; without `first` the state is read, without `last` written.
extern "C" __global__ void __launch_bounds__(384, 1)
    attend_wide(const u16* __restrict__ q, const u8* __restrict__ keys, const u8* __restrict__ values,
                const int* __restrict__ cache_positions, u16* __restrict__ out, float* __restrict__ state,
                float* __restrict__ tops, float* __restrict__ masses, int columns, int group, int heads, int base,
                int end, int split, int first, int last, float scale) {
    extern __shared__ __align__(1024) u8 memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int tile = gridDim.x - 1 - blockIdx.x, head = blockIdx.y;
    const int warpgroup = threadIdx.x / 128, lane = threadIdx.x % 128;
    const int from = tile * ROWS / group, to = min(columns - 1, (tile * ROWS + ROWS - 1) / group);
    int latest = -1, earliest = 0x7fffffff;
    for (int c = from; c <= to; c++) {
        const int p = cache_positions[c];
        latest = max(latest, p);
        if (p >= 0) earliest = min(earliest, p);
    }
    int begin = base;
    if (split) {
        const long part = base / split + blockIdx.z, rows = (long)columns * heads * group;
        begin = part * split;
        end = min(end, begin + split);
        state += part * rows * WIDTH;
        tops += part * rows;
        masses += part * rows;
        if (latest < begin) return;
    }
    const int stop = min(latest + 1, end);
    const int tiles = stop > begin ? (stop - begin + KEYS - 1) / KEYS : 0;
    const int full = min(max((min(earliest, stop - 1) + 1 - begin) / KEYS, 0), tiles);  // seen by all rows

    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(&shared.keys_full[i], 1);
            barrier_init(&shared.values_full[i], 1);
            barrier_init(&shared.keys_empty[i], 8);
            barrier_init(&shared.values_empty[i], 8);
        }
        barrier_init_fence();
    }
    __syncthreads();

    if (warpgroup == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x != 0) return;
        u64 policy;
        asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
        for (int j = 0; j < tiles; j++) {
            const int stage = j % STAGES, phase = j / STAGES & 1;
            const long at = ((long)((begin - base) / KEYS + j) * heads + head) * TILE_BYTES;
            barrier_wait(&shared.keys_empty[stage], phase ^ 1);
            barrier_expect(&shared.keys_full[stage], TILE_BYTES);
            bulk_copy(shared.keys[stage], keys + at, TILE_BYTES, &shared.keys_full[stage], policy);
            barrier_wait(&shared.values_empty[stage], phase ^ 1);
            barrier_expect(&shared.values_full[stage], TILE_BYTES);
            bulk_copy(shared.values[stage], values + at, TILE_BYTES, &shared.values_full[stage], policy);
        }
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    const int half = warpgroup - 1;  // which 64 rows
    u8* image = shared.queries + half * (ROWS / 2 * WIDTH * 2);
    for (int i = lane; i < 64 * WIDTH / 8; i += 128) {
        const int n = i / (WIDTH / 8), chunk = i % (WIDTH / 8), row = tile * ROWS + half * 64 + n, c = row / group;
        Vec4 x = {0, 0, 0, 0};
        if (c < columns)
            x = *reinterpret_cast<const Vec4*>(q + ((long)(c * heads + head) * group + row % group) * WIDTH + 8 * chunk);
        *reinterpret_cast<Vec4*>(image + chunk / 8 * 8192 + n * 128 + (chunk % 8 ^ n & 7) * 16) = x;
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("bar.sync %0, 128;" ::"r"(warpgroup) : "memory");
    const u64 queries = descriptor(image, 16, 1024);

    float o[WIDTH / 2], s[KEYS / 2], shrink[2];
    u32 p[KEYS / 4];
    Row rows[2];
    int position[2], place[2];  // of a row's results, or -1
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = tile * ROWS + half * 64 + lane / 32 * 16 + lane % 32 / 4 + 8 * i, c = row / group;
        position[i] = c < columns ? cache_positions[c] : -1;
        place[i] = c < columns ? (c * heads + head) * group + row % group : -1;
        rows[i].top = -1e30f;
        rows[i].mass = 0;
        if (!first && place[i] >= 0) {
            rows[i].top = tops[place[i]];
            rows[i].mass = lane % 4 == 0 ? masses[place[i]] : 0;
        }
#pragma unroll
        for (int j = 0; j < WIDTH / 8; j++) {
            float2 x = {0, 0};
            if (!first && place[i] >= 0)
                x = *reinterpret_cast<const float2*>(state + (long)place[i] * WIDTH + 8 * j + 2 * (lane % 4));
            o[4 * j + 2 * i] = x.x;
            o[4 * j + 2 * i + 1] = x.y;
        }
    }
    const int seen[2] = {position[0] < 0 ? 0x7fffffff : position[0], position[1] < 0 ? 0x7fffffff : position[1]};
    const int key = begin + 2 * (lane % 4);

    if (tiles > 0) {
        barrier_wait(&shared.keys_full[0], 0);
        issue_scores(s, queries, shared.keys[0]);
        products_wait<0>();
        pin(s);
        warp_arrive(&shared.keys_empty[0]);
        if (full > 0)
            soften<false>(s, rows, shrink, seen, key, scale);
        else
            soften<true>(s, rows, shrink, seen, key, scale);
        shrink_sums(o, shrink);
        pack(p, s);
        for (int j = 1; j < tiles; j++) {
            const int stage = j % STAGES, before = (j - 1) % STAGES;
            barrier_wait(&shared.keys_full[stage], j / STAGES & 1);
            pin(s);
            issue_scores(s, queries, shared.keys[stage]);
            barrier_wait(&shared.values_full[before], (j - 1) / STAGES & 1);
            pin(o);
            issue_values(o, p, shared.values[before]);
            products_wait<1>();
            pin(s);
            warp_arrive(&shared.keys_empty[stage]);
            if (j < full)
                soften<false>(s, rows, shrink, seen, key + j * KEYS, scale);
            else
                soften<true>(s, rows, shrink, seen, key + j * KEYS, scale);
            products_wait<0>();
            pin(o);
            warp_arrive(&shared.values_empty[before]);
            shrink_sums(o, shrink);
            pack(p, s);
        }
        const int before = (tiles - 1) % STAGES;
        barrier_wait(&shared.values_full[before], (tiles - 1) / STAGES & 1);
        pin(o);
        issue_values(o, p, shared.values[before]);
        products_wait<0>();
        pin(o);
    }

#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (place[i] < 0) continue;
        const float mass = quad_sum(rows[i].mass);
        if (last) {
            const float inverse = position[i] < 0 ? 0 : 1 / mass;
#pragma unroll
            for (int j = 0; j < WIDTH / 8; j++)
                *reinterpret_cast<u32*>(out + (long)place[i] * WIDTH + 8 * j + 2 * (lane % 4)) =
                    position[i] < 0 ? 0 : pack_bf16x2(o[4 * j + 2 * i] * inverse, o[4 * j + 2 * i + 1] * inverse);
        } else {
#pragma unroll
            for (int j = 0; j < WIDTH / 8; j++) {
                const float2 x = {o[4 * j + 2 * i], o[4 * j + 2 * i + 1]};
                *reinterpret_cast<float2*>(state + (long)place[i] * WIDTH + 8 * j + 2 * (lane % 4)) = x;
            }
            if (lane % 4 == 0) {
                tops[place[i]] = rows[i].top;
                masses[place[i]] = mass;
            }
        }
    }
}

#endif
