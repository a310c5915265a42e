// Products of rows sorted by group, and attention of one token a row over paged keys and values.
// Called through XLA's foreign function interface by cpu.py, which says what each computes.
//
// A row's bits do not depend on other rows: its numbers come from the same operations in the same
// order, however many rows are worked on at a time.

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

using Floats = ffi::Buffer<ffi::F32>;
using Integers = ffi::Buffer<ffi::S32>;
using Flags = ffi::Buffer<ffi::PRED>;
using NewFloats = ffi::ResultBuffer<ffi::F32>;

constexpr int64_t kLanes = 16;
typedef float Lanes __attribute__((vector_size(4 * kLanes), aligned(4)));
typedef int32_t IntLanes __attribute__((vector_size(4 * kLanes), aligned(4)));

inline Lanes load(const float* p) { return *reinterpret_cast<const Lanes*>(p); }
inline void store(float* p, Lanes x) { *reinterpret_cast<Lanes*>(p) = x; }
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Calls work(i) for all i below `count`, on XLA's threads and on this one. A free thread takes
// the next; threads that come too late find none left, and no thread waits for one not yet begun.
template <typename Work>
void in_parallel(ffi::ThreadPool& pool, int64_t count, const Work& work) {
  struct State {
    std::atomic<int64_t> next{0}, done{0};
  };
  auto state = std::make_shared<State>();
  auto take = [state, count, &work] {
    for (int64_t i; (i = state->next.fetch_add(1)) < count;) {
      work(i);
      state->done.fetch_add(1, std::memory_order_release);
    }
  };
  const int64_t helpers = std::min<int64_t>(pool.num_threads(), count) - 1;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule(decltype(take)(take));
  take();
  for (int spins = 0; state->done.load(std::memory_order_acquire) < count; ++spins) {
    if (spins > 1000) std::this_thread::yield();
  }
}

// Matrix products.

// A matrix whose entry [i, j] is at data[i * row + j * column].
struct Matrix {
  const float* data;
  int64_t row, column;

  const float* at(int64_t i, int64_t j) const { return data + i * row + j * column; }
  Matrix from(int64_t i, int64_t j) const { return {at(i, j), row, column}; }
};

// c [M, V lanes] (+)= a [M, depth] @ b [depth, V lanes], rows of b b_stride apart. On the way b is
// copied to `packed`, and what lies from `next` on in the same rows is fetched; null: neither.
template <int M, int V>
void tile(Matrix a, const float* b, int64_t b_stride, float* c, int64_t c_stride, int64_t depth,
          bool add, float* packed, const float* next) {
  Lanes sum[M][V];
  for (int m = 0; m < M; ++m) {
    for (int v = 0; v < V; ++v) {
      sum[m][v] = add ? load(c + m * c_stride + v * kLanes) : Lanes{};
    }
  }
  auto run = [&](auto fetched) {
    for (int64_t k = 0; k < depth; ++k) {
      Lanes row[V];
      for (int v = 0; v < V; ++v) row[v] = load(b + k * b_stride + v * kLanes);
      if constexpr (decltype(fetched)::value) {
        for (int v = 0; v < V; ++v) {
          __builtin_prefetch(next + k * b_stride + v * kLanes, 0, 2);
          if (packed) store(packed + (k * V + v) * kLanes, row[v]);
        }
      }
      for (int m = 0; m < M; ++m) {
        const float x = *a.at(m, k);
        for (int v = 0; v < V; ++v) sum[m][v] += x * row[v];
      }
    }
  };
  if (next) {
    run(std::true_type());
  } else {
    run(std::false_type());
  }
  for (int m = 0; m < M; ++m) {
    for (int v = 0; v < V; ++v) store(c + m * c_stride + v * kLanes, sum[m][v]);
  }
}

using Tile = void (*)(Matrix, const float*, int64_t, float*, int64_t, int64_t, bool, float*,
                      const float*);

template <int V, size_t... I>
constexpr std::array<Tile, sizeof...(I)> tiles_of(std::index_sequence<I...>) {
  return {tile<I + 1, V>...};
}

