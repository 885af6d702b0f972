// wgmma on E4M3 (sm_90a): 64 rows of one operand times COLUMNS of the other, both 128-byte rows in shared memory; sums
// start over where `add` is 0. Needs wgmma.cuh's lists of registers.
#if COLUMNS == 96
#define PART_SUMS SUMS_32(0), SUMS_16(32)
#define PART_OPERANDS NAMES_48 "}, %48, %49"
#define PART_ADD "%50"
#elif COLUMNS == 112
#define PART_SUMS SUMS_32(0), SUMS_16(32), SUMS_8(48)
#define PART_OPERANDS NAMES_56 "}, %56, %57"
#define PART_ADD "%58"
#elif COLUMNS == 128
#define PART_SUMS SUMS_64(0)
#define PART_OPERANDS NAMES_64 "}, %64, %65"
#define PART_ADD "%66"
#endif
DEVICE void wgmma_e4m3(float* d, u64 a, u64 b, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, " PART_ADD ", 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n" TEXT(COLUMNS) "k32.f32.e4m3.e4m3\n{" PART_OPERANDS ", p, 1, 1;\n}"
                 : PART_SUMS
                 : "l"(a), "l"(b), "r"(add));
}
