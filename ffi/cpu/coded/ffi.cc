// The FFI handler of coded tables.
#include <memory>
#include <vector>

#include "ffi/common/call_args.h"
#include "ffi/cpu/args.h"
#include "ffi/cpu/coded/codebooks.h"
#include "ffi/cpu/dense/dense.h"
#include "ffi/cpu/handlers.h"

namespace jax_tt {
namespace {

Status ReadCoded(const ffi::Dictionary& attrs, const BatchArgs& batch, const ffi::AnyBuffer& sentinel,
                 const CodeArgs& args, const ffi::AnyBuffer& out, std::unique_ptr<Pass>* pass) {
  DenseProblem<Coded> problem;
  float* sums = nullptr;
  JAX_TT_RETURN_IF_ERROR(ReadDenseCall(attrs, batch, args.codes, &problem.lookups, &problem));
  JAX_TT_RETURN_IF_ERROR(ReadCodebooks(attrs, args, &problem.codebooks));
  JAX_TT_RETURN_IF_ERROR(CheckSentinel(sentinel, problem.lookups.table));
  problem.table = static_cast<const Coded*>(args.codes.untyped_data());
  problem.dim = problem.codebooks.dim();
  JAX_TT_RETURN_IF_ERROR(Data(out, "out", problem.lookups.groups * problem.lookups.bags * problem.dim, &sums));
  *pass = DenseForward(problem, sums);
  return {};
}

ffi::Error ForwardImpl(OpThreads threads, ffi::AnyBuffer ids, ffi::AnyBuffer offsets, ffi::AnyBuffer weights,
                       ffi::AnyBuffer sentinel, ffi::AnyBuffer codes, ffi::AnyBuffer hot_codes,
                       ffi::AnyBuffer hot_places, ffi::AnyBuffer codebooks, ffi::Result<ffi::AnyBuffer> out,
                       ffi::Dictionary attrs) {
  std::vector<std::unique_ptr<Pass>> passes(1);
  Status status =
      ReadCoded(attrs, {ids, offsets, weights}, sentinel, {codes, hot_codes, hot_places, codebooks}, *out, &passes[0]);
  if (status.ok()) status = RunPasses(passes, MakePool(threads));
  return ToError(status, "embed_bag");
}

}  // namespace

// Codes of b bits, m of each of the N rows of a table of D columns and h more of each of H hot rows, in parts of w
// columns.
XLA_FFI_DEFINE_HANDLER_SYMBOL(CodedForwardCpu, ForwardImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<OpThreads>()
                                  .Arg<ffi::AnyBuffer>()  // ids [G.., n / G]
                                  .Arg<ffi::AnyBuffer>()  // offsets s32 [G.., B + 1]
                                  .Arg<ffi::AnyBuffer>()  // weights [n], or empty
                                  .Arg<ffi::AnyBuffer>()  // sentinel f32 []
                                  .Arg<ffi::AnyBuffer>()  // codes u8 [N, ceil(m b / 8)]
                                  .Arg<ffi::AnyBuffer>()  // hot_codes u8 [H, ceil(h b / 8)]
                                  .Arg<ffi::AnyBuffer>()  // hot_places u32 [ceil(N / 512), 17], or empty
                                  .Arg<ffi::AnyBuffer>()  // codebooks f32 [(m + h) * 2**b, w]
                                  .Ret<ffi::AnyBuffer>()  // out f32 [G.., B, D]
                                  .Attrs());

}  // namespace jax_tt
