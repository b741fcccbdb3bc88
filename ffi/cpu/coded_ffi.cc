// The FFI handler of coded tables.
#include <memory>
#include <vector>

#include "ffi/common/call_args.h"
#include "ffi/core/coded_rows.h"
#include "ffi/cpu/args.h"
#include "ffi/cpu/dense.h"
#include "ffi/cpu/handlers.h"

namespace jax_tt {
namespace {

Status ReadCodebooks(const ffi::Dictionary& attrs, const ffi::AnyBuffer& codes, const ffi::AnyBuffer& codebooks,
                     Codebooks* books) {
  JAX_TT_RETURN_IF_ERROR(ReadAttr(attrs, "bits", &books->bits));
  JAX_TT_RETURN_IF_ERROR(ReadAttr(attrs, "product", &books->product));
  if (books->bits < 1 || books->bits > 16) return InvalidArgument("codes have 1 to 16 bits");
  const auto sizes = codebooks.dimensions();
  if (sizes.size() != 2 || sizes[0] % (int64_t{1} << books->bits) != 0)
    return InvalidArgument("codebooks must be [codes * 2**bits, columns]");
  books->num_codes = sizes[0] >> books->bits;
  books->width = sizes[1];
  JAX_TT_RETURN_IF_ERROR(CheckCount("a row of codes, in bytes,", codes.dimensions()[1], books->row_bytes()));
  return Data(codebooks, "codebooks", -1, &books->rows);
}

Status ReadCoded(const ffi::Dictionary& attrs, const BatchArgs& batch, const ffi::AnyBuffer& sentinel,
                 const ffi::AnyBuffer& codes, const ffi::AnyBuffer& codebooks, const ffi::AnyBuffer& out,
                 std::unique_ptr<Pass>* pass) {
  DenseProblem<Coded> problem;
  float* sums = nullptr;
  JAX_TT_RETURN_IF_ERROR(ReadDenseCall(attrs, batch, codes, &problem.lookups, &problem));
  if (codes.element_type() != ffi::DataType::U8) return InvalidArgument("codes must be uint8");
  JAX_TT_RETURN_IF_ERROR(ReadCodebooks(attrs, codes, codebooks, &problem.codebooks));
  JAX_TT_RETURN_IF_ERROR(CheckSentinel(sentinel, problem.lookups.table));
  problem.table = static_cast<const Coded*>(codes.untyped_data());
  problem.dim = problem.codebooks.dim();
  JAX_TT_RETURN_IF_ERROR(Data(out, "out", problem.lookups.groups * problem.lookups.bags * problem.dim, &sums));
  *pass = DenseForward(problem, sums);
  return {};
}

ffi::Error ForwardImpl(ffi::ThreadPool threads, ffi::AnyBuffer ids, ffi::AnyBuffer offsets, ffi::AnyBuffer weights,
                       ffi::AnyBuffer sentinel, ffi::AnyBuffer codes, ffi::AnyBuffer codebooks,
                       ffi::Result<ffi::AnyBuffer> out, ffi::Dictionary attrs) {
  std::vector<std::unique_ptr<Pass>> passes(1);
  Status status = ReadCoded(attrs, {ids, offsets, weights}, sentinel, codes, codebooks, *out, &passes[0]);
  if (status.ok()) status = RunPasses(passes, MakePool(threads));
  return ToError(status, "embed_bag");
}

}  // namespace

// m codes of b bits, of the N rows of a table of D columns.
XLA_FFI_DEFINE_HANDLER_SYMBOL(CodedForwardCpu, ForwardImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // ids [G.., n / G]
                                  .Arg<ffi::AnyBuffer>()  // offsets s32 [G.., B + 1]
                                  .Arg<ffi::AnyBuffer>()  // weights [n], or empty
                                  .Arg<ffi::AnyBuffer>()  // sentinel f32 []
                                  .Arg<ffi::AnyBuffer>()  // codes u8 [N, ceil(m b / 8)]
                                  .Arg<ffi::AnyBuffer>()  // codebooks f32 [m * 2**b, D / m] or [m * 2**b, D]
                                  .Ret<ffi::AnyBuffer>()  // out f32 [G.., B, D]
                                  .Attrs());

}  // namespace jax_tt
