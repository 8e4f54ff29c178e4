// RMSNorm of BF16 rows, one CTA a row: out = x * rsqrt(mean(x^2) + eps) * weight, FP32 inside, one rounding.
//
// Order of the sum, the same for every alignment and number of rows: thread t adds elements vec*t .. vec*t+vec-1 of each round with
// FMAs; a butterfly over the warp's lanes (16, 8, 4, 2, 1); one butterfly over the warps' sums.

__device__ __forceinline__ float add_squares(float sum, uint4 v) {
    const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const float value = to_float((words[j / 2] >> (16 * (j & 1))) & 0xffffu);
        sum = __fmaf_rn(value, value, sum);
    }
    return sum;
}

__device__ __forceinline__ uint4 normalize(uint4 x, uint4 weight, float scale) {
    const u32 xs[4] = {x.x, x.y, x.z, x.w}, ws[4] = {weight.x, weight.y, weight.z, weight.w};
    u32 result[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        u32 half[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float value = to_float((xs[j] >> (16 * h)) & 0xffffu);
            const float gain = __fadd_rn(0.0f, to_float((ws[j] >> (16 * h)) & 0xffffu));  // a weight of -0 counts as +0
            half[h] = to_bf16(__fmul_rn(__fmul_rn(value, scale), gain));
        }
        result[j] = half[0] | half[1] << 16;
    }
    return make_uint4(result[0], result[1], result[2], result[3]);
}

extern "C" __global__ void __launch_bounds__(1024)
    rmsnorm(const bf16* x, const bf16* weight, bf16* out, long long x_stride, long long out_stride, int width, int vec,
            float eps, u64 delay_ns, int flag, u64* stamps) {
    __shared__ float warp_sums[32];
    const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
    const int step = blockDim.x * vec, first = thread * vec;

    if (thread == 0) stamp(stamps, STAMP_ENTRY);
    TRIGGER_AT(ENTRY);

    const bf16* row = x + static_cast<long long>(blockIdx.x) * x_stride;
    bf16* out_row = out + static_cast<long long>(blockIdx.x) * out_stride;
    const bool wide_x = vec == 8 && (reinterpret_cast<u64>(row) & 15) == 0;
    const bool wide_weight = vec == 8 && (reinterpret_cast<u64>(weight) & 15) == 0;
    const bool wide_out = vec == 8 && (reinterpret_cast<u64>(out_row) & 15) == 0;

    wait_before_reads(warp, flag);

    // The dependent reads. The first round (1024 * vec elements) stays in registers; wider rows are read once more below, which
    // in the late variant is behind the wait.
    if (lane == 0) stamp(stamps, STAMP_FIRST_READ);
    uint4 mine = make_uint4(0, 0, 0, 0), gain = mine;
    if (first < width) mine = load_vector(row + first, vec, wide_x);
#if WAIT != WAIT_LATE
    if (first < width) gain = load_vector(weight + first, vec, wide_weight);
#endif
    float sum = add_squares(0.0f, mine);
    for (int at = first + step; at < width; at += step) sum = add_squares(sum, load_vector(row + at, vec, wide_x));
#if WAIT == WAIT_LATE
    pdl_wait();
    TRIGGER_AT(AFTER_WAIT);
    if (first < width) gain = load_vector(weight + first, vec, wide_weight);
#endif

    sum = warp_sum(sum);
    if (lane == 0) warp_sums[warp] = sum;
    __syncthreads();
    if (warp == 0) {
        sum = warp_sum(lane < (blockDim.x >> 5) ? warp_sums[lane] : 0.0f);
        if (lane == 0) warp_sums[0] = sum;
    }
    __syncthreads();
    float scale;
    asm("{\n.reg .f32 mean;\n"
        "div.approx.ftz.f32 mean, %1, %2;\nadd.ftz.f32 mean, mean, %3;\nrsqrt.approx.ftz.f32 %0, mean;\n}"
        : "=f"(scale)
        : "f"(warp_sums[0]), "f"(static_cast<float>(width)), "f"(eps));

    uint4 result = normalize(mine, gain, scale);
    TRIGGER_AT(BEFORE_STORES);
    delay_point(delay_ns);
    if (first < width) store_vector(out_row + first, result, vec, wide_out);
    for (int at = first + step; at < width; at += step) {
        result = normalize(load_vector(row + at, vec, wide_x), load_vector(weight + at, vec, wide_weight), scale);
        store_vector(out_row + at, result, vec, wide_out);
    }
    if (lane == 0) stamp(stamps, STAMP_LAST_STORE);
    trigger_after_stores();
    if (lane == 0) stamp(stamps, STAMP_EXIT);
}
