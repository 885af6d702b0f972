// AdamW on a piece of one parameter, to the bits of torch's fused CPU kernel (kernels/optimizer/adamw.py), with sums of
// squares on the way.
//
// A block takes 4096 elements, a thread twice four neighbours, 2048 apart: 14 bytes an element come in by loads of 64
// (bf16) and 128 bits (fp32), all under way before the first is used. Every operation is named with its rounding, so
// that the compiler fuses nothing; division and square root are the correctly rounded ones, subnormals stay.
//
// Set by the launcher: WEIGHT (0 bf16 with a 16-bit remainder, 1 fp32), and torch's order: LERP and SQUARE of its
// vector loop, TAIL_LERP and TAIL_SQUARE of its scalar one; GRADIENT and PREVIOUS for gradient.cuh; MAX_GRADIENTS;
// THEN: 1 where one step more is made in registers, of which the weight alone is kept, elsewhere.
#if THEN && PREVIOUS
#error a step and one more are made from one gradient each
#endif

// m + w (g - m), or from the other end for a w of a half and more.
template <int FUSED>
DEVICE float moved(float m, float g, float weight) {
    const float distance = __fadd_rn(g, -m);
    const int near = fabsf(weight) < 0.5f;
    const float base = near ? m : g, by = near ? weight : __fadd_rn(weight, -1.0f);
    return FUSED ? __fmaf_rn(by, distance, base) : __fadd_rn(base, __fmul_rn(by, distance));
}
template <int FUSED>
DEVICE float mean_square(float v, float g, float keep, float weight) {
    const float scaled = __fmul_rn(weight, g);
    if (FUSED == 1) return __fmaf_rn(v, keep, __fmul_rn(scaled, g));
    if (FUSED == 2) return __fmaf_rn(scaled, g, __fmul_rn(v, keep));
    return __fadd_rn(__fmul_rn(v, keep), __fmul_rn(scaled, g));
}

// One element: `g` is the gradient after clipping; the fp32 bits of the others change in place.
template <int MOVE, int MEAN>
DEVICE void update(u32& master, u32& m, u32& v, float g, const Numbers& by) {
    const float new_m = moved<MOVE>(as_float(m), g, by.weight1);
    const float new_v = mean_square<MEAN>(as_float(v), g, by.beta2, by.weight2);
    const float divisor = __fadd_rn(__fdiv_rn(__fsqrt_rn(new_v), by.root), by.eps);
    const float change = __fdiv_rn(__fmul_rn(by.minus_step_size, new_m), divisor);
    master = as_bits(__fadd_rn(__fmul_rn(as_float(master), by.decay), change));
    m = as_bits(new_m);
    v = as_bits(new_v);
}
// The master that one step more would make; its moments are not kept.
template <int MOVE, int MEAN>
DEVICE u32 after(u32 master, u32 m, u32 v, float g, const Numbers& by) {
    update<MOVE, MEAN>(master, m, v, g, by);
    return master;
}

// That step, and where the weight goes: without it (THEN 0), where it is.
struct Then { void* ahead; const void* gradient; Numbers by; };

