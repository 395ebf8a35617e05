// The checks of op arguments, and the words of their errors. Each raises ValueError with one sentence: the op, the
// argument, what was expected, what came. Every op runs them in one order (dtype, device, layout, shape, range) before
// it allocates or writes anything, so that a call that raises leaves every tensor as it was.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <string>

#include "params.h"

namespace paged_kv::bindings {

// An argument under check: a tensor and the name that the schema gives it; index >= 0: its place in a list of tensors.
struct Arg {
  Arg(const char* name, const at::Tensor& tensor, int64_t index = -1) : name(name), tensor(&tensor), index(index) {}
  const at::Tensor* operator->() const { return tensor; }
  std::string label() const;  // "query", "key_caches[3]"

  const char* name;
  const at::Tensor* tensor;
  int64_t index;
};
using Args = c10::SmallVector<Arg, 8>;

class Checks {
 public:
  explicit Checks(const char* op) : op_(op) {}
  const char* op() const { return op_; }

  // Raises "paged_kv::OP: NAME: expected EXPECTED, got GOT".
  [[noreturn]] void fail(const std::string& name, const std::string& expected, const std::string& got) const;

  // dtype
  void dtype(Arg arg, at::ScalarType expected) const;
  void same_dtype(Arg arg, Arg other) const;
  DType float_dtype(Arg arg) const;                  // float32, float16 or bfloat16
  DType cache_dtype(Arg arg) const;                  // those, or float8_e4m3fn, float8_e5m2, int8
  DType quantised_dtype(Arg arg) const;              // float8_e4m3fn, float8_e5m2 or int8
  void rows_match_cache(Arg rows, Arg cache) const;  // query, key, value: any float dtype over a quantised cache
  void scale_dtype(Arg scale, Arg cache) const;      // float32, and the cache is quantised

  // device
  void device(at::ArrayRef<Arg> args, Arg other) const;
  void host(Arg arg) const;

  // layout
  void last_dim_contiguous(Arg arg) const;
  void contiguous(Arg arg) const;
  // Each written tensor has every element at an address of its own, and shares none with another argument.
  void written_apart(at::ArrayRef<Arg> written, at::ArrayRef<Arg> read) const;

  // shape; `symbols` names the sizes in the error, such as "[S + 1]"
  void dims(Arg arg, int64_t count, const char* symbols) const;
  void shape(Arg arg, at::IntArrayRef expected, const char* symbols) const;
  // [N, ...], with as many blocks as `other` has.
  void blocked_shape(Arg arg, Arg other) const;
  void cache_shape(Arg cache) const;             // [N, Hkv, B, D]: Hkv >= 1, 1 <= B <= 1024, 1 <= D <= 256
  void scale_shape(Arg scale, Arg cache) const;  // [1], [Hkv] or [N, Hkv, B]

  // range; those that take tensors read their values, which lie in host memory
  void finite(const char* name, double value) const;  // as float32
  void seq_lens_range(const at::Tensor& seq_lens, int64_t table_width, int64_t block_size) const;
  // The entries [first, last) of one sequence's block table are ids of blocks; entries outside are not read.
  void table_range(const at::Tensor& block_tables, int64_t seq, int64_t first, int64_t last, int64_t num_blocks) const;
  // Slots are below num_slots, and one that is not negative stands once.
  void slots_range(const at::Tensor& slot_mapping, int64_t num_slots) const;
  // Both columns are ids of blocks, and a destination stands once; `apart`: and is no source.
  void mapping_range(const at::Tensor& block_mapping, int64_t src_blocks, int64_t dst_blocks, bool apart) const;
  // Scales are finite and above 0; of those per token and head, the ones in the slots that slot_mapping names.
  void scale_range(Arg scale, const at::Tensor* slot_mapping = nullptr) const;

 private:
  const char* op_;
};

}  // namespace paged_kv::bindings
