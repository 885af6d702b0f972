// E2M1 codes and E5M3 scales of the tiled layout (kernels/fp4/layout.py) to pairs of bf16 or fp16.
#define PAIR_MASK 0x81C081C0u
#define PAIR_3_BITS 0x001B001Bu
#define PAIR_3_MULTIPLIER 0x1084u

// Products of code and scale as halves are this much smaller, which needs no subnormal scale; the epilogue returns it.
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

// A lane's 16 columns of row `r` of its four, of whose two rows `q` has the codes, to eight pairs.
DEVICE void decode_row(const uint4& q, int r, u32 scale, u32* pairs) {
    decode(r & 1 ? q.z : q.x, scale, pairs);
    decode(r & 1 ? q.w : q.y, scale, pairs + 4);
}

// Places of a warp's A fragments, of the rows of `top` and `bottom`: eight columns, decoded to four pairs.
DEVICE void set_fragments(u32 (*a)[4], int i, const u32* top, const u32* bottom) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
        a[2 * i + (j >> 1)][2 * (j & 1)] = top[j];
        a[2 * i + (j >> 1)][2 * (j & 1) + 1] = bottom[j];
    }
}

// A warp's 16 rows by 64 columns to A fragments, with the scales of the lane's two rows.
DEVICE void decode_rows(const uint4& q, u32 upper, u32 lower, u32 (*a)[4]) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        u32 top[4], bottom[4];
        decode(i ? q.y : q.x, upper, top);
        decode(i ? q.w : q.z, lower, bottom);
        set_fragments(a, i, top, bottom);
    }
}

// Weights in two parts (kernels/fp4/layout.py). Shifts, masks and additions issue at half rate on one pipe, for which
// weights wait. Masking the coarse bits and putting the fine ones next to them is one operation on it; taking away what
// a fine code of 8 adds is a multiplication by one and an addition, on the other pipe: by a parameter, or the compiler
// would see through it.
#define FINE_MASK 0x003C003Cu
#define FINE_NOTHING 0x00200020u

// A coarse pair in place among other bits, with its fine codes, which lie in bits 5..2 of both halves of `fine`, as
// E2M5. No carry leaves a half: only cells that do not begin at zero have fine codes below 8.
DEVICE u32 refine(u32 coarse, u32 fine, u32 one) {
    return ((coarse & PAIR_MASK) | (fine & FINE_MASK)) * one - FINE_NOTHING;
}

// Eight coarse and fine codes to four unscaled pairs.
DEVICE void decode_parts(u32 word, u32 fine, u32 one, u32* pairs) {
    pairs[0] = refine(word, fine, one);
    pairs[1] = refine(rotate_left(word, 10), rotate_left(fine, 28), one);
    pairs[2] = refine(rotate_left(word, 13), rotate_left(fine, 24), one);
    pairs[3] = refine((word & PAIR_3_BITS) * PAIR_3_MULTIPLIER, rotate_left(fine, 20), one);
}

// As `decode_rows`, of weights in two parts.
DEVICE void decode_part_rows(const uint4& q, const uint4& f, u32 upper, u32 lower, u32 one, u32 (*a)[4]) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        u32 top[4], bottom[4];
        decode_parts(i ? q.y : q.x, i ? f.y : f.x, one, top);
        decode_parts(i ? q.w : q.z, i ? f.w : f.z, one, bottom);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            top[j] = multiply_pair(top[j], upper);
            bottom[j] = multiply_pair(bottom[j], lower);
        }
        set_fragments(a, i, top, bottom);
    }
}
