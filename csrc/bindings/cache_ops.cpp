// The ops that write, move and read blocks: for each op its checks in a fixed order (dtype, device, layout, shape,
// range), then the allocation of what it returns, then a params struct for the kernel.
//
// Sizes in errors: T tokens, S sequences, Hq query heads, Hkv key/value heads, D head size, N blocks, B block size,
// M block table width, K pairs of blocks.
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <tuple>
#include <vector>

#include "bindings/checks.h"
#include "bindings/ops.h"
#include "bindings/strides.h"
#include "bindings/views.h"

namespace paged_kv::bindings {
namespace {

using TensorPair = std::tuple<Tensor, Tensor>;

// ---------------------------------------------------------------------------------------------------------------------
// reshape_and_cache, reshape_and_cache_dynamic

void write_cache(const DeviceInterface& device, const Tensor& key, const Tensor& value, const Tensor& key_cache,
                 const Tensor& value_cache, const Tensor& slot_mapping, const MaybeTensor& k_scale,
                 const MaybeTensor& v_scale, bool dynamic) {
  const Checks checks(dynamic ? "reshape_and_cache_dynamic" : "reshape_and_cache");
  const Args rows{{"key", key}, {"value", value}}, caches{{"key_cache", key_cache}, {"value_cache", value_cache}};
  const Args scales = present({{"k_scale", &k_scale}, {"v_scale", &v_scale}});
  const Arg slots{"slot_mapping", slot_mapping};
  Args written = caches, read = rows;
  read.push_back(slots);
  (dynamic ? written : read).append(scales.begin(), scales.end());

  // dtype
  const DType row_dtype = checks.float_dtype(rows[0]);
  const DType cache_dtype = dynamic ? checks.quantised_dtype(caches[0]) : checks.cache_dtype(caches[0]);
  checks.rows_match_cache(rows[0], caches[0]);
  checks.same_dtype(rows[1], rows[0]);
  checks.same_dtype(caches[1], caches[0]);
  checks.dtype(slots, at::kLong);
  for (const Arg& scale : scales) checks.scale_dtype(scale, caches[0]);

  // device
  checks.device(read, rows[0]);
  checks.device(written, rows[0]);

  // layout
  for (const Arg& arg : {rows[0], rows[1], caches[0], caches[1]}) checks.last_dim_contiguous(arg);
  checks.contiguous(slots);
  checks.written_apart(written, read);

  // shape
  checks.cache_shape(caches[0]);
  checks.shape(caches[1], key_cache.sizes(), "of key_cache [N, Hkv, B, D]");
  checks.dims(slots, 1, "[T]");
  checks.dims(rows[0], 3, "[T, Hkv, D]");
  const int64_t num_blocks = key_cache.size(0), num_kv_heads = key_cache.size(1), block_size = key_cache.size(2),
                head_dim = key_cache.size(3), num_tokens = slot_mapping.size(0);
  checks.shape(rows[0], {std::max(key.size(0), num_tokens), num_kv_heads, head_dim}, "[T or more, Hkv, D]");
  checks.shape(rows[1], key.sizes(), "of key [T or more, Hkv, D]");
  for (const Arg& scale : scales) {
    if (dynamic) {
      checks.shape(scale, key_cache.sizes().slice(0, 3), "[N, Hkv, B]");
    } else {
      checks.scale_shape(scale, caches[0]);
    }
  }

  // range
  if (device.checks_values()) {
    const Tensor host_slots = on_host(slot_mapping);
    checks.slots_range(host_slots, num_blocks * block_size);
    for (const Arg& scale : scales) {
      if (!dynamic) checks.scale_range({scale.name, on_host(*scale.tensor)}, &host_slots);
    }
  }

  if (num_tokens == 0) return;
  const ReshapeAndCacheParams params{
      .num_tokens = num_tokens,
      .num_kv_heads = num_kv_heads,
      .head_dim = head_dim,
      .num_blocks = num_blocks,
      .block_size = block_size,
      .key = rows_view(key, row_dtype),
      .value = rows_view(value, row_dtype),
      .key_cache = cache_view(key_cache, cache_dtype, /*written=*/true),
      .value_cache = cache_view(value_cache, cache_dtype, /*written=*/true),
      .k_scale = scale_view(k_scale, dynamic),
      .v_scale = scale_view(v_scale, dynamic),
      .slot_mapping = slot_mapping.const_data_ptr<int64_t>(),
      .dynamic = dynamic,
  };
  call(device, checks, &Backend::reshape_and_cache, params, written, rows[0]);
}

void reshape_and_cache(const DeviceInterface& device, const Tensor& key, const Tensor& value, const Tensor& key_cache,
                       const Tensor& value_cache, const Tensor& slot_mapping, const MaybeTensor& k_scale,
                       const MaybeTensor& v_scale) {
  write_cache(device, key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale, /*dynamic=*/false);
}

void reshape_and_cache_dynamic(const DeviceInterface& device, const Tensor& key, const Tensor& value,
                               const Tensor& key_cache, const Tensor& value_cache, const Tensor& slot_mapping,
                               const Tensor& k_scale, const Tensor& v_scale) {
  write_cache(device, key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale, /*dynamic=*/true);
}

// ---------------------------------------------------------------------------------------------------------------------
// copy_blocks, swap_blocks

// Describes the blocks of tensors of one shape (source and destination, or one alone) by dims in one order.
template <size_t kTensors>
std::array<BlockedBytes, kTensors> blocked_bytes(const Checks& checks, const std::array<Arg, kTensors>& tensors) {
  const Tensor& first = *tensors[0].tensor;
  const int64_t element = static_cast<int64_t>(first.element_size());
  Dims<kTensors> dims;
  for (int64_t d = 1; d < first.dim(); ++d) {
    if (first.size(d) == 1) continue;
    Dim<kTensors> dim{first.size(d), {}};
    for (size_t t = 0; t < kTensors; ++t) dim.stride[t] = tensors[t]->stride(d) * element;
    dims.push_back(dim);
  }
  const int64_t run = join_dims(dims, element);
  if (dims.size() > BlockedBytes::kMaxDims) {
    checks.fail(tensors.back().label(),
                c10::str("blocks of at most ", BlockedBytes::kMaxDims, " dimensions besides contiguous ones"),
                c10::str("shape ", tensors.back()->sizes(), " with strides ", tensors.back()->strides()));
  }
  std::array<BlockedBytes, kTensors> blocks{};
  for (size_t t = 0; t < kTensors; ++t) {
    const bool written = t + 1 == kTensors;
    blocks[t] = {.data = static_cast<char*>(data_of(*tensors[t].tensor, written)),
                 .stride_block_bytes = tensors[t]->stride(0) * element,
                 .inner_bytes = run,
                 .num_dims = static_cast<int>(dims.size()),
                 .size = {},
                 .stride_bytes = {}};
    for (size_t d = 0; d < dims.size(); ++d) {
      blocks[t].size[d] = dims[d].size;
      blocks[t].stride_bytes[d] = dims[d].stride[t];
    }
  }
  return blocks;
}

void copy_blocks(const DeviceInterface& device, at::TensorList key_caches, at::TensorList value_caches,
                 const Tensor& block_mapping) {
  const Checks checks("copy_blocks");
  const Arg mapping{"block_mapping", block_mapping};
  Args caches;
  for (size_t i = 0; i < key_caches.size(); ++i) caches.emplace_back("key_caches", key_caches[i], i);
  for (size_t i = 0; i < value_caches.size(); ++i) caches.emplace_back("value_caches", value_caches[i], i);

  // dtype: caches of any
  checks.dtype(mapping, at::kLong);

  // device
  checks.device(caches, mapping);

  // layout
  checks.contiguous(mapping);
  checks.written_apart(caches, {mapping});

  // shape
  for (const Arg& cache : caches) checks.blocked_shape(cache, caches[0]);
  checks.dims(mapping, 2, "[K, 2]");
  checks.shape(mapping, {block_mapping.size(0), 2}, "[K, 2]");
  std::vector<BlockedBytes> blocks;
  blocks.reserve(caches.size());
  for (const Arg& cache : caches) {
    if (cache->numel() != 0) blocks.push_back(blocked_bytes<1>(checks, {cache})[0]);
  }

  // range
  if (device.checks_values() && !caches.empty()) {
    const int64_t num_blocks = caches[0]->size(0);
    checks.mapping_range(on_host(block_mapping), num_blocks, num_blocks, /*apart=*/true);
  }

  if (blocks.empty() || block_mapping.size(0) == 0) return;
  const CopyBlocksParams params{
      .num_tensors = static_cast<int64_t>(blocks.size()),
      .num_pairs = block_mapping.size(0),
      .tensors = blocks.data(),
      .block_mapping = block_mapping.const_data_ptr<int64_t>(),
  };
  call(device, checks, &Backend::copy_blocks, params, caches, mapping);
}

void swap_blocks(const DeviceInterface& device, const Tensor& src, const Tensor& dst, const Tensor& block_mapping) {
  const Checks checks("swap_blocks");
  const Arg source{"src", src}, destination{"dst", dst}, mapping{"block_mapping", block_mapping};

  // dtype: any, the same
  checks.same_dtype(destination, source);
  checks.dtype(mapping, at::kLong);

  // device: any; the pairs are read on the host
  checks.host(mapping);

  // layout
  checks.contiguous(mapping);
  checks.written_apart({destination}, {source, mapping});

  // shape
  for (const Arg& arg : {source, destination}) checks.blocked_shape(arg, arg);
  if (src.sizes().slice(1) != dst.sizes().slice(1)) {
    checks.fail("dst", c10::str("blocks of src's shape, ", src.sizes().slice(1)), c10::str(dst.sizes().slice(1)));
  }
  checks.dims(mapping, 2, "[K, 2]");
  checks.shape(mapping, {block_mapping.size(0), 2}, "[K, 2]");
  const auto blocks = blocked_bytes<2>(checks, {source, destination});

  // range
  checks.mapping_range(block_mapping, src.size(0), dst.size(0), /*apart=*/false);

  if (dst.numel() == 0 || block_mapping.size(0) == 0) return;
  const SwapBlocksParams params{
      .num_pairs = block_mapping.size(0),
      .src = blocks[0],
      .dst = blocks[1],
      .block_mapping = block_mapping.const_data_ptr<int64_t>(),
  };
  // On the device's stream, whichever end is there.
  call(device, checks, &Backend::swap_blocks, params, {destination}, dst.is_cpu() ? source : destination);
}

// ---------------------------------------------------------------------------------------------------------------------
// gather_kv

struct GatherArgs {
  const Tensor &key_cache, &value_cache, &block_tables, &seq_lens;
  const MaybeTensor &k_scale, &v_scale;

