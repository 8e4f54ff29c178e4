// What the kernels over BF16 rows share, one CTA a row: how a row is read and written, where all of them wait and trigger.
#pragma once

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
    return value;
}

// `vec` BF16 numbers, as two 16-bit halves a word; the rest of the eight is zero. `wide`: vec == 8 and 16-byte aligned.
__device__ __forceinline__ uint4 load_vector(const bf16* address, int vec, bool wide) {
    if (wide) return load_16_bytes(address);
    u32 v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = j < vec ? load_2_bytes(address + j) : 0;
    return make_uint4(v[0] | v[1] << 16, v[2] | v[3] << 16, v[4] | v[5] << 16, v[6] | v[7] << 16);
}

__device__ __forceinline__ void store_vector(bf16* address, uint4 v, int vec, bool wide) {
    if (wide) return store_16_bytes(address, v);
    const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int j = 0; j < 8; ++j)
        if (j < vec) store_2_bytes(address + j, static_cast<bf16>(words[j / 2] >> (16 * (j & 1))));
}

// The wait, before the first read of any operand, gain and bias too; in the late variant a kernel has its own instead.
__device__ __forceinline__ void wait_before_reads(int warp, int flag) {
#if WAIT == WAIT_ALL
    pdl_wait();
    TRIGGER_AT(AFTER_WAIT);
#elif WAIT == WAIT_BARRIER || WAIT == WAIT_ONE_WARP
    if (warp == 0) {
        pdl_wait();
        TRIGGER_AT(AFTER_WAIT);
    }
#if WAIT == WAIT_BARRIER
    __syncthreads();
#endif
#elif WAIT == WAIT_BRANCH
    if (flag) pdl_wait();
    TRIGGER_AT(AFTER_WAIT);
#endif
}

__device__ __forceinline__ void trigger_after_stores() {
#if TRIGGER == TRIGGER_AFTER_STORES
    __syncthreads();  // one thread's trigger counts for the CTA: no thread triggers while another still stores
    pdl_trigger();
#endif
}
