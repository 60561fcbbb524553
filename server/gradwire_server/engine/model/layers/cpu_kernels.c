// What is computed between products, products of some rows, and draws, in float32 on a CPU: see cpu_kernels.py.

#include <math.h>
#include <stdint.h>
#include <string.h>

typedef int64_t number;

enum { PAGE = 16 };  // tokens of a page, as in attention/paged.py

// Numbers in a register, and rows of a tile: two registers for each row, and three more.
#if defined(__AVX512F__)
#define LANES 16
#define ROWS 14
#elif defined(__AVX__)
#define LANES 8
#define ROWS 6
#elif defined(__aarch64__)
#define LANES 4
#define ROWS 14
#else
#define LANES 4
#define ROWS 6
#endif
enum { COLUMNS = 2 * LANES, LINE = 16, AHEAD = 64 * LINE };  // numbers of a panel's row, of a cache line, to ask for early
typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

const number panel_columns = COLUMNS;

// exp(x) to a unit in the last place or two, in operations that a compiler turns into vectors; exp(-87) of less.
static inline float exponential(float x) {
  float kept = x < -87.0f ? -87.0f : x;
  kept = kept > 88.0f ? 88.0f : kept;
  float whole = rintf(kept * 1.44269504f);
  float rest = fmaf(whole, -0.693359375f, kept);
  rest = fmaf(whole, 2.12194440e-4f, rest);
  float sum = 1.0f / 5040;
  sum = fmaf(sum, rest, 1.0f / 720);
  sum = fmaf(sum, rest, 1.0f / 120);
  sum = fmaf(sum, rest, 1.0f / 24);
  sum = fmaf(sum, rest, 1.0f / 6);
  sum = fmaf(sum, rest, 0.5f);
  sum = fmaf(sum, rest, 1.0f);
  sum = fmaf(sum, rest, 1.0f);
  union { int32_t bits; float value; } power = {((int32_t)whole + 127) << 23};
  return sum * power.value;
}

static inline float weight_of(float logit, float most) {
  float less = logit - most;
  return less < -87.0f ? 0.0f : exponential(less);
}

// Keys or values of new tokens: token [M, K, D] with strides -> whole [K, T, D] at places [M].
void write_tokens(const float *token, number of_token, number of_head, const number *places, float *whole, number M,
                  number K, number T, number D) {
  for (number m = 0; m < M; m++) {
    for (number head = 0; m + 2 < M && head < K; head++)
      for (number d = 0; d < D; d += LINE) __builtin_prefetch(whole + (head * T + places[m + 2]) * D + d, 1);
    for (number head = 0; head < K; head++)
      memcpy(whole + (head * T + places[m]) * D, token + m * of_token + head * of_head, sizeof(float) * D);
  }
}

