// Decoders of the other formats; what a decoder is stands in formats_a.cuh, where codes stand in pack.py.
//
// Codes become bf16 integers, which products take exactly: a code under 128 in the last bits of a bf16 of 128 is
// 128 more than itself, and an addition takes off that and the format's offset. Sums over a scale group are
// multiplied by its scale in float32. Minima of groups are integers, too: a second product sums them.
#pragma once
#include "formats_a.cuh"

static const u32 ONES = 0x3f803f80u, MAGIC = 0x43004300u;

// (a & MASK) | c, or (~a & MASK) | c, in one instruction; of two constants one must be in a register, which
// compilers do not see.
template <u32 MASK>
DEVICE u32 masked(u32 a, u32 c) {
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "n"(MASK), "r"(c));
    return d;
}

template <u32 MASK>
DEVICE u32 masked_not(u32 a, u32 c) {
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, 0xae;" : "=r"(d) : "r"(a), "n"(MASK), "r"(c));
    return d;
}

// part = A B, of nothing before.
template <int NT, int R>
DEVICE void fresh_step(const u32 (&x)[NT][R], float (&part)[NT][4], int j, u32 a0, u32 a1, u32 a2, u32 a3) {
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
        float(&c)[4] = part[nt];
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
                     : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
                     : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(x[nt][2 * j]), "r"(x[nt][2 * j + 1]), "f"(0.f));
    }
}

template <int NT, int R>
DEVICE void group_step(const u32 (&x)[NT][R], float (&part)[NT][4], bool first, int j, u32 a0, u32 a1, u32 a2, u32 a3) {
    if (first) fresh_step<NT>(x, part, j, a0, a1, a2, a3);
    else step<NT>(x, part, j, a0, a1, a2, a3);
}

// acc += part times the factors of rows r and r + 8.
template <int NT>
DEVICE void add_scaled(float (&acc)[NT][4], const float (&part)[NT][4], float top, float bottom) {
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
        acc[nt][0] = fmaf(part[nt][0], top, acc[nt][0]);
        acc[nt][1] = fmaf(part[nt][1], top, acc[nt][1]);
        acc[nt][2] = fmaf(part[nt][2], bottom, acc[nt][2]);
        acc[nt][3] = fmaf(part[nt][3], bottom, acc[nt][3]);
    }
}

DEVICE float half_to_float(u32 bits) {
    float f;
    asm("{.reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h;}" : "=f"(f) : "r"(bits));
    return f;
}

// A byte of a word as float32, by the last bits of 2^23.
template <int BYTE>
DEVICE float byte_to_float(u32 w) {
    return __uint_as_float(__byte_perm(w, 0x4b000000u, 0x7440 + BYTE)) - 8388608.f;
}

// A signed byte plus 128 likewise.
template <int BYTE>
DEVICE float signed_to_float(u32 flipped) {
    return __uint_as_float(__byte_perm(flipped, 0x4b000000u, 0x7440 + BYTE)) - 8388736.f;
}

// A byte under 128 of a word, twice, as bf16.
template <int BYTE>
DEVICE u32 byte_to_bf16x2(u32 w) {
    return fma_bf16x2(__byte_perm(w, MAGIC, 0x5050 + 0x101 * BYTE), ONES, 0xc300c300u);
}

// Codes of 64 columns of rows r and r + 8: pair(half, p) is pair p of 8, a register for the product.
template <int BITS, int OFFSET>
struct Codes {
    Vec4 low;
    u32 top, bottom;  // of the fifth bits, or of bits 4 and 5

    DEVICE void load(const u8* unit, int lane) {
        low = load_shared16(unit + 16 * lane);
        if (BITS == 5) top = *reinterpret_cast<const u32*>(unit + 512 + 4 * lane);
        if (BITS == 6) {
            const uint2 v = *reinterpret_cast<const uint2*>(unit + 512 + 8 * lane);
            top = v.x, bottom = v.y;
        }
    }

    DEVICE u32 pair(int half, int p) const {
        const u32 w = half ? (p < 4 ? low.z : low.w) : (p < 4 ? low.x : low.y);
        u32 more = MAGIC;
        if (BITS == 5) {
            const int at = 8 * half + p;
            more = masked<0x00100010u>(at < 4 ? top << (4 - at) : top >> (at - 4), MAGIC);
        }
        if (BITS == 6) {
            const u32 h = half ? bottom : top;
            more = masked<0x00300030u>(p < 2 ? h << (4 - 2 * p) : h >> (2 * p - 4), MAGIC);
        }
        const u32 minus = 0x80008000u | (MAGIC + 0x00010001u * OFFSET);
        return fma_bf16x2(masked<0x000f000fu>(w >> (4 * (p % 4)), more), ONES, minus);
    }

    template <int NT, int R>
    DEVICE void feed(const u32 (&x)[NT][R], float (&part)[NT][4], bool first, int j) const {
        group_step<NT>(x, part, first, j, pair(0, 2 * j), pair(1, 2 * j), pair(0, 2 * j + 1), pair(1, 2 * j + 1));
    }
};

