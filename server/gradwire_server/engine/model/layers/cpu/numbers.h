// What the kernels for a CPU are made of (see ../cpu_kernels.py): vectors, exponentials, and tiles of products.

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

typedef int64_t number;

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
