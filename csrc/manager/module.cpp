// The Python module paged_kv._manager: what the block manager does for every block and row, without torch.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "manager/block_index.h"
#include "manager/loops.h"
#include "manager/sha256.h"

namespace py = pybind11;
using namespace paged_kv;
using namespace paged_kv::manager;

namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style>;
using Blocks = py::array_t<int32_t, py::array::c_style | py::array::forcecast>;

constexpr py::ssize_t AHEAD = 8;  // entries whose cache lines are asked for before they are needed

template <typename T>
void check_range(const char* name, const T& values, py::ssize_t limit) {
  for (py::ssize_t i = 0; i < values.size(); ++i) {
    const int64_t value = values.data()[i];
    if (value < 0 || value >= limit) {
      throw py::value_error(std::string(name) + ": expected 0 to " + std::to_string(limit - 1) + ", got " +
                            std::to_string(value));
    }
  }
}

const uint8_t* digest_bytes(py::handle digest) {
  if (!PyBytes_Check(digest.ptr()) || PyBytes_GET_SIZE(digest.ptr()) != py::ssize_t(DIGEST_BYTES)) {
    throw py::value_error("digest: expected 32 bytes, got " + std::string(py::repr(digest)));
  }
  return reinterpret_cast<const uint8_t*>(PyBytes_AS_STRING(digest.ptr()));
}

py::list hash_blocks(const py::bytes& parent, const py::bytes& tokens, size_t start, size_t count, size_t block_bytes,
                     bool accelerated) {
  const std::string_view bytes = tokens;
  if (start > bytes.size() || (block_bytes && count > (bytes.size() - start) / block_bytes)) {
    throw py::value_error("tokens: expected " + std::to_string(count) + " blocks of " + std::to_string(block_bytes) +
                          " bytes from " + std::to_string(start) + " on, got " + std::to_string(bytes.size()) +
                          " bytes");
  }
  std::vector<uint8_t> digests(count * DIGEST_BYTES);
  hash_chain(digest_bytes(parent), reinterpret_cast<const uint8_t*>(bytes.data()) + start, block_bytes, count,
             accelerated, digests.data());
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
    check_range("blocks", blocks, num_blocks_);
    const py::ssize_t count = blocks.size();
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
    check_range("blocks", blocks, num_blocks_);
    const py::ssize_t count = blocks.size();
    const int32_t* ids = blocks.data();
    for (py::ssize_t i = 0; i < count; ++i) {
      if (i + 2 * AHEAD < count) index_.prefetch(ids[i + 2 * AHEAD]);
      if (i + AHEAD < count) index_.prefetch(index_.groups[ids[i + AHEAD]], index_.digest_of(ids[i + AHEAD]));
      if (!index_.cached[ids[i]]) throw py::value_error("blocks: " + std::to_string(ids[i]) + " is not cached");
      index_.remove(ids[i]);
    }
  }

 private:
  Array<uint64_t> slots_;
  Array<uint8_t> digests_, parents_, groups_, cached_;
  py::ssize_t num_blocks_;
  BlockIndex index_{};
};

// The arrays of a pool that its loops change; see pool.py.
class PoolArrays {
 public:
  PoolArrays(Array<int32_t> refs, Array<uint8_t> cached, Array<int32_t> queue, Array<int64_t> places)
      : refs_(std::move(refs)), cached_(std::move(cached)), queue_(std::move(queue)), places_(std::move(places)) {
    if (cached_.size() != refs_.size() || places_.size() != refs_.size()) {
      throw py::value_error("cached and places: expected one entry for each of refs");
    }
  }

  // (blocks that had two holders, the queue's new end, blocks that are free now)
  py::tuple drop(const Blocks& ids, int64_t tail) {
    check_range("ids", ids, refs_.size());
    if (tail < 0 || tail + ids.size() > queue_.size()) throw py::value_error("tail: no room behind it");
    const Dropped dropped = manager::drop(ids.data(), ids.size(), refs_.mutable_data(), cached_.data(),
                                          queue_.mutable_data(), places_.mutable_data(), tail);
    py::list freed(dropped.freed.size());
    for (size_t i = 0; i < dropped.freed.size(); ++i) freed[i] = dropped.freed[i];
    return py::make_tuple(dropped.num_shared_less, dropped.tail, freed);
  }

  // (the blocks, the queue's new front); `count` of its entries must be true ones.
  py::tuple take_oldest(int64_t head, int64_t count) {
    if (head < 0 || head > queue_.size()) throw py::value_error("head: no such place of the queue");
    Blocks ids(count);
    const int64_t front =
        manager::take_oldest(queue_.data(), queue_.size(), places_.mutable_data(), head, count, ids.mutable_data());
    if (front < 0) throw py::value_error("count: the queue has fewer than " + std::to_string(count) + " true entries");
    return py::make_tuple(std::move(ids), front);
  }

 private:
  Array<int32_t> refs_;
  Array<uint8_t> cached_;
  Array<int32_t> queue_;
  Array<int64_t> places_;
};

