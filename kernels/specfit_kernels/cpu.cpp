// CPU kernels of the decode loop: products with packed weights, and what lies between them.
//
// A pass has M rows (tokens), and a row's bits do not depend on the other rows, on their number, or
// on the threads: every output has one order of addition, which is written out below, and the build
// has -ffp-contract=off, so that a sum rounds where the source says `fma`, `+` or `*`. Hence decoding
// with speculation gives the very logits of decoding without.
//
// Packed weights. Output channels are taken 16 at a time: a tile holds 16 rows of W, interleaved so
// that vector lanes are channels and no sum goes across lanes. Along K a tile is a run of chunks,
// each with its scales first, so that a tile is one stream of memory in multiples of 64 bytes:
//
//   format  columns  scales of a chunk, [block][channel]       values of a chunk               bits a weight
//   nvfp4        64  4 x 16 E4M3                                8 x [16 channels][8 codes]                4.5
//   int8         64  2 x 16 float16                            16 x [16 channels][4 bytes, +128]          8.5
//   fp8         128  1 x 16 float32                           128 x [16 channels] E4M3                   8.25
//   bf16         16  -                                          8 x [16 channels][2]                       16
//   fp32         16  -                                         16 x [16 channels]                          32
//
// Each tile has 16 float32 besides, what its sums are multiplied with: 32 / K bits a weight. Byte j
// of a channel's 8 codes has column j in its low nibble and column j + 4 in the high one.
//
// Activations are float32, or int8 in blocks of 32 (scale amax / 127), the latter for nvfp4 and int8
// weights only. A block's integer sum is exact; it is scaled and added to the total with one fma.
// Weights enter the 8-bit dot product as unsigned numbers (2 * E2M1 + 12; int8 + 128); the sum
// starts at minus the offset times the sum of the activations, so that this costs nothing.
//
// Paths. The second half of this file is written once over vectors of LANES floats and is compiled
// for each path (avx512vnni 16 lanes, avx2 8, portable 4): the file includes itself.

#ifndef LANES

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#ifdef _OPENMP
#include <omp.h>
#endif

#define INLINE inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

namespace {

constexpr int kTile = 16;         // output channels of a tile
constexpr int kPage = 64;         // columns of a page of the KV cache
constexpr int kMaxHeadDim = 256;  // of queries, keys and values

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

enum class Format { nvfp4, int8, fp8, bf16, fp32 };

struct Weight {
  Format format;
  bool int8_activations;
  int64_t rows, columns;
  const uint8_t* tiles;
  const float* channel_scales;
  const float* bias;  // or null
};

// Of one layer. Keys are [page, kv head, dim, kPage] and values [page, kv head, kPage, dim]: in both
// products of attention the lanes then lie along memory.
struct Cache {
  void *keys, *values;
  int64_t num_pages, num_kv_heads, dim;
  bool bf16;  // or float32

  // Where keys and values of one head of a page start.
  int64_t head(int64_t page, int64_t kv_head) const {
    return (page * num_kv_heads + kv_head) * dim * kPage;
  }
};

// Where the rows of a pass stand: row i is the token at positions[i] of sequence sequences[i], whose
// columns p * kPage ... are in page table[sequence, p].
struct Pass {
  int64_t num_rows;
  const int64_t *positions, *sequences, *table;
  int64_t num_sequences, pages_per_sequence;
  const float *cosines, *sines;  // [position, dim / 2]
  int64_t num_positions;
  int threads;

