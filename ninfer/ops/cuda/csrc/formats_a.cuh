// Decoders of NVFP4, FP8 by rows, BF16. What a decoder is:
//
// struct Name {
//     static const int UNIT_BYTES, UNIT_COLUMNS;  // as in packed.py; UNIT_COLUMNS is a multiple of 64
//     static const int ORDER;                     // 0 OWNED, 1 STEPPED: which columns of x a lane gets
//     // acc += (16 rows of the unit) x. `unit` is the unit in shared memory, aligned to 16 bytes. x[nt][i] are
//     // B registers of token tile nt: x[nt][2 j], x[nt][2 j + 1] hold the lane's columns 4 j .. 4 j + 3 of its
//     // token, bf16 (j counts steps of 16 columns, 4 in a unit of 64), zeros beyond T and beyond the columns.
//     // Feed them to mma(acc[nt], row r: 4 j, 4 j + 1; row r + 8: the same; row r: 4 j + 2, 4 j + 3; row r + 8;
//     // x[nt][2 j], x[nt][2 j + 1]). The framework multiplies row sums by row_scales at the end.
//     // Formats of formats_b.cuh get more: see `Prepared` there.
//     template <int NT>
//     static DEVICE void unit(const u8* unit, int lane, const u32 (&x)[NT][UNIT_COLUMNS / 8], float (&acc)[NT][4]);
// };
#pragma once
#include "common.cuh"

// The 16 columns' registers of a step, for all token tiles.
template <int NT, int R>
DEVICE void step(const u32 (&x)[NT][R], float (&acc)[NT][4], int j, u32 a0, u32 a1, u32 a2, u32 a3) {
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) mma(acc[nt], a0, a1, a2, a3, x[nt][2 * j], x[nt][2 * j + 1]);
}

// 512 bytes of codes: 16 bytes a lane, two words of 8 columns for row r, two for row r + 8. In a word the low half
// holds columns 0, 2, 4, 6, the high half 1, 3, 5, 7; of a half, the magnitudes stand at bits 8:6, 5:3, 2:0, 11:9
// and the signs at 15, 12, 13, 14. Then 64 bytes of scales: byte 2 lane for row r, 2 lane + 1 for row r + 8, of the
// lane's group: 8 (E + 22) + M for a scale 2^E (1 + M / 8); where the scale is 0 the codes are.
// A magnitude at bits 8:6 of a bf16 is its value times 2^-126, subnormal included; a scale byte at bits 11:4 under
// three ones is the scale times 2^119; their product is exact, and row_scales bring the 2^7 that lack.
struct Nvfp4 {
    static const int UNIT_BYTES = 576, UNIT_COLUMNS = 64, ORDER = 0;

    static DEVICE void decode(u32 w, u32 scale, u32 (&out)[4]) {
        const u32 both = 0x81c081c0u, magnitude = 0x01c001c0u, sign = 0x80008000u;
        out[0] = mul_bf16x2(w & both, scale);
        out[1] = mul_bf16x2((w << 3) & both, scale);
        out[2] = mul_bf16x2(((w << 6) & magnitude) | ((w << 2) & sign), scale);
        out[3] = mul_bf16x2(((w >> 3) & magnitude) | ((w << 1) & sign), scale);
    }

    template <int NT>
    static DEVICE void unit(const u8* unit, int lane, const u32 (&x)[NT][8], float (&acc)[NT][4]) {
        const Vec4 codes = load_shared16(unit + 16 * lane);
        const u32 scales = *reinterpret_cast<const u16*>(unit + 512 + 2 * lane);
        const u32 low = __byte_perm(scales, 0, 0x4040) * 16 + 0x70007000u;
        const u32 high = __byte_perm(scales, 0, 0x4141) * 16 + 0x70007000u;
        u32 a[4], b[4];
        decode(codes.x, low, a);
        decode(codes.z, high, b);
        step<NT>(x, acc, 0, a[0], b[0], a[1], b[1]);
        step<NT>(x, acc, 1, a[2], b[2], a[3], b[3]);
        decode(codes.y, low, a);
        decode(codes.w, high, b);
        step<NT>(x, acc, 2, a[0], b[0], a[1], b[1]);
        step<NT>(x, acc, 3, a[2], b[2], a[3], b[3]);
    }
};

// 512 bytes for rows r, then 512 for rows r + 8, 16 bytes a lane; in a word of four columns byte 0 is column 2,
// byte 1 column 0, byte 2 column 3, byte 3 column 1. E4M3 at bits 15 and 10:4 of a bf16 is its value times 2^-120.
struct Fp8Row {
    static const int UNIT_BYTES = 1024, UNIT_COLUMNS = 64, ORDER = 0;

    static DEVICE void decode(u32 w, u32& first, u32& second) {
        const u32 magnitude = 0x07f007f0u, sign = 0x80008000u, factor = 0x7b807b80u;
        first = mul_bf16x2(((w >> 4) & magnitude) | (w & sign), factor);
        second = mul_bf16x2(((w << 4) & magnitude) | ((w << 8) & sign), factor);
    }

    template <int NT>
    static DEVICE void unit(const u8* unit, int lane, const u32 (&x)[NT][8], float (&acc)[NT][4]) {
        const Vec4 top = load_shared16(unit + 16 * lane), bottom = load_shared16(unit + 512 + 16 * lane);
        const u32 a[4] = {top.x, top.y, top.z, top.w}, b[4] = {bottom.x, bottom.y, bottom.z, bottom.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            u32 a0, a1, a2, a3;
            decode(a[j], a0, a2);
            decode(b[j], a1, a3);
            step<NT>(x, acc, j, a0, a1, a2, a3);
        }
    }
};

// Vector j is step j of 16 columns: row r's columns 4 j, 4 j + 1; the same of row r + 8; row r's 4 j + 2, 4 j + 3;
// row r + 8's: the A registers as they are.
struct Bf16 {
    static const int UNIT_BYTES = 2048, UNIT_COLUMNS = 64, ORDER = 0;

    template <int NT>
    static DEVICE void unit(const u8* unit, int lane, const u32 (&x)[NT][8], float (&acc)[NT][4]) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const Vec4 a = load_shared16(unit + 512 * j + 16 * lane);
            step<NT>(x, acc, j, a.x, a.y, a.z, a.w);
        }
    }
};
