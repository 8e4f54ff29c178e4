// LayerNorm of BF16 rows, one CTA a row: out = (x - mean) * rsqrt(var + eps) * weight + bias, FP32 inside, one rounding.
//
// The variance is summed in a second pass, over the deviations from the mean: sum(x^2) / n - mean^2 would cancel.
// Order of both sums, the same for every alignment and number of rows: thread t adds elements vec*t .. vec*t+vec-1 of each round;
// a butterfly over the warp's lanes (16, 8, 4, 2, 1); one butterfly over the warps' sums.

__device__ __forceinline__ float element(uint4 v, int j) {
    const u32 words[4] = {v.x, v.y, v.z, v.w};
    return to_float((words[j / 2] >> (16 * (j & 1))) & 0xffffu);
}

__device__ __forceinline__ float add(float sum, uint4 v) {  // what lies past `vec` is zero
#pragma unroll
    for (int j = 0; j < 8; ++j) sum = __fadd_rn(sum, element(v, j));
    return sum;
}

__device__ __forceinline__ float add_squared_deviations(float sum, uint4 v, float mean, int vec) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const float deviation = j < vec ? __fsub_rn(element(v, j), mean) : 0.0f;
        sum = __fmaf_rn(deviation, deviation, sum);
    }
    return sum;
}

// The same bits in every thread. `warp_sums` belongs to one call: one barrier is then enough.
__device__ __forceinline__ float block_sum(float value, float* warp_sums, int lane, int warp) {
    value = warp_sum(value);
    if (blockDim.x == 32) return value;  // narrow rows: the second butterfly would add zeros
    if (lane == 0) warp_sums[warp] = value;
    __syncthreads();
    return warp_sum(lane < (blockDim.x >> 5) ? warp_sums[lane] : 0.0f);
}

// sum / count, correctly rounded (`inverse`: 1 / count, correctly rounded), in three steps off a division's slow path. An
// approximate mean of equal elements would differ from them, and rsqrt(eps) would make that visible.
__device__ __forceinline__ float quotient(float sum, float count, float inverse) {
    const float close = __fmul_rn(sum, inverse);
    return __fmaf_rn(__fmaf_rn(-close, count, sum), inverse, close);
}

__device__ __forceinline__ uint4 normalize(uint4 x, uint4 weight, uint4 bias, float mean, float scale) {
    u32 result[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        u32 half[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int at = 2 * j + h;
            const float value = __fmul_rn(__fsub_rn(element(x, at), mean), scale);
            half[h] = to_bf16(__fmaf_rn(value, element(weight, at), element(bias, at)));
        }
        result[j] = half[0] | half[1] << 16;
    }
    return make_uint4(result[0], result[1], result[2], result[3]);
}

extern "C" __global__ void __launch_bounds__(1024)
    layernorm(const bf16* x, const bf16* weight, const bf16* bias, bf16* out, long long x_stride, long long out_stride, int width,
              int vec, float eps, u64 delay_ns, int flag, u64* stamps) {
    __shared__ float warp_sums[2][32];
    const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
    const int step = blockDim.x * vec, first = thread * vec;

    if (thread == 0) stamp(stamps, STAMP_ENTRY);
    TRIGGER_AT(ENTRY);

    const bf16* row = x + static_cast<long long>(blockIdx.x) * x_stride;
    bf16* out_row = out + static_cast<long long>(blockIdx.x) * out_stride;
    const bool wide_x = vec == 8 && (reinterpret_cast<u64>(row) & 15) == 0;
    const bool wide_weight = vec == 8 && (reinterpret_cast<u64>(weight) & 15) == 0;
    const bool wide_bias = vec == 8 && (reinterpret_cast<u64>(bias) & 15) == 0;
    const bool wide_out = vec == 8 && (reinterpret_cast<u64>(out_row) & 15) == 0;

    const float count = static_cast<float>(width), inverse = __frcp_rn(count);

    wait_before_reads(warp, flag);

    // The dependent reads. The first round (1024 * vec elements) stays in registers; wider rows are read twice more below, which
    // in the late variant is behind the wait.
    if (lane == 0) stamp(stamps, STAMP_FIRST_READ);
    uint4 mine = make_uint4(0, 0, 0, 0), gain = mine, shift = mine;
    if (first < width) mine = load_vector(row + first, vec, wide_x);
#if WAIT != WAIT_LATE
    if (first < width) {
        gain = load_vector(weight + first, vec, wide_weight);
        shift = load_vector(bias + first, vec, wide_bias);
    }
#endif
    float sum = add(0.0f, mine);
    for (int at = first + step; at < width; at += step) sum = add(sum, load_vector(row + at, vec, wide_x));
#if WAIT == WAIT_LATE
    pdl_wait();
    TRIGGER_AT(AFTER_WAIT);
    if (first < width) {
        gain = load_vector(weight + first, vec, wide_weight);
        shift = load_vector(bias + first, vec, wide_bias);
    }
#endif

    sum = block_sum(sum, warp_sums[0], lane, warp);
    const float mean = quotient(sum, count, inverse);
    float squares = 0.0f;
    if (first < width) squares = add_squared_deviations(squares, mine, mean, vec);
    for (int at = first + step; at < width; at += step)
        squares = add_squared_deviations(squares, load_vector(row + at, vec, wide_x), mean, vec);
    squares = block_sum(squares, warp_sums[1], lane, warp);
    const float scale = rsqrtf(__fmaf_rn(squares, inverse, eps));

    uint4 result = normalize(mine, gain, shift, mean, scale);
    TRIGGER_AT(BEFORE_STORES);
    delay_point(delay_ns);
    if (first < width) store_vector(out_row + first, result, vec, wide_out);
    for (int at = first + step; at < width; at += step) {
        result = normalize(load_vector(row + at, vec, wide_x), load_vector(weight + at, vec, wide_weight),
                           load_vector(bias + at, vec, wide_bias), mean, scale);
        store_vector(out_row + at, result, vec, wide_out);
    }
    if (lane == 0) stamp(stamps, STAMP_LAST_STORE);
    trigger_after_stores();
    if (lane == 0) stamp(stamps, STAMP_EXIT);
}