  int64_t page(int64_t row, int64_t index) const {
    return table[sequences[row] * pages_per_sequence + index];
  }
};

struct Layer {
  Weight qkv, o, gate_up, down;
  const float *input_norm, *post_attention_norm;
  float eps;
  const float *q_norm, *k_norm;  // or null
  float head_eps;
};

// 32 activations of a row. Those of a pass lie as [block][row], so that a kernel walks them with
// one pointer.
struct Int8Block {
  int8_t codes[32];
  int32_t starts[2];  // of 16 columns each: -offset * the sum of their codes
  float scale;
};

struct Kernels {
  const char* name;
  void (*linear)(const float* x, int64_t num_rows, const Weight&, float* y, int threads);
  // Where `added` is not null, x + added goes to `stream` first, which may be x, and is normalized.
  void (*rmsnorm)(const float* x, const float* added, const float* weight, float eps,
                  int64_t num_rows, int64_t size, float* stream, float* y, int threads);
  void (*rope_append)(const float* qkv, int64_t num_heads, const Pass&, const Cache&,
                      const float* q_norm, const float* k_norm, float eps, float* queries);
  void (*attention)(const float* queries, int64_t num_heads, const Pass&, const Cache&, float* y);
  void (*silu_mul)(const float* gate_up, int64_t num_rows, int64_t size, float* y, int threads);
  void (*argmax)(const float* x, int64_t num_rows, int64_t size, int64_t* y);
};

// Kept from call to call, one for each use and calling thread.
template <class T>
T* scratch(int use, int64_t size) {
  static thread_local std::vector<T> kept[8];
  if (static_cast<int64_t>(kept[use].size()) < size) kept[use].resize(size);
  return kept[use].data();
}

// body(first, last) over parts of 0..n of at least `grain`, one a thread.
template <class Body>
void parallel(int64_t n, int64_t grain, int threads, const Body& body) {
#ifdef _OPENMP
  if (threads > n / grain) threads = static_cast<int>(n / grain);
  if (threads > 1) {
#pragma omp parallel num_threads(threads)
    {
      const int64_t i = omp_get_thread_num(), parts = omp_get_num_threads();
      body(n * i / parts, n * (i + 1) / parts);
    }
    return;
  }
#endif
  body(0, n);
}

// Rounded to nearest, ties to even; NaN stays.
INLINE uint16_t to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return x != x ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

[[noreturn]] void refuse(const char* name, const char* requirement, int64_t limit, int64_t value) {
  throw std::invalid_argument(std::string(name) + " must " + requirement + " " +
                              std::to_string(limit) + ", got " + std::to_string(value));
}

// What no shape says. The pages of later positions are not looked at.
void check_pass(const Pass& pass, const Cache& cache) {
  const int64_t longest = std::min(pass.num_positions, pass.pages_per_sequence * kPage);
  for (int64_t row = 0; row < pass.num_rows; ++row) {
    const int64_t position = pass.positions[row], sequence = pass.sequences[row];
    if (position < 0 || position >= longest)
      refuse("positions", "be within the block table and the RoPE table, below", longest, position);
    if (sequence < 0 || sequence >= pass.num_sequences)
      refuse("sequences", "be within the block table, below", pass.num_sequences, sequence);
    for (int64_t i = 0; i <= position / kPage; ++i)
      if (pass.page(row, i) < 0 || pass.page(row, i) >= cache.num_pages)
        refuse("block_table", "name pages below", cache.num_pages, pass.page(row, i));
  }
}

// ---- The paths -----------------------------------------------------------------------------------

#define LANES 4
namespace portable {
#include __FILE__
}
#undef LANES

#if defined(__x86_64__) && !defined(__clang__)
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#define LANES 8
namespace avx2 {
#include __FILE__
}
#undef LANES
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512vnni,fma,f16c")
#define LANES 16
namespace avx512vnni {
#include __FILE__
}
#undef LANES
#pragma GCC pop_options
#endif

std::vector<Kernels> paths() {
  std::vector<Kernels> found;
#if defined(__x86_64__) && !defined(__clang__)
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                        __builtin_cpu_supports("f16c");
  if (has_avx2 && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512vnni"))
    found.push_back(avx512vnni::kernels());
  if (has_avx2) found.push_back(avx2::kernels());
#endif
  found.push_back(portable::kernels());
  return found;
}

// ---- Layers ---------------------------------------------------------------------------------------

void forward_layer(const Kernels& k, const Layer& layer, const Cache& cache, const Pass& pass,
                   float* stream) {
  const int64_t rows = pass.num_rows, hidden = layer.o.rows, inner = layer.down.columns;
  const int64_t num_heads = layer.o.columns / cache.dim;
  float* normed = scratch<float>(0, rows * hidden);
  float* delta = scratch<float>(1, rows * hidden);
  float* wide = scratch<float>(2, rows * std::max(layer.qkv.rows, layer.gate_up.rows));
  float* queries = scratch<float>(3, rows * layer.o.columns);
  float* narrow = scratch<float>(4, rows * std::max(layer.o.columns, inner));

  k.rmsnorm(stream, nullptr, layer.input_norm, layer.eps, rows, hidden, nullptr, normed,
            pass.threads);
  k.linear(normed, rows, layer.qkv, wide, pass.threads);
  k.rope_append(wide, num_heads, pass, cache, layer.q_norm, layer.k_norm, layer.head_eps, queries);
  k.attention(queries, num_heads, pass, cache, narrow);
  k.linear(narrow, rows, layer.o, delta, pass.threads);
  k.rmsnorm(stream, delta, layer.post_attention_norm, layer.eps, rows, hidden, stream, normed,
            pass.threads);
  k.linear(normed, rows, layer.gate_up, wide, pass.threads);
  k.silu_mul(wide, rows, inner, narrow, pass.threads);
  k.linear(narrow, rows, layer.down, delta, pass.threads);
  for (int64_t i = 0; i < rows * hidden; ++i) stream[i] += delta[i];
}

// `captures` are pairs of a layer's index and where the stream that enters it is copied to; the
// index behind the last layer is the stream that leaves it.
void forward_layers(const Kernels& k, const std::vector<const Layer*>& layers,
                    const std::vector<const Cache*>& caches, const Pass& pass, float* stream,
                    const std::vector<std::pair<int64_t, uintptr_t>>& captures) {
  for (size_t i = 0; i <= layers.size(); ++i) {
    for (const auto& [index, copy] : captures)
      if (index == static_cast<int64_t>(i))
        std::memcpy(reinterpret_cast<float*>(copy), stream,
                    sizeof(float) * pass.num_rows * layers[0]->o.rows);
    if (i < layers.size()) forward_layer(k, *layers[i], *caches[i], pass, stream);
  }
}

// ---- Python -----------------------------------------------------------------------------------------
//
// Addresses come as integers, and cpu.py has checked what lies there.

namespace py = pybind11;

template <class T>
using Passed = std::conditional_t<std::is_pointer_v<T>, uintptr_t,
                                  std::conditional_t<std::is_enum_v<T>, int, T>>;

template <class T>
T received(Passed<T> value) {
  if constexpr (std::is_pointer_v<T>)
    return reinterpret_cast<T>(value);
  else
    return static_cast<T>(value);
}

template <class... Args>
auto callable(void (*kernel)(Args...)) {
  return [kernel](Passed<Args>... args) { kernel(received<Args>(args)...); };
}

template <class T, class... Fields>
void define_type(py::module_& module, const char* name) {
  py::class_<T>(module, name).def(
      py::init([](Passed<Fields>... fields) { return T{received<Fields>(fields)...}; }));
}

void define_kernels(py::module_ module, const Kernels& k) {
  const py::call_guard<py::gil_scoped_release> unlocked;
  module.def("linear", callable(k.linear), unlocked);
  module.def("rmsnorm", callable(k.rmsnorm), unlocked);
  module.def("rope_append", callable(k.rope_append), unlocked);
  module.def("attention", callable(k.attention), unlocked);
  module.def("silu_mul", callable(k.silu_mul), unlocked);
  module.def("argmax", callable(k.argmax), unlocked);
  module.def("forward_layers",
             [k](const std::vector<const Layer*>& layers, const std::vector<const Cache*>& caches,
                 const Pass& pass, uintptr_t stream,
                 const std::vector<std::pair<int64_t, uintptr_t>>& captures) {
               forward_layers(k, layers, caches, pass, received<float*>(stream), captures);
             },
             unlocked);
}

}  // namespace

// A submodule for each path that this machine has; `paths` names the fastest first.
PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using Bytes = const uint8_t*;
  using Floats = const float*;
  using Ints = const int64_t*;
  define_type<Weight, Format, bool, int64_t, int64_t, Bytes, Floats, Floats>(module, "Weight");
  define_type<Cache, void*, void*, int64_t, int64_t, int64_t, bool>(module, "Cache");
  define_type<Pass, int64_t, Ints, Ints, Ints, int64_t, int64_t, Floats, Floats, int64_t, int>(
      module, "Pass");
  define_type<Layer, const Weight&, const Weight&, const Weight&, const Weight&, Floats, Floats,
              float, Floats, Floats, float>(module, "Layer");
  py::list names;
  for (const Kernels& k : paths()) {
    define_kernels(module.def_submodule(k.name), k);
    names.append(k.name);
  }
  module.attr("paths") = names;
}