// Attention of each row to its pages: q [R, H, D] with strides, k [K, T, D], v [K, T, V], table [R, N], lengths [R] >= 1
// -> out [R, H, V] and lse [R, H]. A page at a time, with the running maximum of Milakov and Gimelshein 2018
// (arXiv:1805.02867).
void attend(const float *q, number of_row, number of_head, const float *k, const float *v, const number *table,
            const number *lengths, float scale, float *out, float *lse, number R, number H, number K, number T,
            number N, number D, number V, number threads, number fewest) {
  number shared_by = H / K, numbers = 0;
  for (number row = 0; row < R; row++) numbers += lengths[row] * K * D;
  if (numbers < fewest) threads = 1;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (number item = 0; item < R * K; item++) {
    number row = item / K, head = item % K;
    const float *own = q + row * of_row + head * shared_by * of_head;
    const float *keys = k + head * T * D, *values = v + head * T * V;
    float *result = out + (row * H + head * shared_by) * V;
    float most[shared_by], total[shared_by], weight[PAGE];
    memset(result, 0, sizeof(float) * shared_by * V);
    for (number s = 0; s < shared_by; s++) most[s] = -INFINITY, total[s] = 0;
    for (number start = 0; start < lengths[row]; start += PAGE) {
      number tokens = lengths[row] - start < PAGE ? lengths[row] - start : PAGE;
      number place = table[row * N + start / PAGE] * PAGE;
      const float *page_keys = keys + place * D, *page_values = values + place * V;
      if (start + PAGE < lengths[row]) {
        number next = table[row * N + start / PAGE + 1] * PAGE;
        for (number d = 0; d < PAGE * D; d += LINE) __builtin_prefetch(keys + next * D + d);
        for (number d = 0; d < PAGE * V; d += LINE) __builtin_prefetch(values + next * V + d);
      }
      for (number s = 0; s < shared_by; s++) {
        const float *query = own + s * of_head;
        float *into = result + s * V, before = most[s];
        for (number t = 0; t < PAGE; t += 4) {
          const float *four = page_keys + t * D;
          float first = 0, second = 0, third = 0, fourth = 0;
          for (number d = 0; d < D; d++) {
            first += query[d] * four[d];
            second += query[d] * four[D + d];
            third += query[d] * four[2 * D + d];
            fourth += query[d] * four[3 * D + d];
          }
          weight[t] = first, weight[t + 1] = second, weight[t + 2] = third, weight[t + 3] = fourth;
        }
        for (number t = 0; t < tokens; t++) {
          weight[t] *= scale;
          most[s] = weight[t] > most[s] || isnan(weight[t]) ? weight[t] : most[s];
        }
        for (number t = tokens; t < PAGE; t++) weight[t] = -INFINITY;
        if (most[s] > before && start) {
          float less = exponential(before - most[s]);
          total[s] *= less;
          for (number d = 0; d < V; d++) into[d] *= less;
        }
        float sum = 0;
        for (number t = 0; t < PAGE; t++) sum += weight[t] = exponential(weight[t] - most[s]);
        total[s] += sum;
        number t = 0;
        for (; t + 4 <= tokens; t += 4) {
          const float *four = page_values + t * V;
          float first = weight[t], second = weight[t + 1], third = weight[t + 2], fourth = weight[t + 3];
          for (number d = 0; d < V; d++)
            into[d] += first * four[d] + second * four[V + d] + third * four[2 * V + d] + fourth * four[3 * V + d];
        }
        for (; t < tokens; t++)
          for (number d = 0; d < V; d++) into[d] += weight[t] * page_values[t * V + d];
      }
    }
    for (number s = 0; s < shared_by; s++) {
      for (number d = 0; d < V; d++) result[s * V + d] /= total[s];
      lse[row * H + head * shared_by + s] = most[s] + logf(total[s]);
    }
  }
}

// x [R, D] / sqrt(mean(x^2) + eps) * (offset + weight) -> out, and the factors [R] (Zhang and Sennrich 2019,
// arXiv:1910.07467).
void norm(const float *x, const float *weight, float eps, float offset, float *out, float *factors, number R, number D,
          number threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (number row = 0; row < R; row++) {
    const float *from = x + row * D;
    float squares = 0;
    for (number d = 0; d < D; d++) squares += from[d] * from[d];
    float by = factors[row] = 1.0f / sqrtf(squares / D + eps);
    for (number d = 0; d < D; d++) out[row * D + d] = from[d] * by * (offset + weight[d]);
  }
}

// The gradients of norm: of x, and in parts [threads, D], each of one thread's rows, of the weight.
void norm_gradients(const float *of_out, const float *x, const float *weight, const float *factors, float offset,
                    float *of_x, float *of_weight, number R, number D, number threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (number part = 0; part < threads; part++) {
    float *sums = of_weight + part * D;
    memset(sums, 0, sizeof(float) * D);
    for (number row = R * part / threads; row < R * (part + 1) / threads; row++) {
      const float *grad = of_out + row * D, *from = x + row * D;
      float by = factors[row], along = 0;
      for (number d = 0; d < D; d++) {
        sums[d] += grad[d] * from[d] * by;
        along += grad[d] * (offset + weight[d]) * from[d];
      }
      along *= by * by / D;
      for (number d = 0; d < D; d++) of_x[row * D + d] = by * (grad[d] * (offset + weight[d]) - along * from[d]);
    }
  }
}

// act(gate) * up -> out, of [count]; out may be gate. SiLU, or GELU by tanh: 0.5 (1 + tanh(u)) is sigmoid(2u).
void gated(const float *gate, const float *up, float *out, number gelu, number count, number threads) {
  float cube = gelu ? 2 * 0.79788456f * 0.044715f : 0.0f, first = gelu ? 2 * 0.79788456f : 1.0f;
#pragma omp parallel for simd schedule(static) num_threads(threads)
  for (number i = 0; i < count; i++) {
    float x = gate[i];
    out[i] = x * up[i] / (1.0f + exponential(-x * (first + cube * x * x)));
  }
}

