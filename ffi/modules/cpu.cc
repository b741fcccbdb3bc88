// The Python module: names of the handlers, and sizes needed at trace time.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <tuple>
#include <vector>

#include "ffi/common/python_reports.h"
#include "ffi/common/python_rules.h"
#include "ffi/core/plan.h"
#include "ffi/core/tt_shape.h"
#include "ffi/cpu/args.h"
#include "ffi/cpu/coded/python.h"
#include "ffi/cpu/handlers.h"
#include "ffi/cpu/kernels/kernels.h"
#include "ffi/cpu/tiers/python.h"

namespace nb = nanobind;

namespace jax_tt {
namespace {

template <typename T>
nb::capsule Encapsulate(T* handler) {
  static_assert(std::is_invocable_r_v<XLA_FFI_Error*, T, XLA_FFI_CallFrame*>, "not an XLA FFI handler");
  return nb::capsule(reinterpret_cast<void*>(handler));
}

nb::dict Registrations() {
  nb::dict targets;
  targets["jax_tt_plan_v1"] = Encapsulate(TTPlanCpu);
  targets["jax_tt_forward_v1"] = Encapsulate(TTForwardCpu);
  targets["jax_tt_backward_v1"] = Encapsulate(TTBackwardCpu);
  targets["jax_tt_update_v1"] = Encapsulate(TTUpdateCpu);
  targets["jax_tt_apply_v1"] = Encapsulate(TTApplyCpu);
  targets["jax_tt_dense_forward_v1"] = Encapsulate(DenseForwardCpu);
  targets["jax_tt_dense_backward_v1"] = Encapsulate(DenseBackwardCpu);
  targets["jax_tt_dense_update_v1"] = Encapsulate(DenseUpdateCpu);
  targets["jax_tt_coded_forward_v1"] = Encapsulate(CodedForwardCpu);
  targets["jax_tt_cache_probe_v1"] = Encapsulate(CacheProbeCpu);
  targets["jax_tt_cache_forward_v1"] = Encapsulate(CacheForwardCpu);
  targets["jax_tt_cache_observe_v1"] = Encapsulate(CacheObserveCpu);
  targets["jax_tt_cache_populate_v1"] = Encapsulate(CachePopulateCpu);
  targets["jax_tt_hash_tables_find_v1"] = Encapsulate(HashTablesFindCpu);
  targets["jax_tt_hash_tables_insert_v1"] = Encapsulate(HashTablesInsertCpu);
  targets["jax_tt_hash_tables_set_back_v1"] = Encapsulate(HashTablesSetBackCpu);
  targets["jax_tt_hash_tables_initial_v1"] = Encapsulate(HashTablesInitialCpu);
  targets["jax_tt_hash_tables_reset_v1"] = Encapsulate(HashTablesResetCpu);
  targets["jax_tt_hash_tables_exchange_v1"] = Encapsulate(HashTablesExchangeCpu);
  targets["jax_tt_hash_double_v1"] = Encapsulate(HashDoubleCpu);
  targets["jax_tt_bag_offsets_v1"] = Encapsulate(BagOffsetsCpu);
  targets["jax_tt_route_bags_v1"] = Encapsulate(RouteBagsCpu);
  targets["jax_tt_route_distinct_v1"] = Encapsulate(RouteDistinctCpu);
  targets["jax_tt_scan_rows_v1"] = Encapsulate(ScanRowsCpu);
  targets["jax_tt_scan_coded_v1"] = Encapsulate(ScanCodedCpu);
  targets["jax_tt_scan_train_v1"] = Encapsulate(ScanTrainCpu);
  return targets;
}

// (int32 elements of the plan for n ids, elements that the forward pass saves per id) for a batch of about `hint` ids.
std::tuple<int64_t, int64_t> PlanSize(const std::vector<int64_t>& row_factors, const std::vector<int64_t>& col_factors,
                                      const std::vector<int64_t>& ranks, int64_t num_embeddings, int64_t n,
                                      int64_t hint) {
  const auto span = [](const std::vector<int64_t>& values) { return Span64(values.data(), values.size()); };
  TTShape shape;
  for (const Status& status : {ReadShape(span(row_factors), span(col_factors), span(ranks), num_embeddings, &shape),
                               CheckIds(n), CheckIds(hint)})
    if (!status.ok()) throw std::invalid_argument(status.message);
  const Contraction contraction = ChooseContraction(shape, hint);
  return {MakeLayout(shape, contraction, n).size(), SavedPerPosition(shape, contraction, hint)};
}

}  // namespace
}  // namespace jax_tt

NB_MODULE(_cpu, m) {
  m.def("registrations", &jax_tt::Registrations, "FFI targets by name.");
  m.def("listen", &jax_tt::Listen, nb::arg("function").none(),
        "Function of table, num_embeddings, count, id and position that ids out of range are reported to, or None.");
  jax_tt::AddNames(m);
  m.def("plan_size", &jax_tt::PlanSize, nb::arg("row_factors"), nb::arg("col_factors"), nb::arg("ranks"),
        nb::arg("num_embeddings"), nb::arg("n"), nb::arg("hint"),
        "Sizes of the buffers that travel from the plan and the forward pass to the backward pass.");
  jax_tt::AddCodes(m);
  jax_tt::AddTiers(m);
  m.def("instruction_set", [] { return jax_tt::GetKernels<float>().name; }, "Instruction set of the kernels in use.");
}