// By their rows, less one: sums fill 24 of the registers, in tiles of two vectors or of four.
constexpr int64_t kTall = 12, kFlat = 6;
constexpr auto kNarrow = tiles_of<2>(std::make_index_sequence<kTall>());
constexpr auto kBroad = tiles_of<4>(std::make_index_sequence<kFlat>());
constexpr int64_t kDepth = 256;  // rows of b, of which two vectors fill most of the first cache

// b [depth, left] to `to` [depth, panel], with zeros behind it.
void pack(Matrix b, int64_t depth, int64_t left, int64_t panel, float* to) {
  if (left < panel) std::fill_n(to, depth * panel, 0.0f);
  if (b.column == 1) {
    for (int64_t k = 0; k < depth; ++k) std::copy_n(b.at(k, 0), left, to + k * panel);
  } else {
    for (int64_t n = 0; n < left; ++n) {
      for (int64_t k = 0; k < depth; ++k) to[k * panel + n] = *b.at(k, n);
    }
  }
}

// c [rows, width] = a [rows, depth] @ b [depth, width], on this thread.
void multiply(Matrix a, Matrix b, float* c, int64_t c_stride, int64_t rows, int64_t width,
              int64_t depth) {
  if (!rows) return;
  const bool flat = rows <= kFlat;
  const auto tile_of = [flat](int64_t m) { return flat ? kBroad[m - 1] : kNarrow[m - 1]; };
  const int64_t panel = (flat ? 4 : 2) * kLanes, tiles = ceil_div(rows, kTall);
  alignas(64) thread_local float packed[kDepth * 4 * kLanes], edge[kTall * 4 * kLanes];
  for (int64_t k = 0; k < depth; k += kDepth) {
    const int64_t deep = std::min(kDepth, depth - k);
    for (int64_t n = 0; n < width; n += panel) {
      const int64_t left = std::min(panel, width - n);
      const bool in_place = left == panel && b.column == 1;  // packed by the first tile
      if (!in_place) pack(b.from(k, n), deep, left, panel, packed);
      for (int64_t t = 0; t < tiles; ++t) {
        const int64_t m = rows * t / tiles, high = rows * (t + 1) / tiles - m;
        const Matrix x = a.from(m, k);
        float* y = c + m * c_stride + n;
        if (left < panel) {
          for (int64_t i = 0; i < high; ++i) std::copy_n(y + i * c_stride, left, edge + i * panel);
          tile_of(high)(x, packed, panel, edge, panel, deep, k > 0, nullptr, nullptr);
          for (int64_t i = 0; i < high; ++i) std::copy_n(edge + i * panel, left, y + i * c_stride);
        } else if (in_place && t == 0) {
          const float* next = n + panel < width ? b.at(k, n + panel) : b.at(k + kDepth, 0);
          float* copy = tiles > 1 ? packed : nullptr;
          tile_of(high)(x, b.at(k, n), b.row, y, c_stride, deep, k > 0, copy, next);
        } else {
          tile_of(high)(x, packed, panel, y, c_stride, deep, k > 0, nullptr, nullptr);
        }
      }
    }
  }
}

// For each group, c(g) = a(g) @ b(g); strips of columns go to whichever thread is free.
struct Product {
  Matrix a, b;
  float* c;
  int64_t rows, depth;
};
template <typename Of>
void multiply_groups(ffi::ThreadPool& pool, int64_t groups, int64_t width, const Of& of) {
  const int64_t enough = ceil_div(4 * std::max<int64_t>(pool.num_threads(), 1), groups);
  const int64_t strip = ceil_div(ceil_div(width, std::max(enough, ceil_div(width, 256))), 64) * 64;
  const int64_t strips = ceil_div(width, strip);
  in_parallel(pool, groups * strips, [&](int64_t i) {
    const int64_t n = i % strips * strip;
    const Product p = of(i / strips);
    multiply(p.a, p.b.from(0, n), p.c + n, width, p.rows, std::min(strip, width - n), p.depth);
  });
}

