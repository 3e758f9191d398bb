// Barriers in shared memory, copies into it, and what a kernel does about its neighbours in the stream.
#pragma once
#include "common.cuh"

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

DEVICE void barrier_init(u64* barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// Barriers that were initialized become visible to bulk copies.
DEVICE void barrier_init_fence() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

DEVICE void barrier_arrive(u64* barrier) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(shared_address(barrier)) : "memory");
}

DEVICE bool barrier_done(u64* barrier, u32 parity) {
    u32 done;
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
#else
    asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
#endif
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
    return done;
}

DEVICE void barrier_wait(u64* barrier, u32 parity) {
    while (!barrier_done(barrier, parity)) {
    }
}

#if __CUDA_ARCH__ >= 900
// Read once: the first to leave the L2 cache.
DEVICE u64 streaming_policy() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// One thread starts a copy of `bytes`, a multiple of 16, for which the barrier waits.
DEVICE void bulk_copy(void* to, const void* from, u32 bytes, u64* barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
            shared_address(to)),
        "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
        : "memory");
}
#else
// Each thread copies 16 bytes.
DEVICE void async_copy16(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

// The thread arrives once its copies have ended.
DEVICE void async_arrive(u64* barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}
#endif

// Threads of some warps of a block wait for each other.
DEVICE void some_wait(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

#if __CUDA_ARCH__ >= 900
// A cluster: blocks that see each other's shared memory.
DEVICE u32 cluster_rank() {
    u32 r;
    asm("mov.u32 %0, %cluster_ctarank;" : "=r"(r));
    return r;
}
// Orders nothing; barriers that were initialized are visible by their own fence.
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// The address of another block's copy of a place in shared memory.
DEVICE u32 remote_address(const void* p, u32 rank) {
    u32 a;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(a) : "r"(shared_address(p)), "r"(rank));
    return a;
}

// 16 bytes to another block, whose barrier (at `barrier` there) waits for them.
DEVICE void send_remote(u32 address, u32 barrier, float a, float b, float c, float d) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
        "f"(a), "f"(b), "f"(c), "f"(d), "r"(barrier)
        : "memory");
}

// The same of 4 bytes.
DEVICE void send_remote(u32 address, u32 barrier, float a) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(address), "f"(a),
                 "r"(barrier)
                 : "memory");
}

// What this thread read before is read; it says nothing of its writes.
DEVICE void arrive_remote(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// One thread: the barrier expects `bytes` from copies, and this thread has arrived.
DEVICE void barrier_expect(u64* barrier, u32 bytes) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1; }" ::"r"(
                     shared_address(barrier)),
                 "r"(bytes)
                 : "memory");
}
#endif

// The kernel behind this one in the stream may start (if it was launched so).
DEVICE void allow_next() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// The kernels ahead have ended, and their writes are visible.
DEVICE void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
