// Decoders of the other formats; what a decoder is stands in formats_a.cuh, where codes stand in pack.py.
//
// A code of up to eight bits is a bf16 as it stands in the last bits: the subnormal number n times 2^-133, which
// products take exactly. So a mask is all of a decoder, and a shift by 8 for every other register; a code that
// stands `raised` bits higher counts as much more. Both is made good in x, which `prepare` multiplies by powers of
// two once a launch (an x of 2^58 or more becomes infinite), and at the end by FACTOR. Sums over a scale group are
// multiplied by its scale in float32. What is taken off codes, and minima of groups, count times the sum of x over
// the group, which `prepare` makes, too.
#pragma once
#include "formats_a.cuh"

// What an x of 1 times a code of 1 is: x is multiplied by 2^BASE.
static const int BASE = 64;
static constexpr float ONE = 0x1p-69f;

// (a & MASK) | c, in one instruction; of two constants one must be in a register, which compilers do not see.
template <u32 MASK>
DEVICE u32 masked(u32 a, u32 c) {
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "n"(MASK), "r"(c));
    return d;
}

// Bits of a where MASK has ones, bits of b elsewhere.
template <u32 MASK>
DEVICE u32 either(u32 a, u32 b) {
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, 0xe2;" : "=r"(d) : "r"(a), "n"(MASK), "r"(b));
    return d;
}

// d = A B + c.
DEVICE void mma_from(float (&d)[4], const float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

// d = A B, of 8 columns.
DEVICE void mma_short(float (&d)[4], u32 a0, u32 a1, u32 b0) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%7,%7,%7};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a0), "r"(a1), "r"(b0), "f"(0.f));
}

// acc += part times the factors of rows r and r + 8.
DEVICE void add_scaled(float (&acc)[4], const float (&part)[4], float top, float bottom) {
    acc[0] = fmaf(part[0], top, acc[0]);
    acc[1] = fmaf(part[1], top, acc[1]);
    acc[2] = fmaf(part[2], bottom, acc[2]);
    acc[3] = fmaf(part[3], bottom, acc[3]);
}

// The FP16 numbers of a word.
DEVICE float2 halves(u32 w) {
    float2 v;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(v.x), "=f"(v.y) : "r"(w));
    return v;
}

// Codes of 64 columns: a[0] is of row r, a[1] of row r + 8, registers 2 j and 2 j + 1 of each for step j.
template <int BITS>
struct Codes {
    u32 a[2][8];

    // By how many bits codes of register i stand higher.
    static DEVICE constexpr int raised(int i) {
        return BITS == 4 ? i % 2 * 4 : BITS == 5 ? i / 5 * 3 : BITS == 6 ? i / 6 * 2 : 0;
    }

    DEVICE Codes(const u8* unit, int lane) {
        const Vec4 v = load_shared16(unit + 16 * lane);
        if (BITS == 4) {
            four(a[0], v.x, v.y), four(a[1], v.z, v.w);
        } else if (BITS == 5) {
            const u32 w = *reinterpret_cast<const u32*>(unit + 512 + 4 * lane);
            const u32 last = either<0xf0f0f0f0u>(either<0xe0e0e0e0u>(w, v.y >> 1), v.w >> 2);
            five(a[0], v.x, v.y, w, last), five(a[1], v.z, v.w, w >> 8, last >> 8);
        } else if (BITS == 6) {
            const uint2 w = *reinterpret_cast<const uint2*>(unit + 512 + 8 * lane);
            six(a[0], v.x, v.y, w.x), six(a[1], v.z, v.w, w.y);
        } else {
            const Vec4 w = load_shared16(unit + 512 + 16 * lane);
            eight(a[0], v), eight(a[1], w);
        }
    }

    template <u32 MASK>
    static DEVICE void two(u32& even, u32& odd, u32 w) {
        even = w & MASK, odd = (w >> 8) & MASK;
    }

