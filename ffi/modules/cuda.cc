// The Python module of the CUDA kernels: names of the handlers, and the sizes that tracing needs.
//
// It is built twice: as _cuda for a GPU, and as _emulated, whose handlers run on the CPU under names of their own.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "ffi/common/args.h"
#include "ffi/common/python_reports.h"
#include "ffi/common/python_rules.h"
#include "ffi/cuda/cache/cache.h"
#include "ffi/cuda/dense/dense.h"
#include "ffi/cuda/handlers.h"
#include "ffi/cuda/hash/hash.h"
#include "ffi/cuda/notices.h"
#include "ffi/cuda/tables/works.h"
#include "ffi/cuda/tt/tt.h"
#include "ffi/cuda/tt_plan/plan.h"

namespace nb = nanobind;

namespace jax_tt {
namespace {

#if defined(JAX_TT_EMULATION)
constexpr const char* kPrefix = "jax_tt_emulated_";
#else
constexpr const char* kPrefix = "jax_tt_";
#endif

nb::dict Registrations() {
  nb::dict targets;
  const auto add = [&](const char* name, auto* handler) {
    static_assert(std::is_invocable_r_v<XLA_FFI_Error*, decltype(*handler), XLA_FFI_CallFrame*>,
                  "not an XLA FFI handler");
    const std::string target = std::string(kPrefix) + name + "_v1";
    targets[target.c_str()] = nb::capsule(reinterpret_cast<void*>(handler));
  };
  add("plan", TTPlanCuda);
  add("forward", TTForwardCuda);
  add("backward", TTBackwardCuda);
  add("update", TTUpdateCuda);
  add("apply", TTApplyCuda);
  add("dense_forward", DenseForwardCuda);
  add("dense_backward", DenseBackwardCuda);
  add("dense_update", DenseUpdateCuda);
  add("bag_offsets", BagOffsetsCuda);
  add("cache_probe", CacheProbeCuda);
  add("cache_observe", CacheObserveCuda);
  add("cache_populate", CachePopulateCuda);
  add("hash_tables_find", HashTablesFindCuda);
  add("hash_tables_insert", HashTablesInsertCuda);
  add("hash_tables_set_back", HashTablesSetBackCuda);
  add("hash_tables_initial", HashTablesInitialCuda);
  add("hash_tables_exchange", HashTablesExchangeCuda);
  add("hash_double", HashDoubleCuda);
  return targets;
}

using Sizes = std::vector<int64_t>;

void Require(const Status& status) {
  if (!status.ok()) throw std::invalid_argument(status.message);
}

TTShape MakeShape(const Sizes& row_factors, const Sizes& col_factors, const Sizes& ranks, int64_t num_embeddings,
                  int64_t n) {
  const auto span = [](const Sizes& values) { return Span64(values.data(), values.size()); };
  TTShape shape;
  Require(ReadShape(span(row_factors), span(col_factors), span(ranks), num_embeddings, &shape));
  Require(CheckIds(n));
  return shape;
}

std::tuple<int64_t, int64_t> PlanSize(const Sizes& row_factors, const Sizes& col_factors, const Sizes& ranks,
                                      int64_t num_embeddings, int64_t n, int64_t /*hint*/) {
  return {MakeCudaPlan(MakeShape(row_factors, col_factors, ranks, num_embeddings, n), n).size(), 0};
}

int64_t WorkspaceSize(const std::string& op, const Sizes& row_factors, const Sizes& col_factors, const Sizes& ranks,
                      int64_t n, bool weights, bool resharded, bool skip_nonfinite, bool own_plan) {
  const TTShape shape = MakeShape(row_factors, col_factors, ranks, 0, n);
  const TTAsked asked{weights, resharded, skip_nonfinite};
  if (op == "plan") return PlanWorkspace(shape, MakeCudaPlan(shape, n));
  if (op == "forward") return TTForwardWorkspace(shape, n, own_plan);
  if (op == "backward") return TTBackwardWorkspace(shape, n, asked);
  if (op == "update") return TTUpdateWorkspace(shape, n, asked);
  if (op == "apply") return TTApplyWorkspace();
  throw std::invalid_argument("op: got '" + op + "', expected plan, forward, backward, update or apply");
}

int64_t DenseWorkspaceSize(const std::string& op, const Sizes& num_embeddings, const Sizes& features, const Sizes& n,
                           int64_t columns) {
  if (num_embeddings.size() != features.size() || n.size() != features.size())
    throw std::invalid_argument("num_embeddings, features, n: expected as many of each");
  std::vector<DenseSize> sizes;
  for (size_t k = 0; k < n.size(); ++k) {
    Require(CheckIds(n[k]));
    sizes.push_back({num_embeddings[k], features[k], n[k]});
  }
  int64_t bytes = 0;
  Require(DenseWorkspace(op, sizes, columns, &bytes));
  return bytes;
}

int64_t CacheWorkspaceSize(const std::string& op, int64_t n, int64_t sets, int64_t ways, int64_t buckets,
                           int64_t room) {
  Require(CheckIds(n));
  return CacheWorkspace(op, n, {.sets = sets, .ways = ways, .buckets = buckets, .room = room});
}

int64_t HashWorkspaceSize(const std::string& op, int64_t n, int64_t sets, int64_t ways) {
  Require(CheckIds(n));
  return HashWorkspace(op, n, sets, ways);
}

}  // namespace
}  // namespace jax_tt