#else  // LANES: what follows is compiled once for each path, inside its namespace

// ---- Vectors --------------------------------------------------------------------------------------

using F = float __attribute__((vector_size(4 * LANES)));
using I = int32_t __attribute__((vector_size(4 * LANES)));
using U = uint32_t __attribute__((vector_size(4 * LANES)));
using B = uint8_t __attribute__((vector_size(4 * LANES)));  // 4 bytes of each channel
using S8 = int8_t __attribute__((vector_size(LANES)));
using U16 = uint16_t __attribute__((vector_size(2 * LANES)));

template <class V>
INLINE V load(const void* from) {
  V v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

template <class V>
INLINE void store(void* to, V v) {
  std::memcpy(to, &v, sizeof v);
}

#if LANES == 16
constexpr const char* kName = "avx512vnni";
constexpr int kRows = 8;  // of a pass, that share the decoding of a weight

INLINE F splat(float x) { return _mm512_set1_ps(x); }
INLINE I splat(int32_t x) { return (I)_mm512_set1_epi32(x); }
INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }

INLINE F float16(const uint8_t* p) { return _mm512_cvtph_ps(load<__m256i>(p)); }

// E4M3 / 256: its bits, moved, are those of a float16, denormal numbers included.
INLINE F e4m3(const uint8_t* p) {
  const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(load<__m128i>(p)), 7);
  return _mm512_cvtph_ps(_mm256_and_si256(wide, _mm256_set1_epi16(static_cast<int16_t>(0xbf80))));
}

// 2 * E2M1 + 12 of codes in bytes.
INLINE B unsigned_e2m1(B codes) {
  const __m512i table = _mm512_broadcast_i32x4(
      _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
  return (B)_mm512_shuffle_epi8(table, (__m512i)codes);
}

// 2 * E2M1 of one of the 8 codes that each lane has.
INLINE F e2m1(U codes, int nibble) {
  const F table = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
  return _mm512_permutexvar_ps((__m512i)(codes >> 4 * nibble), table);
}

// The products of 16 columns with half a block of each of M rows. The rows' chains of additions go
// side by side.
template <int M>
INLINE void dot_codes(const B* weights, const Int8Block* x, int half, I (&sums)[M]) {
  UNROLL for (int m = 0; m < M; ++m) sums[m] = splat(x[m].starts[half]);
  UNROLL for (int i = 0; i < 4; ++i)
    UNROLL for (int m = 0; m < M; ++m) {
      const I columns = splat(load<int32_t>(x[m].codes + 16 * half + 4 * i));
      sums[m] = (I)_mm512_dpbusd_epi32((__m512i)sums[m], (__m512i)weights[i], (__m512i)columns);
    }
}
template <int M>
INLINE void dot_bytes(const B* weights, const Int8Block* x, int half, I (&sums)[M]) {
  dot_codes(weights, x, half, sums);
}

#elif LANES == 8
constexpr const char* kName = "avx2";
constexpr int kRows = 4;

INLINE F splat(float x) { return _mm256_set1_ps(x); }
INLINE I splat(int32_t x) { return (I)_mm256_set1_epi32(x); }
INLINE F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }

INLINE F float16(const uint8_t* p) { return _mm256_cvtph_ps(load<__m128i>(p)); }

INLINE F e4m3(const uint8_t* p) {
  const __m128i wide = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)p)), 7);
  return _mm256_cvtph_ps(_mm_and_si128(wide, _mm_set1_epi16(static_cast<int16_t>(0xbf80))));
}

INLINE B unsigned_e2m1(B codes) {
  const __m256i table = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
  return (B)_mm256_shuffle_epi8(table, (__m256i)codes);
}

INLINE F e2m1(U codes, int nibble) {
  const F table = {0, 1, 2, 3, 4, 6, 8, 12};
  const F size = _mm256_permutevar8x32_ps(table, (__m256i)(codes >> 4 * nibble));
  return (F)((U)size ^ (codes << (28 - 4 * nibble) & 0x80000000u));
}

// A product is at most 24 * 127, so that 8 of them are added in 16 bits.
template <int M>
INLINE void dot_codes(const B* weights, const Int8Block* x, int half, I (&sums)[M]) {
  UNROLL for (int m = 0; m < M; ++m) {
    __m256i pairs = _mm256_setzero_si256();
    UNROLL for (int i = 0; i < 4; ++i) {
      const I columns = splat(load<int32_t>(x[m].codes + 16 * half + 4 * i));
      pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16((__m256i)weights[i], (__m256i)columns));
    }
    sums[m] = (I)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)) + x[m].starts[half];
  }
}

// Bytes up to 255 would saturate 16 bits: the sizes of x, times the signed weights with its signs.
template <int M>
INLINE void dot_bytes(const B* weights, const Int8Block* x, int half, I (&sums)[M]) {
  UNROLL for (int m = 0; m < M; ++m) {
    sums[m] = splat(0);
    UNROLL for (int i = 0; i < 4; ++i) {
      const __m256i columns = (__m256i)splat(load<int32_t>(x[m].codes + 16 * half + 4 * i));
      const __m256i signed_weights = _mm256_sign_epi8((__m256i)(weights[i] ^ 0x80), columns);
      const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(columns), signed_weights);
      sums[m] += (I)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    }
  }
}

#else
constexpr const char* kName = "portable";
constexpr int kRows = 4;
constexpr int8_t kTwiceE2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

INLINE F splat(float x) { return F{x, x, x, x}; }
INLINE I splat(int32_t x) { return I{x, x, x, x}; }
INLINE F fma(F a, F b, F c) { return a * b + c; }  // rounds twice

