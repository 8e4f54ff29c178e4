// out[M, N] = x[M, K] @ weight[N, K]^T (+ bias[N]) for few rows: BF16 in and out, FP32 accumulation, no atomics.
//
// One CTA makes 16 features x 8 rows with 12 warps: 0-3 compute, 4-7 load weights, 8-11 load x (one elected lane each). A ring of stages
// lies in shared memory, each 256 wide in K: 4 boxes of 64 x 16 weights and 4 of 64 x 8 activations. Stage s belongs to compute
// warp s % 4, so warp w does k in [1024 i + 256 w, + 256) for i = 0, 1, ... in ascending order into one accumulator.
// The result is ((w0 + w1) + w2) + w3, plus bias, rounded once: it depends on neither M nor N nor the number of stages.
//
// Weights and bias are independent operands: fetched before the wait (EARLY_WEIGHTS). Only the warps that load x wait; the
// compute warps are ordered behind them by the stage's `full` barrier.

struct alignas(64) TensorMap {
    u64 opaque[16];
};

enum : int { kMaxStages = 16, kBoxK = 64, kBoxes = 4, kStageK = kBoxK * kBoxes, kTurnK = 4 * kStageK, kFeatures = 16, kRows = 8 };
enum : int { kWeightBox = kBoxK * kFeatures * 2, kXBox = kBoxK * kRows * 2, kStageBytes = kBoxes * (kWeightBox + kXBox) };

// One lane of a converged warp, always the same one; keeps the branch's addresses in uniform registers.
__device__ __forceinline__ bool elected() {
    u32 mine;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(mine)::"memory");
    return mine;
}

__device__ __forceinline__ u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Returns once the barrier's phase of this parity is over. A fresh barrier counts as past its phase of parity 1.
__device__ __forceinline__ void barrier_poll(u32 barrier, u32 parity) {
    u32 done;
    do {
        asm volatile(
            "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
    } while (!done);
}

__device__ __forceinline__ void load_box(u32 to, const TensorMap* map, int k, int row, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
                 "l"(map), "r"(k), "r"(row), "r"(barrier)
                 : "memory");
}

