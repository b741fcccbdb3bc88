// The FFI handler of coded tables.
#include <memory>
#include <optional>
#include <vector>

#include "ffi/common/call_args.h"
#include "ffi/common/table_reader.h"
#include "ffi/cpu/args.h"
#include "ffi/cpu/coded/codebooks.h"
#include "ffi/cpu/dense/dense.h"
#include "ffi/cpu/handlers.h"

namespace jax_tt {
namespace {

// The arguments of a table with codes of b bits, m of each of its N rows of D columns and h more of each of H hot rows,
// in parts of w columns: ids, offsets and weights as of dense tables (ffi/common/dense_tables.h), sentinel f32 [],
// codes u8 [N, ceil(m b / 8)], hot_codes u8 [H, ceil(h b / 8)], hot_places u32 [ceil(N / 512), 17] or empty, and
// codebooks f32
// [(m + h) * 2**b, w].  Its result is out f32 [G.., B, D].
Status ReadCoded(TableReader* reader, std::unique_ptr<Pass>* pass) {
  std::optional<ffi::Dictionary> attrs;
  Buffers in, out;
  DenseProblem<Coded> problem;
  float* sums = nullptr;
  JAX_TT_RETURN_IF_ERROR(reader->ReadAttrs(&attrs));
  JAX_TT_RETURN_IF_ERROR(reader->ReadArgs(8, &in));
  JAX_TT_RETURN_IF_ERROR(reader->ReadRets(1, &out));
  JAX_TT_RETURN_IF_ERROR(ReadDenseCall(*attrs, {in[0], in[1], in[2]}, in[4], &problem.lookups, &problem));
  JAX_TT_RETURN_IF_ERROR(ReadCodebooks(*attrs, {in[4], in[5], in[6], in[7]}, &problem.codebooks));
  JAX_TT_RETURN_IF_ERROR(CheckSentinel(in[3], problem.lookups.table));
  problem.table = static_cast<const Coded*>(in[4].untyped_data());
  problem.dim = problem.codebooks.dim();
  JAX_TT_RETURN_IF_ERROR(Data(out[0], "out", problem.lookups.groups * problem.lookups.bags * problem.dim, &sums));
  *pass = DenseForward(problem, sums);
  return {};
}

ffi::Error ForwardImpl(OpThreads threads, Args args, Rets rets, ffi::Dictionary attrs) {
  const auto run = [&]() -> Status {
    const TablesCall call{args, rets, attrs, rets.size()};
    TableReader reader(call);
    std::vector<std::unique_ptr<Pass>> passes;
    while (!reader.done()) JAX_TT_RETURN_IF_ERROR(Named(ReadCoded(&reader, &passes.emplace_back()), reader.table()));
    return RunPasses(passes, MakePool(threads));
  };
  return ToError(run(), attrs);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(CodedForwardCpu, ForwardImpl,
                              ffi::Ffi::Bind().Ctx<OpThreads>().RemainingArgs().RemainingRets().Attrs());

}  // namespace jax_tt