INLINE float float16(uint32_t bits) {
  const uint32_t exponent = bits >> 10 & 31, mantissa = bits & 1023;
  const float size = exponent ? std::ldexp(1024.0f + mantissa, static_cast<int>(exponent) - 25)
                              : std::ldexp(static_cast<float>(mantissa), -24);
  return bits >> 15 & 1 ? -size : size;
}
INLINE F float16(const uint8_t* p) {
  const U16 bits = load<U16>(p);
  return F{float16(bits[0]), float16(bits[1]), float16(bits[2]), float16(bits[3])};
}
INLINE F e4m3(const uint8_t* p) {
  F values;
  for (int i = 0; i < LANES; ++i) values[i] = float16((p[i] & 128) << 8 | (p[i] & 127) << 7);
  return values;
}
INLINE B unsigned_e2m1(B codes) {
  for (int i = 0; i < 4 * LANES; ++i) codes[i] = static_cast<uint8_t>(kTwiceE2m1[codes[i]] + 12);
  return codes;
}
INLINE F e2m1(U codes, int nibble) {
  F values;
  for (int i = 0; i < LANES; ++i) values[i] = kTwiceE2m1[codes[i] >> 4 * nibble & 15];
  return values;
}
template <int M>
INLINE void dot_bytes(const B* weights, const Int8Block* x, int half, I (&sums)[M]) {
  for (int m = 0; m < M; ++m) {
    sums[m] = splat(x[m].starts[half]);
    for (int k = 0; k < 16; ++k)
      for (int i = 0; i < LANES; ++i)
        sums[m][i] += weights[k / 4][4 * i + k % 4] * x[m].codes[16 * half + k];
  }
}
template <int M>
INLINE void dot_codes(const B* weights, const Int8Block* x, int half, I (&sums)[M]) {
  dot_bytes(weights, x, half, sums);
}
#endif

template <class V>
INLINE V shuffled(V v, I lanes) {
#ifdef __clang__
  V result;
  for (int i = 0; i < LANES; ++i) result[i] = v[lanes[i]];
  return result;
#else
  return __builtin_shuffle(v, lanes);
#endif
}

// GCC would rather load a vector again for each use than keep it in a register.
template <class V>
INLINE V kept(V v) {
#if LANES > 4
  asm("" : "+v"(v));
#endif
  return v;
}

