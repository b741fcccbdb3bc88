#include "ffi/cpu/tiers_python.h"

#include <nanobind/ndarray.h>
#include <stdint.h>

#include <stdexcept>

#include "ffi/cpu/copy_rows.h"
#include "ffi/cpu/key_index.h"

namespace nb = nanobind;

namespace jax_tt {
namespace {

template <typename T>
using Vector = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Keys = Vector<const uint64_t>;

void CheckLengths(size_t keys, size_t numbers) {
  if (keys != numbers) throw std::invalid_argument("there must be one number for every key");
}

}  // namespace

void AddTiers(nb::module_& m) {
  nb::class_<KeyIndex>(m, "KeyIndex", "See jax_tt._tiers.key_index.KeyIndex.")
      .def(nb::init<>())
      .def("__len__", &KeyIndex::size)
      .def(
          "find_into",
          [](const KeyIndex& self, const Keys& keys, const Vector<int64_t>& numbers) {
            CheckLengths(keys.size(), numbers.size());
            self.Find(keys.data(), static_cast<int64_t>(keys.size()), numbers.data());
          },
          nb::arg("keys").noconvert(), nb::arg("numbers").noconvert())
      .def(
          "set",
          [](KeyIndex& self, const Keys& keys, const Vector<const int64_t>& numbers) {
            CheckLengths(keys.size(), numbers.size());
            self.Set(keys.data(), numbers.data(), static_cast<int64_t>(keys.size()));
          },
          nb::arg("keys").noconvert(), nb::arg("numbers").noconvert())
      .def(
          "erase", [](KeyIndex& self, const Keys& keys) { self.Erase(keys.data(), static_cast<int64_t>(keys.size())); },
          nb::arg("keys").noconvert());
  m.def(
      "copy_rows",
      [](const Keys& from, const Keys& to, int64_t bytes) {
        if (from.size() != to.size()) throw std::invalid_argument("there must be a target for every source");
        const nb::gil_scoped_release release;
        CopyRows(from.data(), to.data(), static_cast<int64_t>(from.size()), bytes);
      },
      nb::arg("sources").noconvert(), nb::arg("targets").noconvert(), nb::arg("size"),
      "See jax_tt._tiers.addresses.copy_rows.");
}

}  // namespace jax_tt
