// The Python module paged_kv._prefix: what the prefix cache does for every block, without torch and quickly.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <string>
#include <utility>
#include <vector>

#include "prefix/block_index.h"
#include "prefix/sha256.h"

namespace py = pybind11;
using namespace paged_kv::prefix;

namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style>;
using Blocks = py::array_t<int32_t, py::array::c_style | py::array::forcecast>;

constexpr py::ssize_t AHEAD = 8;  // entries whose cache lines are asked for before they are needed

const uint8_t* digest_bytes(py::handle digest) {
  if (!PyBytes_Check(digest.ptr()) || PyBytes_GET_SIZE(digest.ptr()) != py::ssize_t(DIGEST_BYTES)) {
    throw py::value_error("digest: expected 32 bytes, got " + std::string(py::repr(digest)));
  }
  return reinterpret_cast<const uint8_t*>(PyBytes_AS_STRING(digest.ptr()));
}

py::list hash_blocks(const py::bytes& parent, const py::buffer& tokens, size_t start, size_t count, size_t block_bytes,
                     bool accelerated) {
  const py::buffer_info info = tokens.request();
  const size_t size = size_t(info.size * info.itemsize);
  if (start > size || count * block_bytes > size - start) {
    throw py::value_error("tokens: expected " + std::to_string(start + count * block_bytes) + " bytes, got " +
                          std::to_string(size));
  }
  std::vector<uint8_t> digests(count * DIGEST_BYTES);
  hash_chain(digest_bytes(parent), static_cast<const uint8_t*>(info.ptr) + start, block_bytes, count, accelerated,
             digests.data());
  py::list answer(count);
  for (size_t i = 0; i < count; ++i) {
    answer[i] = py::bytes(reinterpret_cast<const char*>(digests.data() + i * DIGEST_BYTES), DIGEST_BYTES);
  }
  return answer;
}

// Holds the arrays alive, and checks what Python gives.
class Index {
 public:
  Index(Array<uint64_t> slots, Array<uint8_t> digests, Array<uint8_t> parents, Array<uint8_t> groups,
        Array<uint8_t> cached)
      : slots_(std::move(slots)),
        digests_(std::move(digests)),
        parents_(std::move(parents)),
        groups_(std::move(groups)),
        cached_(std::move(cached)),
        num_blocks_(cached_.size()) {
    const uint64_t size = uint64_t(slots_.size());
    if ((size & (size - 1)) || size <= uint64_t(num_blocks_) || size > uint64_t(1) << 32) {
      throw py::value_error("slots: expected a power of two above the number of blocks, got " + std::to_string(size));
    }
    const py::ssize_t bytes = py::ssize_t(DIGEST_BYTES) * num_blocks_;
    if (digests_.size() != bytes || parents_.size() != bytes || groups_.size() != num_blocks_) {
      throw py::value_error("digests, parents and groups: expected 32, 32 and 1 bytes for each entry of cached");
    }
    index_ = {slots_.mutable_data(), size - 1, digests_.mutable_data(), parents_.mutable_data(), groups_.mutable_data(),
              cached_.mutable_data()};
  }

  py::object get(int group, py::handle digest) const {
    const int32_t block = index_.find(group, digest_bytes(digest));
    return block < 0 ? py::object(py::none()) : py::int_(block);
  }

  // Blocks of digests[start:stop], until one is not there.
  py::list find(int group, const py::list& digests, size_t start, size_t stop) const {
    py::list found;
    for (size_t i = start; i < stop && i < digests.size(); ++i) {
      const int32_t block = index_.find(group, digest_bytes(digests[i]));
      if (block < 0) break;
      found.append(block);
    }
    return found;
  }

  // Puts blocks under digests[start:], of which the first follows on `parent`; gives the places of those that were put
  // there, and (place, block) of those whose content another block has.
  std::pair<py::list, py::list> store(int group, const py::bytes& parent, const py::list& digests, py::ssize_t start,
                                      const Blocks& blocks) {
    const py::ssize_t count = checked(blocks);
    if (start < 0 || start + count > py::ssize_t(digests.size())) {
      throw py::value_error("digests: expected one for each block");
    }
    std::vector<const uint8_t*> names(size_t(count) + 1,
                                      digest_bytes(parent));  // of what stands before each, and its own
    for (py::ssize_t i = 0; i < count; ++i) names[i + 1] = digest_bytes(digests[start + i]);
    py::list fresh, twins;
    for (py::ssize_t i = 0; i < count; ++i) {
      if (i + AHEAD < count) index_.prefetch(group, names[i + AHEAD + 1]);
      const int32_t block = blocks.data()[i];
      const uint64_t slot = index_.slot(group, names[i + 1]);
      if (const int32_t known = BlockIndex::block_of(index_.slots[slot]); known < 0) {
        if (index_.cached[block]) throw py::value_error("blocks: " + std::to_string(block) + " has other content");
        index_.insert(slot, group, names[i], names[i + 1], block);
        fresh.append(start + i);
      } else if (known != block) {
        twins.append(std::pair(start + i, known));
      }
    }
    return {fresh, twins};
  }

  void remove(const Blocks& blocks) {
    const py::ssize_t count = checked(blocks);
    const int32_t* ids = blocks.data();
    for (py::ssize_t i = 0; i < count; ++i) {
      if (i + 2 * AHEAD < count) index_.prefetch(ids[i + 2 * AHEAD]);
      if (i + AHEAD < count) index_.prefetch(index_.groups[ids[i + AHEAD]], index_.digest_of(ids[i + AHEAD]));
      if (!index_.cached[ids[i]]) throw py::value_error("blocks: " + std::to_string(ids[i]) + " is not cached");
      index_.remove(ids[i]);
    }
  }

 private:
  py::ssize_t checked(const Blocks& blocks) const {
    for (py::ssize_t i = 0; i < blocks.size(); ++i) {
      const int32_t id = blocks.data()[i];
      if (id < 0 || id >= num_blocks_) throw py::value_error("blocks: no block " + std::to_string(id));
    }
    return blocks.size();
  }

  Array<uint64_t> slots_;
  Array<uint8_t> digests_, parents_, groups_, cached_;
  py::ssize_t num_blocks_;
  BlockIndex index_{};
};

}  // namespace

PYBIND11_MODULE(_prefix, m) {
  m.def("has_sha_instructions", &has_sha_instructions);
  m.def("hash_blocks", &hash_blocks, py::arg("parent"), py::arg("tokens"), py::arg("start"), py::arg("count"),
        py::arg("block_bytes"), py::arg("accelerated") = true);
  py::class_<Index>(m, "BlockIndex")
      .def(py::init<Array<uint64_t>, Array<uint8_t>, Array<uint8_t>, Array<uint8_t>, Array<uint8_t>>(),
           py::arg("slots").noconvert(), py::arg("digests").noconvert(), py::arg("parents").noconvert(),
           py::arg("groups").noconvert(), py::arg("cached").noconvert())
      .def("get", &Index::get)
      .def("find", &Index::find)
      .def("store", &Index::store)
      .def("remove", &Index::remove);
}