    static DEVICE void four(u32 (&a)[8], u32 v, u32 w) {
        two<0x000f000fu>(a[0], a[2], v), two<0x00f000f0u>(a[1], a[3], v);
        two<0x000f000fu>(a[4], a[6], w), two<0x00f000f0u>(a[5], a[7], w);
    }

    // The three highest bits of each byte are left over: registers 6 and 7 take those of v and two of w, register 5
    // those of `more` and one of w of both rows.
    static DEVICE void five(u32 (&a)[8], u32 v, u32 w, u32 more, u32 last) {
        two<0x001f001fu>(a[0], a[1], v), two<0x001f001fu>(a[2], a[3], w);
        a[4] = more & 0x001f001fu, a[5] = last & 0x00f800f8u;
        two<0x00f800f8u>(a[6], a[7], either<0xe0e0e0e0u>(v, w >> 3));
    }

    // The two highest bits of each byte are left over, for registers 6 and 7.
    static DEVICE void six(u32 (&a)[8], u32 v, u32 w, u32 more) {
        two<0x003f003fu>(a[0], a[1], v), two<0x003f003fu>(a[2], a[3], w), two<0x003f003fu>(a[4], a[5], more);
        two<0x00fc00fcu>(a[6], a[7], either<0xf0f0f0f0u>(either<0xc0c0c0c0u>(v, w >> 2), more >> 4));
    }

    static DEVICE void eight(u32 (&a)[8], const Vec4& w) {
        two<0x00ff00ffu>(a[0], a[1], w.x), two<0x00ff00ffu>(a[2], a[3], w.y);
        two<0x00ff00ffu>(a[4], a[5], w.z), two<0x00ff00ffu>(a[6], a[7], w.w);
    }

    // part = c + steps [begin, end).
    DEVICE void times(const u32 (&x)[8], int begin, int end, const float (&c)[4], float (&part)[4]) const {
#pragma unroll
        for (int j = begin; j < end; ++j)
            if (j == begin) mma_from(part, c, a[0][2 * j], a[1][2 * j], a[0][2 * j + 1], a[1][2 * j + 1], x[2 * j], x[2 * j + 1]);
            else mma(part, a[0][2 * j], a[1][2 * j], a[0][2 * j + 1], a[1][2 * j + 1], x[2 * j], x[2 * j + 1]);
    }
};

// Integer codes of groups of GROUP columns. `unit` gets besides what `prepare` makes of x once a launch, in shared
// memory: the sums of x of each group, times WEIGHT. PIECES: of 16 bytes, that it takes for two tokens.
struct Prepared {};

template <int BITS, int GROUP>
struct Integers : Prepared {
    static const int UNIT_COLUMNS = 64, ORDER = 1, LANES = GROUP / 8, PIECES = 64 / GROUP;
    static constexpr float FACTOR = 1 / ONE;

    // What register i of x is multiplied by: a bf16, twice.
    static DEVICE u32 power(int i) { return (u32)(127 + BASE - Codes<BITS>::raised(i)) * 0x00800080u; }

    // Where a lane's part begins: the sums of its tokens 2 q, 2 q + 1.
    template <bool FEW>
    static DEVICE int place(int lane) {
        return FEW ? 0 : 16 * PIECES * (lane & 3);
    }

    // Of token tile nt from there.
    static DEVICE const u8* tile(const u8* prepared, int nt) { return prepared + 64 * PIECES * nt; }

    // The sum s of a group of a token, by each of its LANES lanes: twice, for rows r and r + 8.
    template <class Format>
    static DEVICE void put(u8* to, int token, int v, float s, bool there) {
        const int g = v / LANES, i = v % LANES;
        if (there && i < 2) reinterpret_cast<float*>(to + 16 * (PIECES * (token >> 1) + g))[2 * i + (token & 1)] = s * Format::WEIGHT;
    }
};

