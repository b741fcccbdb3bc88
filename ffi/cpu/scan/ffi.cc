// FFI handlers of scans for the best rows of a table.
#include <limits>
#include <memory>

#include "ffi/common/packed_table.h"
#include "ffi/common/table_args.h"
#include "ffi/cpu/args.h"
#include "ffi/cpu/coded/codebooks.h"
#include "ffi/cpu/handlers.h"
#include "ffi/cpu/scan/codes.h"
#include "ffi/cpu/scan/scan.h"
#include "ffi/cpu/scan/stored_rows.h"
#include "ffi/cpu/scan/train.h"

namespace jax_tt {
namespace {

struct ScanArgs {
  const ffi::AnyBuffer& queries;
  const ffi::AnyBuffer& exclude;
  const ffi::AnyBuffer& present;
  const ffi::AnyBuffer& scores;
  const ffi::AnyBuffer& ids;
};

Status ReadRequest(const ffi::Dictionary& attrs, const ScanArgs& args, int64_t num_rows, int64_t dim,
                   ScanRequest* request) {
  request->num_rows = num_rows;
  request->dim = dim;
  JAX_TT_RETURN_IF_ERROR(ReadAttr(attrs, "k", &request->k));
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  if (request->k < 1 || request->k > kMost || num_rows > kMost)
    return InvalidArgument("k must be from 1 to 2**31 - 1, and a table has at most 2**31 - 1 rows");
  if (dim < 1) return InvalidArgument("a table has at least one column");
  request->num_queries = Count(args.queries) / dim;
  const int64_t queries = request->num_queries;
  request->num_excluded = queries > 0 ? Count(args.exclude) / queries : 0;
  JAX_TT_RETURN_IF_ERROR(Data(args.queries, "queries", queries * dim, &request->queries));
  JAX_TT_RETURN_IF_ERROR(Data(args.exclude, "exclude", queries * request->num_excluded, &request->exclude));
  if (args.present.element_type() != ffi::DataType::PRED) return InvalidArgument("present must be bool");
  request->present = nullptr;
  if (Count(args.present) > 0) {
    JAX_TT_RETURN_IF_ERROR(CheckCount("present", Count(args.present), num_rows));
    request->present = static_cast<const bool*>(args.present.untyped_data());
  }
  JAX_TT_RETURN_IF_ERROR(Data(args.scores, "scores", queries * request->k, &request->scores));
  return Data(args.ids, "ids", queries * request->k, &request->ids);
}

// The rows of a dense or quantized table.
Status ReadRows(const ffi::Dictionary& attrs, const ffi::AnyBuffer& table, std::unique_ptr<FloatRows>* rows,
                int64_t* dim) {
  int64_t bits = 0;
  JAX_TT_RETURN_IF_ERROR(ReadBits(attrs, &bits));
  if (bits != 0) {
    const void* packed = nullptr;
    PackedLevels levels;
    JAX_TT_RETURN_IF_ERROR(ReadPackedRows(attrs, table, bits, &packed, dim, &levels));
    *rows = std::make_unique<PackedFloats>(static_cast<const uint8_t*>(packed), *dim, static_cast<int>(bits), levels);
    return {};
  }
  *dim = table.dimensions()[1];
  const void* const data = table.untyped_data();
  const ScanKernels& kernels = GetScanKernels();
  switch (table.element_type()) {
    case ffi::DataType::F32:
      *rows = std::make_unique<StoredFloats>(static_cast<const float*>(data), *dim);
      return {};
    case ffi::DataType::BF16:
      *rows = std::make_unique<HalfRows<bfloat16>>(static_cast<const bfloat16*>(data), *dim, kernels.widen_bfloat16);
      return {};
    case ffi::DataType::F16:
      *rows = std::make_unique<HalfRows<float16>>(static_cast<const float16*>(data), *dim, kernels.widen_float16);
      return {};
    default:
      return InvalidArgument("tables must be float32, bfloat16 or float16");
  }
}

ffi::Error RowsImpl(OpThreads threads, ffi::AnyBuffer queries, ffi::AnyBuffer exclude, ffi::AnyBuffer present,
                    ffi::AnyBuffer table, ffi::Result<ffi::AnyBuffer> scores, ffi::Result<ffi::AnyBuffer> ids,
                    ffi::Dictionary attrs) {
  const auto run = [&]() -> Status {
    ScanRequest request = {};
    std::unique_ptr<FloatRows> rows;
    int64_t dim = 0;
    if (table.dimensions().size() != 2) return InvalidArgument("a dense table has two axes");
    JAX_TT_RETURN_IF_ERROR(ReadRows(attrs, table, &rows, &dim));
    JAX_TT_RETURN_IF_ERROR(
        ReadRequest(attrs, {queries, exclude, present, *scores, *ids}, table.dimensions()[0], dim, &request));
    return ScanRows(request, rows.get(), MakePool(threads));
  };
  return ToError(run(), "top_k");
}

ffi::Error CodedImpl(OpThreads threads, ffi::AnyBuffer queries, ffi::AnyBuffer exclude, ffi::AnyBuffer present,
                     ffi::AnyBuffer codes, ffi::AnyBuffer hot_codes, ffi::AnyBuffer hot_places,
                     ffi::AnyBuffer codebooks, ffi::Result<ffi::AnyBuffer> scores, ffi::Result<ffi::AnyBuffer> ids,
                     ffi::Dictionary attrs) {
  const auto run = [&]() -> Status {
    ScanRequest request = {};
    Codebooks books;
    if (codes.dimensions().size() != 2) return InvalidArgument("codes have two axes");
    JAX_TT_RETURN_IF_ERROR(ReadCodebooks(attrs, {codes, hot_codes, hot_places, codebooks}, &books));
    JAX_TT_RETURN_IF_ERROR(
        ReadRequest(attrs, {queries, exclude, present, *scores, *ids}, codes.dimensions()[0], books.dim(), &request));
    const auto* const bytes = static_cast<const uint8_t*>(codes.untyped_data());
    if (ScansByPartialScores(books, request.num_queries))
      return ScanByPartialScores(request, books, bytes, MakePool(threads));
    CodedFloats rows(books, bytes);
    return ScanRows(request, &rows, MakePool(threads));
  };
  return ToError(run(), "top_k");
}

ffi::Error TrainImpl(OpThreads threads, ffi::AnyBuffer queries, ffi::AnyBuffer exclude, ffi::AnyBuffer present,
                     ffi::RemainingArgs cores, ffi::Result<ffi::AnyBuffer> scores, ffi::Result<ffi::AnyBuffer> ids,
                     ffi::Dictionary attrs) {
  const auto run = [&]() -> Status {
    ScanRequest request = {};
    TTShape shape;
    const float* data[kMaxCores] = {};
    JAX_TT_RETURN_IF_ERROR(ReadTable(attrs, &shape));
    JAX_TT_RETURN_IF_ERROR(ReadCores<float>(shape, cores, 0, data));
    JAX_TT_RETURN_IF_ERROR(
        ReadRequest(attrs, {queries, exclude, present, *scores, *ids}, shape.num_embeddings, shape.dim(), &request));
    return ScanTrain(request, shape, data, MakePool(threads));
  };
  return ToError(run(), "top_k");
}

}  // namespace

// B queries of D numbers, E excluded rows for each, a table of N rows.
XLA_FFI_DEFINE_HANDLER_SYMBOL(ScanRowsCpu, RowsImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<OpThreads>()
                                  .Arg<ffi::AnyBuffer>()  // queries f32 [B.., D]
                                  .Arg<ffi::AnyBuffer>()  // exclude s32 [B.., E]
                                  .Arg<ffi::AnyBuffer>()  // present pred [N], or empty
                                  .Arg<ffi::AnyBuffer>()  // table [N, D], or packed rows
                                  .Ret<ffi::AnyBuffer>()  // scores f32 [B.., k]
                                  .Ret<ffi::AnyBuffer>()  // ids s32 [B.., k]
                                  .Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(ScanCodedCpu, CodedImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<OpThreads>()
                                  .Arg<ffi::AnyBuffer>()  // queries f32 [B.., D]
                                  .Arg<ffi::AnyBuffer>()  // exclude s32 [B.., E]
                                  .Arg<ffi::AnyBuffer>()  // present pred [N], or empty
                                  .Arg<ffi::AnyBuffer>()  // codes u8 [N, ceil(m b / 8)]
                                  .Arg<ffi::AnyBuffer>()  // hot_codes u8 [H, ceil(h b / 8)]
                                  .Arg<ffi::AnyBuffer>()  // hot_places u32 [ceil(N / 512), 17], or empty
                                  .Arg<ffi::AnyBuffer>()  // codebooks f32 [(m + h) * 2**b, w]
                                  .Ret<ffi::AnyBuffer>()  // scores f32 [B.., k]
                                  .Ret<ffi::AnyBuffer>()  // ids s32 [B.., k]
                                  .Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(ScanTrainCpu, TrainImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<OpThreads>()
                                  .Arg<ffi::AnyBuffer>()  // queries f32 [B.., D]
                                  .Arg<ffi::AnyBuffer>()  // exclude s32 [B.., E]
                                  .Arg<ffi::AnyBuffer>()  // present pred [N], or empty
                                  .RemainingArgs()        // cores f32
                                  .Ret<ffi::AnyBuffer>()  // scores f32 [B.., k]
                                  .Ret<ffi::AnyBuffer>()  // ids s32 [B.., k]
                                  .Attrs());

}  // namespace jax_tt