// Where the rows of each group begin, and where those of the last one end.
std::vector<int64_t> starts(Integers sizes, int64_t rows) {
  std::vector<int64_t> start(sizes.element_count() + 1, 0);
  for (size_t g = 0; g + 1 < start.size(); ++g) {
    start[g + 1] = std::min<int64_t>(rows, start[g] + sizes.typed_data()[g]);
  }
  return start;
}

ffi::Error GroupedMatmul(ffi::ThreadPool pool, bool transposed, Floats x, Floats weights,
                         Integers sizes, NewFloats out) {
  const int64_t rows = x.dimensions()[0], depth = x.dimensions()[1], width = out->dimensions()[1];
  const std::vector<int64_t> start = starts(sizes, rows);
  float* c = out->typed_data();
  multiply_groups(pool, weights.dimensions()[0], width, [&](int64_t g) -> Product {
    const float* w = weights.typed_data() + g * depth * width;
    return {{x.typed_data() + start[g] * depth, depth, 1},
            transposed ? Matrix{w, 1, depth} : Matrix{w, width, 1},
            c + start[g] * width,
            start[g + 1] - start[g],
            depth};
  });
  std::fill(c + start.back() * width, c + rows * width, 0.0f);
  return ffi::Error::Success();
}

ffi::Error GroupedOuter(ffi::ThreadPool pool, Floats x, Floats y, Integers sizes, NewFloats out) {
  const int64_t rows = x.dimensions()[1], width = y.dimensions()[1];
  const std::vector<int64_t> start = starts(sizes, x.dimensions()[0]);
  multiply_groups(pool, out->dimensions()[0], width, [&](int64_t g) -> Product {
    return {{x.typed_data() + start[g] * rows, 1, rows},
            {y.typed_data() + start[g] * width, width, 1},
            out->typed_data() + g * rows * width,
            rows,
            start[g + 1] - start[g]};
  });
  for (int64_t g = 0; g < out->dimensions()[0]; ++g) {
    if (start[g] == start[g + 1]) {
      std::fill_n(out->typed_data() + g * rows * width, rows * width, 0.0f);
    }
  }
  return ffi::Error::Success();
}

// Attention.

// exp of numbers that are not above 0: 0 below -87, NaN of NaN, elsewhere right to 2 ulp.
inline Lanes exp_of(Lanes x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: a sum with it is rounded to an integer
  const Lanes shifted = x * 1.44269504f + kRound;
  const Lanes n = shifted - kRound;
  const Lanes r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts
  Lanes y = r * 1.3888889e-3f + 8.3333333e-3f;
  y = y * r + 4.1666667e-2f;
  y = y * r + 1.6666667e-1f;
  y = y * r + 0.5f;
  y = y * r * r + r + 1.0f;
  const IntLanes power = ((IntLanes)shifted + 127) << 23;
  const IntLanes low = x < -87.0f;
  return low ? Lanes{} : y * (Lanes)power;
}

struct Row {
  const float *q, *k, *v;   // [heads, dim], [kv_heads, dim], [kv_heads, dim]
  float *keys, *values;     // [pages, kv_heads, dim, size], [pages, kv_heads, size, dim]
  const int32_t* table;     // the row's pages
  int64_t first, position;  // the first place that the query sees, and its own
  int64_t heads, kv_heads, dim, size;
  float scale;
  const float* sinks;  // [heads], or null
  float* out;          // [heads, dim]
};