  at::ScalarType dtype() const { return k_scale ? at::kFloat : key_cache.scalar_type(); }
};

// Returns the number of tokens: the sum of seq_lens, or, so as not to wait for a device, the rows given for them.
int64_t check_gather_kv(const DeviceInterface& device, const Checks& checks, const GatherArgs& a,
                        at::ArrayRef<Arg> written) {
  const Arg key_cache{"key_cache", a.key_cache}, value_cache{"value_cache", a.value_cache},
      block_tables{"block_tables", a.block_tables}, seq_lens{"seq_lens", a.seq_lens};
  const Args scales = present({{"k_scale", &a.k_scale}, {"v_scale", &a.v_scale}});
  Args read{key_cache, value_cache, block_tables, seq_lens};
  read.append(scales.begin(), scales.end());

  // dtype
  checks.cache_dtype(key_cache);
  checks.same_dtype(value_cache, key_cache);
  for (const Arg& arg : {block_tables, seq_lens}) checks.dtype(arg, at::kInt);
  for (const Arg& scale : scales) checks.scale_dtype(scale, key_cache);
  if (scales.size() == 1) {
    checks.fail(a.k_scale ? "v_scale" : "k_scale", c10::str("a tensor, as ", scales[0].name, " is one"), "None");
  }
  for (const Arg& arg : written) checks.dtype(arg, a.dtype());

  // device
  checks.device(read, key_cache);
  checks.device(written, key_cache);

  // layout
  for (const Arg& arg : {key_cache, value_cache}) checks.last_dim_contiguous(arg);
  checks.contiguous(seq_lens);
  for (const Arg& arg : written) checks.last_dim_contiguous(arg);
  if (!written.empty()) checks.written_apart(written, read);

  // shape
  checks.cache_shape(key_cache);
  checks.shape(value_cache, a.key_cache.sizes(), "of key_cache [N, Hkv, B, D]");
  checks.dims(seq_lens, 1, "[S]");
  const int64_t num_seqs = a.seq_lens.size(0), block_size = a.key_cache.size(2);
  checks.dims(block_tables, 2, "[S, M]");
  checks.shape(block_tables, {num_seqs, a.block_tables.size(1)}, "[S, M]");
  for (const Arg& scale : scales) checks.scale_shape(scale, key_cache);
  for (const Arg& arg : written) {
    checks.dims(arg, 3, "[sum(seq_lens), Hkv, D]");
    checks.shape(arg, {arg->size(0), a.key_cache.size(1), a.key_cache.size(3)}, "[sum(seq_lens), Hkv, D]");
  }

  // range: the lengths are needed on any device where they give the result's shape
  if (!device.checks_values() && !written.empty()) return written[0]->size(0);
  const Tensor host_lens = on_host(a.seq_lens);
  checks.seq_lens_range(host_lens, a.block_tables.size(1), block_size);
  const int32_t* lens = host_lens.const_data_ptr<int32_t>();
  const int64_t num_tokens = std::accumulate(lens, lens + num_seqs, int64_t{0});
  if (device.checks_values()) {
    const Tensor tables = on_host(a.block_tables);
    for (int64_t seq = 0; seq < num_seqs; ++seq) {
      checks.table_range(tables, seq, 0, (lens[seq] + block_size - 1) / block_size, a.key_cache.size(0));
    }
    for (const Arg& scale : scales) checks.scale_range({scale.name, on_host(*scale.tensor)});
  }
  for (const Arg& arg : written) {
    checks.shape(arg, {num_tokens, a.key_cache.size(1), a.key_cache.size(3)}, "[sum(seq_lens), Hkv, D]");
  }
  return num_tokens;
}

void run_gather_kv(const DeviceInterface& device, const Checks& checks, const GatherArgs& a, int64_t num_tokens,
                   at::ArrayRef<Arg> written) {
  if (num_tokens == 0) return;
  const DType cache_dtype = checks.cache_dtype({"key_cache", a.key_cache});
  const DType dtype = a.k_scale ? DType::kFloat32 : cache_dtype;
  const GatherKvParams params{
      .num_seqs = a.seq_lens.size(0),
      .num_kv_heads = a.key_cache.size(1),
      .head_dim = a.key_cache.size(3),
      .num_blocks = a.key_cache.size(0),
      .block_size = a.key_cache.size(2),
      .table_width = a.block_tables.size(1),
      .num_tokens = num_tokens,
      .dequantise = a.k_scale.has_value(),
      .key_cache = cache_view(a.key_cache, cache_dtype),
      .value_cache = cache_view(a.value_cache, cache_dtype),
      .k_scale = scale_view(a.k_scale),
      .v_scale = scale_view(a.v_scale),
      .key = rows_view(*written[0].tensor, dtype, /*written=*/true),
      .value = rows_view(*written[1].tensor, dtype, /*written=*/true),
      .block_tables = a.block_tables.const_data_ptr<int32_t>(),
      .table_stride_seq = a.block_tables.stride(0),
      .table_stride_block = a.block_tables.stride(1),
      .seq_lens = a.seq_lens.const_data_ptr<int32_t>(),
  };
  call(device, checks, &Backend::gather_kv, params, written, {"key_cache", a.key_cache});
}

TensorPair gather_kv(const DeviceInterface& device, const Tensor& key_cache, const Tensor& value_cache,
                     const Tensor& block_tables, const Tensor& seq_lens, const MaybeTensor& k_scale,
                     const MaybeTensor& v_scale) {
  const Checks checks("gather_kv");
  const GatherArgs args{key_cache, value_cache, block_tables, seq_lens, k_scale, v_scale};
  const int64_t num_tokens = check_gather_kv(device, checks, args, {});
  const auto allocate = [&] {
    return device.empty({num_tokens, key_cache.size(1), key_cache.size(3)}, key_cache.options().dtype(args.dtype()));
  };
  Tensor key = allocate(), value = allocate();
  run_gather_kv(device, checks, args, num_tokens, {{"key", key}, {"value", value}});
  return {std::move(key), std::move(value)};
}

void gather_kv_out(const DeviceInterface& device, const Tensor& key_cache, const Tensor& value_cache,
                   const Tensor& block_tables, const Tensor& seq_lens, const MaybeTensor& k_scale,
                   const MaybeTensor& v_scale, const Tensor& key, const Tensor& value) {
  const Checks checks("gather_kv");
  const GatherArgs args{key_cache, value_cache, block_tables, seq_lens, k_scale, v_scale};
  const Args written{{"key", key}, {"value", value}};
  run_gather_kv(device, checks, args, check_gather_kv(device, checks, args, written), written);
}

}  // namespace

void register_cache_ops(torch::Library& library, const DeviceInterface& device) {
  library.impl("reshape_and_cache", on_device(device, reshape_and_cache));
  library.impl("reshape_and_cache_dynamic", on_device(device, reshape_and_cache_dynamic));
  library.impl("copy_blocks", on_device(device, copy_blocks));
  library.impl("swap_blocks", on_device(device, swap_blocks));
  library.impl("gather_kv", on_device(device, gather_kv));
  library.impl("gather_kv.out", on_device(device, gather_kv_out));
}

}  // namespace paged_kv::bindings
