// A row of x, bf16 or with X_FP16 fp16, to E4M3, relative to its largest magnitude (2^-100 at least), which becomes
// 448: by ROUND_WARPS warps of a block, or by one.
#define MIN_TOP 7.8886090522101181e-31f  // 2^-100
#if X_FP16
#define X_FLOAT fp16_to_float
#else
#define X_FLOAT bf16_to_float
#endif

// The larger of a pair of magnitudes and those of eight elements; magnitudes of halves are ordered like their bits.
DEVICE u32 larger_pair(u32 pair, const uint4 v) {
    const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) pair = max_pair(pair, words[i] & 0x7FFF7FFFu);
    return pair;
}
// The largest of all lanes' pairs, as an integer.
DEVICE u32 largest_of_warp(u32 pair) {
    float top = as_float(max(pair & 0xFFFF, pair >> 16));  // positive floats are ordered like their bits, too
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) top = as_float(max(as_bits(top), as_bits(shuffle_xor(top, mask))));
    return as_bits(top);
}
DEVICE float magnitude(u32 bits) {
    const float amax = X_FLOAT((u16)bits);
    return amax < MIN_TOP ? MIN_TOP : amax;
}
DEVICE uint2 rounded(const uint4 v, float factor) {
    const u32 words[4] = {v.x, v.y, v.z, v.w};
    float f[8];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        f[2 * i] = X_FLOAT((u16)words[i]) * factor;
        f[2 * i + 1] = X_FLOAT((u16)(words[i] >> 16)) * factor;
    }
    return make_uint2(to_e4m3(f[0], f[1], f[2], f[3]), to_e4m3(f[4], f[5], f[6], f[7]));
}

// K elements, a multiple of 8; zeros from there to `end`. `put(k, v)` gets elements k to k + 7. A thread keeps KEPT
// granules of 16 bytes and reads the others twice. `tops` has ROUND_WARPS floats in shared memory.
template <class Put>
DEVICE void round_row(const u16* x, float* scale, int K, int end, int tid, float* tops, Put put) {
    const int step = ROUND_WARPS * 256;
    auto read = [&](int k) { return k < K ? *(const uint4*)(x + k) : make_uint4(0, 0, 0, 0); };
    uint4 kept[KEPT];
    u32 pair = 0;
#pragma unroll
    for (int i = 0; i < KEPT; i++) kept[i] = read(tid * 8 + i * step);
#pragma unroll
    for (int i = 0; i < KEPT; i++) pair = larger_pair(pair, kept[i]);
    for (int k = tid * 8 + KEPT * step; k < K; k += step) pair = larger_pair(pair, read(k));
    const u32 top = largest_of_warp(pair);
    if (tid % 32 == 0) tops[tid / 32] = as_float(top);
    __syncthreads();
    u32 bits = 0;
#pragma unroll
    for (int i = 0; i < ROUND_WARPS; i++) bits = max(bits, as_bits(tops[i]));
    const float amax = magnitude(bits), factor = 448.0f / amax;
#pragma unroll
    for (int i = 0; i < KEPT; i++)
        if (tid * 8 + i * step < end) put(tid * 8 + i * step, rounded(kept[i], factor));
    for (int k = tid * 8 + KEPT * step; k < end; k += step) put(k, rounded(read(k), factor));
    if (tid == 0) *scale = amax / 448.0f;
}

// The same by a warp that reads all of it twice.
template <class Put>
DEVICE void round_row_by_warp(const u16* x, float* scale, int K, int end, int lane, Put put) {
    u32 pair = 0;
#pragma unroll 4
    for (int k = lane * 8; k < K; k += 256) pair = larger_pair(pair, *(const uint4*)(x + k));
    const float amax = magnitude(largest_of_warp(pair)), factor = 448.0f / amax;
#pragma unroll 2
    for (int k = lane * 8; k < end; k += 256)
        put(k, rounded(k < K ? *(const uint4*)(x + k) : make_uint4(0, 0, 0, 0), factor));
    if (lane == 0) *scale = amax / 448.0f;
}