#if defined(JAX_TT_EMULATION)
NB_MODULE(_emulated, m) {
  m.def("set_seed", &jax_tt::emulation::SetSeed, nb::arg("seed"),
        "Seed of the order of blocks and threads in every launch from here on; 0 is the natural order.");
  m.def("launches", &jax_tt::emulation::Launches, "Grids launched in this process so far.");
  m.def(
      "launch_counts",
      [] {
        nb::dict counts;
        for (const auto& [kernel, count] : jax_tt::emulation::LaunchCounts())
          counts[kernel.c_str()] = nb::make_tuple(count.launches, count.blocks, count.threads);
        return counts;
      },
      "Launches, blocks and threads by kernel, and those of memsets, since they were cleared.");
  m.def("clear_launch_counts", &jax_tt::emulation::ClearLaunchCounts, "Begins to count anew.");
#else
NB_MODULE(_cuda, m) {
#endif
  m.def("registrations", &jax_tt::Registrations, "FFI targets by name.");
  m.def(
      "listen",
      [](nb::object function, int device) {
        if (function.is_none())
          jax_tt::ReportNotices();
        else
          jax_tt::WatchNotices(device);
        jax_tt::Listen(std::move(function));
      },
      nb::arg("function").none(), nb::arg("device") = 0,
      "As in _cpu; the count is 0, because kernels tell of one id and count none. The device is one of this process.");
  jax_tt::AddNames(m);
  m.def("plan_size", &jax_tt::PlanSize, nb::arg("row_factors"), nb::arg("col_factors"), nb::arg("ranks"),
        nb::arg("num_embeddings"), nb::arg("n"), nb::arg("hint"),
        "Sizes of the buffers that travel from the plan and the forward pass to the backward pass.");
  m.def("workspace_size", &jax_tt::WorkspaceSize, nb::arg("op"), nb::arg("row_factors"), nb::arg("col_factors"),
        nb::arg("ranks"), nb::arg("n"), nb::kw_only(), nb::arg("weights") = false, nb::arg("resharded") = false,
        nb::arg("skip_nonfinite") = false, nb::arg("own_plan") = false,
        "Bytes of workspace that a TT op takes for n ids.");
  m.def("tables_workspace_size", nb::overload_cast<const std::vector<int64_t>&>(&jax_tt::WorksMemory), nb::arg("bytes"),
        "Bytes of workspace of one call on several TT tables, each of which takes as many bytes.");
  m.def(
      "dense_workspace_size", &jax_tt::DenseWorkspaceSize, nb::arg("op"), nb::arg("num_embeddings"),
      nb::arg("features"), nb::arg("n"), nb::arg("columns") = 0,
      "Bytes of workspace that an op on dense tables takes, each with n ids, and with this many columns of one array.");
  m.def("cache_workspace_size", &jax_tt::CacheWorkspaceSize, nb::arg("op"), nb::arg("n"), nb::arg("sets"),
        nb::arg("ways"), nb::arg("buckets"), nb::arg("room"),
        "Bytes of workspace that an op on the row cache takes for n ids.");
  m.def("hash_workspace_size", &jax_tt::HashWorkspaceSize, nb::arg("op"), nb::arg("n"), nb::arg("sets"),
        nb::arg("ways"), "Bytes of workspace that an op on hash tables takes for n keys.");
}
