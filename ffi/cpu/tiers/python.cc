#include "ffi/cpu/tiers/python.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <stdint.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "ffi/common/hash_checks.h"
#include "ffi/common/names.h"
#include "ffi/core/half.h"
#include "ffi/cpu/dense/stored_rows.h"
#include "ffi/cpu/hash/hash.h"
#include "ffi/cpu/passes.h"
#include "ffi/cpu/tiers/copy_rows.h"
#include "ffi/cpu/tiers/key_index.h"

namespace nb = nanobind;

namespace jax_tt {
namespace {

template <typename T>
using Vector = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Keys = Vector<const uint64_t>;

void CheckLengths(size_t keys, size_t numbers) {
  if (keys != numbers) throw std::invalid_argument("there must be one number for every key");
}

// Other Python threads run during calls that take long enough. After a short one, this thread would wait for them
// longer than it has taken.
class WithoutLock {
 public:
  explicit WithoutLock(size_t keys) {
    if (keys >= 512) release_.emplace();
  }

 private:
  std::optional<nb::gil_scoped_release> release_;
};

// Of an index; callers see to it that no two threads use the same one.
void FindInto(const KeyIndex& self, const Keys& keys, const Vector<int64_t>& numbers) {
  CheckLengths(keys.size(), numbers.size());
  const WithoutLock unlocked(keys.size());
  self.Find(keys.data(), static_cast<int64_t>(keys.size()), numbers.data());
}

void Set(KeyIndex& self, const Keys& keys, const Vector<const int64_t>& numbers, const Vector<int64_t>& before) {
  CheckLengths(keys.size(), numbers.size());
  CheckLengths(keys.size(), before.size());
  const int64_t* const given = numbers.data();
  if (std::any_of(given, given + numbers.size(), [](int64_t number) { return number < 0; }))
    throw std::invalid_argument("a number must not be negative");
  const WithoutLock unlocked(keys.size());
  self.Set(keys.data(), numbers.data(), static_cast<int64_t>(keys.size()), before.data());
}

void Erase(KeyIndex& self, const Keys& keys, const Vector<int64_t>& before) {
  CheckLengths(keys.size(), before.size());
  const WithoutLock unlocked(keys.size());
  self.Erase(keys.data(), static_cast<int64_t>(keys.size()), before.data());
}

template <typename T, size_t axes>
using Array = nb::ndarray<T, nb::ndim<axes>, nb::c_contig, nb::device::cpu>;

template <typename A>
auto OfArray(const A& array) {
  return Counted<std::remove_pointer_t<decltype(array.data())>>{array.data(), static_cast<int64_t>(array.size())};
}

void Require(const Status& status) {
  if (!status.ok()) throw std::invalid_argument(status.message);
}

// In the calling thread: XLA's threads are those of the step that runs at the same time.
void RunHere(std::unique_ptr<Pass> pass) {
  const nb::gil_scoped_release release;
  std::vector<std::unique_ptr<Pass>> passes;
  passes.push_back(std::move(pass));
  const Status status = RunPasses(passes, Pool{1, [](const std::function<void()>&) {}});
  if (!status.ok()) throw std::runtime_error(status.message);
}

void HashInsertHere(const Array<uint32_t, 3>& keys, const Array<uint32_t, 3>& scores, const Array<int32_t, 2>& touched,
                    const Array<const uint32_t, 2>& batch, const Vector<const bool>& present,
                    const Array<const uint32_t, 2>& given, int32_t now, const std::string& policy,
                    const Vector<int32_t>& slots, const Array<uint32_t, 2>& inserted,
                    const Array<uint32_t, 2>& old_keys, const Vector<int32_t>& old_touched,
                    const Vector<int32_t>& counts, const Vector<int32_t>& found) {
  std::optional<HashDirectory> directory;
  Require(MakeHashDirectory(static_cast<int64_t>(touched.shape(0)), static_cast<int64_t>(touched.shape(1)),
                            {OfArray(keys), OfArray(scores), OfArray(touched)}, &directory));
  const uint32_t epoch = 0;
  HashEntry entry{.directory = *directory};
  Require(MakeHashBatch(OfArray(batch), OfArray(present), &entry.asked.batch));
  Require(FindName("policy", kHashPolicyNames, policy, &entry.asked.policy));
  const size_t n = present.size();
  const bool custom = entry.asked.policy == HashPolicy::kCustom;
  for (const size_t size : {2 * slots.size(), 2 * old_touched.size(), 2 * found.size(), inserted.size(),
                            old_keys.size(), custom ? given.size() : 2 * n})
    if (size != 2 * n) throw std::invalid_argument("all arrays of a batch must have the same length");
  Require(CheckCount("counts", static_cast<int64_t>(counts.size()), kHashCounts));
  entry.asked.given = given.data();
  entry.asked.now = &now;
  entry.asked.epoch = &epoch;
  entry.done = {slots.data(),       inserted.data(), old_keys.data(), nullptr,
                old_touched.data(), counts.data(),   found.data()};
  RunHere(HashInsert(entry, 1));
}

// Rows [n, features] of a type, as bytes; those of keys that are not wanted stay as they are.
void HashInitialHere(const Array<const uint32_t, 1>& seed, const Array<const int32_t, 2>& quantiles, float scale,
                     bool with_sign, const Array<const uint32_t, 2>& keys, const Vector<const bool>& wanted,
                     const std::string& type, const Array<uint8_t, 2>& rows) {
  HashBatch batch;
  Require(MakeHashBatch(OfArray(keys), OfArray(wanted), &batch));
  if (rows.shape(0) != wanted.size() || seed.size() != 2 || quantiles.size() != kQuantiles)
    throw std::invalid_argument("the arrays do not fit");
  const InitialValues values{quantiles.data(), {seed.data()[0], seed.data()[1]}, scale, with_sign};
  const auto run = [&](auto tag) {
    using T = decltype(tag);
    if (rows.shape(1) % sizeof(T) != 0) throw std::invalid_argument("rows must be whole numbers of " + type);
    const auto features = static_cast<int64_t>(rows.shape(1) / sizeof(T));
    RunHere(HashInitial(values, batch, features, reinterpret_cast<T*>(rows.data())));
  };
  if (type == "float32") return run(float{});
  if (type == "float64") return run(double{});
  if (type == "bfloat16") return run(bfloat16{});
  if (type == "float16") return run(float16{});
  throw std::invalid_argument("rows of " + type);
}

}  // namespace

void AddTiers(nb::module_& m) {
  nb::class_<KeyIndex>(m, "KeyIndex", "See jax_tt._tiers.key_index.KeyIndex.")
      .def(nb::init<>())
      .def("__len__", &KeyIndex::size)
      .def("find_into", &FindInto, nb::arg("keys").noconvert(), nb::arg("numbers").noconvert())
      .def("set", &Set, nb::arg("keys").noconvert(), nb::arg("numbers").noconvert(), nb::arg("before").noconvert())
      .def("erase", &Erase, nb::arg("keys").noconvert(), nb::arg("before").noconvert());
  m.def(
      "copy_rows",
      [](const Keys& from, const Keys& to, int64_t bytes) {
        if (from.size() != to.size()) throw std::invalid_argument("there must be a target for every source");
        if (bytes < 0) throw std::invalid_argument("rows must not have a negative number of bytes");
        const WithoutLock unlocked(from.size());
        CopyRows(from.data(), to.data(), static_cast<int64_t>(from.size()), bytes);
      },
      nb::arg("sources").noconvert(), nb::arg("targets").noconvert(), nb::arg("size"),
      "See jax_tt._tiers.row_bytes.copy_rows.");
  m.def(
      "write_rows",
      [](int file, const Keys& rows, int64_t bytes) {
        if (bytes <= 0) throw std::invalid_argument("rows must have bytes");
        const WithoutLock unlocked(rows.size());
        return WriteRows(file, rows.data(), static_cast<int64_t>(rows.size()), bytes);
      },
      nb::arg("file"), nb::arg("rows").noconvert(), nb::arg("size"), "See jax_tt._tiers.map_reader.");
  m.def(
      "add_checksums",
      [](const nb::ndarray<const uint8_t, nb::ndim<2>, nb::device::cpu>& rows, const Keys& factors,
         const Vector<uint64_t>& sums) {
        const size_t bytes = rows.shape(1);
        if (factors.size() != (bytes + 3) / 4 || sums.size() != rows.shape(0) || (bytes > 1 && rows.stride(1) != 1))
          throw std::invalid_argument("the arrays do not fit");
        const WithoutLock unlocked(sums.size());
        for (size_t k = 0; k < sums.size(); ++k)
          sums.data()[k] += Checksum(rows.data() + static_cast<int64_t>(k) * rows.stride(0), bytes, factors.data());
      },
      nb::arg("rows").noconvert(), nb::arg("factors").noconvert(), nb::arg("sums").noconvert(),
      "See jax_tt._tiers.row_bytes.checksums.");
  m.def("hash_insert_here", &HashInsertHere, "The op hash_tables_insert on numpy arrays, in the calling thread.");
  m.def("hash_initial_here", &HashInitialHere, "The op hash_tables_initial on numpy arrays, in the calling thread.");
}

}  // namespace jax_tt
