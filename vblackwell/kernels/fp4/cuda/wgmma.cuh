// wgmma (sm_90a): 64 weight rows from registers times TOKENS columns of x from shared memory, fp32 sums in registers.
#if FP16
#define WGMMA_TYPES "f32.f16.f16"
#else
#define WGMMA_TYPES "f32.bf16.bf16"
#endif

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(PENDING) : "memory"); }

template <int COUNT>
DEVICE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(COUNT)); }
template <int COUNT>
DEVICE void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(COUNT)); }

// Four 8 x 8 tiles of halves, as tensor cores leave them in pairs, to shared memory by columns: lane 8 j + c says where
// column c of tile j goes.
DEVICE void store_columns(u32 address, u32 tile0, u32 tile1, u32 tile2, u32 tile3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 :: "r"(address), "r"(tile0), "r"(tile1), "r"(tile2), "r"(tile3) : "memory");
}
// The same by rows: lane 8 j + r says where row r of tile j goes.
DEVICE void store_rows(u32 address, u32 tile0, u32 tile1, u32 tile2, u32 tile3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 :: "r"(address), "r"(tile0), "r"(tile1), "r"(tile2), "r"(tile3) : "memory");
}
// Descriptor of a K-major operand of 128-byte rows, 128-byte swizzle, groups of 8 rows 1024 bytes apart.
DEVICE u64 wgmma_operand(u32 address) {
    return (u64)((address & 0x3FFFF) >> 4) | ((u64)1 << 16) | ((u64)64 << 32) | ((u64)1 << 62);
}

// A thread's sums are operands 0 to TOKENS / 2 - 1 of the instruction; after them come its four words of weights and x.
#define SUMS_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SUMS_8(i) SUMS_4(i), SUMS_4(i + 4)
#define SUMS_16(i) SUMS_8(i), SUMS_8(i + 8)
#define SUMS_32(i) SUMS_16(i), SUMS_16(i + 16)
#define SUMS_64(i) SUMS_32(i), SUMS_32(i + 32)
#define NAMES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define NAMES_16 NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_24 NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define NAMES_32 NAMES_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_40 NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define NAMES_48 NAMES_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define NAMES_56 NAMES_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define NAMES_64 NAMES_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_72 NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define NAMES_80 NAMES_72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define NAMES_88 NAMES_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define NAMES_96 NAMES_88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define NAMES_104 NAMES_96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define NAMES_112 NAMES_104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define NAMES_120 NAMES_112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define NAMES_128 NAMES_120 ", %120, %121, %122, %123, %124, %125, %126, %127"

#define AFTER(a, b, c, d, x) "},\n{%" #a ", %" #b ", %" #c ", %" #d "}, %" #x
#define OPERANDS_8(f) f(NAMES_8 AFTER(8, 9, 10, 11, 12), SUMS_8(0))
#define OPERANDS_16(f) f(NAMES_16 AFTER(16, 17, 18, 19, 20), SUMS_16(0))
#define OPERANDS_24(f) f(NAMES_24 AFTER(24, 25, 26, 27, 28), SUMS_16(0), SUMS_8(16))
#define OPERANDS_32(f) f(NAMES_32 AFTER(32, 33, 34, 35, 36), SUMS_32(0))
#define OPERANDS_40(f) f(NAMES_40 AFTER(40, 41, 42, 43, 44), SUMS_32(0), SUMS_8(32))
#define OPERANDS_48(f) f(NAMES_48 AFTER(48, 49, 50, 51, 52), SUMS_32(0), SUMS_16(32))
#define OPERANDS_56(f) f(NAMES_56 AFTER(56, 57, 58, 59, 60), SUMS_32(0), SUMS_16(32), SUMS_8(48))
#define OPERANDS_64(f) f(NAMES_64 AFTER(64, 65, 66, 67, 68), SUMS_64(0))
#define OPERANDS_72(f) f(NAMES_72 AFTER(72, 73, 74, 75, 76), SUMS_64(0), SUMS_8(64))
#define OPERANDS_80(f) f(NAMES_80 AFTER(80, 81, 82, 83, 84), SUMS_64(0), SUMS_16(64))
#define OPERANDS_88(f) f(NAMES_88 AFTER(88, 89, 90, 91, 92), SUMS_64(0), SUMS_16(64), SUMS_8(80))
#define OPERANDS_96(f) f(NAMES_96 AFTER(96, 97, 98, 99, 100), SUMS_64(0), SUMS_32(64))
#define OPERANDS_104(f) f(NAMES_104 AFTER(104, 105, 106, 107, 108), SUMS_64(0), SUMS_32(64), SUMS_8(96))
#define OPERANDS_112(f) f(NAMES_112 AFTER(112, 113, 114, 115, 116), SUMS_64(0), SUMS_32(64), SUMS_16(96))
#define OPERANDS_120(f) f(NAMES_120 AFTER(120, 121, 122, 123, 124), SUMS_64(0), SUMS_32(64), SUMS_16(96), SUMS_8(112))
#define OPERANDS_128(f) f(NAMES_128 AFTER(128, 129, 130, 131, 132), SUMS_64(0), SUMS_64(64))
#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)

#define JOINED(a, b) a##b
#define JOIN(a, b) JOINED(a, b)

#if TOKENS > 0
DEVICE void wgmma(float* d, const u32* a, u64 b) {
#define WGMMA(operands, ...)                                                                                     \
    asm volatile("{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\n"                                                      \
                 "wgmma.mma_async.sync.aligned.m64n" TEXT(TOKENS) "k16." WGMMA_TYPES "\n{" operands ", p, 1, 1, 0;\n}" \
                 : __VA_ARGS__                                                                                   \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
    JOIN(OPERANDS_, SUMS)(WGMMA);  // SUMS, a thread's, is TOKENS / 2
}
#endif