__device__ __forceinline__ void load_matrices(u32 (&m)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void multiply_add(float (&acc)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Walks the stages of one of the four columns of the ring.
struct Walk {
    int column, stages, stage;
    u32 parity;
    __device__ __forceinline__ Walk(int column, int stages) : column(column), stages(stages), stage(column), parity(0) {}
    __device__ __forceinline__ void next() {
        stage += 4;
        if (stage >= stages) {
            stage = column;
            parity ^= 1;
        }
    }
};

struct Ring {
    u32 data, full, empty;
    __device__ __forceinline__ u32 weights(int stage) const { return data + stage * kStageBytes; }
    __device__ __forceinline__ u32 activations(int stage) const { return weights(stage) + kBoxes * kWeightBox; }
};

// One loading warp: every box of its column, in order, by its elected lane.
template <bool kIsWeight>
__device__ __forceinline__ void load_column(const TensorMap* map, const Ring& ring, Walk walk, int row, int width) {
    const u32 box = kIsWeight ? kWeightBox : kXBox;
    for (int k = walk.column * kStageK; k < width; k += kTurnK, walk.next()) {
        const int boxes = min(kBoxes, (width - k) / kBoxK);
        const u32 full = ring.full + 8 * walk.stage;
        const u32 to = kIsWeight ? ring.weights(walk.stage) : ring.activations(walk.stage);
        barrier_poll(ring.empty + 8 * walk.stage, walk.parity ^ 1);
        if (elected()) {
            barrier_expect(full, boxes * box);
#pragma unroll
            for (int b = 0; b < kBoxes; ++b)
                if (b < boxes) load_box(to + b * box, map, k + b * kBoxK, row, full);
        }
    }
}

// kCount boxes of a stage. 16-byte chunk c of row r of a box lies at chunk c ^ (r % 8).
template <int kCount>
__device__ __forceinline__ void multiply_boxes(float (&acc)[4], u32 weights, u32 activations, int lane) {
    const int a_row = lane & 15, a_chunk = lane >> 4, b_row = lane & 7, b_chunk = lane >> 3;
    u32 a[kCount][4][4], x[kCount][2][4];
#pragma unroll
    for (int b = 0; b < kCount; ++b) {
        const u32 a_base = weights + b * kWeightBox + a_row * (kBoxK * 2);
        const u32 b_base = activations + b * kXBox + b_row * (kBoxK * 2);
#pragma unroll
        for (int s = 0; s < 2; ++s) {
            load_matrices(x[b][s], b_base + (((4 * s + b_chunk) ^ b_row) << 4));
            load_matrices(a[b][2 * s], a_base + (((4 * s + a_chunk) ^ (a_row & 7)) << 4));
            load_matrices(a[b][2 * s + 1], a_base + (((4 * s + 2 + a_chunk) ^ (a_row & 7)) << 4));
        }
    }
#pragma unroll
    for (int b = 0; b < kCount; ++b)
#pragma unroll
        for (int s = 0; s < 4; ++s) multiply_add(acc, a[b][s], x[b][s / 2][2 * (s & 1)], x[b][s / 2][2 * (s & 1) + 1]);
}

// One compute warp: every stage of its column, in order.
__device__ __forceinline__ void multiply_column(float (&acc)[4], const Ring& ring, Walk walk, int lane, int width) {
    for (int k = walk.column * kStageK; k < width; k += kTurnK, walk.next()) {
        const u32 weights = ring.weights(walk.stage), activations = ring.activations(walk.stage);
        const int boxes = (width - k) / kBoxK;
        barrier_poll(ring.full + 8 * walk.stage, walk.parity);
        if (boxes >= kBoxes) {
            multiply_boxes<kBoxes>(acc, weights, activations, lane);
        } else {
#pragma unroll 1
            for (int b = 0; b < boxes; ++b) multiply_boxes<1>(acc, weights + b * kWeightBox, activations + b * kXBox, lane);
        }
        __syncwarp();
        if (elected()) barrier_arrive(ring.empty + 8 * walk.stage);
    }
}

extern "C" __global__ void __launch_bounds__(384, 1)
    tinygemm2(const __grid_constant__ TensorMap weight_map, const __grid_constant__ TensorMap x_map, bf16* out, const bf16* bias,
              long long out_stride, int rows, int width, int stages, u64 delay_ns, int flag, u64* stamps) {
    extern __shared__ char dynamic_shared[];
    __shared__ u64 full[kMaxStages], empty[kMaxStages];
    __shared__ float4 partial[3][32];
    const int lane = threadIdx.x & 31, warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0);
    const int feature0 = blockIdx.x * kFeatures, row0 = blockIdx.y * kRows;
    // The 128-byte swizzle follows address bits: boxes start at multiples of 1024.
    const Ring ring = {(shared_address(dynamic_shared) + 1023) & ~1023u, shared_address(full), shared_address(empty)};

    if (threadIdx.x == 0) stamp(stamps, STAMP_ENTRY);
    TRIGGER_AT(ENTRY);
    if (warp < 4 && elected()) {
#pragma unroll 1
        for (int stage = warp; stage < stages; stage += 4) {
            barrier_init(ring.full + 8 * stage, 2);   // its weight loader and its activation loader
            barrier_init(ring.empty + 8 * stage, 1);  // its compute warp
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (warp == 4 && elected()) asm volatile("prefetch.tensormap [%0];" ::"l"(&weight_map) : "memory");
    if (warp == 8 && elected()) asm volatile("prefetch.tensormap [%0];" ::"l"(&x_map) : "memory");
    __syncthreads();

#if !EARLY_WEIGHTS && WAIT == WAIT_ALL
    pdl_wait();
#endif
#if !EARLY_WEIGHTS && WAIT == WAIT_BARRIER
    if (warp == 8) {
        pdl_wait();
        TRIGGER_AT(AFTER_WAIT);
    }
    __syncthreads();
#endif
// The wait of the threads that read weights and bias, where those are read after it.
#if EARLY_WEIGHTS || WAIT == WAIT_ALL || WAIT == WAIT_BARRIER
#define WAIT_FOR_WEIGHTS()
#elif WAIT == WAIT_BRANCH
#define WAIT_FOR_WEIGHTS() \
    if (flag) pdl_wait()
#else
#define WAIT_FOR_WEIGHTS() pdl_wait()
#endif

    float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f}, bias_low = 0.0f, bias_high = 0.0f;
    if (warp < 4) {
        if (warp == 0) {
            WAIT_FOR_WEIGHTS();
            if (bias) {
                bias_low = to_float(load_2_bytes(bias + feature0 + lane / 4));
                bias_high = to_float(load_2_bytes(bias + feature0 + lane / 4 + 8));
            }
        }
#if EARLY_WEIGHTS && WAIT == WAIT_ALL
        pdl_wait();
#endif
        multiply_column(acc, ring, Walk(warp, stages), lane, width);
        if (warp > 0) partial[warp - 1][lane] = make_float4(acc[0], acc[1], acc[2], acc[3]);
    } else if (warp < 8) {
        WAIT_FOR_WEIGHTS();
        load_column<true>(&weight_map, ring, Walk(warp - 4, stages), feature0, width);
#if EARLY_WEIGHTS && WAIT == WAIT_ALL
        pdl_wait();
#endif
    } else {
#if WAIT == WAIT_LOADERS || (WAIT == WAIT_ALL && EARLY_WEIGHTS)
        pdl_wait();
#elif WAIT == WAIT_BRANCH
        if (flag) pdl_wait();
#elif WAIT == WAIT_ONE_WARP || (WAIT == WAIT_BARRIER && EARLY_WEIGHTS)
        if (warp == 8) {
            pdl_wait();
            TRIGGER_AT(AFTER_WAIT);
        }
#endif
#if WAIT == WAIT_BARRIER && EARLY_WEIGHTS
        asm volatile("bar.sync 1, 128;" ::: "memory");  // the four activation warps
#endif
#if WAIT == WAIT_ALL || WAIT == WAIT_LOADERS || WAIT == WAIT_BRANCH
        TRIGGER_AT(AFTER_WAIT);
#endif
        if (lane == 0) stamp(stamps, STAMP_FIRST_READ);
        load_column<false>(&x_map, ring, Walk(warp - 8, stages), row0, width);
#if WAIT == WAIT_LATE
        pdl_wait();
        TRIGGER_AT(AFTER_WAIT);
#endif
    }
    // Reached by every thread, and by the compute warps only when the last load has landed: no thread exits with a load in flight.
    __syncwarp();
    __syncthreads();

    if (warp == 0) {
        const float4 p1 = partial[0][lane], p2 = partial[1][lane], p3 = partial[2][lane];
        const float others[3][4] = {{p1.x, p1.y, p1.z, p1.w}, {p2.x, p2.y, p2.z, p2.w}, {p3.x, p3.y, p3.z, p3.w}};
        bf16 result[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float sum = __fadd_rn(__fadd_rn(__fadd_rn(acc[j], others[0][j]), others[1][j]), others[2][j]);
            if (bias) sum = __fadd_rn(sum, j < 2 ? bias_low : bias_high);
            result[j] = to_bf16(sum);
        }
        TRIGGER_AT(BEFORE_STORES);
        delay_point(delay_ns);
#pragma unroll
        for (int j = 0; j < 4; ++j) {  // accumulator j: feature lane / 4 (+ 8 for j >= 2), row 2 * (lane % 4) + j % 2
            const int row = row0 + 2 * (lane & 3) + (j & 1), feature = feature0 + lane / 4 + (j & 2 ? 8 : 0);
            if (row < rows) store_2_bytes(out + row * out_stride + feature, result[j]);
        }
        if (lane == 0) stamp(stamps, STAMP_LAST_STORE);
#if TRIGGER == TRIGGER_AFTER_STORES
        __syncwarp();  // one thread's trigger counts for the CTA: this warp holds all the CTA's stores
        pdl_trigger();
#endif
        if (lane == 0) stamp(stamps, STAMP_EXIT);
    }
}
