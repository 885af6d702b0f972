// A row of x, bf16 or with X_FP16 fp16, to E4M3. A block of 256 threads takes it, each of which keeps the first KEPT granules of 16 bytes that
// it has read; of a longer row the others are read twice.
#define ROUND_WARPS 8
#define LEAST_TOP 7.8886090522101181e-31f  // 2^-100
#if X_FP16
#define X_FLOAT fp16_to_float
#else
#define X_FLOAT bf16_to_float
#endif

// K elements, a multiple of 8, relative to the largest magnitude (2^-100 at least), which becomes 448; zeros from there to `end`. `put(k, v)`
// gets elements k to k + 7. `tops` has ROUND_WARPS floats in shared memory.
template <class Put>
DEVICE void round_row(const u16* x, float* scale, int K, int end, int tid, float* tops, Put put) {
    const int step = ROUND_WARPS * 256;
    auto read = [&](int k) { return k < K ? *(const uint4*)(x + k) : make_uint4(0, 0, 0, 0); };
    uint4 kept[KEPT];
    u32 pair = 0;  // magnitudes of halves are ordered like their bits
    auto look = [&](const uint4 v) {
        const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; i++) pair = max_pair(pair, words[i] & 0x7FFF7FFFu);
    };
#pragma unroll
    for (int i = 0; i < KEPT; i++) kept[i] = read(tid * 8 + i * step);
#pragma unroll
    for (int i = 0; i < KEPT; i++) look(kept[i]);
    for (int k = tid * 8 + KEPT * step; k < K; k += step) look(read(k));
    float top = as_float(max(pair & 0xFFFF, pair >> 16));  // positive floats are ordered like their bits, too
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) top = as_float(max(as_bits(top), as_bits(shuffle_xor(top, mask))));
    if (tid % 32 == 0) tops[tid / 32] = top;
    __syncthreads();
    u32 bits = 0;
#pragma unroll
    for (int i = 0; i < ROUND_WARPS; i++) bits = max(bits, as_bits(tops[i]));
    float amax = X_FLOAT((u16)bits);
    if (amax < LEAST_TOP) amax = LEAST_TOP;
    const float factor = 448.0f / amax;
    auto round = [&](int k, const uint4 v) {
        const u32 words[4] = {v.x, v.y, v.z, v.w};
        float f[8];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            f[2 * i] = X_FLOAT((u16)words[i]) * factor;
            f[2 * i + 1] = X_FLOAT((u16)(words[i] >> 16)) * factor;
        }
        put(k, make_uint2(to_e4m3(f[0], f[1], f[2], f[3]), to_e4m3(f[4], f[5], f[6], f[7])));
    };
#pragma unroll
    for (int i = 0; i < KEPT; i++)
        if (tid * 8 + i * step < end) round(tid * 8 + i * step, kept[i]);
    for (int k = tid * 8 + KEPT * step; k < end; k += step) round(k, read(k));
    if (tid == 0) *scale = amax / 448.0f;
}
