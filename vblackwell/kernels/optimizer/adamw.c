// AdamW, sums of gradients and split masters on the CPU, to the bits of torch: cpu.py, which compiles it, says more.
//
// Blocks of 1024 elements pass through buffers that stay in the first cache: gradients are widened, the new numbers are
// computed by loops that a compiler vectorises, and written out. Where they go to other memory than they came from,
// they go past the caches, which would first read what is overwritten. Threads of a call's own take its parts one after
// the other, and none needs the interpreter's lock: threads of Python that shared the parts out kept it from those that
// launch a model's kernels (docs/journal/offload.md).
//
// Set by the compiler's caller: torch's order (adamw.py), LERP and SQUARE of its vector loop, TAIL_LERP and TAIL_SQUARE
// of its scalar one. No product and sum becomes one operation unless it is written so (-ffp-contract=off).
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define BUFFER __attribute__((aligned(64)))
// PART: elements that a thread takes at a time. STACK: its bytes, of which the C library keeps those of some 40 threads.
enum { BLOCK = 1024, PART = 1 << 16, STACK = 1 << 20, BF16 = 0, FP32 = 1, FP16 = 2 };

typedef struct { float decay, weight1, beta2, weight2, root, eps, minus_step_size; } Numbers;

// What one is changed from, and what is written: the same memory or other. With a second gradient, the weight is that
// of one step more; all else is of the first step.
typedef struct {
    void *weight;
    int16_t *remainder;  // none: not written; and so the moments
    float *exp_avg, *exp_avg_sq;
    const void *old_weight;
    const int16_t *old_remainder;  // none: weights are fp32
    const float *old_exp_avg, *old_exp_avg_sq;
    const void *gradient;
    const float *factor;  // of gradients, if not none
    const void *then_gradient;
    int64_t count, tail_start;
    Numbers by, then_by;
    int32_t gradient_type, then_type;
} Update;

typedef struct {
    float *total;
    const void *first, *addend;  // none: what total was, nothing
    int64_t count;
    int32_t first_type, addend_type;
} Sum;