DEVICE void get_sums(const u8* from, float (&c)[4]) {
    const float4 v = *reinterpret_cast<const float4*>(from);
    c[0] = v.x, c[1] = v.y, c[2] = v.z, c[3] = v.w;
}

// One FP16 scale for 64 columns: two bytes for row r, two for row r + 8, at 4 r behind the codes.
template <int BITS>
struct Grouped64 : Integers<BITS, 64> {
    static const int UNIT_BYTES = 128 * BITS + 32;
    static constexpr float WEIGHT = -(1 << (BITS - 1)) * ONE;

    template <int NT>
    static DEVICE void unit(const u8* unit, int lane, const u32 (&x)[NT][8], float (&acc)[NT][4], const u8* sums) {
        const Codes<BITS> codes(unit, lane);
        const float2 scales = halves(*reinterpret_cast<const u32*>(unit + 128 * BITS + (lane & 28)));
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) {
            float start[4], part[4];
            get_sums(Grouped64::tile(sums, nt), start);
            codes.times(x[nt], 0, 4, start, part);
            add_scaled(acc[nt], part, scales.x, scales.y);
        }
    }
};

typedef Grouped64<4> Q4G64;
typedef Grouped64<5> Q5G64;
typedef Grouped64<6> Q6G64;

// FP16 scales of 32 columns, two for row r, two for row r + 8.
template <int BITS>
struct Grouped32 : Integers<BITS, 32> {
    static const int UNIT_BYTES = 128 * BITS + 64;
    static constexpr float WEIGHT = -(1 << (BITS - 1)) * ONE;

    template <int NT>
    static DEVICE void unit(const u8* unit, int lane, const u32 (&x)[NT][8], float (&acc)[NT][4], const u8* sums) {
        const Codes<BITS> codes(unit, lane);
        const uint2 scales = *reinterpret_cast<const uint2*>(unit + 128 * BITS + 2 * (lane & 28));
        const float2 top = halves(scales.x), bottom = halves(scales.y);
#pragma unroll
        for (int nt = 0; nt < NT; ++nt)
#pragma unroll
            for (int g = 0; g < 2; ++g) {
                float start[4], part[4];
                get_sums(Grouped32::tile(sums, nt) + 16 * g, start);
                codes.times(x[nt], 2 * g, 2 * g + 2, start, part);
                add_scaled(acc[nt], part, g ? top.y : top.x, g ? bottom.y : bottom.x);
            }
    }
};

typedef Grouped32<4> Q4G32;
typedef Grouped32<8> Q8G32;

// Two FP16 scales and two FP16 minima for row r, then for row r + 8; minima count times the sum of x.
struct Q41 : Integers<4, 32> {
    static const int UNIT_BYTES = 640;
    static constexpr float WEIGHT = ONE;

    template <int NT>
    static DEVICE void unit(const u8* unit, int lane, const u32 (&x)[NT][8], float (&acc)[NT][4], const u8* sums) {
        const Codes<4> codes(unit, lane);
        const Vec4 scales = load_shared16(unit + 512 + 4 * (lane & 28));
        const float2 top = halves(scales.x), bottom = halves(scales.z), top_least = halves(scales.y), bottom_least = halves(scales.w);
        const float none[4] = {0, 0, 0, 0};
#pragma unroll
        for (int nt = 0; nt < NT; ++nt)
#pragma unroll
            for (int g = 0; g < 2; ++g) {
                float part[4];
                codes.times(x[nt], 2 * g, 2 * g + 2, none, part);
                add_scaled(acc[nt], part, g ? top.y : top.x, g ? bottom.y : bottom.x);
                get_sums(tile(sums, nt) + 16 * g, part);
                add_scaled(acc[nt], part, g ? top_least.y : top_least.x, g ? bottom_least.y : bottom_least.x);
            }
    }
};

