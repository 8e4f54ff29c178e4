// The harness's own kernels: the source of true data, and the boundary that grades, poisons and counts.
//
// Everything moves in 16-byte words. All launches at a replay boundary have full edges, so ordinary loads are enough
// there; the source is a PDL secondary only in back-to-back graphs, and it waits before it reads or writes anything.

typedef unsigned long long u64;

enum Counter { REPLAY, BAD, WORDS, FIRST_BAD, TICKET, COUNTERS };
enum Place { NONE, ENTRY, AFTER_WAIT, BEFORE_STORES, AFTER_STORES };

static __device__ __forceinline__ u64 now() {
    u64 t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)::"memory");
    return t;
}
static __device__ __forceinline__ void wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
static __device__ __forceinline__ void trigger() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// An early-release producer: one word a thread. Thread i of replay r writes truth[(r % pool) * stride + word] to
// `out + word`, where word is i. With a table the places are scattered: entry i is {destination address, word | mask << 32},
// and of the word only the bytes in the mask are written. `place` says where it triggers. stamps: {first start, first read,
// last store, last end} or null.
extern "C" __global__ void pdl_stress_source(const uint4* truth, uint4* out, const ulonglong2* table, unsigned words,
                                             unsigned stride, unsigned pool, const u64* counters, unsigned offset,
                                             int place, int fence, u64 delay_ns, u64* stamps) {
    if (stamps && threadIdx.x == 0) atomicMin(&stamps[0], now());
    if (place == ENTRY) trigger();
    wait();
    if (place == AFTER_WAIT) {
        if (fence) __threadfence();
        trigger();
    }
    if (stamps && threadIdx.x == 0) atomicMin(&stamps[1], now());
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    const u64 replay = *(const volatile u64*)&counters[REPLAY] + offset;
    uint4 value = make_uint4(0, 0, 0, 0);
    uint4* target = out + i;
    unsigned word = i, mask = 0xffff;
    if (table && i < words) {
        const ulonglong2 entry = table[i];
        target = (uint4*)entry.x;
        word = (unsigned)entry.y;
        mask = (unsigned)(entry.y >> 32);
    }
    if (i < words) value = truth[(size_t)(replay % pool) * stride + word];
    if (place == BEFORE_STORES) {
        __syncthreads();
        if (fence) __threadfence();
        trigger();
    }
    if (delay_ns) {
        const u64 start = now();
        while (now() - start < delay_ns) {
        }
    }
    if (i < words) {
        if (mask == 0xffff) {
            *target = value;
        } else {
            for (int byte = 0; byte < 16; ++byte)
                if (mask >> byte & 1) ((unsigned char*)target)[byte] = ((const unsigned char*)&value)[byte];
        }
    }
    // One thread's trigger counts for its CTA: every store of the CTA must come first, and the last stamp too.
    __syncthreads();
    if (stamps && threadIdx.x == 0) atomicMax(&stamps[2], now());
    if (place == AFTER_STORES) {
        if (fence) __threadfence();
        trigger();
    }
    if (stamps && threadIdx.x == 0) atomicMax(&stamps[3], now());
}

// Grades one row of words per blockIdx.y against the reference of its replay, then poisons it. Row y belongs to replay
// REPLAY + first_row + y. The first bad replay's differing blocks go to `snapshot` (marked in `marks`), so that the host
// can say what was wrong. The last block advances REPLAY by `advance`. `grade` 0: only poison.
extern "C" __global__ void pdl_stress_boundary(uint4* rows, unsigned words, const uint4* reference, unsigned stride,
                                               const uint4* poison, unsigned pool, unsigned first_row, unsigned advance,
                                               u64* counters, u64* last_bad, uint4* snapshot, unsigned* marks,
                                               uint4* extra, unsigned extra_words, int grade) {
    __shared__ bool first;
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    const unsigned row = first_row + blockIdx.y;
    const u64 replay = *(const volatile u64*)&counters[REPLAY] + row;
    uint4 got = make_uint4(0, 0, 0, 0);
    bool bad = false;
    if (i < words) {
        uint4* here = rows + (size_t)blockIdx.y * words + i;
        if (grade) {
            got = __ldcg(here);
            const uint4 want = reference[(size_t)(replay % pool) * stride + i];
            bad = (got.x ^ want.x) | (got.y ^ want.y) | (got.z ^ want.z) | (got.w ^ want.w);
        }
        *here = poison[i];
    }
    if (blockIdx.y == 0 && i < extra_words) {
        const unsigned nan = 0x7fc17fc1u;
        extra[i] = make_uint4(nan, nan, nan, nan);
    }
    if (!grade) return;
    if (__syncthreads_or(bad)) {
        if (threadIdx.x == 0) {
            if (atomicExch(&last_bad[row], replay) != replay) atomicAdd(&counters[BAD], 1ull);
            const u64 old = atomicCAS(&counters[FIRST_BAD], ~0ull, replay);
            first = old == ~0ull || old == replay;
        }
        __syncthreads();
        if (first) {
            if (i < words) snapshot[i] = got;
            if (threadIdx.x == 0) marks[blockIdx.x] = 1;
        }
    }
    if (threadIdx.x == 0) {
        const unsigned begin = min(words, blockIdx.x * blockDim.x);  // blocks beyond it only poison `extra`
        atomicAdd(&counters[WORDS], (u64)(min(words, begin + blockDim.x) - begin));
        __threadfence();
        const u64 blocks = (u64)gridDim.x * gridDim.y;
        if (atomicAdd(&counters[TICKET], 1ull) == blocks - 1) {
            counters[TICKET] = 0;
            counters[REPLAY] += advance;
        }
    }
}

// Neighbours: they run beside the chain and touch none of its memory. This one keeps its SM to itself: it is launched with
// all the shared memory that a CTA may have.
extern "C" __global__ void pdl_stress_hold(u64 ns) {
    const u64 start = now();
    while (now() - start < ns) {
    }
}

// This one keeps the memory and the L2 busy: it rewrites `data` until `ns` have passed.
extern "C" __global__ void pdl_stress_stream(uint4* data, u64 words, u64 ns) {
    const u64 start = now(), step = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; now() - start < ns; i = (i + step) % words) {
        uint4 value = data[i];
        ++value.x;
        data[i] = value;
    }
}
