// Kernels that stand around captured kernels of which nothing is known but the memory that they touch.
//
// That memory is a list of 16-byte words anywhere: entry i of a table is {address, word | mask << 32}. `word` is the
// place of its content in a packed row, and only the bytes in the mask belong to it. There is one packed row for each
// generation of inputs; replay r has generation (r + offset) % pool.

typedef unsigned long long u64;

enum Counter { REPLAY, BAD, WORDS, FIRST_BAD, TICKET, COUNTERS };

static __device__ __forceinline__ u64 now() {
    u64 t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)::"memory");
    return t;
}

static __device__ __forceinline__ void put(uint4* to, uint4 value, unsigned mask) {
    if (mask == 0xffff) {
        *to = value;
        return;
    }
    for (int byte = 0; byte < 16; ++byte)
        if (mask >> byte & 1) ((unsigned char*)to)[byte] = ((const unsigned char*)&value)[byte];
}

// Copies packed content to its words, or (`gather`) words to their packed places. With `early` it is an early-release
// producer or reader: it triggers at once, waits for what is before it, lets `delay_ns` pass, and only then copies.
// At most a few CTAs, so that the kernel behind it finds room.
extern "C" __global__ void pdl_stress_copy(const ulonglong2* table, unsigned words, uint4* packed, unsigned stride,
                                           unsigned pool, const u64* counters, unsigned offset, int gather, int early,
                                           u64 delay_ns) {
    if (early) {
        asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
        asm volatile("griddepcontrol.wait;" ::: "memory");
        const u64 start = now();
        while (now() - start < delay_ns) {
        }
    }
    const u64 replay = *(const volatile u64*)&counters[REPLAY] + offset;
    uint4* row = packed + (size_t)(replay % pool) * stride;
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < words; i += gridDim.x * blockDim.x) {
        const ulonglong2 entry = table[i];
        uint4* live = (uint4*)entry.x;
        const unsigned word = (unsigned)entry.y, mask = (unsigned)(entry.y >> 32);
        if (gather)
            put(row + word, *live, mask);
        else
            put(live, row[word], mask);
    }
}

// Compares words with the packed row of their generation, counts, and ends the replay. `seen` and `marks` (one per packed
// word) take what the first bad replay held.
extern "C" __global__ void pdl_stress_grade(const ulonglong2* table, unsigned words, const uint4* expected,
                                            unsigned stride, unsigned pool, u64* counters, u64* last_bad, uint4* seen,
                                            unsigned char* marks) {
    const u64 replay = *(const volatile u64*)&counters[REPLAY];
    const uint4* row = expected + (size_t)(replay % pool) * stride;
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < words; i += gridDim.x * blockDim.x) {
        const ulonglong2 entry = table[i];
        const unsigned word = (unsigned)entry.y, mask = (unsigned)(entry.y >> 32);
        const uint4 got = *(const uint4*)entry.x, want = row[word];
        bool bad = false;
        for (int byte = 0; byte < 16; ++byte)
            bad |= (mask >> byte & 1) && ((const unsigned char*)&got)[byte] != ((const unsigned char*)&want)[byte];
        if (!bad) continue;
        if (atomicExch(last_bad, replay) != replay) atomicAdd(&counters[BAD], 1ull);
        const u64 old = atomicCAS(&counters[FIRST_BAD], ~0ull, replay);
        if (old == ~0ull || old == replay) {
            seen[word] = got;
            marks[word] = 1;
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        unsigned mine = 0;
        for (unsigned i = blockIdx.x * blockDim.x; i < words; i += gridDim.x * blockDim.x)
            mine += min(blockDim.x, words - i);
        atomicAdd(&counters[WORDS], (u64)mine);
        __threadfence();
        if (atomicAdd(&counters[TICKET], 1ull) == gridDim.x - 1) {
            counters[TICKET] = 0;
            counters[REPLAY] += 1;
        }
    }
}

// A dependent that never waits: watches words until they hold the packed content, and notes how long after its own start
// the last of them did. lag: {nanoseconds, threads that gave up}.
extern "C" __global__ void pdl_stress_watch(const ulonglong2* table, unsigned words, const uint4* packed, unsigned stride,
                                            unsigned pool, const u64* counters, u64 limit_ns, u64* lag) {
    const u64 start = now();
    const u64 replay = *(const volatile u64*)&counters[REPLAY];
    const uint4* row = packed + (size_t)(replay % pool) * stride;
    u64 last = 0, late = 0;
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < words; i += gridDim.x * blockDim.x) {
        const ulonglong2 entry = table[i];
        const unsigned word = (unsigned)entry.y, mask = (unsigned)(entry.y >> 32);
        const uint4 want = row[word];
        bool first = true;
        for (;;) {
            unsigned got[4];
            const volatile unsigned* live = (const volatile unsigned*)entry.x;
            for (int part = 0; part < 4; ++part) got[part] = live[part];
            bool same = true;
            for (int byte = 0; byte < 16; ++byte)
                same &= !(mask >> byte & 1) || ((const unsigned char*)got)[byte] == ((const unsigned char*)&want)[byte];
            if (same) break;
            first = false;
            if (now() - start > limit_ns) {
                late = 1;
                break;
            }
        }
        if (!first) last = now() - start;
    }
    if (last) atomicMax(&lag[0], last);
    if (late) atomicAdd(&lag[1], 1ull);
}