// scores [G, stride] of G queries with the keys [dim, size] of one page; fetches the page `next`.
template <int G>
void score(const float* q, const float* keys, int64_t dim, int64_t size, float scale, float* scores,
           int64_t stride, const float* next) {
  int64_t t = 0;
  for (; t + kLanes <= size; t += kLanes) {
    Lanes sum[G][4] = {};
    int64_t d = 0;
    for (; d + 4 <= dim; d += 4) {
      for (int j = 0; j < 4; ++j) {
        const Lanes key = load(keys + (d + j) * size + t);
        __builtin_prefetch(next + (d + j) * size + t);
        for (int g = 0; g < G; ++g) sum[g][j] += q[g * dim + d + j] * key;
      }
    }
    for (; d < dim; ++d) {
      const Lanes key = load(keys + d * size + t);
      for (int g = 0; g < G; ++g) sum[g][0] += q[g * dim + d] * key;
    }
    for (int g = 0; g < G; ++g) {
      store(scores + g * stride + t, ((sum[g][0] + sum[g][1]) + (sum[g][2] + sum[g][3])) * scale);
    }
  }
  for (; t < size; ++t) {
    for (int g = 0; g < G; ++g) {
      float sum = 0;
      for (int64_t d = 0; d < dim; ++d) sum += q[g * dim + d] * keys[d * size + t];
      scores[g * stride + t] = sum * scale;
    }
  }
}

// out [G, dim] += weights [G, from .. to) @ values [from .. to, dim] of one page.
template <int G>
void add_values(const float* weights, int64_t stride, const float* values, int64_t from, int64_t to,
                int64_t dim, float* out, const float* next) {
  int64_t d = 0;
  for (; d + 4 * kLanes <= dim; d += 4 * kLanes) {
    Lanes sum[G][4];
    for (int g = 0; g < G; ++g) {
      for (int j = 0; j < 4; ++j) sum[g][j] = load(out + g * dim + d + j * kLanes);
    }
    for (int64_t t = from; t < to; ++t) {
      for (int j = 0; j < 4; ++j) {
        const int64_t at = t * dim + d + j * kLanes;
        const Lanes v = load(values + at);
        __builtin_prefetch(next + at);
        for (int g = 0; g < G; ++g) sum[g][j] += weights[g * stride + t] * v;
      }
    }
    for (int g = 0; g < G; ++g) {
      for (int j = 0; j < 4; ++j) store(out + g * dim + d + j * kLanes, sum[g][j]);
    }
  }
  for (int64_t t = from; t < to; ++t) {
    for (int g = 0; g < G; ++g) {
      for (int64_t e = d; e < dim; ++e) {
        out[g * dim + e] += weights[g * stride + t] * values[t * dim + e];
      }
    }
  }
}

// Scores [low .. high) to their softmax; with `sink`, a score that has no value takes part.
void normalize(float* scores, int64_t low, int64_t high, int64_t padded, const float* sink) {
  std::fill(scores, scores + low, -INFINITY);
  std::fill(scores + high, scores + padded, -INFINITY);
  Lanes tops = load(scores);
  for (int64_t t = kLanes; t < padded; t += kLanes) {
    const Lanes x = load(scores + t);
    tops = x > tops ? x : tops;
  }
  float top = sink ? *sink : -INFINITY;
  for (int64_t i = 0; i < kLanes; ++i) top = tops[i] > top ? tops[i] : top;
  Lanes sums = {};
  for (int64_t t = 0; t < padded; t += kLanes) {
    const Lanes e = exp_of(load(scores + t) - top);
    store(scores + t, e);
    sums += e;
  }
  float total = sink ? std::exp(*sink - top) : 0.0f;
  for (int64_t i = 0; i < kLanes; ++i) total += sums[i];
  const float inverse = 1.0f / total;
  for (int64_t t = 0; t < padded; t += kLanes) store(scores + t, load(scores + t) * inverse);
}