typedef struct {
    const uint32_t *master;
    uint16_t *weight;
    int16_t *remainder;
    int64_t count;
} Split;

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}
INLINE float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
INLINE float from_bf16(uint16_t half) { return float_of((uint32_t)half << 16); }
// Its exponent is 112 too small where the bits are moved; of infinities and NaN it is then the largest.
INLINE float from_fp16(uint16_t half) {
    const uint32_t moved = (half & 0x7FFFu) << 13, sign = (half & 0x8000u) << 16;
    const uint32_t finite = bits_of(float_of(moved) * 0x1p112f);
    return float_of(sign | ((half & 0x7C00u) == 0x7C00u ? moved | 0x7F800000u : finite));
}
// Ties away from zero; a NaN, which the sum could make a number, is torch's.
INLINE uint16_t to_bf16(uint32_t bits) {
    return (bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : (bits + 0x8000u) >> 16;
}

INLINE void widen(float *restrict to, const void *from, int type, int64_t at, int64_t n) {
    if (type == BF16)
        for (int64_t i = 0; i < n; i++) to[i] = from_bf16(((const uint16_t *)from)[at + i]);
    else if (type == FP16)
        for (int64_t i = 0; i < n; i++) to[i] = from_fp16(((const uint16_t *)from)[at + i]);
    else
        memcpy(to, (const float *)from + at, 4 * n);
}

// m + w (g - m), or from the other end for a w of a half and more.
INLINE float moved(int fused, float m, float g, float weight) {
    const float distance = g - m;
    const int near = fabsf(weight) < 0.5f;
    const float base = near ? m : g, by = near ? weight : weight - 1.0f;
    return fused ? __builtin_fmaf(by, distance, base) : base + by * distance;
}
INLINE float mean_square(int fused, float v, float g, float keep, float weight) {
    const float scaled = weight * g;
    if (fused == 1) return __builtin_fmaf(v, keep, scaled * g);
    if (fused == 2) return __builtin_fmaf(scaled, g, v * keep);
    return v * keep + scaled * g;
}
// The new numbers; without `m` and `v` of the weight alone.
INLINE void compute(int move, int mean, float *restrict w, float *restrict m, float *restrict v,
                    const float *restrict old_w, const float *restrict old_m, const float *restrict old_v,
                    const float *restrict g, int64_t n, Numbers by) {
    for (int64_t i = 0; i < n; i++) {
        const float new_m = moved(move, old_m[i], g[i], by.weight1);
        const float new_v = mean_square(mean, old_v[i], g[i], by.beta2, by.weight2);
        const float change = by.minus_step_size * new_m / (sqrtf(new_v) / by.root + by.eps);
        w[i] = old_w[i] * by.decay + change;
        if (m) m[i] = new_m;
        if (v) v[i] = new_v;
    }
}

// Bytes from a buffer to where they are kept, past the caches where that is `elsewhere` than what was read.
static void put(void *to, const void *from, int64_t bytes, int elsewhere) {
    int64_t done = 0;
    (void)elsewhere;
#if defined(__AVX512F__)
    if (elsewhere && !((uintptr_t)to & 63))
        for (; done + 64 <= bytes; done += 64)
            _mm512_stream_si512((void *)((char *)to + done), _mm512_load_si512((const char *)from + done));
#elif defined(__AVX2__)
    if (elsewhere && !((uintptr_t)to & 31))
        for (; done + 32 <= bytes; done += 32)
            _mm256_stream_si256((void *)((char *)to + done), _mm256_load_si256((void *)((char *)from + done)));
#endif
    memcpy((char *)to + done, (const char *)from + done, bytes - done);
}

INLINE void update_part(int move, int mean, const Update *u, int64_t start, int64_t stop) {
    BUFFER float g[BLOCK], joined[BLOCK], w[BLOCK], m[BLOCK], v[BLOCK];
    BUFFER uint16_t high[BLOCK], low[BLOCK];
    const float factor = u->factor ? *u->factor : 1.0f;
    const int split = u->old_remainder != 0, elsewhere = u->weight != u->old_weight;
    for (int64_t at = start; at < stop; at += BLOCK) {
        const int64_t n = least(stop - at, BLOCK);
        widen(g, u->gradient, u->gradient_type, at, n);
        if (u->factor)
            for (int64_t i = 0; i < n; i++) g[i] *= factor;
        const float *from = (const float *)u->old_weight + at;
        if (split) {
            const uint16_t *old = (const uint16_t *)u->old_weight + at;
            const int16_t *rest = u->old_remainder + at;
            for (int64_t i = 0; i < n; i++) joined[i] = float_of(((uint32_t)old[i] << 16) + (uint32_t)(int32_t)rest[i]);
            from = joined;
        }
        compute(move, mean, w, m, v, from, u->old_exp_avg + at, u->old_exp_avg_sq + at, g, n, u->by);
        const float *last = w;
        if (u->then_gradient) {
            widen(g, u->then_gradient, u->then_type, at, n);
            compute(move, mean, joined, 0, 0, w, m, v, g, n, u->then_by);
            last = joined;
        }
        if (split) {
            for (int64_t i = 0; i < n; i++) high[i] = to_bf16(bits_of(last[i])), low[i] = (uint16_t)bits_of(w[i]);
            put((uint16_t *)u->weight + at, high, 2 * n, elsewhere);
            if (u->remainder) put(u->remainder + at, low, 2 * n, u->remainder != u->old_remainder);
        } else {
            put((float *)u->weight + at, last, 4 * n, elsewhere);
        }
        if (u->exp_avg) put(u->exp_avg + at, m, 4 * n, u->exp_avg != u->old_exp_avg);
        if (u->exp_avg_sq) put(u->exp_avg_sq + at, v, 4 * n, u->exp_avg_sq != u->old_exp_avg_sq);
    }
}

static void add_part(const Sum *s, int64_t start, int64_t stop) {
    BUFFER float first[BLOCK], addend[BLOCK];
    for (int64_t at = start; at < stop; at += BLOCK) {
        const int64_t n = least(stop - at, BLOCK);
        if (s->first)
            widen(first, s->first, s->first_type, at, n);
        else
            memcpy(first, s->total + at, 4 * n);
        if (s->addend) {
            widen(addend, s->addend, s->addend_type, at, n);
            for (int64_t i = 0; i < n; i++) first[i] += addend[i];
        }
        put(s->total + at, first, 4 * n, s->first != 0);
    }
}

static void split_part(const Split *s, int64_t start, int64_t stop) {
    BUFFER uint16_t high[BLOCK], low[BLOCK];
    for (int64_t at = start; at < stop; at += BLOCK) {
        const int64_t n = least(stop - at, BLOCK);
        for (int64_t i = 0; i < n; i++) high[i] = to_bf16(s->master[at + i]), low[i] = (uint16_t)s->master[at + i];
        put(s->weight + at, high, 2 * n, 1);
        put(s->remainder + at, low, 2 * n, 1);
    }
}

// Updates, or sums, or splits.
typedef struct {
    const Update *updates;
    const Sum *sums;
    const Split *splits;
    int64_t number;
    atomic_llong taken;  // parts of all of them
} Work;

INLINE int64_t count_of(const Work *work, int64_t i) {
    return work->updates ? work->updates[i].count : work->sums ? work->sums[i].count : work->splits[i].count;
}
INLINE int64_t parts_of(int64_t count) { return (count + PART - 1) / PART; }

static void *take_parts(void *given) {
    Work *work = given;
    int64_t i = 0, before = 0;  // parts of those ahead of i
    for (;;) {
        const int64_t part = atomic_fetch_add(&work->taken, 1);
        while (i < work->number && part - before >= parts_of(count_of(work, i))) before += parts_of(count_of(work, i++));
        if (i == work->number) break;
        const int64_t start = (part - before) * PART, stop = least(start + PART, count_of(work, i));
        if (work->updates) {
            const Update *u = work->updates + i;
            update_part(LERP, SQUARE, u, start, least(stop, u->tail_start));
            update_part(TAIL_LERP, TAIL_SQUARE, u, most(start, u->tail_start), stop);
        } else if (work->sums) {
            add_part(work->sums + i, start, stop);
        } else {
            split_part(work->splits + i, start, stop);
        }
    }
#ifdef __SSE2__
    _mm_sfence();  // what went past the caches is there before this thread says that it is done
#endif
    return 0;
}

// All of it, by the caller and up to threads - 1 others, who take no signals: those are for the interpreter's. How many
// of them the system refused.
static int make(Work *work, int64_t threads) {
    int64_t parts = 0, started = 0;
    for (int64_t i = 0; i < work->number; i++) parts += parts_of(count_of(work, i));
    const int64_t wanted = most(least(threads, parts), 1) - 1;
    pthread_t others[wanted + 1];
    pthread_attr_t small;
    sigset_t every, own;
    sigfillset(&every);
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, STACK);
    pthread_sigmask(SIG_SETMASK, &every, &own);
    while (started < wanted && !pthread_create(others + started, &small, take_parts, work)) started++;
    pthread_sigmask(SIG_SETMASK, &own, 0);
    pthread_attr_destroy(&small);
    const int refused = (int)(wanted - started);
    take_parts(work);
    while (started) pthread_join(others[--started], 0);
    return refused;
}

int update(const Update *updates, int64_t number, int64_t threads) {
    Work work = {updates, 0, 0, number, 0};
    return make(&work, threads);
}

int add_up(const Sum *sums, int64_t number, int64_t threads) {
    Work work = {0, sums, 0, number, 0};
    return make(&work, threads);
}

int split(const Split *splits, int64_t number, int64_t threads) {
    Work work = {0, 0, splits, number, 0};
    return make(&work, threads);
}
