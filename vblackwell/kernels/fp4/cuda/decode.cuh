// E2M1 codes and E5M3 scales of the tiled layout (kernels/fp4/layout.py) to pairs of bf16 or fp16.
#define PAIR_MASK 0x81C081C0u
#define PAIR_3_BITS 0x001B001Bu
#define PAIR_3_MULTIPLIER 0x1084u

// Product of code and scale as a half: value * 2^-SHIFT, so that it needs no subnormal scale. The epilogue returns
// 2^SHIFT.
#if FP16
#define WEIGHT_UNIT 16384.0f
#else
#define WEIGHT_UNIT 128.0f
#endif

// The scale of byte `row` as a pair of halves, such that times a decoded code it is exact.
DEVICE u32 scale_pair(u32 scales, int row) {
    u32 bytes = permute_bytes(scales, 0, 0x4040u + 0x0101u * row);
#if FP16
    return bytes * 128u;
#else
    return bytes * 16u + ((231u << 7) | (231u << 23));
#endif
}

// Where a masked pair has its exponent: bf16 in place, fp16 three bits higher.
DEVICE u32 place(u32 pair) {
#if FP16
    return ((pair & 0x01C001C0u) << 3) | (pair & 0x80008000u);
#else
    return pair;
#endif
}

// Eight codes to four pairs of scaled halves; pair p holds columns 2p and 2p + 1.
DEVICE void decode(u32 word, u32 scale, u32* pairs) {
    pairs[0] = multiply_pair(place(word & PAIR_MASK), scale);
    pairs[1] = multiply_pair(place(rotate_left(word, 10) & PAIR_MASK), scale);
    pairs[2] = multiply_pair(place(rotate_left(word, 13) & PAIR_MASK), scale);
    pairs[3] = multiply_pair(place(((word & PAIR_3_BITS) * PAIR_3_MULTIPLIER) & PAIR_MASK), scale);
}

// One warp's 16 rows by 64 columns to A fragments. `scales` has the lane's four rows of the band.
DEVICE void decode_window(const uint4& q, u32 scales, int half, u32 (*a)[4]) {
    const u32 pair = scales >> (16 * half);
    const u32 upper = scale_pair(pair, 0), lower = scale_pair(pair, 1);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        u32 top[4], bottom[4];
        decode(i ? q.y : q.x, upper, top);
        decode(i ? q.w : q.z, lower, bottom);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            a[2 * i + (j >> 1)][2 * (j & 1)] = top[j];
            a[2 * i + (j >> 1)][2 * (j & 1) + 1] = bottom[j];
        }
    }
}

// Weights in two parts (kernels/fp4/layout.py). Shifts, masks and additions all issue at half rate on one pipe, and it
// is that pipe the weights wait for. Masking the coarse bits and putting the fine ones next to them is one operation on
// it; taking away what a fine code of 8 adds is a multiplication by one and an addition, which the other pipe does. The
// one is a parameter, or the compiler would see through it.
#define FINE_MASK 0x003C003Cu
#define FINE_NOTHING 0x00200020u

// A coarse pair in place among other bits, with its fine codes, which lie in bits 5..2 of both halves of `fine`, as
// E2M5. No carry leaves a half: only cells that do not begin at zero have fine codes below 8.
DEVICE u32 refine(u32 coarse, u32 fine, u32 one) { return ((coarse & PAIR_MASK) | (fine & FINE_MASK)) * one - FINE_NOTHING; }

// Eight coarse and fine codes to four unscaled pairs.
DEVICE void decode_parts(u32 word, u32 fine, u32 one, u32* pairs) {
    pairs[0] = refine(word, fine, one);
    pairs[1] = refine(rotate_left(word, 10), rotate_left(fine, 28), one);
    pairs[2] = refine(rotate_left(word, 13), rotate_left(fine, 24), one);
    pairs[3] = refine((word & PAIR_3_BITS) * PAIR_3_MULTIPLIER, rotate_left(fine, 20), one);
}