void attend(const Row& r) {
  const int64_t page = r.size * r.dim, groups = r.heads / r.kv_heads;
  const int64_t begin = r.first / r.size, last = r.position / r.size, at = r.position % r.size;
  const int64_t width = ceil_div((last + 1 - begin) * r.size, kLanes) * kLanes;
  thread_local std::vector<float> kept;
  if (static_cast<int64_t>(kept.size()) < groups * width) kept.resize(groups * width);
  float* const scores = kept.data();
  for (int64_t h = 0; h < r.kv_heads; ++h) {
    const auto of_head = [&](int64_t p, int64_t h) { return (r.table[p] * r.kv_heads + h) * page; };
    const auto place = [&](int64_t p) { return of_head(p, h); };
    float *key = r.keys + place(last) + at, *value = r.values + place(last) + at * r.dim;
    for (int64_t d = 0; d < r.dim; ++d) key[d * r.size] = r.k[h * r.dim + d];
    std::copy_n(r.v + h * r.dim, r.dim, value);
    const float* q = r.q + h * groups * r.dim;
    float* out = r.out + h * groups * r.dim;
    for (int64_t p = begin; p <= last; ++p) {
      const float* keys = r.keys + place(p);
      const float* next = p < last ? r.keys + place(p + 1) : r.values + place(begin);
      float* to = scores + (p - begin) * r.size;
      for (int64_t g = 0; g < groups; g += 2) {
        (g + 1 < groups ? score<2> : score<1>)(q + g * r.dim, keys, r.dim, r.size, r.scale,
                                               to + g * width, width, next);
      }
    }
    const int64_t low = r.first - begin * r.size, high = r.position + 1 - begin * r.size;
    for (int64_t g = 0; g < groups; ++g) {
      const float* sink = r.sinks ? r.sinks + h * groups + g : nullptr;
      normalize(scores + g * width, low, high, width, sink);
    }
    std::fill_n(out, groups * r.dim, 0.0f);
    for (int64_t p = begin; p <= last; ++p) {
      const float* values = r.values + place(p);
      const float* next = p < last ? r.values + place(p + 1)
                                   : r.keys + of_head(begin, (h + 1) % r.kv_heads);
      const float* from = scores + (p - begin) * r.size;
      const int64_t start = p == begin ? low : 0, stop = p == last ? at + 1 : r.size;
      for (int64_t g = 0; g < groups; g += 2) {
        (g + 1 < groups ? add_values<2> : add_values<1>)(from + g * width, width, values, start,
                                                         stop, r.dim, out + g * r.dim, next);
      }
    }
  }
}

ffi::Error DecodeAttention(ffi::ThreadPool pool, int64_t layer, int64_t window, float scale,
                           Floats q, Floats k, Floats v, Integers table, Integers positions,
                           Flags live, Floats sinks, Floats keys, Floats values, NewFloats out,
                           NewFloats new_keys, NewFloats new_values) {
  if (keys.typed_data() != new_keys->typed_data() ||
      values.typed_data() != new_values->typed_data()) {
    return ffi::Error::Internal("keys and values were not given to be updated in place");
  }
  const auto shape = keys.dimensions();  // [layers, pages, kv_heads, dim, size]
  const int64_t heads = q.dimensions()[1], kv_heads = shape[2], dim = shape[3], size = shape[4];
  const int64_t skipped = layer * shape[1] * kv_heads * dim * size;
  in_parallel(pool, q.dimensions()[0], [&](int64_t i) {
    float* to = out->typed_data() + i * heads * dim;
    if (!live.typed_data()[i]) {
      std::fill_n(to, heads * dim, 0.0f);
      return;
    }
    const int64_t position = positions.typed_data()[i];
    attend({q.typed_data() + i * heads * dim, k.typed_data() + i * kv_heads * dim,
            v.typed_data() + i * kv_heads * dim, new_keys->typed_data() + skipped,
            new_values->typed_data() + skipped, table.typed_data() + i * table.dimensions()[1],
            window > 0 ? std::max<int64_t>(0, position + 1 - window) : 0, position, heads, kv_heads,
            dim, size, scale, sinks.element_count() ? sinks.typed_data() : nullptr, to});
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(rljax_grouped_matmul, GroupedMatmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<bool>("transposed")
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Integers>()
                                  .Ret<Floats>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(rljax_grouped_outer, GroupedOuter,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Integers>()
                                  .Ret<Floats>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(rljax_decode_attention, DecodeAttention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<int64_t>("layer")
                                  .Attr<int64_t>("window")
                                  .Attr<float>("scale")
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Integers>()
                                  .Arg<Integers>()
                                  .Arg<Flags>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Ret<Floats>()
                                  .Ret<Floats>()
                                  .Ret<Floats>());
