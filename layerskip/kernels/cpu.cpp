// The parts of a decoder's pass over a few rows: products by packed weights, norms, rotary positions, gated MLPs. Activations,
// sums and results are float32. Every row is computed as if it were alone, so verification repeats what plain decoding
// computes.
//
// A panel is the weights of PANEL outputs: for every input, the values of these outputs side by side. Every output is summed
// over the inputs in their order.
#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr int PANEL = 2 * LANES;                // two vectors of LANES values
constexpr int MOST_ROWS = LANES == 16 ? 8 : 6;  // whose sums fit the registers beside the weights
constexpr int64_t CACHED_BYTES = 1 << 17;       // of weights, which stay in the second-level cache while all rows pass

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES), aligned(2)));

// The panels of a weight [outputs, inputs]: values of 16 bits in bfloat16, or codes of 8 or 4 bits in blocks of inputs. The
// value of a code is code * scale + offset. Panels of 4 bits hold the codes of outputs i and i + LANES in one byte.
struct Weight {
  const uint8_t* panels;
  const float* blocks;  // [panels, blocks, scale and offset, PANEL]
  int64_t inputs, outputs, block, bits;

  int64_t panel_bytes() const { return inputs * PANEL * bits / 8; }
};

inline Floats load(const float* at) {
  Floats values;
  std::memcpy(&values, at, sizeof values);
  return values;
}

inline Floats widen(const uint16_t* at) {
  Words bits = __builtin_convertvector(*reinterpret_cast<const Halves*>(at), Words) << 16;
  Floats values;
  std::memcpy(&values, &bits, sizeof values);
  return values;
}

// Compilers turn a conversion of bytes into a dozen instructions.
inline Ints integers(const uint8_t* at) {
#if LANES == 16
  return reinterpret_cast<Ints>(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))));
#else
  return reinterpret_cast<Ints>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at))));
#endif
}

// Reads the two vectors of an input; `block` has the scales and offsets of its block.
template <int BITS>
inline void read(const uint8_t* panel, int64_t input, const float* block, Floats* values) {
  if (BITS == 16) {
    const uint16_t* const at = reinterpret_cast<const uint16_t*>(panel) + input * PANEL;
    values[0] = widen(at), values[1] = widen(at + LANES);
    return;
  }
  Ints codes[2];
  if (BITS == 8) {
    codes[0] = integers(panel + input * PANEL), codes[1] = integers(panel + input * PANEL + LANES);
  } else {
    const Ints both = integers(panel + input * LANES);
    codes[0] = both & 15, codes[1] = both >> 4;
  }
  for (int v = 0; v < 2; ++v)
    values[v] = __builtin_convertvector(codes[v], Floats) * load(block + v * LANES) + load(block + PANEL + v * LANES);
}

// Multiplies ROWS rows by PANELS panels; one row takes several panels, so that its additions do not wait for each other.
template <int BITS, int ROWS, int PANELS>
void block(const Weight& of, const float* rows, float* results, int64_t panel) {
  const int64_t blocks = of.inputs / of.block;
  Floats sums[ROWS][2 * PANELS] = {};
  for (int64_t number = 0; number < blocks; ++number)
    for (int64_t input = number * of.block; input < (number + 1) * of.block; ++input) {
      Floats weights[2 * PANELS];
#pragma GCC unroll 4
      for (int p = 0; p < PANELS; ++p)
        read<BITS>(of.panels + (panel + p) * of.panel_bytes(), input, of.blocks + ((panel + p) * blocks + number) * 2 * PANEL,
                   weights + 2 * p);
#pragma GCC unroll 8
      for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 8
        for (int v = 0; v < 2 * PANELS; ++v) sums[row][v] += weights[v] * rows[row * of.inputs + input];
    }
  for (int row = 0; row < ROWS; ++row)
    for (int p = 0; p < PANELS; ++p) {
      int64_t first = (panel + p) * PANEL, count = std::min<int64_t>(PANEL, of.outputs - first);
      std::memcpy(results + row * of.outputs + first, &sums[row][2 * p], count * sizeof(float));
    }
}

