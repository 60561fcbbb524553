// What is computed between products, products of some rows, and draws.

#include "numbers.h"

const number panel_columns = COLUMNS;

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

enum { BLOCK = 128 };  // logits whose weights are summed together

static __attribute__((noinline)) float largest(const float *logits, number V) {
  float best[BLOCK], most = -INFINITY;
  for (number c = 0; c < BLOCK; c++) best[c] = -INFINITY;
  for (number start = 0; start < V; start += BLOCK)
    for (number c = 0, count = V - start < BLOCK ? V - start : BLOCK; c < count; c++)
      best[c] = logits[start + c] > best[c] ? logits[start + c] : best[c];
  for (number c = 0; c < BLOCK; c++) most = best[c] > most ? best[c] : most;
  return most;
}

static __attribute__((noinline)) double sum_of(const float *block, number count, float most) {
  float sum = 0;
  for (number c = 0; c < count; c++) sum += weight_of(block[c], most);
  return sum;
}

// Log-probabilities [R, C] of tokens [R, C], given logits [R, V]: what draw gives for the token that it draws.
void log_probabilities(const float *logits, const number *tokens, float *out, number R, number C, number V,
                       number threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (number row = 0; row < R; row++) {
    const float *own = logits + row * V;
    float most = largest(own, V);
    double total = 0;
    for (number b = 0; b < V; b += BLOCK) total += sum_of(own + b, V - b < BLOCK ? V - b : BLOCK, most);
    for (number c = 0; c < C; c++) out[row * C + c] = own[tokens[row * C + c]] - most - log(total);
  }
}

// Rows of a product with a weight as it is: the sum over each lane of two steps in turns, then that of the lanes.
static inline __attribute__((always_inline)) void dots(int rows, const float *x, const float *weight, float scale,
                                                       number adds, float *out, number I, number O) {
  lanes sums[4][2] = {0};
  number i = 0;
  for (; i + LANES <= I; i += 2 * LANES) {
    lanes first = *(const lanes *)(weight + i);
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) sums[r][0] += first * *(const lanes *)(x + r * I + i);
    if (i + 2 * LANES > I) {
      i += LANES;
      break;
    }
    lanes second = *(const lanes *)(weight + i + LANES);
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) sums[r][1] += second * *(const lanes *)(x + r * I + i + LANES);
  }
#pragma GCC unroll 4
  for (int r = 0; r < rows; r++) {
    union { lanes vector; float numbers[LANES]; } whole = {sums[r][0] + sums[r][1]};
    for (int half = LANES / 2; half; half /= 2)
      for (int l = 0; l < half; l++) whole.numbers[l] += whole.numbers[l + half];
    float total = whole.numbers[0];
    for (number rest = i; rest < I; rest++) total = fmaf(weight[rest], x[r * I + rest], total);
    out[r * O] = fmaf(scale, total, adds ? out[r * O] : 0.0f);
  }
}

// scale * x [M, I] with a weight [O, I] -> out [M, O], or added to it; a number is the same whatever the other rows are.
// For weights of few outputs or inputs, which change too often to be worth panels.
void small_product(const float *x, const float *weight, float scale, number adds, float *out, number M, number I,
                   number O, number threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (number o = 0; o < O; o++) {
    number row = 0;
    for (; row + 4 <= M; row += 4) dots(4, x + row * I, weight + o * I, scale, adds, out + row * O + o, I, O);
    for (; row < M; row++) dots(1, x + row * I, weight + o * I, scale, adds, out + row * O + o, I, O);
  }
}

// A token of each row of logits [R, V] with a stride, drawn by inverting its cumulative distribution at uniform [R], and
// its log-probability [R]: as drawing/draw.py does, the block first, whose sums are in double. A weight of zero is never
// drawn; where a logit is not a number, nor is the log-probability.
void draw(const float *logits, number of_row, const double *uniform, number *tokens, float *logprobs, number R, number V,
          number threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (number row = 0; row < R; row++) {
    const float *own = logits + row * of_row;
    float most = largest(own, V);
    number blocks = (V + BLOCK - 1) / BLOCK;
    double sums[blocks], total = 0;
    for (number b = 0; b < blocks; b++) {
      total += sums[b] = sum_of(own + b * BLOCK, V - b * BLOCK < BLOCK ? V - b * BLOCK : BLOCK, most);
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
