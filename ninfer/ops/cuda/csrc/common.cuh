// What every source here may use: short types, fragments, products, bf16 helpers. No header of CUDA is needed.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE __device__ __forceinline__

// acc (16 rows x 8 tokens) += A (16 x 16, bf16) B (16 x 8, bf16). Lane 4 r + q holds of A the rows r (a0, a2) and
// r + 8 (a1, a3), of B token r, of the sum rows r (c0, c1) and r + 8 (c2, c3) of tokens 2 q and 2 q + 1.
DEVICE void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Both bf16 of a times those of b, rounded to nearest; subnormal numbers count.
DEVICE u32 mul_bf16x2(u32 a, u32 b) {
    u32 d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0x80008000u));
    return d;
}

DEVICE u32 fma_bf16x2(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

// (low, high) rounded to nearest even.
DEVICE u32 pack_bf16x2(float low, float high) {
    u32 d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}

DEVICE u16 to_bf16(float x) {
    u16 d;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(d) : "f"(x));
    return d;
}

DEVICE float low_bf16(u32 x) { return __uint_as_float(x << 16); }
DEVICE float high_bf16(u32 x) { return __uint_as_float(x & 0xffff0000u); }

struct alignas(16) Vec4 {
    u32 x, y, z, w;
};

// 16 bytes of shared memory.
DEVICE Vec4 load_shared16(const u8* p) { return *reinterpret_cast<const Vec4*>(p); }