// The gradients of gated.
void gated_gradients(const float *of_out, const float *gate, const float *up, float *of_gate, float *of_up, number gelu,
                     number count, number threads) {
  float cube = gelu ? 2 * 0.79788456f * 0.044715f : 0.0f, first = gelu ? 2 * 0.79788456f : 1.0f;
#pragma omp parallel for simd schedule(static) num_threads(threads)
  for (number i = 0; i < count; i++) {
    float x = gate[i], grad = of_out[i];
    float part = 1.0f / (1.0f + exponential(-x * (first + cube * x * x)));
    of_up[i] = grad * x * part;
    of_gate[i] = grad * up[i] * part * (1.0f + x * (1.0f - part) * (first + 3 * cube * x * x));
  }
}

// x [M, H, D] with strides, its halves turned by cos and sin [M, D] -> out [M, H, D] (Su et al. 2021, arXiv:2104.09864);
// back: the gradient of x, given that of out.
void rotate(const float *x, number of_token, number of_head, const float *cosines, const float *sines, number back,
            float *out, number M, number H, number D, number threads) {
  number half = D / 2, low = back ? half : 0;
  float sign = back ? -1.0f : 1.0f;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (number m = 0; m < M; m++) {
    const float *c = cosines + m * D, *of_low = sines + m * D + low, *of_high = sines + m * D + half - low;
    for (number head = 0; head < H; head++) {
      const float *from = x + m * of_token + head * of_head;
      float *into = out + (m * H + head) * D;
      for (number d = 0; d < half; d++) {
        into[d] = from[d] * c[d] - sign * from[half + d] * of_low[d];
        into[half + d] = from[half + d] * c[half + d] + sign * from[d] * of_high[d];
      }
    }
  }
}

// A tile of a product: out [rows, COLUMNS] of x [rows, I] and a panel [I, COLUMNS], all with strides, in registers; or
// what out held and that; or, of a product that goes through a whole weight, the first columns of it.
enum tile_kind { STREAMED, WRITTEN, ADDED };

static inline __attribute__((always_inline)) void tile(int rows, enum tile_kind kind, const float *x, number of_row,
                                                       number of_step, const float *panel, number of_line, float *out,
                                                       number O, number I, number columns) {
  lanes sums[ROWS][2] = {0};
  if (kind == ADDED)
#pragma GCC unroll 14
    for (int r = 0; r < rows; r++)
      sums[r][0] = *(const lanes *)(out + r * O), sums[r][1] = *(const lanes *)(out + r * O + LANES);
  for (number i = 0; i < I; i++, panel += of_line, x += of_step) {
    lanes low = *(const lanes *)panel, high = *(const lanes *)(panel + LANES);
    if (kind == STREAMED)
#pragma GCC unroll 2
      for (int c = 0; c < COLUMNS; c += LINE) __builtin_prefetch(panel + AHEAD + c);
#pragma GCC unroll 14
    for (int r = 0; r < rows; r++) {
      sums[r][0] += x[r * of_row] * low;
      sums[r][1] += x[r * of_row] * high;
    }
  }
#pragma GCC unroll 14
  for (int r = 0; r < rows; r++) {
    if (kind != STREAMED || columns == COLUMNS)
      *(lanes *)(out + r * O) = sums[r][0], *(lanes *)(out + r * O + LANES) = sums[r][1];
    else
      memcpy(out + r * O, sums[r], sizeof(float) * columns);
  }
}

#define TILE(rows) \
  case rows: \
    tile(rows, kind, x, of_row, of_step, panel, of_line, out, O, I, columns); \
    break;

static inline __attribute__((always_inline)) void tile_of(number rows, enum tile_kind kind, const float *x,
                                                          number of_row, number of_step, const float *panel,
                                                          number of_line, float *out, number O, number I,
                                                          number columns) {
  switch (rows) {
    TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6)
#if ROWS > 6
    TILE(7) TILE(8) TILE(9) TILE(10) TILE(11) TILE(12) TILE(13) TILE(14)
#endif
  }
}

