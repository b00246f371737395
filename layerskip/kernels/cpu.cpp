// The parts of a decoder's pass over a few rows: products by packed weights, norms, rotary positions, gated MLPs. Activations,
// sums and results are float32. Every row is computed as if it were alone, so verification repeats what plain decoding
// computes. Sums use explicit fused multiply-adds, so the number of rows of a call cannot change how they are rounded.
//
// A panel is the weights of PANEL outputs: for every input, the values of these outputs side by side. Every output is summed
// over the inputs in their order.
#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

constexpr int PANEL = 2 * LANES;                // two vectors of LANES values
constexpr int MOST_ROWS = LANES == 16 ? 8 : 6;  // whose sums fit the registers beside the weights
constexpr int64_t CACHED_BYTES = 1 << 17;       // of weights, which stay in the second-level cache while all rows pass

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));

// The panels of a weight [outputs, inputs]: values of 32 bits, or of 16 in bfloat16, or codes of 8 or 4 in blocks of inputs. The
// value of a code is code * scale + offset. Panels of 16 and 4 bits hold outputs i and i + LANES side by side: as the halves of
// a word, which shift and mask widen, and of a byte. Panels that are multiplied in integers hold the codes of an output for
// `together` inputs side by side.
//
// `packed` holds the same values of bfloat16 in 12 bits. For two inputs, it has 2 * PANEL bytes of sign and fraction. Then come
// PANEL bytes of two numbers each, which say where in `tables` the exponents are. The low number belongs to the byte at its own
// place, the high one to that PANEL places later. Values with other exponents are zeros in `panels` and `packed`, and listed. So
// both give the same results, bit by bit. Few rows are faster by fewer bytes, many by less unpacking.
struct Listed {
  int32_t input, output;  // the latter within its panel
  float value;
};

struct Weight {
  const uint8_t* panels;
  const uint8_t* blocks;  // [panels, blocks, scale and offset, PANEL], numbers of 32 or 16 bits
  const uint8_t* packed;  // null if there is none
  const uint8_t* tables;  // [2, 16], the low bit of an exponent in the highest place, and the others
  const Listed* listed;
  const int64_t* begins;  // [panels + 1], of those of a panel
  int64_t inputs, outputs, block, bits, block_bits, together;

  int64_t panel_bytes() const { return inputs * PANEL * bits / 8; }
};

inline Floats load(const float* at) {
  Floats values;
  std::memcpy(&values, at, sizeof values);
  return values;
}

inline Floats spread(float value) {
#if LANES == 16
  return _mm512_set1_ps(value);
#else
  return _mm256_set1_ps(value);
#endif
}

// a * b + c, rounded once.
inline Floats fused(Floats a, Floats b, Floats c) {
#if LANES == 16
  return _mm512_fmadd_ps(a, b, c);
#else
  return _mm256_fmadd_ps(a, b, c);
#endif
}

// Reads numbers of 16 bits in float16.
inline Floats load_half(const uint8_t* at) {
#if LANES == 16
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
#else
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
#endif
}

// Reads LANES numbers of 32 or 16 bits from the `index`-th on.
inline Floats load_numbers(const uint8_t* at, int64_t index, int64_t bits) {
  return bits == 16 ? load_half(at + index * 2) : load(reinterpret_cast<const float*>(at) + index);
}

// Compilers turn a conversion of bytes into a dozen instructions.
inline Ints integers(const uint8_t* at) {
#if LANES == 16
  return reinterpret_cast<Ints>(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))));
#else
  return reinterpret_cast<Ints>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at))));
#endif
}

// Reads the two vectors of an input; `block` has the scales and offsets of its block, two vectors each.
template <int BITS>
inline void read(const uint8_t* panel, int64_t input, const Floats* block, Floats* values) {
  if (BITS == 32) {
    const float* const at = reinterpret_cast<const float*>(panel) + input * PANEL;
    values[0] = load(at), values[1] = load(at + LANES);
    return;
  }
  if (BITS == 16) {
    Words both;
    std::memcpy(&both, panel + input * PANEL * 2, sizeof both);
    const Words halves[] = {both << 16, both & 0xffff0000u};
    std::memcpy(values, halves, sizeof halves);
    return;
  }
  Ints codes[2];
  if (BITS == 8) {
    codes[0] = integers(panel + input * PANEL), codes[1] = integers(panel + input * PANEL + LANES);
  } else {
    const Ints both = integers(panel + input * LANES);
    codes[0] = both & 15, codes[1] = both >> 4;
  }
  for (int v = 0; v < 2; ++v) values[v] = fused(__builtin_convertvector(codes[v], Floats), block[v], block[2 + v]);
}

#if LANES == 16
typedef __m512i Bytes;

inline Bytes table(const uint8_t* at) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
}
#else
typedef __m256i Bytes;

inline Bytes table(const uint8_t* at) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
}
#endif

// Reads the values of two inputs, which have 12 bits, as those of 16 bits.
inline void read_pair(const uint8_t* at, const Bytes* tables, Words* words) {
#if LANES == 16
  const Bytes rest = _mm512_loadu_si512(at);
  const Bytes both = _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at + 2 * PANEL)));
  const Bytes shifts = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(4), 1);
  const Bytes places = _mm512_and_si512(_mm512_srlv_epi16(both, shifts), _mm512_set1_epi8(15));
  constexpr int EITHER = 0xf8;  // a | (b & c)
  const Bytes low = _mm512_ternarylogic_epi32(_mm512_shuffle_epi8(tables[0], places), rest, _mm512_set1_epi8(0x7f), EITHER);
  const Bytes high =
      _mm512_ternarylogic_epi32(_mm512_shuffle_epi8(tables[1], places), rest, _mm512_set1_epi8(-128), EITHER);
  words[0] = reinterpret_cast<Words>(_mm512_unpacklo_epi8(low, high));
  words[1] = reinterpret_cast<Words>(_mm512_unpackhi_epi8(low, high));
#else
  const Bytes rest = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
  const __m128i both = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at + 2 * PANEL));
  const Bytes places = _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(both, 4), both), _mm256_set1_epi8(15));
  const Bytes low =
      _mm256_or_si256(_mm256_shuffle_epi8(tables[0], places), _mm256_and_si256(rest, _mm256_set1_epi8(0x7f)));
  const Bytes high =
      _mm256_or_si256(_mm256_shuffle_epi8(tables[1], places), _mm256_and_si256(rest, _mm256_set1_epi8(-128)));
  words[0] = reinterpret_cast<Words>(_mm256_unpacklo_epi8(low, high));
  words[1] = reinterpret_cast<Words>(_mm256_unpackhi_epi8(low, high));
