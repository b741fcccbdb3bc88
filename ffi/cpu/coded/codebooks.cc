#include "ffi/cpu/coded/codebooks.h"

namespace jax_tt {
namespace {

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

}  // namespace

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

}  // namespace jax_tt