// Bytes 0, 2 and 1, 3 of a word, codes plus 128, as two registers of bf16: 128 plus seven bits, less 256 or 128.
struct Bytes {
    Vec4 top, bottom;

    DEVICE void load(const u8* unit, int lane) {
        top = load_shared16(unit + 16 * lane), bottom = load_shared16(unit + 512 + 16 * lane);
    }

    static DEVICE u32 pair(u32 w) {
        return fma_bf16x2(masked<0x007f007fu>(w, MAGIC), ONES, masked_not<0x00800080u>(w, 0xc300c300u));
    }

    template <int NT, int R>
    DEVICE void feed(const u32 (&x)[NT][R], float (&part)[NT][4], bool first, int j) const {
        const u32 a = j == 0 ? top.x : j == 1 ? top.y : j == 2 ? top.z : top.w;
        const u32 b = j == 0 ? bottom.x : j == 1 ? bottom.y : j == 2 ? bottom.z : bottom.w;
        group_step<NT>(x, part, first, j, pair(a), pair(b), pair(a >> 8), pair(b >> 8));
    }
};

// One FP16 scale for 64 columns: two bytes for row r, two for row r + 8, at 4 r behind the codes.
template <int BITS, int BYTES>
struct Grouped64 {
    static const int UNIT_BYTES = BYTES, UNIT_COLUMNS = 64, ORDER = 1;

    template <int NT>
    static DEVICE void unit(const u8* unit, int lane, const u32 (&x)[NT][8], float (&acc)[NT][4]) {
        Codes<BITS, (1 << (BITS - 1))> codes;
        codes.load(unit, lane);
        const u32 scales = *reinterpret_cast<const u32*>(unit + BYTES - 32 + (lane & 28));
        float part[NT][4];
#pragma unroll
        for (int j = 0; j < 4; ++j) codes.feed(x, part, j == 0, j);
        add_scaled<NT>(acc, part, half_to_float(scales & 0xffff), half_to_float(scales >> 16));
    }
};

typedef Grouped64<4, 544> Q4G64;
typedef Grouped64<5, 672> Q5G64;
typedef Grouped64<6, 800> Q6G64;

// FP16 scales of 32 columns, two for row r, two for row r + 8.
struct Q4G32 {
    static const int UNIT_BYTES = 576, UNIT_COLUMNS = 64, ORDER = 1;

    template <int NT>
    static DEVICE void unit(const u8* unit, int lane, const u32 (&x)[NT][8], float (&acc)[NT][4]) {
        Codes<4, 8> codes;
        codes.load(unit, lane);
        const uint2 scales = *reinterpret_cast<const uint2*>(unit + 512 + 2 * (lane & 28));
#pragma unroll
        for (int g = 0; g < 2; ++g) {
            float part[NT][4];
            codes.feed(x, part, true, 2 * g);
            codes.feed(x, part, false, 2 * g + 1);
            add_scaled<NT>(acc, part, half_to_float((scales.x >> (16 * g)) & 0xffff), half_to_float((scales.y >> (16 * g)) & 0xffff));
        }
    }
};

struct Q8G32 {
    static const int UNIT_BYTES = 1088, UNIT_COLUMNS = 64, ORDER = 1;

    template <int NT>
    static DEVICE void unit(const u8* unit, int lane, const u32 (&x)[NT][8], float (&acc)[NT][4]) {
        Bytes codes;
        codes.load(unit, lane);
        const uint2 scales = *reinterpret_cast<const uint2*>(unit + 1024 + 2 * (lane & 28));
#pragma unroll
        for (int g = 0; g < 2; ++g) {
            float part[NT][4];
            codes.feed(x, part, true, 2 * g);
            codes.feed(x, part, false, 2 * g + 1);
            add_scaled<NT>(acc, part, half_to_float((scales.x >> (16 * g)) & 0xffff), half_to_float((scales.y >> (16 * g)) & 0xffff));
        }
    }
};

// Two FP16 scales and two FP16 minima for row r, then for row r + 8; minima count times the sum of x.
struct Q41 {
    static const int UNIT_BYTES = 640, UNIT_COLUMNS = 64, ORDER = 1;

    template <int NT>
    static DEVICE void unit(const u8* unit, int lane, const u32 (&x)[NT][8], float (&acc)[NT][4]) {
        Codes<4, 0> codes;
        codes.load(unit, lane);
        const Vec4 scales = load_shared16(unit + 512 + 4 * (lane & 28));
#pragma unroll
        for (int g = 0; g < 2; ++g) {
            float part[NT][4];
            codes.feed(x, part, true, 2 * g);
            codes.feed(x, part, false, 2 * g + 1);
            add_scaled<NT>(acc, part, half_to_float((scales.x >> (16 * g)) & 0xffff), half_to_float((scales.z >> (16 * g)) & 0xffff));
            fresh_step<NT>(x, part, 2 * g, ONES, ONES, ONES, ONES);
            step<NT>(x, part, 2 * g + 1, ONES, ONES, ONES, ONES);
            add_scaled<NT>(acc, part, half_to_float((scales.y >> (16 * g)) & 0xffff), half_to_float((scales.w >> (16 * g)) & 0xffff));
        }
    }
};