#endif
}

// Adds the products of the listed values of some panels to results.
void add_listed(const Weight& of, const float* rows, float* results, int64_t count, int64_t panel, int64_t end) {
  for (; panel < end; ++panel)
    for (int64_t number = of.begins[panel]; number < of.begins[panel + 1]; ++number) {
      const Listed& one = of.listed[number];
      for (int64_t row = 0; row < count; ++row) {
        float& result = results[row * of.outputs + panel * PANEL + one.output];
        result = std::fma(one.value, rows[row * of.inputs + one.input], result);
      }
    }
}

// Multiplies ROWS rows by PANELS panels. A row alone takes several panels, so that its additions do not wait for each other.
// Where many rows or the unpacking of codes keep the processor from running ahead to its next loads, panels are fetched ahead.
template <int BITS, int ROWS, int PANELS>
void block(const Weight& of, const float* rows, float* results, int64_t panel) {
  constexpr int64_t FETCHED = BITS >= 16 ? 2048 : 1024;  // bytes between the weights that are read and those that are fetched
  const int64_t blocks = of.inputs / of.block;
  Floats sums[ROWS][2 * PANELS] = {};
  if constexpr (BITS == 12) {
    const Bytes tables[] = {table(of.tables), table(of.tables + 16)};
    for (int64_t input = 0; input < of.inputs; input += 2) {
      Words words[PANELS][2];
#pragma GCC unroll 4
      for (int p = 0; p < PANELS; ++p) {
        const uint8_t* const at = of.panels + (panel + p) * of.panel_bytes() + input * PANEL * BITS / 8;
        if (ROWS > 1) __builtin_prefetch(at + FETCHED), __builtin_prefetch(at + FETCHED + 64);
        read_pair(at, tables, words[p]);
      }
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        Floats weights[2 * PANELS];
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; ++p) {
          weights[2 * p] = reinterpret_cast<Floats>(words[p][i] << 16);
          weights[2 * p + 1] = reinterpret_cast<Floats>(words[p][i] & 0xffff0000u);
        }
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; ++row) {
          const Floats factor = spread(rows[row * of.inputs + input + i]);
#pragma GCC unroll 8
          for (int v = 0; v < 2 * PANELS; ++v) sums[row][v] = fused(weights[v], factor, sums[row][v]);
        }
      }
    }
  }
  for (int64_t number = 0; number < blocks && BITS != 12; ++number) {
    Floats scales[PANELS][4];
    if constexpr (BITS < 16)
      for (int p = 0; p < PANELS; ++p) {
        const uint8_t* const at = of.blocks + ((panel + p) * blocks + number) * 2 * PANEL * of.block_bits / 8;
        for (int v = 0; v < 4; ++v) scales[p][v] = load_numbers(at, v * LANES, of.block_bits);
      }
    for (int64_t input = number * of.block; input < (number + 1) * of.block; ++input) {
      Floats weights[2 * PANELS];
      for (int p = 0; p < PANELS && (PANELS == 1 || BITS < 16); ++p)
        __builtin_prefetch(of.panels + (panel + p) * of.panel_bytes() + input * PANEL * BITS / 8 + FETCHED);
#pragma GCC unroll 4
      for (int p = 0; p < PANELS; ++p)
        read<BITS>(of.panels + (panel + p) * of.panel_bytes(), input, scales[p], weights + 2 * p);
#pragma GCC unroll 8
      for (int row = 0; row < ROWS; ++row) {
        const Floats factor = spread(rows[row * of.inputs + input]);
#pragma GCC unroll 8
        for (int v = 0; v < 2 * PANELS; ++v) sums[row][v] = fused(weights[v], factor, sums[row][v]);
      }
    }
  }
  for (int row = 0; row < ROWS; ++row)
    for (int p = 0; p < PANELS; ++p) {
      int64_t first = (panel + p) * PANEL, count = std::min<int64_t>(PANEL, of.outputs - first);
      std::memcpy(results + row * of.outputs + first, &sums[row][2 * p], count * sizeof(float));
    }
  if (BITS >= 12 && of.begins) add_listed(of, rows, results, ROWS, panel, panel + PANELS);
}

template <int BITS, int ROWS, int PANELS>
void blocks(const Weight& of, const float* rows, float* results, int64_t panel, int64_t end) {
  for (; panel + PANELS <= end; panel += PANELS) block<BITS, ROWS, PANELS>(of, rows, results, panel);
  for (; panel < end; ++panel) block<BITS, ROWS, 1>(of, rows, results, panel);
}

template <int BITS>
void multiply_panels(const Weight& of, const float* rows, float* results, int64_t count, int64_t panel, int64_t end) {
  using Blocks = void (*)(const Weight&, const float*, float*, int64_t, int64_t);
  constexpr int ALONE = BITS >= 16 ? 4 : BITS < 12 ? 2 : LANES == 16 ? 4 : 1;  // scales, offsets and tables need registers
  constexpr int FEW = LANES == 16 ? 2 : 1;     // of 32 registers
  constexpr Blocks sizes[] = {blocks<BITS, 1, ALONE>, blocks<BITS, 2, (ALONE + 1) / 2>, blocks<BITS, 3, FEW>, blocks<BITS, 4, FEW>,
                              blocks<BITS, 5, FEW>,   blocks<BITS, 6, FEW>,       blocks<BITS, 7, 1>,   blocks<BITS, 8, 1>};
  while (count > 0) {
    int64_t now = count > MOST_ROWS && count < 2 * MOST_ROWS ? (count + 1) / 2 : std::min<int64_t>(count, MOST_ROWS);
    sizes[now - 1](of, rows, results, panel, end);
    rows += now * of.inputs, results += now * of.outputs, count -= now;
  }
}

constexpr int TOGETHER = 4;  // inputs of a step in integers
#ifdef __AVX512VNNI__
constexpr bool HAS_VNNI = true;
#else
constexpr bool HAS_VNNI = false;
#endif