// x [M, I] with a weight [O, I] in panels [O / COLUMNS, I, COLUMNS], of which the last is filled up, and bias [O] or NULL
// -> out [M, O]; a number is the same whatever the other rows and the threads are. Each panel is read once for all tiles
// (Goto and van de Geijn 2008, https://doi.org/10.1145/1356052.1356053).
void product(const float *x, const float *panels, const float *bias, float *out, number M, number I, number O,
             number threads) {
  number tiles = (M + ROWS - 1) / ROWS;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (number at = 0; at < O; at += COLUMNS) {
    number columns = O - at < COLUMNS ? O - at : COLUMNS;
    for (number t = 0; t < tiles; t++) {
      number row = M * t / tiles, end = M * (t + 1) / tiles;
      tile_of(end - row, STREAMED, x + row * I, I, 1, panels + at * I, COLUMNS, out + row * O + at, O, I, columns);
      if (bias != NULL)
        for (; row < end; row++)
          for (number c = 0; c < columns; c++) out[row * O + at + c] += bias[at + c];
    }
  }
}

// A token of each row of logits [R, V] with a stride, drawn by inverting its cumulative distribution at uniform [R], and
// its log-probability [R]: as drawing/draw.py does, the block first, whose sums are in double. A weight of zero is never
// drawn; where a logit is not a number, nor is the log-probability.
void draw(const float *logits, number of_row, const double *uniform, number *tokens, float *logprobs, number R, number V,
          number threads) {
  enum { BLOCK = 128 };
#pragma omp parallel for schedule(static) num_threads(threads)
  for (number row = 0; row < R; row++) {
    const float *own = logits + row * of_row;
    float best[BLOCK], most = -INFINITY;
    for (number c = 0; c < BLOCK; c++) best[c] = -INFINITY;
    for (number start = 0; start < V; start += BLOCK)
      for (number c = 0, count = V - start < BLOCK ? V - start : BLOCK; c < count; c++)
        best[c] = own[start + c] > best[c] ? own[start + c] : best[c];
    for (number c = 0; c < BLOCK; c++) most = best[c] > most ? best[c] : most;
    number blocks = (V + BLOCK - 1) / BLOCK;
    double sums[blocks], total = 0;
    for (number b = 0; b < blocks; b++) {
      const float *block = own + b * BLOCK;
      number count = V - b * BLOCK < BLOCK ? V - b * BLOCK : BLOCK;
      float sum = 0;
      for (number c = 0; c < count; c++) sum += weight_of(block[c], most);
      total += sums[b] = sum;
    }
    double before = 0, passed = 0, target = uniform[row] * total;
    number chosen = 0, token = 0;
    for (number b = 0; b < blocks; b++) {  // the first that ends after the target, or the last that has a weight
      if (!(sums[b] > 0)) continue;
      chosen = b, before = passed, passed += sums[b];
      if (passed > target) break;
    }
    for (number t = chosen * BLOCK; t < V && t < (chosen + 1) * BLOCK; t++) {
      float weight = weight_of(own[t], most);
      if (!(weight > 0)) continue;
      token = t;
      if ((before += weight) > target) break;
    }
    tokens[row] = token;
    logprobs[row] = own[token] - most - log(total);
  }
}

enum { BLOCK = 64 };  // queries, and keys, at a time

// The numbers of a product that a mask leaves: all, of a row those up to its diagonal, or from it on.
enum part { ALL, UP_TO, FROM };

// out [M, N] of, or and, x [M, I] by lines [I, N], all with strides, N in whole panels. Row m has its diagonal at m + edge,
// or, of those from it on, at m - edge.
static inline __attribute__((always_inline)) void multiply(enum tile_kind kind, enum part part, number edge,
                                                           const float *x, number of_row, number of_step,
                                                           const float *lines, number of_line, number of_panel,
                                                           float *out, number O, number M, number I, number N) {
  number tiles = (M + ROWS - 1) / ROWS;
  for (number t = 0; t < tiles; t++) {
    number row = M * t / tiles, end = M * (t + 1) / tiles, first = 0, steps = I;
    if (part == UP_TO && end + edge < steps) steps = end + edge;
    if (part == FROM && row - edge > 0) first = row - edge;
    if (first >= steps) continue;
    for (number n = 0; n < N; n += COLUMNS)
      tile_of(end - row, kind, x + row * of_row + first * of_step, of_row, of_step,
              lines + first * of_line + n / COLUMNS * of_panel, of_line, out + row * O + n, O, steps - first, COLUMNS);
  }
}

static void added(enum part part, number edge, const float *x, number of_row, number of_step, const float *lines,
                  float *out, number O, number M, number I, number N) {
  if (part == UP_TO)
    multiply(ADDED, UP_TO, edge, x, of_row, of_step, lines, N, COLUMNS, out, O, M, I, N);
  else
    multiply(ADDED, FROM, edge, x, of_row, of_step, lines, N, COLUMNS, out, O, M, I, N);
}

