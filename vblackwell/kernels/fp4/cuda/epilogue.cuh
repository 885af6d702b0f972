// From sums to y: scale, bias, activation, one rounding.
DEVICE float activate(float z, int activation) {  // by index into ACTIVATIONS of kernels/fp4/reference.py
    if (activation == 1) return z < 0.0f ? 0.0f : z;
    if (activation == 2) return 0.5f * z * (1.0f + erff(z * 0.70710678118654752f));
    if (activation == 3) return z / (1.0f + expf(-z));
    return z;
}
DEVICE void add4(float4& a, const float4 b) {
    a.x += b.x;
    a.y += b.y;
    a.z += b.z;
    a.w += b.w;
}
// Four neighbouring outputs of one token, from feature n on; y has rows of N.
DEVICE void store4(void* y, u64 token, int n, int N, float4 sum, float unit, const u16* bias, int activation) {
    float z[4] = {sum.x * unit, sum.y * unit, sum.z * unit, sum.w * unit};
    const int count = min(4, N - n);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (bias && i < count) z[i] += half_to_float(bias[n + i]);
        z[i] = activate(z[i], activation);
    }
    const u64 at = token * N + n;
#if OUT32
    for (int i = 0; i < 4; i++)
        if (i < count) ((float*)y)[at + i] = z[i];
#else
    u16 h[4];
#pragma unroll
    for (int i = 0; i < 4; i++) h[i] = float_to_half(z[i]);
    if (count == 4 && N % 4 == 0) {
        *(uint2*)((u16*)y + at) = make_uint2(h[0] | ((u32)h[1] << 16), h[2] | ((u32)h[3] << 16));
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (i < count) ((u16*)y)[at + i] = h[i];
    }
#endif
}