// Rounds to the nearest integers; compilers call a function for every value.
inline Ints nearest(Floats values) {
#if LANES == 16
  return reinterpret_cast<Ints>(_mm512_cvtps_epi32(values));
#else
  return reinterpret_cast<Ints>(_mm256_cvtps_epi32(values));
#endif
}

// Stores integers of -128 to 127 in a byte each.
inline void store_bytes(Ints values, int8_t* at) {
#if LANES == 16
  _mm_storeu_si128(reinterpret_cast<__m128i*>(at), _mm512_cvtepi32_epi8(reinterpret_cast<__m512i>(values)));
#else
  const __m256i all = reinterpret_cast<__m256i>(values);
  const __m128i pairs = _mm_packs_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(at), _mm_packs_epi16(pairs, pairs));
#endif
}

// Rows whose values are rounded to 8 bits, in the blocks of a weight: value is about code * scale. `sums` are those of the
// rounded values of a block. With two terms, codes have 16 bits: those of a row, shifted right, and then the rest of each. The
// codes of a step, TOGETHER of each row and term, lie side by side.
struct Rounded {
  static constexpr int SHIFT = HAS_VNNI ? 8 : 7;
  std::vector<int8_t> codes, own;  // `own` are those of a block
  std::vector<float> scales, sums;

  template <int TERMS>
  void round(const float* rows, int64_t count, const Weight& of) {
    const float most = HAS_VNNI || (TERMS == 1 && of.bits == 4) ? 127 : 63;  // a pair of products with codes is exact in 16 bits
    const float largest_code = TERMS == 2 ? most * (1 << SHIFT) : most;
    const int64_t block = of.block, blocks = of.inputs / block;
    const bool alone = count * TERMS == 1;  // its codes are in order
    codes.resize(count * TERMS * of.inputs + LANES), scales.resize(count * blocks), sums.resize(count * blocks);
    own.resize(TERMS * (block + LANES));
    for (int64_t number = 0; number < count * blocks; ++number) {
      const float* const values = rows + number * block;
      int8_t *const high = alone ? codes.data() + number * block : own.data(), *const low = own.data() + block + LANES;
      int32_t bits = 0;  // of the largest magnitude; compilers vectorise the maximum of integers
      for (int64_t i = 0; i < block; ++i) {
        int32_t magnitude;
        std::memcpy(&magnitude, values + i, sizeof magnitude);
        bits = std::max(bits, magnitude & 0x7fffffff);
      }
      float largest;
      std::memcpy(&largest, &bits, sizeof largest);
      const float factor = largest > 1e-30f ? largest_code / largest : 0;  // of smaller ones it overflows
      Ints added = {};
      const auto round_at = [&](const float* from, int64_t i) {
        const Ints rounded = nearest(load(from) * factor);
        added += rounded;
        if (TERMS == 1) return store_bytes(rounded, high + i);
        const Ints upper = (rounded + (1 << (SHIFT - 1))) >> SHIFT;
        store_bytes(upper, high + i), store_bytes(rounded - (upper << SHIFT), low + i);
      };
      int64_t i = 0;
      for (; i + LANES <= block; i += LANES) round_at(values + i, i);
      if (i < block) {
        float last[LANES] = {};
        std::copy(values + i, values + block, last);
        round_at(last, i);
      }
      for (i = 0; i < block && !alone; i += TOGETHER) {
        int8_t* const at = codes.data() + place<TERMS>(number / blocks, number % blocks * block + i, count);
        std::memcpy(at, high + i, TOGETHER);
        if (TERMS == 2) std::memcpy(at + TOGETHER, low + i, TOGETHER);
      }
      int32_t sum = 0;
      for (int lane = 0; lane < LANES; ++lane) sum += added[lane];
      scales[number] = largest / largest_code, sums[number] = sum * scales[number];
    }
  }

  // Returns where the codes of an input of a row begin, which is the first one of a step, or within one.
  template <int TERMS>
  static int64_t place(int64_t row, int64_t input, int64_t count) {
    return (input / TOGETHER * count + row) * TERMS * TOGETHER + input % TOGETHER;
  }
};

// Adds products of codes and of rounded values, TOGETHER of them in each number. Without VNNI, pairs of products are added in
// 16 bits.
inline Ints add_products(Ints sums, Ints codes, Ints values) {
#ifdef __AVX512VNNI__
  return reinterpret_cast<Ints>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sums), reinterpret_cast<__m512i>(codes),
                                                    reinterpret_cast<__m512i>(values)));
#elif LANES == 16
  const __m512i pairs = _mm512_maddubs_epi16(reinterpret_cast<__m512i>(codes), reinterpret_cast<__m512i>(values));
  return sums + reinterpret_cast<Ints>(_mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
#else
  const __m256i pairs = _mm256_maddubs_epi16(reinterpret_cast<__m256i>(codes), reinterpret_cast<__m256i>(values));
  return sums + reinterpret_cast<Ints>(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
}

// Multiplies ROWS of `all` rounded rows by a panel.
template <int BITS, int TERMS, int ROWS>
void integer_block(const Weight& of, const Rounded& rounded, int64_t row, int64_t all, float* results, int64_t panel) {
  const int64_t blocks = of.inputs / of.block;
  const uint8_t* codes = of.panels + panel * of.panel_bytes();
  const int8_t* values = rounded.codes.data() + Rounded::place<TERMS>(row, 0, all);
  Floats sums[ROWS][2] = {};
  for (int64_t number = 0; number < blocks; ++number) {
    Ints dots[ROWS * TERMS][2] = {};
    for (int64_t input = 0; input < of.block; input += TOGETHER, values += all * TERMS * TOGETHER) {
      Ints both[2];
      if (BITS == 4 && ROWS > 1) __builtin_prefetch(codes + 1024);
      if (BITS == 8 && ROWS > 1)
        __builtin_prefetch(codes + of.panel_bytes(), 0, 2), __builtin_prefetch(codes + of.panel_bytes() + 64, 0, 2);
      std::memcpy(&both[0], codes, sizeof(Ints)), codes += sizeof(Ints);
      if (BITS == 8)
        std::memcpy(&both[1], codes, sizeof(Ints)), codes += sizeof(Ints);
      else
        both[1] = (both[0] >> 4) & 0x0f0f0f0f, both[0] &= 0x0f0f0f0f;
#pragma GCC unroll 12
      for (int r = 0; r < ROWS * TERMS; ++r) {
        int32_t word;
        std::memcpy(&word, values + r * TOGETHER, sizeof word);
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) dots[r][v] = add_products(dots[r][v], both[v], Ints{} + word);
      }
    }
    const uint8_t* const at = of.blocks + (panel * blocks + number) * 2 * PANEL * of.block_bits / 8;
    for (int v = 0; v < 2; ++v) {
      const Floats scale = load_numbers(at, v * LANES, of.block_bits);
      const Floats offset = load_numbers(at, PANEL + v * LANES, of.block_bits);
      for (int r = 0; r < ROWS; ++r) {
        const int64_t place = (row + r) * blocks + number;
        const Ints whole = TERMS == 2 ? (dots[2 * r][v] << Rounded::SHIFT) + dots[2 * r + TERMS - 1][v] : dots[r][v];
        sums[r][v] = fused(offset, spread(rounded.sums[place]), sums[r][v]);
        sums[r][v] = fused(__builtin_convertvector(whole, Floats), scale * spread(rounded.scales[place]), sums[r][v]);
      }
    }
  }
  const int64_t first = panel * PANEL, count = std::min<int64_t>(PANEL, of.outputs - first);
  for (int r = 0; r < ROWS; ++r) std::memcpy(results + (row + r) * of.outputs + first, sums[r], count * sizeof(float));
}

