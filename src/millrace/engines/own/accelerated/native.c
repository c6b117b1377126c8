/* What a decode step does between its products, in float32. `native.py` compiles and calls it.

A row is computed by itself and over its own keys only. NaN goes through everything. */

#include <math.h>
#include <string.h>

#if defined(__AVX512F__)
#define W 16 /* numbers in a vector: the compiler is poor with wider ones than the processor has */
#elif defined(__AVX__)
#define W 8
#else
#define W 4
#endif
#define BLOCK 32 /* keys; the cache's number of positions is a multiple of it */

typedef float V __attribute__((vector_size(4 * W)));
typedef int I __attribute__((vector_size(4 * W)));
typedef float U __attribute__((vector_size(4 * W), aligned(4), may_alias)); /* where it is not aligned */

/* The next loop is divided among s->threads, if it is over so many numbers that this pays. */
#define ENOUGH 32768
#define PRAGMA(text) _Pragma(#text)
#define DIVIDED(numbers) PRAGMA(omp parallel for num_threads(s->threads) if (s->threads > 1 && (numbers) >= ENOUGH))

struct shape {
    long heads, kv_heads, head_dim, positions, threads;
    float eps, from_one, scale;
};

/* keys (slots, kv_heads, head_dim, positions), values (slots, kv_heads, positions, head_dim); tables of the rotary
   embedding (positions, rotated), the sine with its sign; norms of a head, or NULL; `window` 0: all keys */
struct layer {
    float *keys, *values;
    const float *cos, *sin, *q_norm, *k_norm;
    long rotated, window;
};

static inline V load(const float *from) { return *(const U *)from; }
static inline void store(float *to, V x) { *(U *)to = x; }

static inline V choose(I which, V yes, V no) { return (V)((which & (I)yes) | (~which & (I)no)); }

static inline float sum(V x)
{
    float total = 0;
    for (int i = 0; i < W; i++) total += x[i];
    return total;
}

/* Cephes' expf: below 2 units in the last place. Below -87 it is exp(-87), above 88 exp(88). */
static inline V exponential(V x)
{
    x = choose(x < -87.0f, (V){} - 87.0f, x);
    x = choose(x > 88.0f, (V){} + 88.0f, x);
    V shifted = x * 1.44269504088896341f + 12582912.0f; /* rounds: its last bits are the whole number */
    V whole = shifted - 12582912.0f;
    V r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    V p = (V){} + 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * (V)(((I)shifted - 0x4b400000 + 127) << 23);
}

/* out = x / sqrt(mean(x^2) + eps) * (weight + from_one), over n numbers */
static void norm_row(const float *x, const float *weight, float *out, long n, float eps, float from_one)
{
    V squares = {};
    long i = 0;
    for (; i + W <= n; i += W) squares += load(x + i) * load(x + i);
    float total = sum(squares);
    for (; i < n; i++) total += x[i] * x[i];
    float factor = 1.0f / sqrtf(total / n + eps);
    for (i = 0; i + W <= n; i += W) store(out + i, load(x + i) * factor * (load(weight + i) + from_one));
    for (; i < n; i++) out[i] = x[i] * factor * (weight[i] + from_one);
}

void norm(const struct shape *s, long rows, const float *x, const float *weight, float *out, long n)
{
    DIVIDED(rows * n)
    for (long m = 0; m < rows; m++) norm_row(x + m * n, weight, out + m * n, n, s->eps, s->from_one);
}

/* out = g sigmoid(a g + b g^3) up, of rows [g, up]. SiLU: 1, 0. GELU by tanh: 2 sqrt(2 / pi), that by 0.044715. */
static void gate_row(const float *gate_up, float *out, long n, float a, float b)
{
    long i = 0;
    for (; i + W <= n; i += W) {
        V g = load(gate_up + i);
        store(out + i, g / (1.0f + exponential(-g * (a + b * g * g))) * load(gate_up + n + i));
    }
    if (i < n) {
        float rest[W] = {0};
        memcpy(rest, gate_up + i, 4 * (n - i));
        V g = load(rest);
        store(rest, g / (1.0f + exponential(-g * (a + b * g * g))));
        for (long j = 0; i + j < n; j++) out[i + j] = rest[j] * gate_up[n + i + j];
    }
}

void gate(const struct shape *s, long rows, const float *gate_up, float *out, long n, float a, float b)
{
    DIVIDED(rows * n)
    for (long m = 0; m < rows; m++) gate_row(gate_up + m * 2 * n, out + m * n, n, a, b);
}

/* A head, normalised if there is a `weight`, then rotated in place. */
static void turn(const struct shape *s, const struct layer *l, const float *weight, float *x, long position)
{
    const float *cos = l->cos + position * l->rotated, *sin = l->sin + position * l->rotated;
    long half = l->rotated / 2;
    if (weight) norm_row(x, weight, x, s->head_dim, s->eps, s->from_one);
    for (long i = 0; i < half; i++) {
        float first = x[i], second = x[i + half];
        x[i] = first * cos[i] + second * sin[i];
        x[i + half] = second * cos[i + half] + first * sin[i + half];
    }
}