// A thread's share of a block that lies inside the piece.
DEVICE void update_whole(const void* weight, u16* remainder, u32* exp_avg, u32* exp_avg_sq, const void* gradient,
                         const void* previous, const float* factor, float* square_sum, float* partial,
                         const Numbers& by, const Then& then) {
    const int first = blockIdx.x * 4096 + threadIdx.x * 4;
    Loaded loaded[2];
#if THEN
    Loaded next[2];
#endif
    uint4 m[2], v[2];
#if WEIGHT == 1
    uint4 w[2];
#else
    uint2 w[2], low[2];
#endif
#pragma unroll
    for (int k = 0; k < 2; k++) {
        const int at = first + k * 2048;
        load_gradient<1>(loaded[k], gradient, previous, at, 4);
#if THEN
        load_gradient<1>(next[k], then.gradient, previous, at, 4);
#endif
#if WEIGHT == 1
        w[k] = *(const uint4*)((const u32*)weight + at);
#else
        w[k] = *(const uint2*)((const u16*)weight + at);
        low[k] = *(const uint2*)(remainder + at);
#endif
        m[k] = *(const uint4*)(exp_avg + at);
        v[k] = *(const uint4*)(exp_avg_sq + at);
    }
    const float scale = factor ? *factor : 1.0f;
    float g[2][4];
#pragma unroll
    for (int k = 0; k < 2; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) g[k][i] = gradient_value(loaded[k], i);
    if (square_sum) write_square_sum(g, partial, square_sum);
#pragma unroll
    for (int k = 0; k < 2; k++) {
        const int at = first + k * 2048;
#if WEIGHT == 1
        u32 master[4] = {w[k].x, w[k].y, w[k].z, w[k].w};
#else
        u32 master[4] = {(w[k].x << 16) + (u32)((int)(low[k].x << 16) >> 16),
                         (w[k].x & 0xFFFF0000u) + (u32)((int)low[k].x >> 16),
                         (w[k].y << 16) + (u32)((int)(low[k].y << 16) >> 16),
                         (w[k].y & 0xFFFF0000u) + (u32)((int)low[k].y >> 16)};
#endif
        update<LERP, SQUARE>(master[0], m[k].x, v[k].x, __fmul_rn(g[k][0], scale), by);
        update<LERP, SQUARE>(master[1], m[k].y, v[k].y, __fmul_rn(g[k][1], scale), by);
        update<LERP, SQUARE>(master[2], m[k].z, v[k].z, __fmul_rn(g[k][2], scale), by);
        update<LERP, SQUARE>(master[3], m[k].w, v[k].w, __fmul_rn(g[k][3], scale), by);
#if THEN
        const u32 last[4] = {after<LERP, SQUARE>(master[0], m[k].x, v[k].x, gradient_value(next[k], 0), then.by),
                             after<LERP, SQUARE>(master[1], m[k].y, v[k].y, gradient_value(next[k], 1), then.by),
                             after<LERP, SQUARE>(master[2], m[k].z, v[k].z, gradient_value(next[k], 2), then.by),
                             after<LERP, SQUARE>(master[3], m[k].w, v[k].w, gradient_value(next[k], 3), then.by)};
#else
        const u32(&last)[4] = master;
#endif
#if WEIGHT == 1
        *(uint4*)((u32*)then.ahead + at) = make_uint4(last[0], last[1], last[2], last[3]);
#else
        *(uint2*)((u16*)then.ahead + at) = make_uint2(rounded_half(last[0]) | (rounded_half(last[1]) << 16),
                                                      rounded_half(last[2]) | (rounded_half(last[3]) << 16));
        *(uint2*)(remainder + at) = make_uint2((master[0] & 0xFFFFu) | (master[1] << 16),
                                               (master[2] & 0xFFFFu) | (master[3] << 16));
#endif
        *(uint4*)(exp_avg + at) = m[k];
        *(uint4*)(exp_avg_sq + at) = v[k];
    }
}

// The same one by one, for the last block and pointers that are not aligned.
DEVICE void update_ragged(const void* weight, u16* remainder, u32* exp_avg, u32* exp_avg_sq, const void* gradient,
                          const void* previous, const float* factor, float* square_sum, float* partial, int n,
                          int tail_start, const Numbers& by, const Then& then) {
    if (square_sum) sum_block<0>(gradient, previous, blockIdx.x * 4096, square_sum, partial, n);
    const float scale = factor ? *factor : 1.0f;
    const int end = min(n, (int)blockIdx.x * 4096 + 4096);
#pragma unroll 1
    for (int at = blockIdx.x * 4096 + threadIdx.x; at < end; at += THREADS) {
        Loaded loaded;
        load_gradient<0>(loaded, gradient, previous, at, 1);
        const float g = __fmul_rn(gradient_value(loaded, 0), scale);
#if WEIGHT == 1
        u32 master = ((const u32*)weight)[at];
#else
        u32 master = ((u32)((const u16*)weight)[at] << 16) + (u32)(int)(short)remainder[at];
#endif
        u32 m = exp_avg[at], v = exp_avg_sq[at];
        if (at < tail_start)
            update<LERP, SQUARE>(master, m, v, g, by);
        else
            update<TAIL_LERP, TAIL_SQUARE>(master, m, v, g, by);
        u32 last = master;
#if THEN
        load_gradient<0>(loaded, then.gradient, previous, at, 1);
        const float next = gradient_value(loaded, 0);
        if (at < tail_start)
            last = after<LERP, SQUARE>(master, m, v, next, then.by);
        else
            last = after<TAIL_LERP, TAIL_SQUARE>(master, m, v, next, then.by);
#endif
#if WEIGHT == 1
        ((u32*)then.ahead)[at] = last;
#else
        ((u16*)then.ahead)[at] = (u16)rounded_half(last);
        remainder[at] = (u16)master;
#endif
        exp_avg[at] = m;
        exp_avg_sq[at] = v;
    }
}