// The arrays of sequences' rows; see tables.py.
class RowArrays {
 public:
  RowArrays(Array<int64_t> room, Array<int64_t> seq_len, Array<int64_t> num_blocks, Array<int64_t> next_slot,
            Array<int32_t> blocks)
      : room_(std::move(room)),
        seq_len_(std::move(seq_len)),
        num_blocks_(std::move(num_blocks)),
        next_slot_(std::move(next_slot)),
        blocks_(std::move(blocks)) {
    if (blocks_.ndim() != 3) throw py::value_error("blocks: expected [groups, rows, width]");
    rows_.num_groups = blocks_.shape(0), rows_.num_rows = blocks_.shape(1), rows_.width = blocks_.shape(2);
    for (const Array<int64_t>* array : {&room_, &seq_len_, &num_blocks_}) {
      if (array->size() != rows_.num_rows) throw py::value_error("room, seq_len and num_blocks: expected [rows]");
    }
    if (next_slot_.size() != rows_.num_groups * rows_.num_rows) {
      throw py::value_error("next_slot: expected [groups, rows]");
    }
    rows_.room = room_.mutable_data(), rows_.seq_len = seq_len_.mutable_data();
    rows_.num_blocks = num_blocks_.mutable_data(), rows_.next_slot = next_slot_.mutable_data();
    rows_.blocks = blocks_.mutable_data();
  }

  // The next slot of each row, [groups, rows]; or None, and nothing done, where one has no room.
  py::object advance(const Array<int64_t>& rows) {
    check_range("rows", rows, rows_.num_rows);
    for (py::ssize_t i = 0; i < rows.size(); ++i) {
      if (rows_.room[rows.data()[i]] <= 0) return py::none();
    }
    Array<int64_t> slots({rows_.num_groups, int64_t(rows.size())});
    manager::advance(rows_, rows.data(), rows.size(), slots.mutable_data());
    return slots;
  }

  // Those of the rows that have no room, whether the blocks of all of these are full, and for each group the last block
  // of each, -1 where it has none.
  py::tuple asking(const Array<int64_t>& rows, int64_t block_size) const {
    check_range("rows", rows, rows_.num_rows);
    std::vector<int64_t> found;
    bool full = true;
    for (py::ssize_t i = 0; i < rows.size(); ++i) {
      const int64_t row = rows.data()[i];
      if (rows_.room[row] > 0) continue;
      full = full && rows_.seq_len[row] == rows_.num_blocks[row] * block_size;
      found.push_back(row);
    }
    py::list last(rows_.num_groups);
    for (int64_t group = 0; group < rows_.num_groups; ++group) {
      py::list ids(found.size());
      for (size_t i = 0; i < found.size(); ++i) {
        const int32_t* blocks = rows_.blocks + (group * rows_.num_rows + found[i]) * rows_.width;
        const int64_t num_blocks = rows_.num_blocks[found[i]];
        ids[i] = num_blocks ? blocks[num_blocks - 1] : -1;
      }
      last[group] = ids;
    }
    return py::make_tuple(Array<int64_t>(py::ssize_t(found.size()), found.data()), full, last);
  }

  // Gives each of the rows, whose blocks are full, one more: taken, [groups, rows].
  void add_blocks(const Array<int64_t>& rows, const Blocks& taken, int64_t block_size) {
    check_range("rows", rows, rows_.num_rows);
    if (taken.size() != rows_.num_groups * rows.size()) throw py::value_error("taken: expected [groups, rows]");
    for (py::ssize_t i = 0; i < rows.size(); ++i) {
      if (rows_.num_blocks[rows.data()[i]] >= rows_.width) throw py::value_error("rows: a table is full");
    }
    manager::add_blocks(rows_, rows.data(), rows.size(), taken.data(), block_size);
  }

  // Slots of positions [start, stop) of the row in the group, [stop - start].
  Array<int64_t> slots(int64_t group, int64_t row, int64_t start, int64_t stop, int64_t block_size) const {
    if (group < 0 || group >= rows_.num_groups || row < 0 || row >= rows_.num_rows || block_size < 1 || start < 0 ||
        start > stop || stop > rows_.width * block_size) {
      throw py::value_error("slots: no such positions");
    }
    Array<int64_t> slots(stop - start);
    const int32_t* blocks = rows_.blocks + (group * rows_.num_rows + row) * rows_.width + start / block_size;
    fill_slots(blocks, block_size, start, stop, slots.mutable_data());
    return slots;
  }

 private:
  Array<int64_t> room_, seq_len_, num_blocks_, next_slot_;
  Array<int32_t> blocks_;
  Rows rows_{};
};

}  // namespace

PYBIND11_MODULE(_manager, m) {
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
  py::class_<PoolArrays>(m, "PoolArrays")
      .def(py::init<Array<int32_t>, Array<uint8_t>, Array<int32_t>, Array<int64_t>>(), py::arg("refs").noconvert(),
           py::arg("cached").noconvert(), py::arg("queue").noconvert(), py::arg("places").noconvert())
      .def("drop", &PoolArrays::drop)
      .def("take_oldest", &PoolArrays::take_oldest);
  py::class_<RowArrays>(m, "RowArrays")
      .def(py::init<Array<int64_t>, Array<int64_t>, Array<int64_t>, Array<int64_t>, Array<int32_t>>(),
           py::arg("room").noconvert(), py::arg("seq_len").noconvert(), py::arg("num_blocks").noconvert(),
           py::arg("next_slot").noconvert(), py::arg("blocks").noconvert())
      .def("advance", &RowArrays::advance)
      .def("asking", &RowArrays::asking)
      .def("add_blocks", &RowArrays::add_blocks)
      .def("slots", &RowArrays::slots);
}
