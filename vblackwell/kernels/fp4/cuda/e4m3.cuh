// E2M1 codes, decoded by decode.cuh as bf16, to bytes of E4M3, whose exponent and mantissa are bits 10 to 4 of a bf16
// that is 2^-120 as large, subnormals included.
#define E4M3_UNIT (139u << 7)  // of a bf16: what a code of the row's largest scale is multiplied by, 2^(6 + 126 - 120)

// Four values, whose exponents are E4M3's, as bytes.
DEVICE u32 e4m3_bytes(u32 low, u32 high) {
    auto shifted = [](u32 pair) { return select_bits(0x80008000u, pair, pair << 4); };
    return permute_bytes(shifted(low), shifted(high), 0x7531);
}

// The scales of a row, whose largest has the E5M3 byte `top`, less it: as added to a bf16 pair's exponents.
DEVICE u32 e4m3_unit(u32 top) { return (E4M3_UNIT - (top >> 3 << 7)) * 0x00010001u; }

// A lane's 16 columns of row `r` of its four, whose block scales are `scales`; zeros where it is not `inside`.
DEVICE uint4 e4m3_row(const uint4& q, u32 scales, int r, u32 unit, bool inside) {
    u32 pairs[8];
    const u32 scale = permute_bytes(scales, 0, 0x4040u + 0x0101u * r) * 16u + unit;  // 2^(field - 15), as the largest
    decode_row(q, r, inside ? scale : 0, pairs);
    return make_uint4(e4m3_bytes(pairs[0], pairs[1]), e4m3_bytes(pairs[2], pairs[3]),
                      e4m3_bytes(pairs[4], pairs[5]), e4m3_bytes(pairs[6], pairs[7]));
}
