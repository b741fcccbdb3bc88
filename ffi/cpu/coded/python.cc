#include "ffi/cpu/coded/python.h"

#include <nanobind/ndarray.h>
#include <stdint.h>

#include <limits>
#include <stdexcept>
#include <vector>

#include "ffi/cpu/kernels/search_kernels.h"

namespace nb = nanobind;

namespace jax_tt {
namespace {

template <typename T, size_t axes>
using Array = nb::ndarray<T, nb::ndim<axes>, nb::c_contig, nb::device::cpu>;

// In the calling thread.
void ChooseSums(const Array<const float, 2>& rows, const Array<const float, 3>& codebooks, int64_t beam, int64_t sweeps,
                const Array<int32_t, 2>& codes) {
  CodeSearch search = {};
  search.n = static_cast<int64_t>(rows.shape(0));
  search.width = static_cast<int64_t>(rows.shape(1));
  search.terms = static_cast<int64_t>(codebooks.shape(0));
  search.size = static_cast<int64_t>(codebooks.shape(1));
  if (codebooks.shape(2) != rows.shape(1) || codes.shape(0) != rows.shape(0) || codes.shape(1) != codebooks.shape(0))
    throw std::invalid_argument("the arrays do not fit");
  if (search.terms < 1 || search.size < 1 || search.size > std::numeric_limits<int32_t>::max() / kSearchRows)
    throw std::invalid_argument("codebooks must have rows, and less than 2^29");
  if (beam < 1 || beam > kSearchRows || sweeps < 0)
    throw std::invalid_argument("the beam must have 1 to 4 sums, and sweeps must not be negative");
  const nb::gil_scoped_release release;
  search.rows = rows.data();
  search.codebooks = codebooks.data();
  search.codes = codes.data();
  search.beam = beam;
  search.sweeps = sweeps;
  search.stride = (search.size + kSearchStride - 1) / kSearchStride * kSearchStride;
  std::vector<float> columns(search.terms * search.width * search.stride);
  std::vector<float> lengths(search.terms * search.stride, std::numeric_limits<float>::infinity());
  for (int64_t term = 0; term < search.terms; ++term)
    for (int64_t code = 0; code < search.size; ++code) {
      const float* const row = search.codebooks + (term * search.size + code) * search.width;
      float length = 0;
      const int64_t part = term * search.stride + code / kSearchStride * kSearchStride;
      for (int64_t t = 0; t < search.width; ++t) {
        columns[part * search.width + t * kSearchStride + code % kSearchStride] = row[t];
        length += row[t] * row[t];
      }
      lengths[term * search.stride + code] = length;
    }
  std::vector<float> floats(search.floats_needed());
  std::vector<int32_t> integers(search.integers_needed());
  search.columns = columns.data();
  search.lengths = lengths.data();
  search.floats = floats.data();
  search.integers = integers.data();
  GetSearchCodes()(search);
}

}  // namespace

void AddCodes(nb::module_& m) {
  m.def("choose_sums", &ChooseSums, nb::arg("rows").noconvert(), nb::arg("codebooks").noconvert(), nb::arg("beam"),
        nb::arg("sweeps"), nb::arg("codes").noconvert(), "See jax_tt._kinds.coded.search.search_sums.");
}

}  // namespace jax_tt