template <int BITS, int ROWS, int PANELS>
void blocks(const Weight& of, const float* rows, float* results, int64_t panel, int64_t end) {
  for (; panel + PANELS <= end; panel += PANELS) block<BITS, ROWS, PANELS>(of, rows, results, panel);
  for (; panel < end; ++panel) block<BITS, ROWS, 1>(of, rows, results, panel);
}

template <int BITS>
void multiply_panels(const Weight& of, const float* rows, float* results, int64_t count, int64_t panel, int64_t end) {
  using Blocks = void (*)(const Weight&, const float*, float*, int64_t, int64_t);
  constexpr int ALONE = BITS == 16 ? 4 : 2;  // scales and offsets need registers
  constexpr Blocks sizes[] = {blocks<BITS, 1, ALONE>, blocks<BITS, 2, ALONE / 2>, blocks<BITS, 3, 1>, blocks<BITS, 4, 1>,
                              blocks<BITS, 5, 1>,     blocks<BITS, 6, 1>,         blocks<BITS, 7, 1>, blocks<BITS, 8, 1>};
  while (count > 0) {
    int64_t now = count > MOST_ROWS && count < 2 * MOST_ROWS ? (count + 1) / 2 : std::min<int64_t>(count, MOST_ROWS);
    sizes[now - 1](of, rows, results, panel, end);
    rows += now * of.inputs, results += now * of.outputs, count -= now;
  }
}

// The share of a thread among a number of items.
struct Share {
  int64_t begin, end;
  explicit Share(int64_t items) {
    const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
    begin = items * thread / threads, end = items * (thread + 1) / threads;
  }
};

int64_t panels_of(int64_t outputs) { return (outputs + PANEL - 1) / PANEL; }

// Multiplies by some panels of a weight, in parts that stay in the cache.
void multiply_share(const Weight& of, const float* rows, float* results, int64_t count, Share panels) {
  const auto multiply = of.bits == 16 ? multiply_panels<16> : of.bits == 8 ? multiply_panels<8> : multiply_panels<4>;
  const int64_t most = std::max<int64_t>(4, CACHED_BYTES / of.panel_bytes());
  const int64_t step = count <= MOST_ROWS ? panels_of(of.outputs) : most;
  for (int64_t panel = panels.begin; panel < panels.end; panel += step)
    multiply(of, rows, results, count, panel, std::min(panels.end, panel + step));
}

inline float sum_of(Floats values) {
  float sum = 0;
  for (int lane = 0; lane < LANES; ++lane) sum += values[lane];
  return sum;
}

void normalise_row(const float* row, const float* scale, float* result, int64_t width, float epsilon) {
  Floats squares = {};
  int64_t i = 0;
  float rest = 0;
  for (; i + LANES <= width; i += LANES) squares += load(row + i) * load(row + i);
  for (; i < width; ++i) rest += row[i] * row[i];
  const float factor = 1 / std::sqrt((sum_of(squares) + rest) / width + epsilon);
  for (i = 0; i < width; ++i) result[i] = row[i] * factor * scale[i];
}

// e^x to about one unit in the last place, without branches, so that compilers vectorise it.
inline float exponential(float x) {
  x = std::min(88.0f, std::max(-87.0f, x));
  const float n = std::nearbyint(x * 1.44269504f);
  const float r = x - n * 0.693145751953125f - n * 1.42860682030941723212e-6f;
  float y = 1.9875691500e-4f;
  y = y * r + 1.3981999507e-3f, y = y * r + 8.3334519073e-3f, y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f, y = y * r + 5.0000001201e-1f, y = y * r * r + r + 1;
  const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return y * power;
}

enum Activation { SILU, GELU_TANH };

inline float activated(float x, int activation) {
  // gelu's tanh form is x * sigmoid(2u).
  const float u = activation == SILU ? x : 1.5957691216f * (x + 0.044715f * x * x * x);
  return x / (1 + exponential(-u));
}

}  // namespace