// Returns the rounded rows.
template <int BITS, int TERMS = 1>
const Rounded& multiply_integers(const Weight& of, const float* rows, float* results, int64_t count, int64_t panel, int64_t end) {
  static thread_local Rounded rounded;
  rounded.round<TERMS>(rows, count, of);
  constexpr decltype(&integer_block<BITS, TERMS, 1>) sizes[] = {
      integer_block<BITS, TERMS, 1>, integer_block<BITS, TERMS, 2>, integer_block<BITS, TERMS, 3>,
      integer_block<BITS, TERMS, 4>, integer_block<BITS, TERMS, 5>, integer_block<BITS, TERMS, 6>};
  constexpr int64_t MOST = LANES == 16 ? 6 : 4;  // whose sums fit the registers
  const int64_t parts = (count + MOST - 1) / MOST;
  for (; panel < end; ++panel)
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t row = count * part / parts;
      sizes[count * (part + 1) / parts - row - 1](of, rounded, row, count, results, panel);
    }
  return rounded;
}

// The share of a thread among a number of items.
struct Share {
  int64_t begin, end;
  Share(int64_t begin, int64_t end) : begin(begin), end(end) {}
  explicit Share(int64_t items) {
    const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
    begin = items * thread / threads, end = items * (thread + 1) / threads;
  }
};

enum Part { PRODUCTS, ATTENTION, OTHERS, BARRIERS, PARTS = 8 };  // a thread's numbers fill a line of the cache
double* spent = nullptr;                                         // seconds [threads, PARTS]; null if none are taken

// The clock of a thread, for the parts of its time.
struct Clock {
  double* const seconds = spent ? spent + omp_get_thread_num() * PARTS : nullptr;
  double last = seconds ? omp_get_wtime() : 0;

  // Ends a part.
  void end(Part part) {
    if (!seconds) return;
    const double now = omp_get_wtime();
    seconds[part] += now - last;
    last = now;
  }

  // Ends a part, and waits for the other threads.
  void wait(Part part) {
    end(part);
#pragma omp barrier
    end(BARRIERS);
  }
};

int64_t panels_of(int64_t outputs) { return (outputs + PANEL - 1) / PANEL; }

constexpr int MOST_THREADS = 256;
int packed_rows[MOST_THREADS + 1] = {};  // by the number of threads, the most rows that read 12 bits

// Multiplies by some panels of a weight, in parts that stay in the cache.
void multiply_share(const Weight& of, const float* rows, float* results, int64_t count, Share panels) {
  if (of.together > 1) {
    (of.bits == 8 ? multiply_integers<8> : multiply_integers<4>)(of, rows, results, count, panels.begin, panels.end);
    return;
  }
  Weight read = of;
  if (of.packed && count <= packed_rows[std::min(omp_get_num_threads(), MOST_THREADS)]) read.panels = of.packed, read.bits = 12;
  const auto multiply = read.bits == 32   ? multiply_panels<32>
                        : read.bits == 16 ? multiply_panels<16>
                        : read.bits == 12 ? multiply_panels<12>
                        : read.bits == 8  ? multiply_panels<8>
                                          : multiply_panels<4>;
  const int64_t most = std::max<int64_t>(4, CACHED_BYTES / read.panel_bytes());
  const int64_t step = count <= MOST_ROWS ? panels_of(of.outputs) : most;
  for (int64_t panel = panels.begin; panel < panels.end; panel += step)
    multiply(read, rows, results, count, panel, std::min(panels.end, panel + step));
}

inline float sum_of(Floats values) {
#if LANES == 16
  return _mm512_reduce_add_ps(values);
#else
  __m128 sums = _mm_add_ps(_mm256_castps256_ps128(values), _mm256_extractf128_ps(values, 1));
  sums = _mm_add_ps(sums, _mm_movehl_ps(sums, sums));
  return _mm_cvtss_f32(_mm_add_ss(sums, _mm_movehdup_ps(sums)));
#endif
}

// By how much logits of codes may differ from those of the weight itself, for a row x and its rounded values y. Of two products,
// |w.x - v.y| <= |w - v| |x| + |v| |x - y|. `distances` [panels, 2, PANEL] are |w - v| and |v| of each output, the former with
// room for rounded sums.
struct Bounds {
  const float* distances;
  float size, error, least;  // `least` is what the largest logit is at least, by the panels that were looked at

  Bounds(const float* distances, const float* row, const Rounded& rounded, int64_t number, int64_t count, const Weight& codes)
      : distances(distances), least(-std::numeric_limits<float>::infinity()) {
    double squares = 0, errors = 0;
    const float* scale = rounded.scales.data() + number * (codes.inputs / codes.block);
    for (int64_t first = 0; first < codes.inputs; first += codes.block, ++scale)
      for (int64_t i = first; i < first + codes.block; ++i) {
        const int8_t* const parts = rounded.codes.data() + Rounded::place<2>(number, i, count);
        const int32_t code = parts[0] * (1 << Rounded::SHIFT) + parts[TOGETHER];
        const double off = row[i] - static_cast<double>(code) * *scale;
        squares += static_cast<double>(row[i]) * row[i], errors += off * off;
      }
    size = 1.001 * std::sqrt(squares), error = 1.001 * std::sqrt(errors);
  }

