// The FFI handler of quantized tables.
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ffi/common/call_args.h"
#include "ffi/core/packed_rows.h"
#include "ffi/cpu/args.h"
#include "ffi/cpu/dense.h"
#include "ffi/cpu/handlers.h"

namespace jax_tt {
namespace {

// Calls body(TypeTag<Packed<bits>>).
template <typename F>
Status DispatchBits(int64_t bits, F&& body) {
  switch (bits) {
    case 8:
      return body(TypeTag<Packed<8>>{});
    case 4:
      return body(TypeTag<Packed<4>>{});
    case 3:
      return body(TypeTag<Packed<3>>{});
    case 2:
      return body(TypeTag<Packed<2>>{});
    default:
      return InvalidArgument("quantized tables have 8, 4, 3 or 2 bits a number");
  }
}

struct QuantizedArgs {
  const ffi::Dictionary& attrs;
  BatchArgs batch;
  const ffi::AnyBuffer &sentinel, &packed, &out;
};

template <typename T>
Status ReadProblem(const QuantizedArgs& args, DenseProblem<T>* problem, float** out) {
  JAX_TT_RETURN_IF_ERROR(ReadDenseCall(args.attrs, args.batch, args.packed, &problem->lookups, problem));
  JAX_TT_RETURN_IF_ERROR(ReadAttr(args.attrs, "features", &problem->dim));
  const int64_t dim = problem->dim;
  if (dim < 1 || dim > INT32_MAX) return InvalidArgument("features must be from 1 to 2**31 - 1");
  const ffi::DataType type = args.packed.element_type();
  // The rows of a table that is trained are words, as JAX differentiates only floats.
  if (type != ffi::DataType::U8 && type != ffi::DataType::F32)
    return InvalidArgument("packed rows must be uint8, or words in float32");
  const int64_t unit = type == ffi::DataType::U8 ? 1 : 4;
  JAX_TT_RETURN_IF_ERROR(
      CheckCount("a packed row, in bytes,", args.packed.dimensions()[1] * unit, PackedRowBytes(dim, kPackedBits<T>)));
  JAX_TT_RETURN_IF_ERROR(CheckSentinel(args.sentinel, problem->lookups.table));
  problem->table = static_cast<const T*>(args.packed.untyped_data());
  const int64_t bags = problem->lookups.groups * problem->lookups.bags;
  return Data(args.out, "out", bags * dim, out);
}

Status Forward(const Pool& pool, const QuantizedArgs& args) {
  int64_t bits = 0;
  JAX_TT_RETURN_IF_ERROR(ReadAttr(args.attrs, "bits", &bits));
  return DispatchBits(bits, [&](auto tag) -> Status {
    DenseProblem<typename decltype(tag)::type> problem;
    float* out = nullptr;
    JAX_TT_RETURN_IF_ERROR(ReadProblem(args, &problem, &out));
    std::vector<std::unique_ptr<Pass>> passes;
    passes.push_back(DenseForward(problem, out));
    return RunPasses(passes, pool);
  });
}

ffi::Error ForwardImpl(ffi::ThreadPool threads, ffi::AnyBuffer ids, ffi::AnyBuffer offsets, ffi::AnyBuffer weights,
                       ffi::AnyBuffer sentinel, ffi::AnyBuffer packed, ffi::Result<ffi::AnyBuffer> out,
                       ffi::Dictionary attrs) {
  PreferHugePages({*out});
  return ToError(Forward(MakePool(threads), {attrs, {ids, offsets, weights}, sentinel, packed, *out}),
                 "quantized_embed_bag");
}

}  // namespace

// n = ids, G = groups, B = bags of a group, N x D = the table, of which a row has W bytes.
XLA_FFI_DEFINE_HANDLER_SYMBOL(QuantizedForwardCpu, ForwardImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // ids [G.., n / G]
                                  .Arg<ffi::AnyBuffer>()  // offsets s32 [G.., B + 1]
                                  .Arg<ffi::AnyBuffer>()  // weights [n], or empty
                                  .Arg<ffi::AnyBuffer>()  // sentinel f32 []
                                  .Arg<ffi::AnyBuffer>()  // packed rows u8 [N, W], or f32 [N, W / 4]
                                  .Ret<ffi::AnyBuffer>()  // out f32 [G.., B, D]
                                  .Attrs());              // bits, features, and those of a lookup

}  // namespace jax_tt