// x [tokens, D] with a stride -> rows without gaps: those with them may share few sets of a cache.
static void gather(const float *x, number of_token, float *rows, number tokens, number D) {
  for (number t = 0; t < tokens; t++) memcpy(rows + t * D, x + t * of_token, sizeof(float) * D);
}

// x [tokens, D] times a number -> panels [BLOCK / COLUMNS, D, COLUMNS] of its transpose.
static void turn(const float *x, float by, float *panels, number tokens, number D) {
  for (number at = 0; at < tokens; at += COLUMNS) {
    float *panel = panels + at * D;
    number count = tokens - at < COLUMNS ? tokens - at : COLUMNS;
    if (count < COLUMNS) memset(panel, 0, sizeof(float) * COLUMNS * D);
    for (number d = 0; d < D; d += 8)
      for (number t = 0; t < count; t++)
        for (number e = d; e < d + 8; e++) panel[e * COLUMNS + t] = x[(at + t) * D + e] * by;
  }
}

// The first of the queries from..to that have a key.
static inline number start_of(number key, number from, number to, number edge) {
  number first = key - edge > from ? key - edge : from;
  return first < to ? first : to;
}

// Products [tokens, BLOCK] of keys [tokens, D] and the queries from..to of turned ones. A query has those up
// to its own place and edge; others are not written.
static void products(const float *keys, const float *turned, float *out, number tokens, number from, number to,
                     number edge, number D) {
  for (number n = from / COLUMNS * COLUMNS; n < to; n += COLUMNS) {
    number needed = n + COLUMNS + edge < tokens ? n + COLUMNS + edge : tokens;
    multiply(WRITTEN, ALL, 0, keys, D, 1, turned + n * D, COLUMNS, 0, out + n, BLOCK, needed, D, COLUMNS);
  }
}

// Causal attention of segments to themselves and to prefixes: q [M, H, D], k and v [M, K, D], with strides -> out [M, H, D]
// and lse [M, H]. A block has queries start..stop, and parts first..last: queries start..stop that attend to the keys
// from..to, each up to its own place. Running maxima as in attend.
void attend_in_blocks(const float *q, number q_token, number q_head, const float *k, number k_token, number k_head,
                      const float *v, number v_token, number v_head, const number *blocks, const number *parts,
                      float scale, float *out, float *lse, number B, number H, number K, number D, number threads) {
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (number item = 0; item < B * H; item++) {
    const number *block = blocks + item / H * 4;
    number head = item % H, kv = head / (H / K), start = block[0], rows = block[1] - start;
    float result[BLOCK * D], turned[BLOCK * D], keys[BLOCK * D], scores[BLOCK * BLOCK];
    float most[BLOCK], total[BLOCK], less[BLOCK];
    gather(q + start * q_token + head * q_head, q_token, result, rows, D);
    turn(result, scale, turned, rows, D);
    memset(result, 0, sizeof(float) * rows * D);
    for (number r = 0; r < rows; r++) most[r] = -1e30f, total[r] = 0;
    for (const number *part = parts + block[2] * 4; part < parts + block[3] * 4; part += 4) {
      number from = part[0] - start, to = part[1] - start;
      for (number key = part[2]; key < part[3]; key += BLOCK) {
        number tokens = part[3] - key < BLOCK ? part[3] - key : BLOCK, edge = start - key;
        gather(k + key * k_token + kv * k_head, k_token, keys, tokens, D);
        products(keys, turned, scores, tokens, from, to, edge, D);
        memcpy(less, most, sizeof less);
        for (number c = 0; c < tokens; c++) {
          const float *own = scores + c * BLOCK;
          for (number r = start_of(c, from, to, edge); r < to; r++) most[r] = own[r] > most[r] ? own[r] : most[r];
        }
        for (number r = from; r < to; r++) total[r] *= less[r] = weight_of(less[r], most[r]);
        for (number c = 0; c < tokens; c++) {
          float *own = scores + c * BLOCK;
          number r = start_of(c, from, to, edge);
          memset(own + from, 0, sizeof(float) * (r - from));
          for (; r < to; r++) total[r] += own[r] = weight_of(own[r], most[r]);
        }
        for (number r = from; r < to; r++)
          for (number d = 0; d < D; d++) result[r * D + d] *= less[r];
        gather(v + key * v_token + kv * v_head, v_token, keys, tokens, D);
        added(UP_TO, from + edge, scores + from, 1, BLOCK, keys, result + from * D, D, to - from, tokens, D);
      }
    }
    for (number r = 0; r < rows; r++) {
      for (number d = 0; d < D; d++) out[((start + r) * H + head) * D + d] = result[r * D + d] / total[r];
      lse[(start + r) * H + head] = most[r] + logf(total[r]);
    }
  }
}