INLINE F to_float(I x) { return __builtin_convertvector(x, F); }
INLINE float to_float(float x) { return x; }
INLINE float to_float(uint16_t bf16) {
  const uint32_t bits = static_cast<uint32_t>(bf16) << 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
INLINE F load_floats(const float* p) { return load<F>(p); }
INLINE F load_floats(const uint16_t* bf16) {
  return (F)(__builtin_convertvector(load<U16>(bf16), U) << 16);
}

// All lanes into one, by halves: an order of addition that the number of lanes fixes.
template <class V, class Op>
INLINE auto folded(V v, const Op& op) {
  I lanes;
  for (int i = 0; i < LANES; ++i) lanes[i] = i;
  UNROLL for (int half = LANES / 2; half > 0; half /= 2) v = op(v, shuffled(v, lanes ^ half));
  return v[0];
}
template <class V>
INLINE auto sum_of(V v) {
  return folded(v, [](V a, V b) { return a + b; });
}
template <class V>
INLINE auto largest_of(V v) {
  return folded(v, [](V a, V b) { return a > b ? a : b; });
}

// Within 2 ulp; results are at least 2^-126, and NaN stays. exp(x) = 2^n exp(r), |r| <= ln(2) / 2.
INLINE F exp(F x) {
  x = x > 88.37f ? splat(88.37f) : x;
  x = x < -87.3f ? splat(-87.3f) : x;
  const F shifted = fma(x, splat(1.44269504f), splat(12582912.0f));  // 1.5 * 2^23: rounds to n
  const F n = shifted - 12582912.0f;
  F r = fma(n, splat(-0.693359375f), x);  // ln(2) in two parts; the first has few bits
  r = fma(n, splat(2.12194440e-4f), r);
  constexpr float kTerms[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f,
                              1.6666665459e-1f, 5.0000001201e-1f, 1.0f, 1.0f};
  F y = splat(1.9875691500e-4f);
  UNROLL for (int i = 0; i < 7; ++i) y = fma(y, r, splat(kTerms[i]));
  return y * (F)(((U)shifted - 0x4b400000u + 127) << 23);  // unsigned: of a NaN they wrap
}

// ---- Linear: y = x W' ---------------------------------------------------------------------------

// The 32 columns of a half chunk, for int8 activations.
struct Nvfp4Block {
  static constexpr int kOffset = 12, kChunkBytes = 64 + 512;
  static constexpr float kFactor = 128;  // twice the codes, E4M3 / 256
  B weights[8];
  F scales[2];

  INLINE Nvfp4Block(const uint8_t* chunk, int half, int lane) {
    UNROLL for (int i = 0; i < 4; ++i) {
      const B codes = load<B>(chunk + 64 + 256 * half + 64 * i + 4 * lane);
      weights[2 * i] = unsigned_e2m1(codes & 15);
      weights[2 * i + 1] = unsigned_e2m1(codes >> 4);
    }
    UNROLL for (int i = 0; i < 2; ++i) scales[i] = e4m3(chunk + 32 * half + 16 * i + lane);
  }
  template <int M>
  INLINE void add(const Int8Block* x, F (&sums)[M]) const {
    I dots[M];
    F products[M];
    dot_codes(weights, x, 0, dots);
    UNROLL for (int m = 0; m < M; ++m) products[m] = to_float(dots[m]) * scales[0];
    dot_codes(weights + 4, x, 1, dots);
    UNROLL for (int m = 0; m < M; ++m)
      sums[m] = fma(fma(to_float(dots[m]), scales[1], products[m]), splat(x[m].scale), sums[m]);
  }
};

struct Int8WeightBlock {
  static constexpr int kOffset = 128, kChunkBytes = 64 + 1024;
  static constexpr float kFactor = 1;
  B weights[8];
  F scale;

  INLINE Int8WeightBlock(const uint8_t* chunk, int half, int lane) {
    UNROLL for (int i = 0; i < 8; ++i)
      weights[i] = kept(load<B>(chunk + 64 + 512 * half + 64 * i + 4 * lane));
    scale = float16(chunk + 32 * half + 2 * lane);
  }
  template <int M>
  INLINE void add(const Int8Block* x, F (&sums)[M]) const {
    I first[M], second[M];
    dot_bytes(weights, x, 0, first);
    dot_bytes(weights + 4, x, 1, second);
    UNROLL for (int m = 0; m < M; ++m)
      sums[m] = fma(to_float(first[m] + second[m]) * scale, splat(x[m].scale), sums[m]);
  }
};

template <class Block>
struct Int8Product {
  static constexpr float kFactor = Block::kFactor;
  const Int8Block* x;
  int64_t num_rows, chunks;

  int64_t tile_bytes() const { return chunks * Block::kChunkBytes; }

  template <int M>
  INLINE void run(const uint8_t* tile, int lane, int64_t row, F (&sums)[M]) const {
    const Int8Block* some = x + row;
    for (int64_t chunk = 0; chunk < chunks; ++chunk, tile += Block::kChunkBytes)
      UNROLL for (int half = 0; half < 2; ++half, some += num_rows) {
        const Block block(tile, half, lane);
        block.add(some, sums);
      }
  }
};

// 16 columns, for float32 activations: `at` is one column of 16 channels, and `add` scales their sum.
struct Nvfp4Values {
  static constexpr int kChunkColumns = 64, kChunkBytes = 64 + 512;
  static constexpr float kFactor = 128;
  const uint8_t* codes;
  F scale;

  INLINE Nvfp4Values(const uint8_t* chunk, int64_t block, int lane)
      : codes(chunk + 64 + 128 * block + 4 * lane), scale(e4m3(chunk + 16 * block + lane)) {}
  INLINE F at(int k) const { return e2m1(load<U>(codes + 64 * (k / 8)), k % 4 * 2 + k % 8 / 4); }
  INLINE F add(F sum, F total) const { return fma(sum, scale, total); }
};

struct Int8Values {
  static constexpr int kChunkColumns = 64, kChunkBytes = 64 + 1024;
  static constexpr float kFactor = 1;
  const uint8_t* bytes;
  F scale;

  INLINE Int8Values(const uint8_t* chunk, int64_t block, int lane)
      : bytes(chunk + 64 + 256 * block + 4 * lane),
        scale(float16(chunk + 32 * (block / 2) + 2 * lane)) {}
  INLINE F at(int k) const {
    return to_float((I)(load<U>(bytes + 64 * (k / 4)) >> 8 * (k % 4) & 255) - 128);
  }
  INLINE F add(F sum, F total) const { return fma(sum, scale, total); }
};

struct Fp8Values {
  static constexpr int kChunkColumns = 128, kChunkBytes = 64 + 2048;
  static constexpr float kFactor = 256;
  const uint8_t* bytes;
  F scale;

  INLINE Fp8Values(const uint8_t* chunk, int64_t block, int lane)
      : bytes(chunk + 64 + 256 * block + lane), scale(load<F>(chunk + 4 * lane)) {}
  INLINE F at(int k) const { return e4m3(bytes + 16 * k); }
  INLINE F add(F sum, F total) const { return fma(sum, scale, total); }
};

struct Bf16Values {
  static constexpr int kChunkColumns = 16, kChunkBytes = 512;
  static constexpr float kFactor = 1;
  const uint8_t* pairs;

  INLINE Bf16Values(const uint8_t* chunk, int64_t /*block*/, int lane) : pairs(chunk + 4 * lane) {}
  INLINE F at(int k) const {
    const U pair = load<U>(pairs + 64 * (k / 2));
    return (F)(k % 2 ? pair & 0xffff0000u : pair << 16);
  }
  INLINE F add(F sum, F total) const { return total + sum; }
};

struct Fp32Values {
  static constexpr int kChunkColumns = 16, kChunkBytes = 1024;
  static constexpr float kFactor = 1;
  const uint8_t* values;

  INLINE Fp32Values(const uint8_t* chunk, int64_t /*block*/, int lane) : values(chunk + 4 * lane) {}
  INLINE F at(int k) const { return kept(load<F>(values + 64 * k)); }
  INLINE F add(F sum, F total) const { return total + sum; }
};

template <class Values>
struct Fp32Product {
  static constexpr float kFactor = Values::kFactor;
  const float* x;
  int64_t columns;

  int64_t tile_bytes() const {
    return (columns + Values::kChunkColumns - 1) / Values::kChunkColumns * Values::kChunkBytes;
  }

  // Even and odd columns of 16 are added apart: two chains are enough to hide the latency of one.
  template <int M>
  INLINE void run(const uint8_t* tile, int lane, int64_t row, F (&sums)[M]) const {
    constexpr int kBlocks = Values::kChunkColumns / 16;
    const float* some = x + row * columns;
    for (int64_t left = columns / 16, block = 0; left > 0; --left, some += 16) {
      const Values values(tile, block, lane);
      F parts[2][M] = {};
      UNROLL for (int k = 0; k < 16; ++k) {
        const F w = values.at(k);
        UNROLL for (int m = 0; m < M; ++m)
          parts[k % 2][m] = fma(w, splat(some[m * columns + k]), parts[k % 2][m]);
      }
      UNROLL for (int m = 0; m < M; ++m) sums[m] = values.add(parts[0][m] + parts[1][m], sums[m]);
      if (++block == kBlocks) block = 0, tile += Values::kChunkBytes;
    }
  }
};

__attribute__((noinline)) void store_first(float* to, F values, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = values[i];
}

// LANES channels of a tile for `count` rows, M at most.
template <int M, class Product>
__attribute__((noinline)) void tile_rows(const Product& product, const Weight& weight, int64_t tile,
                                         int lane, int64_t row, int64_t count, float* y) {
  if constexpr (M > 1)
    if (count < M) return tile_rows<M - 1>(product, weight, tile, lane, row, count, y);
  F sums[M] = {};
  product.run(weight.tiles + tile * product.tile_bytes(), lane, row, sums);
  const int64_t channel = tile * kTile + lane, left = weight.rows - channel;
  const F scale = load<F>(weight.channel_scales + channel) * Product::kFactor;
  UNROLL for (int m = 0; m < M; ++m) {
    F values = sums[m] * scale;
    if (weight.bias) values += load<F>(weight.bias + channel);
    float* to = y + (row + m) * weight.rows + channel;
    if (left >= LANES)
      store(to, values);
    else
      store_first(to, values, left);
  }
}

template <class Product>
void all_tiles(const Product& product, int64_t num_rows, const Weight& weight, float* y,
               int threads) {
  const int64_t num_tiles = (weight.rows + kTile - 1) / kTile;
  parallel(num_tiles, 4, threads, [&](int64_t first, int64_t last) {
    for (int64_t tile = first; tile < last; ++tile)
      for (int lane = 0; lane < kTile; lane += LANES)
        for (int64_t row = 0; row < num_rows; row += kRows)
          tile_rows<kRows>(product, weight, tile, lane, row, num_rows - row, y);
  });
}

// The block of 32 floats, of which `count` are there and the others are zero.
void quantize_block(const float* x, int64_t count, int offset, Int8Block& block) {
  float padded[32] = {};
  if (count < 32) {
    if (count > 0) std::memcpy(padded, x, sizeof(float) * count);
    x = padded;
  }
  // As integers: they order sizes as floats do, and a NaN is the largest.
  I top = splat(0);
  UNROLL for (int i = 0; i < 32; i += LANES) {
    const I size = load<I>(x + i) & 0x7fffffff;
    top = size > top ? size : top;
  }
  const int32_t bits = largest_of(top);
  float amax;
  std::memcpy(&amax, &bits, 4);
  // Below 2^-100 the quotient 127 / amax would overflow. A NaN or an infinity has no codes; it stays
  // in the scale.
  const bool zeros = amax < 0x1p-100f;
  if (zeros || !std::isfinite(amax)) {
    block = {};
    block.scale = zeros ? 0 : amax / 127.0f;
    return;
  }
  block.scale = amax / 127.0f;
  const F inverse = splat(127.0f / amax);
  I codes[32 / LANES];
  UNROLL for (int i = 0; i < 32 / LANES; ++i) {
    // Adding 1.5 * 2^23 rounds to the nearest integer, ties to even, and leaves it in the low bits.
    codes[i] = (I)(load<F>(x + LANES * i) * inverse + 12582912.0f) - 0x4b400000;
    store(block.codes + LANES * i, __builtin_convertvector(codes[i], S8));
  }
  UNROLL for (int half = 0; half < 2; ++half) {
    I sum = splat(0);
    UNROLL for (int i = 0; i < 16 / LANES; ++i) sum += codes[half * (16 / LANES) + i];
    block.starts[half] = -offset * sum_of(sum);
  }
}

template <class Block>
void linear_int8(const float* x, int64_t num_rows, const Weight& weight, float* y, int threads) {
  const int64_t chunks = (weight.columns + 63) / 64;
  Int8Block* blocks = scratch<Int8Block>(0, num_rows * chunks * 2);
  parallel(num_rows, 16, threads, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row)
      for (int64_t i = 0; i < chunks * 2; ++i)
        quantize_block(x + row * weight.columns + 32 * i, weight.columns - 32 * i, Block::kOffset,
                       blocks[i * num_rows + row]);
  });
  all_tiles(Int8Product<Block>{blocks, num_rows, chunks}, num_rows, weight, y, threads);
}

