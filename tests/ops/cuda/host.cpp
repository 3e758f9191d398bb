// What a kernel of csrc/ needs to run on the host: every thread of a block is a thread, and those of a warp and of
// the block meet at barriers. Blocks run one after the other. `KERNELS` are the sources.
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __shared__ static
#define __launch_bounds__(threads)
#define DEVICE static inline

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

struct Place {
    u32 x, y, z;
};

struct Warp {
    std::barrier<> meeting{32};
    u64 given[32];
};

static thread_local Place threadIdx;
static Place blockIdx;
static std::unique_ptr<std::barrier<>> block_meeting;
static std::vector<std::unique_ptr<Warp>> warps;
alignas(16) static u8 dynamic_shared[1 << 20];

static void wait_for_previous() {}
static void allow_next() {}
static void __syncthreads() { block_meeting->arrive_and_wait(); }

// Every lane gives a value and takes that of one lane.
template <typename T>
T __shfl_sync(u32, T value, int source) {
    Warp& warp = *warps[threadIdx.x / 32];
    u64 bits = 0;
    std::memcpy(&bits, &value, sizeof value);
    warp.given[threadIdx.x % 32] = bits;
    warp.meeting.arrive_and_wait();
    T taken;
    std::memcpy(&taken, &warp.given[source], sizeof taken);
    warp.meeting.arrive_and_wait();
    return taken;
}

template <typename T>
T __shfl_xor_sync(u32 all, T value, int mask) {
    return __shfl_sync(all, value, (threadIdx.x % 32) ^ mask);
}

static u32 __ballot_sync(u32 all, bool yes) {
    u32 votes = 0;
    for (int lane = 0; lane < 32; lane++) votes |= __shfl_sync(all, (u32)yes, lane) << lane;
    return votes;
}

static int atomicAdd(int* at, int more) { return __atomic_fetch_add(at, more, __ATOMIC_SEQ_CST); }
static int atomicAdd(const int* at, int more) { return atomicAdd(const_cast<int*>(at), more); }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fadd_rn(float a, float b) { return a + b; }
static float __fsub_rn(float a, float b) { return a - b; }
static int __popc(u32 x) { return __builtin_popcount(x); }
static int __ffs(u32 x) { return __builtin_ffs(x); }

static int __float_as_int(float x) {
    int bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}

static float __int_as_float(int bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

static void launch(u32 columns, u32 rows, u32 threads, const std::function<void()>& kernel) {
    for (u32 y = 0; y < rows; y++)
        for (u32 x = 0; x < columns; x++) {
            blockIdx = {x, y, 0};
            block_meeting = std::make_unique<std::barrier<>>(threads);
            warps.clear();
            for (u32 i = 0; i < threads; i += 32) warps.push_back(std::make_unique<Warp>());
            std::vector<std::thread> block;
            for (u32 i = 0; i < threads; i++)
                block.emplace_back([&kernel, i] {
                    threadIdx = {i, 0, 0};
                    kernel();
                });
            for (std::thread& thread : block) thread.join();
        }
}

#include KERNELS
