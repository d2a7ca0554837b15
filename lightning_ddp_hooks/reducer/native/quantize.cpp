#include "quantize.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <array>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

// The loops are compiled twice, and the machine's processor chooses; without FMA, so that both round as torch does.
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define LDH_WIDE __attribute__((target_clones("avx2", "default")))
#else
#define LDH_WIDE
#endif

namespace ldh {
namespace {

constexpr int64_t kBlocksPerThread = 128;

uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// ---- loops over one block

LDH_WIDE void add(float* __restrict out, const float* __restrict a, const float* __restrict b, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    out[i] = a[i] + b[i];
  }
}

LDH_WIDE void carry(float* __restrict residual, const float* __restrict came, const float* __restrict went, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    residual[i] = (residual[i] + came[i]) - went[i];
  }
}

LDH_WIDE void scale_by(float* __restrict out, const float* __restrict values, float factor, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    out[i] = values[i] * factor;
  }
}

// The largest magnitude. Compared as integers, an Inf is above all numbers and a NaN above that, so that neither is lost.
LDH_WIDE float largest(const float* values, int64_t n) {
  uint32_t most = 0;
  for (int64_t i = 0; i < n; i++) {
    uint32_t bits;
    std::memcpy(&bits, values + i, sizeof bits);
    bits &= 0x7fffffffu;
    most = bits > most ? bits : most;
  }
  return float_of(most);
}

LDH_WIDE void to_int8(uint8_t* __restrict codes, const float* __restrict values, float inverse, int64_t n) {
  // Adding 1.5 * 2**23 leaves no bits behind the point, so the addition rounds to the nearest, ties to even.
  constexpr float kMagic = 12582912.0f;
  for (int64_t i = 0; i < n; i++) {
    const float shifted = values[i] * inverse + kMagic;
    uint32_t bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    codes[i] = static_cast<uint8_t>(bits);
  }
}

LDH_WIDE void from_int8(float* __restrict out, const uint8_t* __restrict codes, float scale, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    out[i] = static_cast<float>(static_cast<int8_t>(codes[i])) * scale;
  }
}

LDH_WIDE void to_fp8(uint8_t* __restrict codes, const float* __restrict values, float inverse, int64_t n) {
  // Where e4m3 has subnormal numbers, adding 2**14 leaves multiples of 2**-9; elsewhere 20 bits are rounded off. Both are
  // computed and one is masked: a branch would keep the loop from being vectorised.
  constexpr uint32_t kLargest = 0x43e00000u;  // 448
  for (int64_t i = 0; i < n; i++) {
    const float scaled = values[i] * inverse;
    uint32_t bits;
    std::memcpy(&bits, &scaled, sizeof bits);
    const uint32_t sign = (bits >> 24) & 0x80u;
    bits &= 0x7fffffffu;
    bits = bits < kLargest ? bits : kLargest;
    float magnitude;
    std::memcpy(&magnitude, &bits, sizeof magnitude);
    const float shifted = magnitude + 16384.0f;
    uint32_t small;
    std::memcpy(&small, &shifted, sizeof small);
    const uint32_t normal = (bits - (120u << 23) + 0x7ffffu + ((bits >> 20) & 1u)) >> 20;
    const uint32_t is_small = 0u - ((bits - (121u << 23)) >> 31);  // all ones below 2**-6
    codes[i] = static_cast<uint8_t>((small & is_small) | (normal & ~is_small) | sign);
  }
}

const std::array<float, 256>& fp8_values() {
  static const std::array<float, 256> table = [] {
    std::array<float, 256> values{};
    for (int code = 0; code < 256; code++) {
      const int exponent = (code >> 3) & 15;
      const float mantissa = static_cast<float>(code & 7) / 8.0f;
      const float magnitude =
          exponent == 0 ? std::ldexp(mantissa, -6) : std::ldexp(1.0f + mantissa, exponent - 7);
      values[code] = code & 128 ? -magnitude : magnitude;
    }
    return values;
  }();
  return table;
}

void from_fp8(float* __restrict out, const uint8_t* __restrict codes, float scale, int64_t n) {
  const auto& table = fp8_values();
  for (int64_t i = 0; i < n; i++) {
    out[i] = table[codes[i]] * scale;
  }
}