void linear(const float* x, int64_t num_rows, const Weight& weight, float* y, int threads) {
  const auto with_fp32 = [&](auto product) { all_tiles(product, num_rows, weight, y, threads); };
  const int64_t columns = weight.columns;
  switch (weight.format) {
    case Format::nvfp4:
      if (weight.int8_activations) return linear_int8<Nvfp4Block>(x, num_rows, weight, y, threads);
      return with_fp32(Fp32Product<Nvfp4Values>{x, columns});
    case Format::int8:
      if (weight.int8_activations)
        return linear_int8<Int8WeightBlock>(x, num_rows, weight, y, threads);
      return with_fp32(Fp32Product<Int8Values>{x, columns});
    case Format::fp8: return with_fp32(Fp32Product<Fp8Values>{x, columns});
    case Format::bf16: return with_fp32(Fp32Product<Bf16Values>{x, columns});
    case Format::fp32: return with_fp32(Fp32Product<Fp32Values>{x, columns});
  }
}

// ---- Norm, RoPE, SiLU, argmax ---------------------------------------------------------------------

// y = x * weight / sqrt(mean(x^2) + eps)
INLINE void normalize(const float* x, const float* weight, float eps, int64_t size, float* y) {
  F squares = splat(0.0f);
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) squares = fma(load<F>(x + i), load<F>(x + i), squares);
  float sum = sum_of(squares);
  for (; i < size; ++i) sum += x[i] * x[i];
  const float inverse = 1.0f / std::sqrt(sum / static_cast<float>(size) + eps);
  for (i = 0; i < size; ++i) y[i] = x[i] * inverse * weight[i];
}

void rmsnorm(const float* x, const float* added, const float* weight, float eps, int64_t num_rows,
             int64_t size, float* stream, float* y, int threads) {
  parallel(num_rows, 16, threads, [&](int64_t first, int64_t last) {
    for (int64_t at = first * size; at < last * size; at += size) {
      if (added)
        for (int64_t i = 0; i < size; ++i) stream[at + i] = x[at + i] + added[at + i];
      normalize((added ? stream : x) + at, weight, eps, size, y + at);
    }
  });
}

// One head: its norm, if it has one, then pairs (i, i + dim / 2) turned by the position's angles.
INLINE void turned(const float* x, const float* norm, float eps, const float* cosines,
                   const float* sines, int64_t dim, float* y) {
  float normed[kMaxHeadDim];
  if (norm) {
    normalize(x, norm, eps, dim, normed);
    x = normed;
  }
  for (int64_t i = 0; i < dim / 2; ++i) {
    const float a = x[i], b = x[i + dim / 2];
    y[i] = a * cosines[i] - b * sines[i];
    y[i + dim / 2] = b * cosines[i] + a * sines[i];
  }
}