// `tail_start`: first element of torch's scalar loop, in the last block, which is not whole; `aligned`: whether all
// pointers allow accesses of four elements. A whole block takes them unguarded, so that nothing stands between its
// loads.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
adamw(void* weight, u16* remainder, u32* exp_avg, u32* exp_avg_sq, const void* gradient, const void* previous,
      const float* factor, float* square_sums, int n, int tail_start, int aligned, float decay, float weight1,
      float beta2, float weight2, float root, float eps, float minus_step_size
#if THEN
      ,
      void* ahead, const void* then_gradient, float then_decay, float then_weight1, float then_beta2,
      float then_weight2, float then_root, float then_eps, float then_minus_step_size
#endif
) {
    SHARED_MEMORY(memory);
    let_next_start();
    wait_for_previous();
#if THEN
    factor = 0, square_sums = 0;  // never given, and registers are scarce
#endif
    float* square_sum = square_sums ? square_sums + blockIdx.x : square_sums;
    const Numbers by = {decay, weight1, beta2, weight2, root, eps, minus_step_size};
#if THEN
    const Then then = {ahead, then_gradient, {then_decay, then_weight1, then_beta2, then_weight2, then_root, then_eps,
                                              then_minus_step_size}};
#else
    const Then then = {weight, 0, by};
#endif
    if (aligned && n - (int)blockIdx.x * 4096 >= 4096)
        update_whole(weight, remainder, exp_avg, exp_avg_sq, gradient, previous, factor, square_sum, (float*)memory,
                     by, then);
    else
        update_ragged(weight, remainder, exp_avg, exp_avg_sq, gradient, previous, factor, square_sum, (float*)memory, n,
                      tail_start, by, then);
}

// Gradients wherever they are, as an argument: all of a layer are one launch, and a table in memory would have to be
// brought there. `stop`: of the launch's blocks, the one after the gradient's last.
struct Gradients { struct { const void* at; int elements, stop; } each[MAX_GRADIENTS]; };

DEVICE int start_of(const Gradients& gradients, int index) { return index ? gradients.each[index - 1].stop : 0; }

// The same sums of squares of `count` gradients, and nothing else. `previous`: of the only one.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
square_sums(float* out, const void* previous, int count, const Gradients gradients) {
    SHARED_MEMORY(memory);
    let_next_start();
    wait_for_previous();
    int index = 0;
    for (int end = count - 1; index < end;) {  // the first that stops after this block
        const int middle = (index + end) / 2;
        if (gradients.each[middle].stop > (int)blockIdx.x)
            end = middle;
        else
            index = middle + 1;
    }
    const void* gradient = gradients.each[index].at;
    const int n = gradients.each[index].elements, first = ((int)blockIdx.x - start_of(gradients, index)) * 4096;
    const int aligned = (u64)gradient % (GRADIENT == 1 ? 16 : 8) == 0 && (u64)previous % (PREVIOUS == 2 ? 16 : 8) == 0;
    if (aligned && n - first >= 4096)
        sum_block<1>(gradient, previous, first, out + blockIdx.x, (float*)memory, n);
    else
        sum_block<0>(gradient, previous, first, out + blockIdx.x, (float*)memory, n);
}

// sqrt of the sum of a gradient's block sums, in double, by one block each: a thread adds columns t and t + 512 of rows
// of 1024, row by row; then the columns 512, 256, ... 1 apart.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
block_norms(const float* sums, float* out, const Gradients gradients) {
    SHARED_MEMORY(memory);
    let_next_start();
    wait_for_previous();
    double* totals = (double*)memory;
    const int start = start_of(gradients, blockIdx.x), count = gradients.each[blockIdx.x].stop - start;
    const int t = threadIdx.x;
    double first = 0.0, second = 0.0;
    sums += start;
    for (int row = 0; row < count; row += 2 * THREADS) {
        if (row + t < count) first = __dadd_rn(first, (double)sums[row + t]);
        if (row + t + THREADS < count) second = __dadd_rn(second, (double)sums[row + t + THREADS]);
    }
    totals[t] = __dadd_rn(first, second);
    for (int apart = THREADS / 2; apart > 0; apart >>= 1) {
        __syncthreads();
        if (t < apart) totals[t] = __dadd_rn(totals[t], totals[t + apart]);
    }
    if (t == 0) out[blockIdx.x] = __double2float_rn(__dsqrt_rn(totals[0]));
}