extern "C" {

int panel_size() { return PANEL; }

// rows [count, inputs] by a weight [outputs, inputs] to results [count, outputs].
void multiply(const float* rows, const Weight* weight, float* results, int64_t count, int threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
  multiply_share(*weight, rows, results, count, Share(panels_of(weight->outputs)));
}

// Root-mean-square norms (arXiv 1910.07467) of rows [count, width].
void normalise(const float* rows, const float* scale, float* results, int64_t count, int64_t width, float epsilon) {
  for (int64_t row = 0; row < count; ++row) normalise_row(rows + row * width, scale, results + row * width, width, epsilon);
}

// down(activation(gate(x)) * up(x)) for rows [count, inputs]; hidden [2, count, inner] is memory to work in.
void gated_mlp(const float* rows, const Weight* gate, const Weight* up, const Weight* down, float* hidden, float* results,
               int64_t count, int activation, int threads) {
  const int64_t inner = gate->outputs;
  float* const factors = hidden + count * inner;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const Share panels(panels_of(inner));
    multiply_share(*gate, rows, hidden, count, panels);
    multiply_share(*up, rows, factors, count, panels);
    const int64_t begin = panels.begin * PANEL, end = std::min(inner, panels.end * PANEL);
    for (int64_t row = 0; row < count; ++row) {
      float* const values = hidden + row * inner;
      const float* const others = factors + row * inner;
      if (activation == SILU)
        for (int64_t i = begin; i < end; ++i) values[i] = activated(values[i], SILU) * others[i];
      else
        for (int64_t i = begin; i < end; ++i) values[i] = activated(values[i], GELU_TANH) * others[i];
    }
#pragma omp barrier
    multiply_share(*down, hidden, results, count, Share(panels_of(down->outputs)));
  }
}

// Queries, keys and values of rows [count, inputs], by heads: [heads, count, width], with norms (or null) and rotary
// positions (arXiv 2104.09864) whose halves are rotated; cosine and sine are [count, rotated]. products [count, outputs of all]
// is memory to work in.
void project(const float* rows, const Weight* const* weights, const float* const* biases, const float* const* norms,
             const float* cosine, const float* sine, float* products, float* const* results, int64_t count, int64_t width,
             int64_t rotated, float epsilon, int threads) {
  constexpr int PARTS = 3;
  int64_t heads[PARTS];
  for (int part = 0; part < PARTS; ++part) heads[part] = weights[part]->outputs / width;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    float* at = products;
    for (int part = 0; part < PARTS; ++part) {
      const Weight& weight = *weights[part];
      multiply_share(weight, rows, at, count, Share(panels_of(weight.outputs)));
      at += count * weight.outputs;
    }
#pragma omp barrier
    const Share share((heads[0] + heads[1] + heads[2]) * count);
    for (int64_t item = share.begin; item < share.end; ++item) {
      int64_t rest = item;
      int part = 0;
      float* products_of = products;
      for (; rest >= heads[part] * count; ++part) rest -= heads[part] * count, products_of += heads[part] * count * width;
      const int64_t head = rest / count, row = rest % count;
      float* const values = products_of + (row * heads[part] + head) * width;
      float* const result = results[part] + (head * count + row) * width;
      if (biases[part])
        for (int64_t i = 0; i < width; ++i) values[i] += biases[part][head * width + i];
      if (norms[part]) normalise_row(values, norms[part], values, width, epsilon);
      std::memcpy(result, values, width * sizeof(float));
      if (part == 2) continue;
      const int64_t half = rotated / 2;
      const float *cos = cosine + row * rotated, *sin = sine + row * rotated;
      for (int64_t i = 0; i < half; ++i) {
        result[i] = values[i] * cos[i] - values[i + half] * sin[i];
        result[i + half] = values[i + half] * cos[i + half] + values[i] * sin[i + half];
      }
    }
  }
}

}  // extern "C"