  Floats of(int64_t panel, int64_t v) const {
    const float* const at = distances + 2 * panel * PANEL + v * LANES;
    return fused(load(at), spread(size), load(at + PANEL) * error);
  }
};

// Reads LANES logits from one on; where fewer are left, with the smallest number in place of the others.
inline Floats load_logits(const float* logits, int64_t left) {
  if (left >= LANES) return load(logits);
  Floats found = spread(-std::numeric_limits<float>::infinity());
  for (int64_t i = 0; i < left; ++i) found[i] = logits[i];
  return found;
}

// Returns whether any value is not below another, as NaN is not.
inline bool any_reaches(Floats values, Floats others) {
#if LANES == 16
  return _mm512_cmp_ps_mask(values, others, _CMP_NLT_UQ);
#else
  return _mm256_movemask_ps(_mm256_cmp_ps(values, others, _CMP_NLT_UQ));
#endif
}

// Computes logits of which the largest of each row are exact, in place and value, in the share of a thread. Codes of 8 bits, by
// activations of 16 bits or 14, show which panels may have it, and only those are multiplied by the weight itself. Comparisons
// with NaN count as "may", so a row without a largest logit is computed whole. `most` is memory for count values of each thread.
void find_largest(const Weight& of, const Weight& codes, const float* distances, const float* rows, float* logits, int64_t count,
                  float* most, Clock& clock) {
  const Share panels(panels_of(of.outputs));
  const Rounded& rounded = multiply_integers<8, 2>(codes, rows, logits, count, panels.begin, panels.end);
  static thread_local std::vector<Bounds> bounds;
  bounds.clear();
  for (int64_t row = 0; row < count; ++row) {
    const Bounds& own = bounds.emplace_back(distances, rows + row * of.inputs, rounded, row, count, codes);
    Floats least = spread(own.least);
    for (int64_t at = panels.begin * PANEL; at < std::min(of.outputs, panels.end * PANEL); at += LANES) {
      const Floats low = load_logits(logits + row * of.outputs + at, of.outputs - at) - own.of(at / PANEL, at % PANEL / LANES);
      least = low > least ? low : least;
    }
    float& mine = most[omp_get_thread_num() * count + row] = least[0];
    for (int lane = 1; lane < LANES; ++lane) mine = std::max(mine, least[lane]);
  }
  clock.wait(PRODUCTS);
  for (int64_t row = 0; row < count; ++row)
    for (int64_t thread = 0; thread < omp_get_num_threads(); ++thread)
      bounds[row].least = std::max(bounds[row].least, most[thread * count + row]);
  for (int64_t panel = panels.begin; panel < panels.end; ++panel)  // which stays in the cache for all rows
    for (int64_t row = 0; row < count; ++row) {
      const Bounds& own = bounds[row];
      bool may = false;
      for (int64_t v = 0; v < 2; ++v) {
        const int64_t at = panel * PANEL + v * LANES;
        const Floats high = load_logits(logits + row * of.outputs + at, of.outputs - at) + own.of(panel, v);
        may |= any_reaches(high, spread(own.least));
      }
      if (may) multiply_share(of, rows + row * of.inputs, logits + row * of.outputs, 1, Share(panel, panel + 1));
    }
}

void normalise_row(const float* row, const float* scale, float* result, int64_t width, float epsilon) {
  Floats squares = {};
  int64_t i = 0;
  float rest = 0;
  for (; i + LANES <= width; i += LANES) squares = fused(load(row + i), load(row + i), squares);
  for (; i < width; ++i) rest += row[i] * row[i];
  const float factor = 1 / std::sqrt((sum_of(squares) + rest) / width + epsilon);
  for (i = 0; i < width; ++i) result[i] = row[i] * factor * scale[i];
}

void normalise_rows(const float* rows, const float* scale, float* results, int64_t count, int64_t width, float epsilon) {
  for (int64_t row = 0; row < count; ++row) normalise_row(rows + row * width, scale, results + row * width, width, epsilon);
}

