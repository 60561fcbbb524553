// Attention of packed sequences to themselves and to prefixes, with its gradients.

#include "numbers.h"

#include <stdlib.h>

enum { BLOCK = 64 };  // queries, as in model/packing.py, and keys at a time

// The numbers of a product that a mask leaves: all, of a row those up to its diagonal, or from it on.
enum part { ALL, UP_TO, FROM };

// out [M, N] of, or and, x [M, I] by lines [I, N], all with strides, N in whole panels. Row m has its diagonal at
// m / heads + edge, or, of those from it on, at m - edge.
static inline __attribute__((always_inline)) void multiply(enum tile_kind kind, enum part part, number edge,
                                                           number heads, const float *x, number of_row, number of_step,
                                                           const float *lines, number of_line, number of_panel,
                                                           float *out, number O, number M, number I, number N) {
  number tiles = (M + ROWS - 1) / ROWS;
  for (number t = 0; t < tiles; t++) {
    number row = M * t / tiles, end = M * (t + 1) / tiles, first = 0, steps = I;
    if (part == UP_TO && (end - 1) / heads + 1 + edge < steps) steps = (end - 1) / heads + 1 + edge;
    if (part == FROM && row - edge > 0) first = row - edge;
    if (first >= steps) continue;
    for (number n = 0; n < N; n += COLUMNS)
      tile_of(end - row, kind, x + row * of_row + first * of_step, of_row, of_step,
              lines + first * of_line + n / COLUMNS * of_panel, of_line, out + row * O + n, O, steps - first, COLUMNS);
  }
}