INLINE void put(float* to, float x) { *to = x; }
INLINE void put(uint16_t* to, float x) { *to = to_bf16(x); }

template <class T>
void rope_append_as(const float* qkv, int64_t num_heads, const Pass& pass, const Cache& cache,
                    const float* q_norm, const float* k_norm, float eps, float* queries) {
  const int64_t dim = cache.dim, half = dim / 2;
  for (int64_t row = 0; row < pass.num_rows; ++row) {
    const int64_t position = pass.positions[row], column = position % kPage;
    const int64_t page = pass.page(row, position / kPage);
    const float *cosines = pass.cosines + position * half, *sines = pass.sines + position * half;
    for (int64_t h = 0; h < num_heads; ++h, qkv += dim, queries += dim)
      turned(qkv, q_norm, eps, cosines, sines, dim, queries);
    for (int64_t h = 0; h < cache.num_kv_heads; ++h, qkv += dim) {
      T* keys = static_cast<T*>(cache.keys) + cache.head(page, h) + column;
      float key[kMaxHeadDim];
      turned(qkv, k_norm, eps, cosines, sines, dim, key);
      for (int64_t d = 0; d < dim; ++d) put(keys + d * kPage, key[d]);
    }
    for (int64_t h = 0; h < cache.num_kv_heads; ++h, qkv += dim) {
      T* values = static_cast<T*>(cache.values) + cache.head(page, h) + column * dim;
      for (int64_t d = 0; d < dim; ++d) put(values + d, qkv[d]);
    }
  }
}

void rope_append(const float* qkv, int64_t num_heads, const Pass& pass, const Cache& cache,
                 const float* q_norm, const float* k_norm, float eps, float* queries) {
  check_pass(pass, cache);
  (cache.bf16 ? rope_append_as<uint16_t> : rope_append_as<float>)(qkv, num_heads, pass, cache,
                                                                  q_norm, k_norm, eps, queries);
}

void silu_mul(const float* gate_up, int64_t num_rows, int64_t size, float* y, int threads) {
  parallel(num_rows, 16, threads, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const float *gate = gate_up + 2 * row * size, *up = gate + size;
      for (int64_t i = 0; i < size; i += LANES) {
        const F g = load<F>(gate + i);
        store(y + row * size + i, g / (exp(-g) + 1.0f) * load<F>(up + i));
      }
    }
  });
}

// As torch: the first of the largest, and a NaN is larger than all.
void argmax(const float* x, int64_t num_rows, int64_t size, int64_t* y) {
  const auto larger = [](float a, float b) { return a > b || (a != a && b == b); };
  for (int64_t row = 0; row < num_rows; ++row, x += size) {
    F best = splat(kMinusInfinity);
    I where = splat(0);
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
      const F v = load<F>(x + i);
      const I replace = (v > best) | ((v != v) & (best == best));
      best = replace ? v : best;
      where = replace ? splat(static_cast<int32_t>(i)) : where;
    }
    float top = x[0];
    int64_t index = 0;
    const auto take = [&](float v, int64_t j) {
      if (larger(v, top) || (j < index && !larger(top, v))) top = v, index = j;
    };
    if (i > 0)
      for (int lane = 0; lane < LANES; ++lane) take(best[lane], where[lane] + lane);
    for (; i < size; ++i) take(x[i], i);
    y[row] = index;
  }
}

// ---- Attention ----------------------------------------------------------------------------------
//
// Softmax page by page: a page's largest score rescales what was summed so far. A row's order of
// addition is that of its columns' pages, whatever lies behind its own position. Rows of a sequence
// go over a page together, and while they do, the next page comes from memory.

constexpr int kVectors = LANES == 16 ? 4 : 2;  // of columns or of dims at once, to hide latency
constexpr int kRun = 16;                       // rows of one sequence that go together

// Scores of a page for G query heads of one key head; what lies behind `count` is -inf. Memory is
// read ahead from `next` on.
template <class T, int G>
INLINE void scores_of(const T* keys, const float* queries, int64_t dim, int64_t count,
                      const char* next, float (&scores)[G][kPage]) {
  const F scale = splat(1.0f / std::sqrt(static_cast<float>(dim)));
  I lanes;
  for (int i = 0; i < LANES; ++i) lanes[i] = i;
  for (int64_t column = 0; column < count; column += kVectors * LANES) {
    F sums[G][kVectors] = {};
    for (int64_t d = 0; d < dim; ++d, next += 64) {
      __builtin_prefetch(next);
      UNROLL for (int v = 0; v < kVectors; ++v) {
        const F key = kept(load_floats(keys + d * kPage + column + v * LANES));
        UNROLL for (int g = 0; g < G; ++g)
          sums[g][v] = fma(key, splat(queries[g * dim + d]), sums[g][v]);
      }
    }
    UNROLL for (int v = 0; v < kVectors; ++v) {
      const int64_t first = column + v * LANES;
      const I there = lanes < static_cast<int32_t>(count - first);
      UNROLL for (int g = 0; g < G; ++g)
        store(scores[g] + first, there ? sums[g][v] * scale : splat(kMinusInfinity));
    }
  }
}

// Adds a page's weighted values to V vectors of what G heads have so far, which is rescaled.
template <class T, int G, int V>
INLINE void add_values(const T* values, const float (&probs)[G][kPage], const float* factors,
                       int64_t dim, int64_t count, const char* next, float* totals) {
  F sums[G][V];
  UNROLL for (int g = 0; g < G; ++g)
    UNROLL for (int v = 0; v < V; ++v)
      sums[g][v] = load<F>(totals + g * dim + v * LANES) * factors[g];
  for (int64_t column = 0; column < count; ++column, next += 64) {
    __builtin_prefetch(next);
    UNROLL for (int v = 0; v < V; ++v) {
      const F value = kept(load_floats(values + column * dim + v * LANES));
      UNROLL for (int g = 0; g < G; ++g)
        sums[g][v] = fma(value, splat(probs[g][column]), sums[g][v]);
    }
  }
  UNROLL for (int g = 0; g < G; ++g)
    UNROLL for (int v = 0; v < V; ++v) store(totals + g * dim + v * LANES, sums[g][v]);
}

