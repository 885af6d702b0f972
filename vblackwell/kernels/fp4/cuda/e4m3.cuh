// E2M1 codes, decoded by decode.cuh as bf16, to bytes of E4M3.
#define E4M3_UNIT (139u << 7)  // of a bf16: what a code of the row's largest scale is multiplied by, 2^(6 + 126 - 120)

// Four values, whose exponents are E4M3's, as bytes.
DEVICE u32 e4m3_bytes(u32 low, u32 high) {
    auto shifted = [](u32 pair) { return select_bits(0x80008000u, pair, pair << 4); };
    return permute_bytes(shifted(low), shifted(high), 0x7531);
}