static void added(enum part part, number edge, number heads, const float *x, number of_row, number of_step,
                  const float *lines, float *out, number O, number M, number I, number N) {
  if (part == UP_TO)
    multiply(ADDED, UP_TO, edge, heads, x, of_row, of_step, lines, N, COLUMNS, out, O, M, I, N);
  else
    multiply(ADDED, FROM, edge, heads, x, of_row, of_step, lines, N, COLUMNS, out, O, M, I, N);
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

// Products [tokens, width] of keys [tokens, D] and the queries from..to of turned ones. A query, of which each token has so
// many, has those up to its token's own place and edge; others are not written.
static inline __attribute__((always_inline)) void products(const float *keys, const float *turned, float *out,
                                                           number width, number tokens, number from, number to,
                                                           number edge, number heads, number D) {
  for (number n = from / COLUMNS * COLUMNS; n < to; n += COLUMNS) {
    number last = (n + COLUMNS - 1) / heads + 1 + edge, needed = last < tokens ? last : tokens;
    multiply(WRITTEN, ALL, 0, 1, keys, D, 1, turned + n * D, COLUMNS, 0, out + n, width, needed, D, COLUMNS);
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
    for (number r = 0; r < rows; r++) most[r] = -FLT_MAX, total[r] = 0;
    for (const number *part = parts + block[2] * 4; part < parts + block[3] * 4; part += 4) {
      number from = part[0] - start, to = part[1] - start;
      for (number key = part[2]; key < part[3]; key += BLOCK) {
        number tokens = part[3] - key < BLOCK ? part[3] - key : BLOCK, edge = start - key;
        gather(k + key * k_token + kv * k_head, k_token, keys, tokens, D);
        products(keys, turned, scores, BLOCK, tokens, from, to, edge, 1, D);
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
        added(UP_TO, from + edge, 1, scores + from, 1, BLOCK, keys, result + from * D, D, to - from, tokens, D);
      }
    }
    for (number r = 0; r < rows; r++) {
      for (number d = 0; d < D; d++) out[((start + r) * H + head) * D + d] = result[r * D + d] / total[r];
      lse[(start + r) * H + head] = most[r] + logf(total[r]);
    }
  }
}

// One behind the last of the tokens, each of which has seen one key more than the one before, in whose window a key is.
static inline number last_of(number key, number tokens, number seen, number window) {
  number last = key + window - seen + 1;
  return last < tokens ? last : tokens;
}

// Rows x [tokens, D] at places -> rows without gaps; asks for those to be taken next, of y, as early.
static void taken(const float *x, number x_token, const number *places, float *rows, number tokens, const float *y,
                  number y_token, const number *next, number there, number D) {
  for (number t = 0; t < tokens || t < there; t++) {
    for (number d = 0; t < there && d < D; d += LINE) __builtin_prefetch(y + next[t] * y_token + d);
    if (t < tokens) memcpy(rows + t * D, x + places[t] * x_token, sizeof(float) * D);
  }
}

// Attention of the queries of some heads to the keys at places, which all have: the first token to those before seen, and
// each one after it to one more, of which it has the last window. Key by key in the order of the places, with the running
// maximum of each BLOCK of a sequence, where the first of these keys is so far from its start. So a query's bits are the same
// whatever queries are beside it, and wherever its keys lie.
static void in_order(const float *q, number q_token, number q_head, number tokens, number heads, number seen,
                     number window, const float *k, number k_token, const float *v, number v_token,
                     const number *places, number count, number first, float scale, float *out, number of_token,
                     float *lse, number lse_token, number D) {
  number rows = tokens * heads, width = (rows + COLUMNS - 1) / COLUMNS * COLUMNS;
  float result[BLOCK * D], turned[BLOCK * D], keys[BLOCK * D], scores[BLOCK * BLOCK];
  float most[BLOCK], total[BLOCK], less[BLOCK];
  for (number t = 0; t < tokens; t++) gather(q + t * q_token, q_head, result + t * heads * D, heads, D);
  turn(result, scale, turned, rows, D);
  memset(result, 0, sizeof(float) * rows * D);
  for (number r = 0; r < width; r++) most[r] = -FLT_MAX, total[r] = 0;
  for (number key = 0, there; key < count; key += there) {
    there = BLOCK - (first + key) % BLOCK;
    if (there > count - key) there = count - key;
    number edge = seen - 1 - key, behind = key + there, more = count - behind < BLOCK ? count - behind : BLOCK;
    taken(k, k_token, places + key, keys, there, v, v_token, places + key, there, D);
    products(keys, turned, scores, width, there, 0, rows, edge, heads, D);
    if (edge < there - 1 || last_of(key, tokens, seen, window) < tokens)
      for (number c = 0; c < there; c++) {
        float *own = scores + c * width;
        number from = start_of(c, 0, tokens, edge) * heads, last = last_of(key + c, tokens, seen, window) * heads;
        for (number r = 0; r < from; r++) own[r] = -INFINITY;
        for (number r = last; r < width; r++) own[r] = -INFINITY;
      }
    for (number n = 0; n < width; n += COLUMNS) {  // all of a panel: faster than what there is of it
      float *own = scores + n, *high = most + n, *sum = total + n, *by = less + n;
      memcpy(by, high, sizeof(float) * COLUMNS);
      for (number c = 0; c < there; c++)
        for (number r = 0; r < COLUMNS; r++) high[r] = own[c * width + r] > high[r] ? own[c * width + r] : high[r];
      for (number r = 0; r < COLUMNS; r++) sum[r] *= by[r] = weight_of(by[r], high[r]);
      for (number c = 0; c < there; c++)
        for (number r = 0; r < COLUMNS; r++) own[c * width + r] = weight_of(own[c * width + r], high[r]);
      for (number r = 0; r < COLUMNS; r += LANES)  // as vectors, which a compiler adds up one by one
        for (number c = 0; c < there; c++) *(lanes *)(sum + r) += *(lanes *)(own + c * width + r);
    }
    for (number r = 0; r < rows; r++)
      for (number d = 0; less[r] != 1 && d < D; d++) result[r * D + d] *= less[r];
    taken(v, v_token, places + key, keys, there, k, k_token, places + behind, more, D);
    added(UP_TO, edge, heads, scores, 1, width, keys, result, D, rows, there, D);
  }
  for (number r = 0; r < rows; r++) {
    for (number d = 0; d < D; d++) out[r / heads * of_token + r % heads * D + d] = result[r * D + d] / total[r];
    lse[r / heads * lse_token + r % heads] = most[r] + logf(total[r]);
  }
}

// How many of the heads that share keys are one block with so many tokens.
static inline number together(number shared_by, number tokens) {
  number heads = shared_by;
  while (heads > 1 && (shared_by % heads || heads * tokens > BLOCK)) heads--;
  return heads;
}

// The same as attend_in_blocks, in order. A block has queries start..stop, of which the last has the keys at
// places[first]..places[last - 1], and each one before it one less, of which it has the last window.
void attend_in_order(const float *q, number q_token, number q_head, const float *k, number k_token, number k_head,
                     const float *v, number v_token, number v_head, const number *places, const number *blocks,
                     float scale, float *out, float *lse, number B, number H, number K, number D, number window,
                     number threads) {
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (number item = 0; item < B * H; item++) {
    const number *block = blocks + item / H * 4;
    number head = item % H, kv = head / (H / K), start = block[0], tokens = block[1] - start;
    number heads = together(H / K, tokens);
    if (head % heads) continue;
    number seen = block[3] - block[2] - tokens + 1, out_of_all = seen > window ? seen - window : 0;
    in_order(q + start * q_token + head * q_head, q_token, q_head, tokens, heads, seen - out_of_all, window,
             k + kv * k_head, k_token, v + kv * v_head, v_token, places + block[2] + out_of_all,
             block[3] - block[2] - out_of_all, out_of_all, scale, out + (start * H + head) * D, H * D,
             lse + start * H + head, H, D);
  }
}

// The same as attend, in order, with heads of one size.
void attend_to_pages_in_order(const float *q, number of_row, number of_head, const float *k, const float *v,
                              const number *table, const number *lengths, float scale, float *out, float *lse, number R,
                              number H, number K, number T, number N, number page, number D, number window,
                              number threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (number item = 0; item < R * K; item++) {
    number row = item / K, kv = item % K, shared_by = H / K, count = lengths[row] < window ? lengths[row] : window;
    number *places = malloc(sizeof(number) * count);
    for (number t = lengths[row] - count, own = 0; own < count; t++, own++)
      places[own] = table[row * N + t / page] * page + t % page;
    for (number first = 0; first < shared_by; first += BLOCK) {
      number heads = shared_by - first < BLOCK ? shared_by - first : BLOCK, head = kv * shared_by + first;
      in_order(q + row * of_row + head * of_head, of_row, of_head, 1, heads, count, count, k + kv * T * D, D,
               v + kv * T * D, D, places, count, lengths[row] - count, scale, out + (row * H + head) * D, H * D,
               lse + row * H + head, H, D);
    }
    free(places);
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
          products(keys, turned, scores, BLOCK, tokens, from, to, edge, 1, D);
          products(values, of_turned, of_scores, BLOCK, tokens, from, to, edge, 1, D);
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
          added(FROM, from + edge, 1, scores + from, BLOCK, 1, grad + from * D, of_v + (key * K + kv) * D, K * D, tokens,
                to - from, D);
          added(FROM, from + edge, 1, of_scores + from, BLOCK, 1, queries + from * D, of_k + (key * K + kv) * D, K * D,
                tokens, to - from, D);
          added(UP_TO, from + edge, 1, of_scores + from, 1, BLOCK, keys, of_queries + from * D, D, to - from, tokens, D);
        }
      }
      for (number r = 0; r < rows; r++)
        memcpy(of_q + ((start + r) * H + head) * D, of_queries + r * D, sizeof(float) * D);
    }
  }
}
