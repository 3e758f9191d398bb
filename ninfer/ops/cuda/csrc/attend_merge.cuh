// The second kernel of `attend_few.cuh`.
#pragma once
#include "attend_parts.cuh"

// Fold the splits of one column and head in ascending order, eight at a time, a slice of dimensions a block. Where
// values are rotated the slice is all.
constexpr int SLICE = V_TURNED ? D : 64, MERGERS = V_TURNED ? 512 : 256;
constexpr int ACROSS = SLICE / 4, EIGHTS = (TARGET + 7) / 8;

extern "C" __global__ void __launch_bounds__(MERGERS)
attend_merge(const float* sums, const float* tops, const int* positions, const u16* gate, int gate_stride, u16* out,
             int splits) {
  constexpr int Q_HEADS = HEADS * GROUP;
  __shared__ float weights[EIGHTS * 8];
  __shared__ __align__(16) float eights[EIGHTS][SLICE];
  __shared__ float turned[SLICE];
  const int thread = threadIdx.x, lane = thread % 32;
  const int place = blockIdx.x, t = place / Q_HEADS, head = place % Q_HEADS, slice = blockIdx.y * SLICE;
  // These were there before any block of the splits' kernel allowed this one to start.
  int position;
  asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(position) : "l"(positions + t));
  u16 g = 0;
  if (gate != nullptr && thread < SLICE)
    asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(g) : "l"(gate + (long long)t * gate_stride + head * D + slice + thread));
  const int length = max(position + 1, 0), pages = (length + 63) / 64;
  const int per_split = max((pages + TARGET - 1) / TARGET, 1), count = (pages + per_split - 1) / per_split;
  const float4* from = (const float4*)(sums + (long long)place * splits * D + slice) + thread % ACROSS;
  const float2* ends = (const float2*)tops + (long long)place * splits;
  allow_next();  // a product: see gdn_mix
  wait_for_previous();
  float mass = 0.0f, most = LOWEST;
  bool known = false;
  int eight = thread / ACROSS;
  do {
    float4 x[8];
#pragma unroll
    for (int i = 0; i < 8; i++)
      x[i] = 8 * eight + i < count ? from[(8 * eight + i) * (D / 4)] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (!known) {
      // Each warp finds the maximum and the mass.
      constexpr int OF_LANE = (TARGET + 31) / 32;
      float2 end[OF_LANE];
#pragma unroll
      for (int i = 0; i < OF_LANE; i++) end[i] = lane + 32 * i < count ? ends[lane + 32 * i] : make_float2(LOWEST, 0.0f);
#pragma unroll
      for (int i = 0; i < OF_LANE; i++) most = fmaxf(most, end[i].x);
#pragma unroll
      for (int stride = 1; stride < 32; stride *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, stride));
#pragma unroll
      for (int i = 0; i < OF_LANE; i++) {
        const float weight = exp2_(end[i].x - most);
        mass += weight * end[i].y;
        if (thread < 32 && lane + 32 * i < EIGHTS * 8) weights[lane + 32 * i] = weight;
      }
#pragma unroll
      for (int stride = 1; stride < 32; stride *= 2) mass += __shfl_xor_sync(~0u, mass, stride);
      known = true;
      __syncthreads();
    }
    if (eight < EIGHTS) {
      float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const float weight = weights[8 * eight + i];
        sum.x += weight * x[i].x;
        sum.y += weight * x[i].y;
        sum.z += weight * x[i].z;
        sum.w += weight * x[i].w;
      }
      *(float4*)&eights[eight][thread % ACROSS * 4] = sum;
    }
    eight += MERGERS / ACROSS;
  } while (8 * eight < count);
  __syncthreads();
  float total = 0.0f;
  if (thread < SLICE)
    for (int i = 0; 8 * i < count; i++) total += eights[i][thread];
  total = count > 0 ? total / mass : 0.0f;
  if constexpr (V_TURNED) {
    for (int stride = 1; stride < 32; stride *= 2) {
      const float other = __shfl_xor_sync(~0u, total, stride);
      total = lane & stride ? other - total : total + other;
    }
    for (int stride = 32; stride < D; stride *= 2) {
      if (thread < SLICE) turned[thread] = total;
      __syncthreads();
      const float other = thread < SLICE ? turned[thread ^ stride] : 0.0f;
      total = thread & stride ? other - total : total + other;
      __syncthreads();
    }
    total *= TURN;
  }
  if (thread >= SLICE) return;
  u32 result = pack_bf16x2(total, 0.0f) & 0xffff;
  if (gate != nullptr) result = pack_bf16x2(low_bf16(result) / (1.0f + __expf(-low_bf16((u32)g))), 0.0f) & 0xffff;
  out[(long long)place * D + slice + thread] = (u16)result;
}