// Behind the codes, for row r, then for row r + 8: a word with a minimum at bit 0, two scales at bits 6 and 12, a
// minimum at bit 18; d and dmin, FP16. A scale is a float32 of 1 + n 2^-17 or 1 + n 2^-11, and the x of the first
// group are 2^6 larger for it. Minima are codes of a product with the sums of x, three bf16 each.
template <int BITS>
struct KQuant : Integers<BITS, 32> {
    static const int UNIT_BYTES = 128 * BITS + 128;
    static constexpr float FACTOR = 0x1p80f;

    static DEVICE u32 power(int i) { return Integers<BITS, 32>::power(i) + (i < 4 ? 6 * 0x00800080u : 0); }

    template <bool FEW>
    static DEVICE int place(int lane) {
        return 16 * ((lane >> 2) % (FEW ? 2 : 8)) + 4 * (lane & 3);
    }

    // The two sums of a token in three bf16: lane q's B register is part q of both.
    template <class Format>
    static DEVICE void put(u8* to, int token, int v, float s, bool there) {
        const float other = __shfl_xor_sync(~0u, s, 4);
        float first = s * 0x1p53f, second = other * 0x1p51f;
        u32 part = pack_bf16x2(first, second);
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (i < v) {
                first -= low_bf16(part), second -= high_bf16(part);
                part = pack_bf16x2(first, second);
            }
        if (there && v < 4) reinterpret_cast<u32*>(to + 16 * token)[v] = v < 3 ? part : 0;
    }

    template <int NT>
    static DEVICE void unit(const u8* unit, int lane, const u32 (&x)[NT][8], float (&acc)[NT][4], const u8* sums) {
        const Codes<BITS> codes(unit, lane);
        const Vec4 scales = load_shared16(unit + 128 * BITS + 4 * (lane & 28));
        const float2 top = halves(scales.y), bottom = halves(scales.w);
        const float none[4] = {0, 0, 0, 0};
        const float top0 = scale<0x00000fc0u>(scales.x, top.x), top1 = scale<0x0003f000u>(scales.x, top.x);
        const float bottom0 = scale<0x00000fc0u>(scales.z, bottom.x), bottom1 = scale<0x0003f000u>(scales.z, bottom.x);
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) {
            float part[4];
            codes.times(x[nt], 0, 2, none, part);
            add_scaled(acc[nt], part, top0, bottom0);
            codes.times(x[nt], 2, 4, none, part);
            add_scaled(acc[nt], part, top1, bottom1);
            mma_short(part, scales.x & 0x00fc003fu, scales.z & 0x00fc003fu, *reinterpret_cast<const u32*>(sums + 128 * nt));
            add_scaled(acc[nt], part, -top.y, -bottom.y);
        }
    }

    template <u32 MASK>
    static DEVICE float scale(u32 w, float d) {
        return fmaf(d, __uint_as_float(masked<MASK>(w, 0x3f800000u)), -d);
    }
};

typedef KQuant<4> Q4K;
typedef KQuant<5> Q5K;

// Behind the codes the four scales, plus 128, of row r, of row r + 8; behind all rows' scales d (FP16) of both. A
// scale is a float32 of 1 + n 2^-15.
struct Q6K : Integers<6, 16> {
    static const int UNIT_BYTES = 864;
    static constexpr float WEIGHT = -32 * ONE, FACTOR = 0x1p84f;

    template <int NT>
    static DEVICE void unit(const u8* unit, int lane, const u32 (&x)[NT][8], float (&acc)[NT][4], const u8* sums) {
        const Codes<6> codes(unit, lane);
        const uint2 both = *reinterpret_cast<const uint2*>(unit + 768 + 2 * (lane & 28));
        const float2 d = halves(*reinterpret_cast<const u32*>(unit + 832 + (lane & 28)));
        const float top[4] = {scale<0>(both.x, d.x), scale<1>(both.x, d.x), scale<2>(both.x, d.x), scale<3>(both.x, d.x)};
        const float bottom[4] = {scale<0>(both.y, d.y), scale<1>(both.y, d.y), scale<2>(both.y, d.y), scale<3>(both.y, d.y)};
#pragma unroll
        for (int nt = 0; nt < NT; ++nt)
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                float start[4], part[4];
                get_sums(tile(sums, nt) + 16 * j, start);
                codes.times(x[nt], j, j + 1, start, part);
                add_scaled(acc[nt], part, top[j], bottom[j]);
            }
    }

    template <int BYTE>
    static DEVICE float scale(u32 w, float d) {
        return fmaf(d, __uint_as_float(__byte_perm(w, 0x3f800000u, 0x7604 + (BYTE << 4))), -d * 1.00390625f);
    }
};