// One dim at a time, where dims are no multiple of the lanes.
template <class T, int G>
INLINE void add_value(const T* values, const float (&probs)[G][kPage], const float* factors,
                      int64_t dim, int64_t count, float* totals) {
  for (int g = 0; g < G; ++g) {
    float sum = totals[g * dim] * factors[g];
    for (int64_t column = 0; column < count; ++column)
      sum += to_float(values[column * dim]) * probs[g][column];
    totals[g * dim] = sum;
  }
}

// G heads of some rows of one sequence. `queries` and y are those of the first row, and from row to
// row they are `stride` apart.
template <class T, int G>
__attribute__((noinline)) void attend(const float* queries, int64_t stride, const Pass& pass,
                                      int64_t first, int64_t num_rows, const Cache& cache,
                                      int64_t kv_head, float* y) {
  const int64_t dim = cache.dim;
  float scores[G][kPage], factors[G], tops[kRun][G], sums[kRun][G] = {};
  int64_t longest = 0;
  for (int64_t r = 0; r < num_rows; ++r) {
    for (int g = 0; g < G; ++g) tops[r][g] = kMinusInfinity;
    for (int64_t i = 0; i < G * dim; ++i) y[r * stride + i] = 0;
    longest = std::max(longest, pass.positions[first + r] + 1);
  }
  for (int64_t page = 0, start = 0; start < longest; ++page, start += kPage) {
    const bool more = start + kPage < longest;
    const int64_t head = cache.head(pass.page(first, page), kv_head);
    const int64_t next = more ? cache.head(pass.page(first, page + 1), kv_head) : head;
    const T *keys = static_cast<const T*>(cache.keys), *values = static_cast<const T*>(cache.values);
    for (int64_t r = 0; r < num_rows; ++r) {
      const int64_t count = std::min<int64_t>(pass.positions[first + r] + 1 - start, kPage);
      if (count <= 0) continue;
      // Each row reads another part of the next page ahead, while there are some left.
      const int64_t part = std::min<int64_t>(r, 3) * dim * kPage / 4;
      const char* next_keys = reinterpret_cast<const char*>(keys + next + part);
      const char* next_values = reinterpret_cast<const char*>(values + next + part);
      scores_of<T, G>(keys + head, queries + r * stride, dim, count, next_keys, scores);
      for (int g = 0; g < G; ++g) {
        F top = splat(tops[r][g]), sum = splat(0.0f);
        for (int64_t i = 0; i < count; i += LANES) {
          const F score = load<F>(scores[g] + i);
          top = score > top ? score : top;
        }
        top = splat(largest_of(top));
        for (int64_t i = 0; i < count; i += LANES) {
          const F prob = exp(load<F>(scores[g] + i) - top);
          store(scores[g] + i, prob);
          sum += prob;
        }
        // On the first page exp() gives the least there is, and it is multiplied with zeros.
        factors[g] = exp(splat(tops[r][g]) - top)[0];
        sums[r][g] = sums[r][g] * factors[g] + sum_of(sum);
        tops[r][g] = top[0];
      }
      float* totals = y + r * stride;
      int64_t d = 0;
      for (; d + kVectors * LANES <= dim; d += kVectors * LANES)
        add_values<T, G, kVectors>(values + head + d, scores, factors, dim, count, next_values,
                                   totals + d);
      for (; d + LANES <= dim; d += LANES)
        add_values<T, G, 1>(values + head + d, scores, factors, dim, count, next_values, totals + d);
      for (; d < dim; ++d)
        add_value<T, G>(values + head + d, scores, factors, dim, count, totals + d);
    }
  }
  for (int64_t r = 0; r < num_rows; ++r)
    for (int g = 0; g < G; ++g)
      for (int64_t d = 0; d < dim; ++d) y[r * stride + g * dim + d] /= sums[r][g];
}

template <class T>
void attention_as(const float* queries, int64_t num_heads, const Pass& pass, const Cache& cache,
                  float* y) {
  const int64_t group = num_heads / cache.num_kv_heads, stride = num_heads * cache.dim;
  int64_t* runs = scratch<int64_t>(0, pass.num_rows + 1);  // where they start
  int64_t num_runs = 0, columns = 1;
  for (int64_t row = 0; row < pass.num_rows; ++row) {
    columns += pass.positions[row] + 1;
    if (row == 0 || pass.sequences[row] != pass.sequences[row - 1] ||
        row - runs[num_runs - 1] == kRun)
      runs[num_runs++] = row;
  }
  runs[num_runs] = pass.num_rows;
  // An item is a run and a key head. A thread gets enough of them for about 4096 columns.
  parallel(num_runs * cache.num_kv_heads, 1 + 4096 * num_runs / columns, pass.threads,
           [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t row = runs[i / cache.num_kv_heads], kv_head = i % cache.num_kv_heads;
      const int64_t num_rows = runs[i / cache.num_kv_heads + 1] - row;
      for (int64_t g = 0; g < group; g += 4) {
        const int64_t left = group - g, at = row * stride + (kv_head * group + g) * cache.dim;
        const auto kernel = left == 1   ? attend<T, 1>
                            : left == 2 ? attend<T, 2>
                            : left == 3 ? attend<T, 3>
                                        : attend<T, 4>;
        kernel(queries + at, stride, pass, row, num_rows, cache, kv_head, y + at);
      }
    }
  });
}

void attention(const float* queries, int64_t num_heads, const Pass& pass, const Cache& cache,
               float* y) {
  check_pass(pass, cache);
  (cache.bf16 ? attention_as<uint16_t> : attention_as<float>)(queries, num_heads, pass, cache, y);
}

Kernels kernels() {
  return {kName, linear, rmsnorm, rope_append, attention, silu_mul, argmax};
}

#endif  // LANES
