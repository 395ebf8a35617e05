#include "bindings/checks.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "bindings/overlap.h"

namespace paged_kv::bindings {
namespace {

constexpr int64_t kMaxBlockSize = 1024, kMaxHeadDim = 256;

struct NamedDType {
  at::ScalarType torch;
  DType dtype;
};
constexpr NamedDType kDTypes[] = {
    {at::kFloat, DType::kFloat32},          {at::kHalf, DType::kFloat16},
    {at::kBFloat16, DType::kBFloat16},      {at::kFloat8_e4m3fn, DType::kFloat8E4M3},
    {at::kFloat8_e5m2, DType::kFloat8E5M2}, {at::kChar, DType::kInt8},
};
constexpr size_t kNumFloats = 3;  // the float dtypes come first
constexpr at::ArrayRef<NamedDType> kAll(kDTypes), kFloats(kDTypes, kNumFloats),
    kQuantised(kDTypes + kNumFloats, std::size(kDTypes) - kNumFloats);

std::string name_of(at::ScalarType type) { return std::string(c10::getDtypeNames(type).first); }

DType one_of(const Checks& checks, Arg arg, at::ArrayRef<NamedDType> allowed) {
  const at::ScalarType type = arg->scalar_type();
  for (const auto& row : allowed) {
    if (row.torch == type) return row.dtype;
  }
  std::string list;
  for (size_t i = 0; i < allowed.size(); ++i) {
    list += (i == 0 ? "" : i + 1 == allowed.size() ? " or " : ", ") + name_of(allowed[i].torch);
  }
  checks.fail(arg.label(), "dtype " + list, name_of(type));
}

bool is_valid_scale(float scale) { return std::isfinite(scale) && scale > 0; }

}  // namespace

std::string Arg::label() const { return index < 0 ? name : c10::str(name, "[", index, "]"); }

void Checks::fail(const std::string& name, const std::string& expected, const std::string& got) const {
  TORCH_CHECK_VALUE(false, "paged_kv::", op_, ": ", name, ": expected ", expected, ", got ", got);
}

// ---------------------------------------------------------------------------------------------------------------------
// dtype

void Checks::dtype(Arg arg, at::ScalarType expected) const {
  if (arg->scalar_type() != expected) {
    fail(arg.label(), "dtype " + name_of(expected), name_of(arg->scalar_type()));
  }
}

void Checks::same_dtype(Arg arg, Arg other) const {
  if (arg->scalar_type() != other->scalar_type()) {
    fail(arg.label(), c10::str("the dtype of ", other.label(), ", ", name_of(other->scalar_type())),
         name_of(arg->scalar_type()));
  }
}

DType Checks::float_dtype(Arg arg) const { return one_of(*this, arg, kFloats); }

DType Checks::cache_dtype(Arg arg) const { return one_of(*this, arg, kAll); }

DType Checks::quantised_dtype(Arg arg) const { return one_of(*this, arg, kQuantised); }

void Checks::rows_match_cache(Arg rows, Arg cache) const {
  float_dtype(rows);
  if (!is_quantised(cache_dtype(cache))) same_dtype(rows, cache);
}

void Checks::scale_dtype(Arg scale, Arg cache) const {
  if (!is_quantised(cache_dtype(cache))) {
    fail(scale.label(),
         c10::str("None, since ", cache.label(), " is not quantised (", name_of(cache->scalar_type()), ")"),
         "a tensor");
  }
  dtype(scale, at::kFloat);
}

// ---------------------------------------------------------------------------------------------------------------------
// device

void Checks::device(at::ArrayRef<Arg> args, Arg other) const {
  for (const Arg& arg : args) {
    if (arg->device() != other->device()) {
      fail(arg.label(), c10::str("the device of ", other.label(), ", ", other->device()), arg->device().str());
    }
  }
}

void Checks::host(Arg arg) const {
  if (!arg->is_cpu()) fail(arg.label(), "device cpu", arg->device().str());
}

// ---------------------------------------------------------------------------------------------------------------------
// layout

void Checks::last_dim_contiguous(Arg arg) const {
  if (arg->dim() > 0 && arg->size(-1) > 1 && arg->stride(-1) != 1) {
    fail(arg.label(), "a contiguous last dimension (stride 1)", c10::str("strides ", arg->strides()));
  }
}

void Checks::contiguous(Arg arg) const {
  if (!arg->is_contiguous()) fail(arg.label(), "a contiguous tensor", c10::str("strides ", arg->strides()));
}

void Checks::written_apart(at::ArrayRef<Arg> written, at::ArrayRef<Arg> read) const {
  c10::SmallVector<ByteBox, 8> boxes;
  for (const Arg& arg : written) {
    boxes.emplace_back(*arg.tensor);
    if (overlaps_itself(boxes.back())) {
      fail(arg.label(), "every element at an address of its own, as it is written",
           c10::str("shape ", arg->sizes(), " with strides ", arg->strides()));
    }
  }
  for (const Arg& arg : read) boxes.emplace_back(*arg.tensor);
  for (size_t w = 0; w < written.size(); ++w) {
    for (size_t other = w + 1; other < boxes.size(); ++other) {
      if (share_bytes(boxes[w], boxes[other])) {
        const Arg& arg = other < written.size() ? written[other] : read[other - written.size()];
        fail(written[w].label(), c10::str("memory apart from ", arg.label(), ", as it is written"),
             "tensors that share elements");
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// shape

void Checks::dims(Arg arg, int64_t count, const char* symbols) const {
  if (arg->dim() != count) fail(arg.label(), c10::str("shape ", symbols), c10::str(arg->sizes()));
}

void Checks::shape(Arg arg, at::IntArrayRef expected, const char* symbols) const {
  if (arg->sizes() != expected) {
    fail(arg.label(), c10::str("shape ", symbols, " = ", expected), c10::str(arg->sizes()));
  }
}

void Checks::blocked_shape(Arg arg, Arg other) const {
  if (arg->dim() == 0) fail(arg.label(), "a first dimension of N blocks", c10::str("shape ", arg->sizes()));
  if (arg->size(0) != other->size(0)) {
    fail(arg.label(), c10::str("a first dimension of N = ", other->size(0), " blocks, as ", other.label()),
         c10::str("shape ", arg->sizes()));
  }
}

void Checks::cache_shape(Arg cache) const {
  dims(cache, 4, "[N, Hkv, B, D]");
  const int64_t num_kv_heads = cache->size(1), block_size = cache->size(2), head_dim = cache->size(3);
  if (num_kv_heads < 1) fail(cache.label(), "at least 1 head in [N, Hkv, B, D]", c10::str(cache->sizes()));
  if (block_size < 1 || block_size > kMaxBlockSize) {
    fail(cache.label(), c10::str("a block size B from 1 to ", kMaxBlockSize, " in [N, Hkv, B, D]"),
         c10::str(cache->sizes()));
  }
  if (head_dim < 1 || head_dim > kMaxHeadDim) {
    fail(cache.label(), c10::str("a head size D from 1 to ", kMaxHeadDim, " in [N, Hkv, B, D]"),
         c10::str(cache->sizes()));
  }
}

void Checks::scale_shape(Arg scale, Arg cache) const {
  const int64_t num_kv_heads = cache->size(1);
  const at::IntArrayRef sizes = scale->sizes();
  if (sizes != at::IntArrayRef{1} && sizes != at::IntArrayRef{num_kv_heads} && sizes != cache->sizes().slice(0, 3)) {
    fail(scale.label(),
         c10::str("shape [1], [Hkv] = [", num_kv_heads, "] or [N, Hkv, B] = ", cache->sizes().slice(0, 3)),
         c10::str(sizes));
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// range

void Checks::finite(const char* name, double value) const {
  if (!std::isfinite(static_cast<float>(value))) fail(name, "a finite float32", c10::str(value));
}

void Checks::seq_lens_range(const at::Tensor& seq_lens, int64_t table_width, int64_t block_size) const {
  const int32_t* lens = seq_lens.const_data_ptr<int32_t>();
  for (int64_t seq = 0; seq < seq_lens.size(0); ++seq) {
    if (lens[seq] < 0 || lens[seq] > table_width * block_size) {
      fail("seq_lens",
           c10::str("lengths from 0 to ", table_width * block_size, " (block_tables has ", table_width,
                    " entries a sequence, a block ", block_size, " slots)"),
           c10::str(lens[seq], " for sequence ", seq));
    }
  }
}

void Checks::table_range(const at::Tensor& block_tables, int64_t seq, int64_t first, int64_t last,
                         int64_t num_blocks) const {
  const int64_t stride = block_tables.stride(1);
  const int32_t* table = block_tables.const_data_ptr<int32_t>() + seq * block_tables.stride(0);
  for (int64_t entry = first; entry < last; ++entry) {
    const int32_t id = table[entry * stride];
    if (id < 0 || id >= num_blocks) {
      fail("block_tables", c10::str("ids from 0 to ", num_blocks - 1, " in the entries in use"),
           c10::str(id, " in entry ", entry, " of sequence ", seq));
    }
  }
}

void Checks::slots_range(const at::Tensor& slot_mapping, int64_t num_slots) const {
  const int64_t* slots = slot_mapping.const_data_ptr<int64_t>();
  const int64_t num_tokens = slot_mapping.size(0);
  // Runs of neighbouring slots: a prompt has one for each run of neighbouring blocks, so that few are sorted.
  struct Run {
    int64_t slot, length, token;
  };
  c10::SmallVector<Run, 64> runs;
  for (int64_t token = 0; token < num_tokens; ++token) {
    const int64_t slot = slots[token];
    if (slot >= num_slots) {
      fail("slot_mapping", c10::str("slots below N * B = ", num_slots), c10::str(slot, " for token ", token));
    }
    if (slot < 0) continue;
    if (!runs.empty() && slot == runs.back().slot + runs.back().length) {
      ++runs.back().length;
    } else {
      runs.push_back({slot, 1, token});
    }
  }
  std::sort(runs.begin(), runs.end(), [](const Run& a, const Run& b) { return a.slot < b.slot; });
  for (size_t i = 1; i < runs.size(); ++i) {
    if (runs[i].slot < runs[i - 1].slot + runs[i - 1].length) {
      fail("slot_mapping", "a slot for one token only", c10::str(runs[i].slot, " for two tokens"));
    }
  }
}

void Checks::mapping_range(const at::Tensor& block_mapping, int64_t src_blocks, int64_t dst_blocks, bool apart) const {
  const auto pairs = block_mapping.accessor<const int64_t, 2>();
  const int64_t num_pairs = pairs.size(0);
  c10::SmallVector<int64_t, 64> destinations;
  for (int64_t pair = 0; pair < num_pairs; ++pair) {
    const int64_t source = pairs[pair][0], destination = pairs[pair][1];
    if (source < 0 || source >= src_blocks) {
      fail("block_mapping", c10::str("source ids from 0 to ", src_blocks - 1), c10::str(source, " in row ", pair));
    }
    if (destination < 0 || destination >= dst_blocks) {
      fail("block_mapping", c10::str("destination ids from 0 to ", dst_blocks - 1),
           c10::str(destination, " in row ", pair));
    }
    destinations.push_back(destination);
  }
  std::sort(destinations.begin(), destinations.end());
  if (auto twice = std::adjacent_find(destinations.begin(), destinations.end()); twice != destinations.end()) {
    fail("block_mapping", "a destination once only", c10::str(*twice, " twice"));
  }
  for (int64_t pair = 0; apart && pair < num_pairs; ++pair) {
    if (std::binary_search(destinations.begin(), destinations.end(), pairs[pair][0])) {
      fail("block_mapping", "destinations that are no sources", c10::str(pairs[pair][0], " as both"));
    }
  }
}

void Checks::scale_range(Arg scale, const at::Tensor* slot_mapping) const {
  if (scale->dim() == 1) {
    const auto scales = scale->accessor<const float, 1>();
    for (int64_t head = 0; head < scales.size(0); ++head) {
      if (!is_valid_scale(scales[head])) {
        fail(scale.label(), "finite scales above 0", c10::str(scales[head], " at [", head, "]"));
      }
    }
    return;
  }
  if (slot_mapping == nullptr) return;
  const auto scales = scale->accessor<const float, 3>();
  const int64_t* slots = slot_mapping->const_data_ptr<int64_t>();
  for (int64_t token = 0; token < slot_mapping->size(0); ++token) {
    if (slots[token] < 0) continue;
    const int64_t block = slots[token] / scales.size(2), offset = slots[token] % scales.size(2);
    for (int64_t head = 0; head < scales.size(1); ++head) {
      if (!is_valid_scale(scales[block][head][offset])) {
        fail(scale.label(), "finite scales above 0 in the slots written",
             c10::str(scales[block][head][offset], " at [", block, ", ", head, ", ", offset, "]"));
      }
    }
  }
}

}  // namespace paged_kv::bindings
