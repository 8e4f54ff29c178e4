// The PDL vocabulary shared by the native kernels. The host puts these definitions in front of it:
//   WAIT     one of the WAIT_* names below        TRIGGER  one of the TRIGGER_* names below
//   FENCE, EARLY_WEIGHTS, DELAY, STAMPS           0 or 1
// A kernel has one source; a behaviour switches its marked points on or off at compile time, and never its parameters.
#pragma once

typedef unsigned short bf16;  // the bits of a BF16 number
typedef unsigned int u32;
typedef unsigned long long u64;

#define WAIT_NEVER 0
#define WAIT_ALL 1       // every thread waits before its own reads
#define WAIT_LOADERS 2   // every thread that loads a dependent operand waits
#define WAIT_BARRIER 3   // one warp waits, a barrier holds the other readers behind it
#define WAIT_ONE_WARP 4  // one warp waits, nothing holds the other readers
#define WAIT_BRANCH 5    // the wait stands under `if (flag)`
#define WAIT_LATE 6      // dependent reads first, then the wait

#define TRIGGER_NONE 0
#define TRIGGER_ENTRY 1
#define TRIGGER_AFTER_WAIT 2
#define TRIGGER_BEFORE_STORES 3
#define TRIGGER_AFTER_STORES 4

// Every statement here is volatile with a "memory" clobber: the compiler keeps them, the loads and the stores in program order.
__device__ __forceinline__ void pdl_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ __forceinline__ void pdl_trigger() {
#if FENCE
    __threadfence();
#endif
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

#define TRIGGER_AT(place)                          \
    do {                                           \
        if (TRIGGER == TRIGGER_##place) pdl_trigger(); \
    } while (0)

__device__ __forceinline__ u64 global_time() {
    u64 now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)::"memory");
    return now;
}

// The delay point: between trigger and stores, in the storing threads.
__device__ __forceinline__ void delay_point(u64 delay_ns) {
#if DELAY
    if (delay_ns == 0) return;
    const u64 start = global_time();
    while (global_time() - start < delay_ns) {
    }
#endif
}

// stamps[4], set to {max, max, 0, 0} by the host:
//   [0] first CTA entry, [1] first read of a dependent operand, [2] last store issued, [3] last exit.
enum Stamp { STAMP_ENTRY = 0, STAMP_FIRST_READ = 1, STAMP_LAST_STORE = 2, STAMP_EXIT = 3 };

__device__ __forceinline__ void stamp(u64* stamps, Stamp which) {
#if STAMPS
    const u64 now = global_time();
    if (which == STAMP_ENTRY || which == STAMP_FIRST_READ)
        asm volatile("red.relaxed.gpu.global.min.u64 [%0], %1;" ::"l"(stamps + which), "l"(now) : "memory");
    else
        asm volatile("red.relaxed.gpu.global.max.u64 [%0], %1;" ::"l"(stamps + which), "l"(now) : "memory");
#endif
}

__device__ __forceinline__ float to_float(u32 bits) { return __uint_as_float(bits << 16); }

__device__ __forceinline__ bf16 to_bf16(float value) {  // one rounding, to nearest even
    bf16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

// Relaxed (strong) loads: never the non-coherent path, never moved across the wait, in no behaviour.
__device__ __forceinline__ uint4 load_16_bytes(const bf16* address) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(address)
                 : "memory");
    return v;
}

__device__ __forceinline__ u32 load_2_bytes(const bf16* address) {
    bf16 v;
    asm volatile("ld.relaxed.gpu.global.u16 %0, [%1];" : "=h"(v) : "l"(address) : "memory");
    return v;
}

__device__ __forceinline__ void store_16_bytes(bf16* address, uint4 v) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

__device__ __forceinline__ void store_2_bytes(bf16* address, bf16 v) {
    asm volatile("st.global.u16 [%0], %1;" ::"l"(address), "h"(v) : "memory");
}