// Codes as in Fp8Row, then the BF16 scale of row r's tile, of row r + 8's.
struct Fp8Tile {
    static const int UNIT_BYTES = 1056, UNIT_COLUMNS = 64, ORDER = 0;

    template <int NT>
    static DEVICE void unit(const u8* unit, int lane, const u32 (&x)[NT][8], float (&acc)[NT][4]) {
        float part[NT][4] = {};
        const Vec4 top = load_shared16(unit + 16 * lane), bottom = load_shared16(unit + 512 + 16 * lane);
        const u32 a[4] = {top.x, top.y, top.z, top.w}, b[4] = {bottom.x, bottom.y, bottom.z, bottom.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            u32 a0, a1, a2, a3;
            Fp8Row::decode(a[j], a0, a2);
            Fp8Row::decode(b[j], a1, a3);
            step<NT>(x, part, j, a0, a1, a2, a3);
        }
        const u32 scales = *reinterpret_cast<const u32*>(unit + 1024 + (lane & 28));
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) add_scaled(acc[nt], part[nt], low_bf16(scales), high_bf16(scales));
    }
};

// What a kernel calls: for formats that want nothing prepared there is nothing. BYTES: of shared memory for a unit.
// FEW: there are two tokens at most.
template <class Format, int NT, bool FEW, bool = __is_base_of(Prepared, Format)>
struct Decoder {
    static const int BYTES = 0;
    static constexpr float FACTOR = 1;

    static DEVICE int place(int) { return 0; }
    static DEVICE void prepare(Vec4&, u8*, int, int, bool) {}
    static DEVICE void unit(const u8* unit, int lane, const u32 (&x)[NT][8], float (&acc)[NT][4], const u8*) {
        Format::template unit<NT>(unit, lane, x, acc);
    }
};

template <class Format, int NT, bool FEW>
struct Decoder<Format, NT, FEW, true> {
    static const int BYTES = 16 * Format::PIECES * (FEW ? 1 : 4 * NT);
    static constexpr float FACTOR = Format::FACTOR;

    static DEVICE int place(int lane) { return Format::template place<FEW>(lane); }

    // Columns 8 v .. 8 v + 7 of a unit for a token, by 8 lanes of a warp that all call it; `there` is one for them.
    static DEVICE void prepare(Vec4& x, u8* to, int token, int v, bool there) {
        float s = (low_bf16(x.x) + high_bf16(x.x)) + (low_bf16(x.y) + high_bf16(x.y));
        s += (low_bf16(x.z) + high_bf16(x.z)) + (low_bf16(x.w) + high_bf16(x.w));
#pragma unroll
        for (int d = 1; d < Format::LANES; d *= 2) s += __shfl_xor_sync(~0u, s, d);
        Format::template put<Format>(to, token, v, s, there);
        const u32 even = Format::power(v & ~1), odd = Format::power(v | 1);
        x.x = mul_bf16x2(x.x, even), x.z = mul_bf16x2(x.z, even);
        x.y = mul_bf16x2(x.y, odd), x.w = mul_bf16x2(x.w, odd);
    }

    static DEVICE void unit(const u8* unit, int lane, const u32 (&x)[NT][8], float (&acc)[NT][4], const u8* prepared) {
        Format::template unit<NT>(unit, lane, x, acc, prepared);
    }
};