// The gradients of attend_in_blocks, given that of out, all [M, H, D] or [M, K, D] without gaps (Dao 2023,
// arXiv:2307.08691). The blocks of a family, families[f]..families[f + 1], have keys of their own tokens only.
void attend_in_blocks_gradients(const float *of_out, const float *q, number q_token, number q_head, const float *k,
                                number k_token, number k_head, const float *v, number v_token, number v_head,
                                const float *out, const float *lse, const number *blocks, const number *parts,
                                const number *families, float scale, float *of_q, float *of_k, float *of_v, number F,
                                number H, number K, number D, number threads) {
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (number item = 0; item < F * K; item++) {
    number kv = item % K, shared_by = H / K;
    const number *first = blocks + families[item / K] * 4, *last = blocks + families[item / K + 1] * 4;
    float queries[BLOCK * D], grad[BLOCK * D], keys[BLOCK * D], values[BLOCK * D], of_queries[BLOCK * D];
    float turned[BLOCK * D], of_turned[BLOCK * D], scores[BLOCK * BLOCK], of_scores[BLOCK * BLOCK];
    float along[BLOCK], sums[BLOCK];
    for (number m = first[0]; m < last[-3]; m++) {
      memset(of_k + (m * K + kv) * D, 0, sizeof(float) * D);
      memset(of_v + (m * K + kv) * D, 0, sizeof(float) * D);
    }
    for (number pair = 0; pair < (last - first) / 4 * shared_by; pair++) {
      const number *block = first + pair / shared_by * 4;
      number head = kv * shared_by + pair % shared_by, start = block[0], rows = block[1] - start;
      gather(q + start * q_token + head * q_head, q_token, queries, rows, D);
      gather(of_out + (start * H + head) * D, H * D, grad, rows, D);
      turn(queries, scale, turned, rows, D);
      turn(grad, 1.0f, of_turned, rows, D);
      memset(of_queries, 0, sizeof(float) * rows * D);
      for (number r = 0; r < rows; r++) {
        const float *result = out + ((start + r) * H + head) * D;
        along[r] = 0, sums[r] = lse[(start + r) * H + head];
        for (number d = 0; d < D; d++) along[r] += grad[r * D + d] * result[d];
      }
      for (const number *part = parts + block[2] * 4; part < parts + block[3] * 4; part += 4) {
        number from = part[0] - start, to = part[1] - start;
        for (number key = part[2]; key < part[3]; key += BLOCK) {
          number tokens = part[3] - key < BLOCK ? part[3] - key : BLOCK, edge = start - key;
          gather(k + key * k_token + kv * k_head, k_token, keys, tokens, D);
          gather(v + key * v_token + kv * v_head, v_token, values, tokens, D);
          products(keys, turned, scores, tokens, from, to, edge, D);
          products(values, of_turned, of_scores, tokens, from, to, edge, D);
          for (number c = 0; c < tokens; c++) {
            float *own = scores + c * BLOCK, *of_own = of_scores + c * BLOCK;
            number first = start_of(c, from, to, edge);
            memset(own + from, 0, sizeof(float) * (first - from));
            memset(of_own + from, 0, sizeof(float) * (first - from));
            for (number r = first; r < to; r++) {
              own[r] = weight_of(own[r], sums[r]);
              of_own[r] = own[r] * (of_own[r] - along[r]) * scale;
            }
          }
          added(FROM, from + edge, scores + from, BLOCK, 1, grad + from * D, of_v + (key * K + kv) * D, K * D, tokens,
                to - from, D);
          added(FROM, from + edge, of_scores + from, BLOCK, 1, queries + from * D, of_k + (key * K + kv) * D, K * D,
                tokens, to - from, D);
          added(UP_TO, from + edge, of_scores + from, 1, BLOCK, keys, of_queries + from * D, D, to - from, tokens, D);
        }
      }
      for (number r = 0; r < rows; r++)
        memcpy(of_q + ((start + r) * H + head) * D, of_queries + r * D, sizeof(float) * D);
    }
  }
}