// e^x to about one unit in the last place, without branches, so that compilers vectorise it.
inline float exponential(float x) {
  x = std::min(88.0f, std::max(-87.0f, x));
  const float n = std::nearbyint(x * 1.44269504f);
  const float r = x - n * 0.693145751953125f - n * 1.42860682030941723212e-6f;
  float y = 1.9875691500e-4f;
  y = std::fma(y, r, 1.3981999507e-3f), y = std::fma(y, r, 8.3334519073e-3f), y = std::fma(y, r, 4.1665795894e-2f);
  y = std::fma(y, r, 1.6666665459e-1f), y = std::fma(y, r, 5.0000001201e-1f), y = std::fma(y * r, r, r) + 1;
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

// Multiplies the gate of a MLP by the other factor, for the share of a thread.
void activate(float* gates, const float* factors, int64_t count, int64_t inner, Share panels, int activation) {
  const int64_t begin = panels.begin * PANEL, end = std::min(inner, panels.end * PANEL);
  for (int64_t row = 0; row < count; ++row) {
    float* const values = gates + row * inner;
    const float* const others = factors + row * inner;
    if (activation == SILU)
      for (int64_t i = begin; i < end; ++i) values[i] = activated(values[i], SILU) * others[i];
    else
      for (int64_t i = begin; i < end; ++i) values[i] = activated(values[i], GELU_TANH) * others[i];
  }
}

// Queries, keys and values of some rows, and where they go: the states of a head begin `stride` rows after those of the one
// before. Norms and biases may be null. Halves of `rotated` values take rotary positions (arXiv 2104.09864); cosine and sine
// are [count, rotated].
struct Heads {
  const Weight* const* weights;
  const float *const *biases, *const *norms;
  const float *cosine, *sine;
  float* products;  // [count, outputs of all]
  float* results[3];
  int64_t strides[3];
  int64_t count, width, rotated;
  const float* epsilons;

  int64_t heads(int part) const { return weights[part]->outputs / width; }

  void multiply(const float* rows) const {
    float* at = products;
    for (int part = 0; part < 3; ++part) {
      multiply_share(*weights[part], rows, at, count, Share(panels_of(weights[part]->outputs)));
      at += count * weights[part]->outputs;
    }
  }

  void place() const {
    const Share share((heads(0) + heads(1) + heads(2)) * count);
    for (int64_t item = share.begin; item < share.end; ++item) {
      int64_t rest = item;
      int part = 0;
      float* from = products;
      for (; rest >= heads(part) * count; ++part) rest -= heads(part) * count, from += heads(part) * count * width;
      const int64_t head = rest / count, row = rest % count;
      float* const values = from + (row * heads(part) + head) * width;
      float* const result = results[part] + (head * strides[part] + row) * width;
      if (biases[part])
        for (int64_t i = 0; i < width; ++i) values[i] += biases[part][head * width + i];
      if (norms[part]) normalise_row(values, norms[part], values, width, epsilons[part]);
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
};

// The positions that a row sees: `run` of them from `begin` on, then `others`, which rise.
struct Seen {
  int64_t begin, run, count;
  const int32_t* others;

  int64_t at(int64_t number) const { return number < run ? begin + number : others[number - run]; }
};

// Reads a row of a mask [length]; `others` is memory for the positions after the first run.
Seen seen_by(const uint8_t* mask, int64_t length, int32_t* others) {
  Seen seen{0, 0, 0, others};
  while (seen.begin < length && !mask[seen.begin]) ++seen.begin;
  while (seen.begin + seen.run < length && mask[seen.begin + seen.run]) ++seen.run;
  seen.count = seen.run;
  for (int64_t at = seen.begin + seen.run; at < length; ++at)
    if (mask[at]) others[seen.count++ - seen.run] = at;
  return seen;
}

// Returns the sum of every vector in its place.
inline Floats sums_of(Floats* vectors) {
  Ints even, odd;
  for (int i = 0; i < LANES; ++i) even[i] = 2 * i, odd[i] = 2 * i + 1;
  for (int number = LANES / 2; number > 0; number /= 2)
#pragma GCC unroll 8
    for (int i = 0; i < number; ++i) {
      const Floats first = vectors[2 * i], second = vectors[2 * i + 1];
      vectors[i] = __builtin_shuffle(first, second, even) + __builtin_shuffle(first, second, odd);
    }
  return vectors[0];
}

// Products of QUERIES queries [QUERIES, width] and LANES keys, times a factor.
template <int QUERIES>
__attribute__((always_inline)) inline void score(const float* queries, const float* const* keys, int64_t width, float factor, float* results, int64_t stride) {
  Floats sums[QUERIES][LANES];
  for (int k = 0; k < LANES; ++k) {
    Floats own[QUERIES] = {};
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES)
      for (int q = 0; q < QUERIES; ++q) own[q] = fused(load(queries + q * width + i), load(keys[k] + i), own[q]);
    for (; i < width; ++i)
      for (int q = 0; q < QUERIES; ++q) own[q][0] = std::fma(queries[q * width + i], keys[k][i], own[q][0]);
    for (int q = 0; q < QUERIES; ++q) sums[q][k] = own[q];
  }
  for (int q = 0; q < QUERIES; ++q) {
    const Floats scores = sums_of(sums[q]) * factor;
    std::memcpy(results + q * stride, &scores, sizeof scores);
  }
}

// Sums VECTORS vectors of the values from `i` on, weighted for each query, to its result. The first `shared` positions are the
// same for all queries.
template <int QUERIES, int VECTORS>
inline void weigh(const float* weights, int64_t stride, const float* values, const Seen* const* seen, int64_t shared,
                  int64_t width, const float* total, float* const* results, int64_t i) {
  Floats sums[QUERIES][VECTORS] = {};
  const float* const first = values + seen[0]->begin * width + i;
  for (int64_t at = 0; at < shared; ++at)
    for (int v = 0; v < VECTORS; ++v) {
      const Floats value = load(first + at * width + v * LANES);
      for (int q = 0; q < QUERIES; ++q) sums[q][v] = fused(spread(weights[q * stride + at]), value, sums[q][v]);
    }
  for (int q = 0; q < QUERIES; ++q) {
    for (int64_t at = shared; at < seen[q]->count; ++at)
      for (int v = 0; v < VECTORS; ++v) {
        const Floats value = load(values + seen[q]->at(at) * width + i + v * LANES);
        sums[q][v] = fused(spread(weights[q * stride + at]), value, sums[q][v]);
      }
    for (int v = 0; v < VECTORS; ++v) {
      const Floats result = sums[q][v] / total[q];
      std::memcpy(results[q] + i + v * LANES, &result, sizeof result);
    }
  }
}

// Attention of QUERIES queries [QUERIES, width], whose first positions begin at the same one. Every query is computed as if it
// were alone. `scores` is memory for QUERIES rows of `stride` numbers, a multiple of LANES. Queries of a WIDTH that compilers know
// stay in registers; 0 is for any other.
template <int QUERIES, int WIDTH>
void attend(const float* queries, const float* keys, const float* values, const Seen* const* seen, int64_t any_width, float scale,
            float* scores, int64_t stride, float* const* results) {
  const int64_t width = WIDTH ? WIDTH : any_width;
  int64_t shared = seen[0]->run;
  for (int q = 1; q < QUERIES; ++q) shared = std::min(shared, seen[q]->run);
  const float* at_keys[LANES];
  const int64_t grouped = shared / LANES * LANES;
  for (int64_t at = 0; at < grouped; at += LANES) {
    for (int k = 0; k < LANES; ++k) at_keys[k] = keys + (seen[0]->begin + at + k) * width;
    score<QUERIES>(queries, at_keys, width, scale, scores + at, stride);
  }
  float total[QUERIES];
  for (int q = 0; q < QUERIES; ++q) {
    float* const weights = scores + q * stride;
    const int64_t count = seen[q]->count, filled = (count + LANES - 1) / LANES * LANES;
    for (int64_t at = grouped; at < count; at += LANES) {
      for (int k = 0; k < LANES; ++k) at_keys[k] = keys + seen[q]->at(std::min(at + k, count - 1)) * width;
      score<1>(queries + q * width, at_keys, width, scale, weights + at, stride);
    }
    std::fill(weights + count, weights + filled, -std::numeric_limits<float>::max());
    Floats most = load(weights), spoiled = {}, sums = {};
    // A score that is not finite makes the result NaN; the exponential would hide it.
    for (int64_t at = 0; at < filled; at += LANES) {
      const Floats found = load(weights + at);
      most = found > most ? found : most, spoiled += found * 0;
    }
    float largest = most[0];
    for (int i = 1; i < LANES; ++i) largest = std::max(largest, most[i]);
    for (int64_t at = 0; at < count; ++at) weights[at] = exponential(weights[at] - largest);
    std::fill(weights + count, weights + filled, 0.0f);
    for (int64_t at = 0; at < filled; at += LANES) sums += load(weights + at);
    total[q] = sum_of(sums) + sum_of(spoiled);
  }
  constexpr int VECTORS = LANES == 16 ? 4 : 8 / QUERIES;  // side by side, as many as there are registers for their sums
  int64_t i = 0;
  for (; i + VECTORS * LANES <= width; i += VECTORS * LANES)
    weigh<QUERIES, VECTORS>(scores, stride, values, seen, shared, width, total, results, i);
  for (; i + LANES <= width; i += LANES) weigh<QUERIES, 1>(scores, stride, values, seen, shared, width, total, results, i);
  for (; i < width; ++i)
    for (int q = 0; q < QUERIES; ++q) {
      float sum = 0;
      for (int64_t at = 0; at < seen[q]->count; ++at)
        sum = std::fma(scores[q * stride + at], values[seen[q]->at(at) * width + i], sum);
      results[q][i] = sum / total[q];
    }
}

// Returns how many queries of `wanted` share the reading of their keys, so that no thread works long.
int64_t fastest_size(int64_t groups, int64_t wanted, int64_t threads) {
  int64_t best = 1, least = std::numeric_limits<int64_t>::max();
  for (int64_t size = 1; size <= std::min<int64_t>(wanted, 4); ++size) {
    const int64_t items = groups * ((wanted + size - 1) / size), work = (items + threads - 1) / threads * (2 + size);
    if (work <= least) best = size, least = work;
  }
  return best;
}

// A decoder layer of the usual form; null pointers mark norms and biases that a model lacks.
struct Layer {
  const Weight* weights[7];  // of queries, keys, values, the output of attention, gate, up, down
  const float* biases[4];
  const float* norms[7];  // of queries, of keys, none, before attention, after it, before the MLP, after it
  float epsilons[7];
  float scale;  // of the scores of attention
  int64_t width;
  int32_t activation, has_attention, has_mlp;  // the last two are 0 where the sub-layer is skipped
};

// Adds what a sub-layer computes to the hidden states before it, in the share of a thread, after a norm if there is one. `own` is
// memory of the thread.
void add_share(const float* before, const float* outputs, float* after, const float* norm, float epsilon, int64_t count,
               int64_t inputs, float* own, Clock& clock) {
  clock.end(PRODUCTS);
  if (norm) {
    clock.wait(OTHERS);
    normalise_rows(outputs, norm, own, count, inputs, epsilon);
    outputs = own;
  }
  const Share panels(panels_of(inputs));
  const int64_t begin = panels.begin * PANEL, end = std::min(inputs, panels.end * PANEL);
  for (int64_t row = 0; row < count; ++row)
    for (int64_t i = row * inputs + begin; i < row * inputs + end; ++i) after[i] = before[i] + outputs[i];
  clock.wait(OTHERS);
}

}  // namespace

extern "C" {

int panel_size() { return PANEL; }

void set_clock(double* seconds) { spent = seconds; }

void set_packed_rows(int threads, int rows) { packed_rows[std::min(threads, MOST_THREADS)] = rows; }

// rows [count, inputs] by a weight [outputs, inputs] to results [count, outputs].
void multiply(const float* rows, const Weight* weight, float* results, int64_t count, int threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    Clock clock;
    multiply_share(*weight, rows, results, count, Share(panels_of(weight->outputs)));
    if (clock.seconds) clock.wait(PRODUCTS);
  }
}

// Root-mean-square norms (arXiv 1910.07467) of rows [count, width].
void normalise(const float* rows, const float* scale, float* results, int64_t count, int64_t width, float epsilon) {
  Clock clock;
  normalise_rows(rows, scale, results, count, width, epsilon);
  clock.end(OTHERS);
}

// The places of the largest values of rows [count, width], the first of several, and the probabilities there unless these are
// null. A row with NaN has the first one's place. Without a finite largest value, a probability is NaN.
void find_likeliest(const float* rows, int64_t count, int64_t width, int64_t* places, float* probabilities, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && count > 1)
  for (int64_t row = 0; row < count; ++row) {
    const float* const values = rows + row * width;
    Floats most = spread(-std::numeric_limits<float>::infinity()), sums = {};
    Ints is_nan = {};
    for (int64_t at = 0; at < width; at += LANES) {
      const Floats found = load_logits(values + at, width - at);
      most = found > most ? found : most, is_nan |= found != found;
    }
    float largest = most[0];
    bool has_nan = is_nan[0];
    for (int lane = 1; lane < LANES; ++lane) largest = std::max(largest, most[lane]), has_nan |= is_nan[lane] != 0;
    int64_t place = 0;
    if (!has_nan)
      while (!any_reaches(load_logits(values + place, width - place), spread(largest))) place += LANES;
    while (has_nan ? !std::isnan(values[place]) : values[place] != largest) ++place;
    places[row] = place;
    for (int64_t at = 0; at < width && probabilities; at += LANES) {
      const Floats found = load_logits(values + at, width - at);
      Floats powers;
      for (int lane = 0; lane < LANES; ++lane) powers[lane] = exponential(found[lane] - largest);
      sums += powers;
    }
    if (probabilities)
      probabilities[row] = std::isfinite(values[place]) ? 1 / sum_of(sums) : std::numeric_limits<float>::quiet_NaN();
  }
}

