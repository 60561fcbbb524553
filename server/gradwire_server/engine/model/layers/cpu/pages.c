// Keys and values in pages, and attention to them.

#include "numbers.h"

enum { PAGE = 16 };  // tokens of a page, as in attention/paged.py

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