// Behind the codes, for row r, then for row r + 8: two scales and two minima, bytes; d and dmin, FP16.
template <int BITS, int BYTES>
struct KQuant {
    static const int UNIT_BYTES = BYTES, UNIT_COLUMNS = 64, ORDER = 1;

    template <int NT>
    static DEVICE void unit(const u8* unit, int lane, const u32 (&x)[NT][8], float (&acc)[NT][4]) {
        Codes<BITS, 0> codes;
        codes.load(unit, lane);
        const Vec4 scales = load_shared16(unit + BYTES - 128 + 4 * (lane & 28));
        const float top = half_to_float(scales.y & 0xffff), bottom = half_to_float(scales.w & 0xffff);
        float part[NT][4];
        codes.feed(x, part, true, 0);
        codes.feed(x, part, false, 1);
        add_scaled<NT>(acc, part, top * byte_to_float<0>(scales.x), bottom * byte_to_float<0>(scales.z));
        codes.feed(x, part, true, 2);
        codes.feed(x, part, false, 3);
        add_scaled<NT>(acc, part, top * byte_to_float<1>(scales.x), bottom * byte_to_float<1>(scales.z));
        const u32 a = byte_to_bf16x2<2>(scales.x), b = byte_to_bf16x2<2>(scales.z);
        fresh_step<NT>(x, part, 0, a, b, a, b);
        step<NT>(x, part, 1, a, b, a, b);
        const u32 c = byte_to_bf16x2<3>(scales.x), d = byte_to_bf16x2<3>(scales.z);
        step<NT>(x, part, 2, c, d, c, d);
        step<NT>(x, part, 3, c, d, c, d);
        add_scaled<NT>(acc, part, -half_to_float(scales.y >> 16), -half_to_float(scales.w >> 16));
    }
};

typedef KQuant<4, 640> Q4K;
typedef KQuant<5, 768> Q5K;

// Behind the codes the four int8 scales of row r, of row r + 8; behind all rows' scales d (FP16) of both.
struct Q6K {
    static const int UNIT_BYTES = 864, UNIT_COLUMNS = 64, ORDER = 1;

    template <int NT>
    static DEVICE void unit(const u8* unit, int lane, const u32 (&x)[NT][8], float (&acc)[NT][4]) {
        Codes<6, 32> codes;
        codes.load(unit, lane);
        uint2 both = *reinterpret_cast<const uint2*>(unit + 768 + 2 * (lane & 28));
        const u32 whole = *reinterpret_cast<const u32*>(unit + 832 + (lane & 28));
        const float top = half_to_float(whole & 0xffff), bottom = half_to_float(whole >> 16);
        both.x ^= 0x80808080u, both.y ^= 0x80808080u;
        float part[NT][4];
        codes.feed(x, part, true, 0);
        add_scaled<NT>(acc, part, top * signed_to_float<0>(both.x), bottom * signed_to_float<0>(both.y));
        codes.feed(x, part, true, 1);
        add_scaled<NT>(acc, part, top * signed_to_float<1>(both.x), bottom * signed_to_float<1>(both.y));
        codes.feed(x, part, true, 2);
        add_scaled<NT>(acc, part, top * signed_to_float<2>(both.x), bottom * signed_to_float<2>(both.y));
        codes.feed(x, part, true, 3);
        add_scaled<NT>(acc, part, top * signed_to_float<3>(both.x), bottom * signed_to_float<3>(both.y));
    }
};

// Codes as in Fp8Row, then the BF16 scale of row r's tile, of row r + 8's.
struct Fp8Tile {
    static const int UNIT_BYTES = 1056, UNIT_COLUMNS = 64, ORDER = 0;

    template <int NT>
    static DEVICE void unit(const u8* unit, int lane, const u32 (&x)[NT][8], float (&acc)[NT][4]) {
        float part[NT][4];
        const Vec4 top = load_shared16(unit + 16 * lane), bottom = load_shared16(unit + 512 + 16 * lane);
        const u32 a[4] = {top.x, top.y, top.z, top.w}, b[4] = {bottom.x, bottom.y, bottom.z, bottom.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            u32 a0, a1, a2, a3;
            Fp8Row::decode(a[j], a0, a2);
            Fp8Row::decode(b[j], a1, a3);
            group_step<NT>(x, part, j == 0, j, a0, a1, a2, a3);
        }
        const u32 scales = *reinterpret_cast<const u32*>(unit + 1024 + (lane & 28));
        add_scaled<NT>(acc, part, low_bf16(scales), high_bf16(scales));
    }
};