LDH_WIDE float sum_of_magnitudes(const float* values, int64_t n) {
  // Several sums at once: the compiler may not reorder one. A block is a multiple of 8 long.
  float sums[8] = {};
  for (int64_t i = 0; i < n; i += 8) {
    for (int lane = 0; lane < 8; lane++) {
      sums[lane] += std::fabs(values[i + lane]);
    }
  }
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

void to_signs(uint8_t* __restrict codes, const float* __restrict values, int64_t n) {
  for (int64_t i = 0; i < n / 8; i++) {
    uint32_t byte = 0;
    for (int bit = 0; bit < 8; bit++) {
      byte |= (bits_of(values[8 * i + bit]) >> 31) << bit;
    }
    codes[i] = static_cast<uint8_t>(byte);
  }
}

// For each byte the sign bits of eight floats.
using SignMasks = std::array<std::array<uint32_t, 8>, 256>;

const SignMasks& sign_masks() {
  static const SignMasks table = [] {
    SignMasks masks{};
    for (uint32_t byte = 0; byte < 256; byte++) {
      for (uint32_t bit = 0; bit < 8; bit++) {
        masks[byte][bit] = ((byte >> bit) & 1u) << 31;
      }
    }
    return masks;
  }();
  return table;
}

LDH_WIDE void from_signs(float* __restrict out, const uint8_t* __restrict codes, float scale, const SignMasks& masks,
                         int64_t n) {
  uint32_t scale_bits;
  std::memcpy(&scale_bits, &scale, sizeof scale_bits);
  for (int64_t i = 0; i < n / 8; i++) {
    const uint32_t* mask = masks[codes[i]].data();
    for (int bit = 0; bit < 8; bit++) {
      const uint32_t bits = scale_bits ^ mask[bit];
      std::memcpy(out + 8 * i + bit, &bits, sizeof bits);
    }
  }
}

// ---- codecs (kernels.py)

// The scale by which the block's largest magnitude becomes `top`, and what to multiply by; a block of vanishing values
// counts as zero, and one with an Inf or a NaN keeps its scale only.
float scale_for(const float* values, int64_t n, float top, float& inverse) {
  float scale = largest(values, n) / top;
  if (scale < FLT_MIN) {
    scale = 0.0f;
  }
  inverse = scale > 0.0f && std::isfinite(scale) ? 1.0f / scale : 0.0f;
  return scale;
}

struct Int8 {
  static int64_t code_bytes(int64_t block) {
    return block;
  }
  static float encode(const float* values, uint8_t* codes, int64_t block, int64_t) {
    float inverse;
    const float scale = scale_for(values, block, 127.0f, inverse);
    if (std::isfinite(scale)) {
      to_int8(codes, values, inverse, block);
    } else {
      std::memset(codes, 0, block);
    }
    return scale;
  }
  static void decode(float* out, const uint8_t* codes, float scale, int64_t block) {
    from_int8(out, codes, scale, block);
  }
};

struct Fp8 {
  static int64_t code_bytes(int64_t block) {
    return block;
  }
  static float encode(const float* values, uint8_t* codes, int64_t block, int64_t) {
    float inverse;
    const float scale = scale_for(values, block, 448.0f, inverse);
    if (std::isfinite(scale)) {
      to_fp8(codes, values, inverse, block);
    } else {
      std::memset(codes, 0, block);
    }
    return scale;
  }
  static void decode(float* out, const uint8_t* codes, float scale, int64_t block) {
    from_fp8(out, codes, scale, block);
  }
};

struct Sign {
  static int64_t code_bytes(int64_t block) {
    return block / 8;
  }
  static float encode(const float* values, uint8_t* codes, int64_t block, int64_t real) {
    to_signs(codes, values, block);
    return sum_of_magnitudes(values, block) / static_cast<float>(std::max<int64_t>(real, 1));
  }
  static void decode(float* out, const uint8_t* codes, float scale, int64_t block) {
    from_signs(out, codes, scale, sign_masks(), block);
  }
};

// ---- messages

// One message: scales of all blocks, then codes of all blocks.
template <typename Codec>
struct Message {
  uint8_t* bytes;
  int64_t blocks;
  int64_t block;

  void encode(int64_t index, const float* values, int64_t real) const {
    const float scale = Codec::encode(values, codes(index), block, real);
    std::memcpy(bytes + 4 * index, &scale, sizeof scale);
  }
  void decode(int64_t index, float* out) const {
    float scale;
    std::memcpy(&scale, bytes + 4 * index, sizeof scale);
    Codec::decode(out, codes(index), scale, block);
  }
  uint8_t* codes(int64_t index) const {
    return bytes + 4 * blocks + index * Codec::code_bytes(block);
  }
};

// The messages of all chunks, one behind the other.
template <typename Codec>
struct Messages {
  uint8_t* bytes;
  int64_t count;
  int64_t stride;
  int64_t blocks;
  int64_t block;

  Messages(const at::Tensor& tensor, int64_t blocks, int64_t block)
      : bytes(tensor.mutable_data_ptr<uint8_t>()),
        count(tensor.size(0)),
        stride(tensor.size(1)),
        blocks(blocks),
        block(block) {
    TORCH_CHECK(tensor.is_contiguous() && stride >= blocks * (4 + Codec::code_bytes(block)),
                "A message of ", stride, " bytes does not hold ", blocks, " blocks of ", block, " elements.");
  }
  Message<Codec> operator[](int64_t chunk) const {
    return {bytes + chunk * stride, blocks, block};
  }
};

float* floats(const at::Tensor& tensor, int64_t numel) {
  TORCH_CHECK(tensor.is_cpu() && tensor.is_contiguous() && tensor.numel() >= numel,
              "Expected a dense CPU tensor of ", numel, " elements, got ", tensor.numel(), ".");
  tensor.unsafeGetTensorImpl()->bump_version();
  return tensor.mutable_data_ptr<float>();
}

float* floats(const std::optional<at::Tensor>& tensor, int64_t numel) {
  return tensor ? floats(*tensor, numel) : nullptr;
}

// Calls `visit(block index, first element, real elements, scratch)` for all blocks of `numel` elements and of the
// padding behind them.
template <typename Visit>
void for_each_block(int64_t blocks, int64_t block, int64_t numel, const Visit& visit) {
  at::parallel_for(0, blocks, kBlocksPerThread, [&](int64_t begin, int64_t end) {
    std::vector<float> scratch(2 * block);
    for (int64_t index = begin; index < end; index++) {
      const int64_t first = index * block;
      visit(index, first, std::clamp<int64_t>(numel - first, 0, block), scratch.data());
    }
  });
}

template <typename Codec>
void encode_blocks(const at::Tensor& gradient, const std::optional<at::Tensor>& residual, const at::Tensor& sent,
                   int64_t blocks, int64_t block) {
  const Messages<Codec> messages(sent, blocks, block);
  const int64_t numel = gradient.numel();
  const float* from = floats(gradient, numel);
  const float* more = floats(residual, numel);
  for_each_block(messages.count * blocks, block, numel,
                 [&](int64_t index, int64_t first, int64_t real, float* scratch) {
                   const float* values = from + first;
                   if (more != nullptr) {
                     add(scratch, values, more + first, real);
                     values = scratch;
                   } else if (real < block) {
                     std::copy_n(values, real, scratch);
                     values = scratch;
                   }
                   if (real < block) {
                     std::fill(scratch + real, scratch + block, 0.0f);
                   }
                   messages[index / blocks].encode(index % blocks, values, real);
                 });
}

template <typename Codec>
void add_up_blocks(const at::Tensor& received, const std::optional<at::Tensor>& residual, int64_t numel,
                   const at::Tensor& sum, const at::Tensor& answer, int64_t blocks, int64_t block) {
  const Messages<Codec> messages(received, blocks, block), answers(answer, blocks, block);
  const float* more = floats(residual, numel);
  float* total = floats(sum, blocks * block);
  for_each_block(blocks, block, numel, [&](int64_t index, int64_t first, int64_t real, float* scratch) {
    float* own = total + first;
    float* theirs = scratch + block;
    messages[0].decode(index, own);
    for (int64_t rank = 1; rank < messages.count; rank++) {
      messages[rank].decode(index, theirs);
      std::copy_n(own, block, scratch);
      add(own, scratch, theirs, block);
    }
    if (more != nullptr) {
      add(scratch, own, more + first, real);
    } else {
      std::copy_n(own, real, scratch);
    }
    std::fill(scratch + real, scratch + block, 0.0f);
    answers[0].encode(index, scratch, real);
  });
}

template <typename Codec>
void carry_over_blocks(const at::Tensor& sent, const at::Tensor& gradient, const at::Tensor& residual, int64_t blocks,
                       int64_t block) {
  const Messages<Codec> messages(sent, blocks, block);
  const int64_t numel = gradient.numel();
  const float* came = floats(gradient, numel);
  float* left = floats(residual, numel);
  for_each_block(messages.count * blocks, block, numel,
                 [&](int64_t index, int64_t first, int64_t real, float* scratch) {
                   if (real > 0) {
                     messages[index / blocks].decode(index % blocks, scratch);
                     carry(left + first, came + first, scratch, real);
                   }
                 });
}

template <typename Codec>
void decode_blocks(const at::Tensor& received, double factor, const at::Tensor& out, int64_t blocks, int64_t block) {
  const Messages<Codec> messages(received, blocks, block);
  const int64_t numel = out.numel();
  float* to = floats(out, numel);
  for_each_block(messages.count * blocks, block, numel,
                 [&](int64_t index, int64_t first, int64_t real, float* scratch) {
                   if (real > 0) {
                     messages[index / blocks].decode(index % blocks, scratch);
                     scale_by(to + first, scratch, static_cast<float>(factor), real);
                   }
                 });
}

template <typename Codec>
void bind_codec(pybind11::module_& m, const std::string& name) {
  using NoGil = pybind11::call_guard<pybind11::gil_scoped_release>;
  const auto in = [&](const char* what) { return std::string(what) + "_" + name; };
  m.def(in("encode").c_str(), &encode_blocks<Codec>, NoGil());
  m.def(in("add_up").c_str(), &add_up_blocks<Codec>, NoGil());
  m.def(in("carry_over").c_str(), &carry_over_blocks<Codec>, NoGil());
  m.def(in("decode").c_str(), &decode_blocks<Codec>, NoGil());
}

}  // namespace

void bind_quantization(pybind11::module_& m) {
  bind_codec<Int8>(m, "int8");
  bind_codec<Fp8>(m, "fp8");
  bind_codec<Sign>(m, "onebit");
}

}  // namespace ldh