// Decoder layers of one shape, one after the other: hidden [count, inputs] to outputs [layers, count, inputs]. Keys and values of
// those with attention, [heads, capacity, width], have `start` positions and take the new ones. visible [count, visible_stride]
// says which positions a row sees; null if there is one row, which sees all. The output layer is null, or computes logits
// [last, its outputs] of the last rows of states [count, inputs], which are those after the last layer and a norm. With its codes
// and their distances, only the largest logits are exact.
void decode(const Layer* const* layers, int64_t number, const float* hidden, float* outputs, const float* cosine,
            const float* sine, float* const* keys, float* const* values, const uint8_t* visible, int64_t count,
            int64_t rotated, int64_t start, int64_t capacity, int64_t visible_stride, int threads, const float* norm,
            float epsilon, const Weight* output_layer, float* states, float* logits, int64_t last, const Weight* codes,
            const float* distances) {
  const Weight* const* const shapes = layers[0]->weights;
  const int64_t inputs = shapes[0]->inputs, inner = shapes[4]->outputs, width = layers[0]->width, length = start + count;
  const int64_t all = shapes[0]->outputs, groups = shapes[1]->outputs / width, members = all / width / groups;
  const int64_t stride = (length + LANES - 1) / LANES * LANES, private_size = count * inputs + 4 * stride;
  static thread_local std::vector<float> memory;
  static thread_local std::vector<int32_t> positions;
  static thread_local std::vector<Seen> rows_see;
  memory.resize(count * (2 * all + 2 * groups * width + all + inputs + 2 * inner) + threads * (private_size + count));
  if (visible) positions.resize(count * length);
  rows_see.assign(count, Seen{0, length, length, nullptr});
  Seen* const seen = rows_see.data();
  int32_t* const others = positions.data();
  float* const queries = memory.data();  // [heads, count, width]
  float* const products = queries + count * all;
  float* const attended = products + count * (all + 2 * groups * width);  // [count, all]
  float* const added = attended + count * all;                            // [count, inputs], by a sub-layer
  float* const gates = added + count * inputs;
  float* const factors = gates + count * inner;
  float* const owned = factors + count * inner;
  float* const most = owned + threads * private_size;  // [threads, last]
  using Attend = decltype(&attend<1, 0>);
  constexpr Attend any[] = {attend<1, 0>, attend<2, 0>, attend<3, 0>, attend<4, 0>};
  constexpr Attend of_64[] = {attend<1, 64>, attend<2, 64>, attend<3, 64>, attend<4, 64>};
  constexpr Attend of_128[] = {attend<1, 128>, attend<2, 128>, attend<3, 128>, attend<4, 128>};
  const Attend* const attends = width == 64 ? of_64 : width == 128 ? of_128 : any;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    Clock clock;
    float* const own = owned + omp_get_thread_num() * private_size;
    float* const scores = own + count * inputs;
    const Share panels(panels_of(inputs)), inners(panels_of(inner)), read(visible ? count : 0);
    for (int64_t row = read.begin; row < read.end; ++row)
      seen[row] = seen_by(visible + row * visible_stride, length, others + row * length);
    for (int64_t place = 0; place < number; ++place) {
      const Layer& layer = *layers[place];
      const Weight* const* const weights = layer.weights;
      const float* const before = place ? outputs + (place - 1) * count * inputs : hidden;
      float* const after = outputs + place * count * inputs;
      if (layer.has_attention) {
        const Heads heads{weights, layer.biases, layer.norms, cosine, sine, products,
                          {queries, keys[place] + start * width, values[place] + start * width},
                          {count, capacity, capacity}, count, width, rotated, layer.epsilons};
        normalise_rows(before, layer.norms[3], own, count, inputs, layer.epsilons[3]);
        clock.end(OTHERS);
        heads.multiply(own);
        clock.wait(PRODUCTS);
        heads.place();
        clock.wait(OTHERS);
        // The queries of a key's head, row by row. Up to four share the reading of a key.
        const int64_t wanted = members * count, size = fastest_size(groups, wanted, threads);
        const int64_t parts = (wanted + size - 1) / size;
        const Share share(groups * parts);
        for (int64_t item = share.begin; item < share.end; ++item) {
          const int64_t group = item / parts, first = item % parts * size, together = std::min(size, wanted - first);
          const float* const from = queries + (group * wanted + first) * width;
          const float* const of_keys = keys[place] + group * capacity * width;
          const float* const of_values = values[place] + group * capacity * width;
          const Seen* see[4];
          float* results[4];
          bool alike = true;
          for (int64_t i = 0; i < together; ++i) {
            const int64_t row = (first + i) % count;
            see[i] = seen + row, alike = alike && see[i]->begin == see[0]->begin;
            results[i] = attended + row * all + (group * members + (first + i) / count) * width;
          }
          if (alike)
            attends[together - 1](from, of_keys, of_values, see, width, layer.scale, scores, stride, results);
          else
            for (int64_t i = 0; i < together; ++i)
              attends[0](from + i * width, of_keys, of_values, see + i, width, layer.scale, scores, stride, results + i);
        }
        clock.wait(ATTENTION);
        multiply_share(*weights[3], attended, added, count, panels);
        if (layer.biases[3])
          for (int64_t row = 0; row < count; ++row)
            for (int64_t i = panels.begin * PANEL; i < std::min(inputs, panels.end * PANEL); ++i)
              added[row * inputs + i] += layer.biases[3][i];
        add_share(before, added, after, layer.norms[4], layer.epsilons[4], count, inputs, own, clock);
      }
      const float* const between = layer.has_attention ? after : before;
      if (layer.has_mlp) {
        normalise_rows(between, layer.norms[5], own, count, inputs, layer.epsilons[5]);
        clock.end(OTHERS);
        multiply_share(*weights[4], own, gates, count, inners);
        multiply_share(*weights[5], own, factors, count, inners);
        clock.end(PRODUCTS);
        activate(gates, factors, count, inner, inners, layer.activation);
        clock.wait(OTHERS);
        multiply_share(*weights[6], gates, added, count, panels);
        add_share(between, added, after, layer.norms[6], layer.epsilons[6], count, inputs, own, clock);
      }
    }
    if (output_layer) {
      normalise_rows(outputs + (number - 1) * count * inputs, norm, own, count, inputs, epsilon);
      if (omp_get_thread_num() == 0) std::copy(own, own + count * inputs, states);
      clock.end(OTHERS);
      const float* const rows = own + (count - last) * inputs;
      if (codes)
        find_largest(*output_layer, *codes, distances, rows, logits, last, most, clock);
      else
        multiply_share(*output_layer, rows, logits, last, Share(panels_of(output_layer->outputs)));
      if (clock.seconds) clock.wait(PRODUCTS);
    }
  }
}

}  // extern "C"
