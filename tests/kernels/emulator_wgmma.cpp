// Products of emulator.h's wgmma: what a thread has of 64 rows by `columns`, from shared memory with the 128-byte swizzle.
#include "emulator_runtime.h"

#include <math.h>
#include <string.h>

// 16 bytes, `offset` after the beginning of a row.
static const u8* bytes_of(u32 operand, int row, int offset) {
    const u32 at = (operand << 4) + row / 8 * 1024 + row % 8 * 128 + offset;
    return shared_at(running->rank, at ^ ((at >> 7 & 7) << 4), 16);
}

void multiply_halves(float* d, const Operands& operands) {
    const int t = threadIdx.x % 4;
    for (int i = 0; i < operands.columns / 2; i++) {
        u16 x[16];
        for (int half = 0; half < 2; half++) memcpy(x + 8 * half, bytes_of(operands.b, i / 4 * 8 + 2 * t + i % 2, 16 * half), 16);
        double sum = d[i];
        for (int k = 0; k < 16; k++) sum += (double)operands.weights[i / 2 % 2][k] * operands.to_float(x[k]);
        d[i] = (float)sum;
    }
}

struct E4M3 {
    double of[256];
    E4M3() {
        for (int code = 0; code < 256; code++) {
            const int exponent = code >> 3 & 15, mantissa = code & 7;
            const double v = exponent ? ldexp(8 + mantissa, exponent - 10) : ldexp(mantissa, -9);
            of[code] = (code & 127) == 127 ? NAN : code & 128 ? -v : v;
        }
    }
};
static const E4M3 values;
static void row_of(u32 operand, int row, double* out) {
    for (int k = 0; k < 32; k += 16) {
        const u8* bytes = bytes_of(operand, row, k);
        for (int i = 0; i < 16; i++) out[k + i] = values.of[bytes[i]];
    }
}
void multiply_e4m3(float* d, const Operands& operands) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, warp = threadIdx.x / 32 % 4;
    double a[2][32], b[32];
    for (int i = 0; i < 2; i++) row_of(operands.a, warp * 16 + g + 8 * i, a[i]);
    for (int column = 0; column < operands.columns / 4; column++) {
        row_of(operands.b, column / 2 * 8 + 2 * t + column % 2, b);
        for (int i = 0; i < 2; i++) {
            float& sum = d[column / 2 * 4 + 2 * i + column % 2];
            double z = operands.add ? sum : 0.0;
            for (int k = 0; k < 32; k++) z += a[i][k] * b[k];
            sum = (float)z;
        }
    }
}