/* scores of keys [start, end) for one query; `start` is a multiple of BLOCK, and BLOCKs are completed. So far on
   lies what is wanted `next`. */
static void multiply(const struct shape *s, const float *q, const float *keys, float *scores, long start, long end,
                     long next)
{
    for (long k = start; k < end; k += BLOCK) {
        V sums[BLOCK / W] = {};
        for (long d = 0; d < s->head_dim; d++) {
            const float *these = keys + d * s->positions + k;
            for (int i = 0; i < BLOCK / W; i++) sums[i] += q[d] * load(these + i * W);
            for (int i = 0; i < BLOCK; i += 16) __builtin_prefetch(these + next + i);
        }
        for (int i = 0; i < BLOCK / W; i++) store(scores + k + i * W, sums[i] * s->scale);
    }
}

/* scores to exp(score - largest); those outside [from, end) to 0. Returns the sum. */
static float weigh(float *scores, long start, long from, long end)
{
    long last = (end + BLOCK - 1) / BLOCK * BLOCK;
    for (long k = start; k < from; k++) scores[k] = -INFINITY;
    for (long k = end; k < last; k++) scores[k] = -INFINITY;
    V most = load(scores + start), total = {};
    for (long k = start; k < last; k += W) {
        V x = load(scores + k);
        most = choose(x > most, x, most);
    }
    float largest = most[0];
    for (int i = 1; i < W; i++) largest = most[i] > largest ? most[i] : largest;
    for (long k = start; k < last; k += W) {
        V x = load(scores + k), weight = exponential(x - largest);
        weight = choose(x == -INFINITY, (V){}, weight);
        store(scores + k, weight);
        total += weight;
    }
    return sum(total);
}

/* out = sum of weights[k] values[k] over [start, end), times `factor` */
static void gather(const struct shape *s, const float *weights, const float *values, float *out, long start,
                   long end, float factor, long next)
{
    long n = s->head_dim;
    for (long d = 0; d < n; d += W) {
        V sums[4] = {};
        long k = start;
        for (; k + 4 <= end; k += 4)
            for (int i = 0; i < 4; i++) {
                const float *these = values + (k + i) * n + d;
                sums[i] += weights[k + i] * load(these);
                __builtin_prefetch(these + next);
            }
        for (; k < end; k++) sums[0] += weights[k] * load(values + k * n + d);
        store(out + d, ((sums[0] + sums[1]) + (sums[2] + sums[3])) * factor);
    }
}

/* Queries and keys of one row are normalised and rotated, and its keys and values cached. */
static void cache_row(const struct shape *s, const struct layer *l, long slot, long position, float *qkv)
{
    long n = s->head_dim;
    for (long h = 0; h < s->heads + s->kv_heads; h++)
        turn(s, l, h < s->heads ? l->q_norm : l->k_norm, qkv + h * n, position);
    for (long k = 0; k < s->kv_heads; k++) {
        long place = (slot * s->kv_heads + k) * n * s->positions;
        const float *key = qkv + (s->heads + k) * n, *value = key + s->kv_heads * n;
        for (long d = 0; d < n; d++) l->keys[place + d * s->positions + position] = key[d];
        memcpy(l->values + place + position * n, value, 4 * n);
    }
}

/* The queries of one row over the keys of one head. */
static void attend_head(const struct shape *s, const struct layer *l, long slot, long k, long position,
                        const float *qkv, float *out, float *scores)
{
    long n = s->head_dim, group = s->heads / s->kv_heads, end = position + 1;
    long from = l->window && l->window < end ? end - l->window : 0, start = from / BLOCK * BLOCK;
    long place = (slot * s->kv_heads + k) * n * s->positions;
    for (long h = k * group; h < (k + 1) * group; h++) {
        multiply(s, qkv + h * n, l->keys + place, scores, start, end, n * s->positions);
        float total = weigh(scores, start, from, end);
        gather(s, scores, l->values + place, out + h * n, from, end, 1.0f / total, n * s->positions);
    }
}

/* Row m is a token of slot `slots[m]`, at `positions[m]`; earlier ones of its slot are cached, or among the rows.
   qkv: (rows, heads + 2 kv_heads, head_dim), where queries and keys are changed; out: (rows, heads, head_dim);
   scores: for each thread room for one query. */
void attend(const struct shape *s, const struct layer *l, long rows, const long *slots, const long *positions,
            float *qkv, float *out, float *scores)
{
    long width = (s->heads + 2 * s->kv_heads) * s->head_dim;
    DIVIDED(rows * width)
    for (long m = 0; m < rows; m++) cache_row(s, l, slots[m], positions[m], qkv + m * width);
    DIVIDED(rows * width)
    for (long i = 0; i < rows * s->kv_heads; i++) {
        long m = i / s->kv_heads, k = i % s->kv_heads;
        attend_head(s, l, slots[m], k, positions[m], qkv + m * width, out + m * s->heads * s->head_dim,
                    scores + omp_get_thread_num() * s->positions);
    }
}
