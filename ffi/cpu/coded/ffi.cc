// The FFI handler of coded tables.
#include <memory>
#include <vector>

#include "ffi/common/call_args.h"
#include "ffi/core/coded_rows.h"
#include "ffi/cpu/args.h"
#include "ffi/cpu/dense/dense.h"
#include "ffi/cpu/handlers.h"

namespace jax_tt {
namespace {

struct CodeArgs {
  const ffi::AnyBuffer& codes;
  const ffi::AnyBuffer& hot_codes;
  const ffi::AnyBuffer& hot_places;
  const ffi::AnyBuffer& codebooks;
};

Status ReadHotRows(const CodeArgs& args, Codebooks* books) {
  const auto sizes = args.hot_codes.dimensions();
  if (args.hot_codes.element_type() != ffi::DataType::U8 || args.hot_places.element_type() != ffi::DataType::U32)
    return InvalidArgument("codes of hot rows must be uint8, and their places uint32");
  if (sizes.size() != 2) return InvalidArgument("codes of hot rows have two axes");
  if (books->hot_terms == 0) return {};
  JAX_TT_RETURN_IF_ERROR(CheckCount("a row of hot codes, in bytes,", sizes[1], books->hot_bytes()));
  const int64_t blocks = (args.codes.dimensions()[0] + kHotBlock - 1) / kHotBlock;
  JAX_TT_RETURN_IF_ERROR(CheckCount("places of hot rows", Count(args.hot_places), blocks * (1 + kHotWords)));
  books->num_hot = sizes[0];
  books->hot_codes = static_cast<const uint8_t*>(args.hot_codes.untyped_data());
  books->hot_places = static_cast<const uint32_t*>(args.hot_places.untyped_data());
  return {};
}

Status ReadCodebooks(const ffi::Dictionary& attrs, const CodeArgs& args, Codebooks* books) {
  JAX_TT_RETURN_IF_ERROR(ReadAttr(attrs, "bits", &books->bits));
  JAX_TT_RETURN_IF_ERROR(ReadAttr(attrs, "terms", &books->terms));
  JAX_TT_RETURN_IF_ERROR(ReadAttr(attrs, "hot_terms", &books->hot_terms));
  if (books->bits < 1 || books->bits > 16) return InvalidArgument("codes have 1 to 16 bits");
  if (args.codes.element_type() != ffi::DataType::U8) return InvalidArgument("codes must be uint8");
  const auto sizes = args.codebooks.dimensions();
  const int64_t codes = sizes.size() == 2 ? sizes[0] >> books->bits : 0;
  if (books->terms < 1 || books->hot_terms < 0 || books->terms > codes || books->hot_terms > codes)
    return InvalidArgument("codebooks must be [codes * 2**bits, columns], with at least as many codes as terms");
  const int64_t of_part = books->terms + books->hot_terms;
  books->parts = codes / of_part;
  books->width = sizes[1];
  // Kernels keep places in a codebook in 32 bits.
  if (books->width > (int64_t{1} << 32) >> books->bits) return InvalidArgument("a codebook has at most 2**32 numbers");
  JAX_TT_RETURN_IF_ERROR(CheckCount("rows of codebooks", sizes[0], (books->parts * of_part) << books->bits));
  JAX_TT_RETURN_IF_ERROR(CheckCount("a row of codes, in bytes,", args.codes.dimensions()[1], books->row_bytes()));
  JAX_TT_RETURN_IF_ERROR(ReadHotRows(args, books));
  return Data(args.codebooks, "codebooks", -1, &books->rows);
}

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
