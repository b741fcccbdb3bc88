"""Small tables from trained rows, as `distill` finetunes them: those of the library, and others."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_tt
from benchmarks.quality.distill import Small
from benchmarks.quality.sizes import hashed_rows, low_rank, remainders
from benchmarks.quality.small import mix

HALF = jnp.bfloat16
# Codes of the residual quantizer, as many as `jax_tt.compress` tries in a sum: more take very long to fit.
_MOST_RESIDUALS = 16


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """What a table is made of.

    Attributes:
        rows: trained ones, [N, features].
        weights: importance of each [N].
        metric: the larger the better, of other rows in their place.
        seed: of fits.
    """

    rows: np.ndarray
    weights: np.ndarray
    metric: Callable[[np.ndarray], float]
    seed: int

    def ratio(self, max_bytes: int) -> float:
        """How much smaller than the rows so many bytes are."""
        return self.rows.nbytes / max_bytes


def chosen(source: Source, max_bytes: int, kind: str = "auto") -> Small:
    """What `jax_tt.compress` chooses."""
    found = jax_tt.compress(
        source.rows,
        kind=kind,
        max_bytes=max_bytes,
        metric=lambda table, state: source.metric(
            np.asarray(jax.jit(jax_tt.tables.to_dense, static_argnums=0)(table, state))
        ),
        weights=source.weights,
        param_dtype=HALF,
        seed=source.seed,
        progress=False,
    )
    print(found, flush=True)
    return of_table(found.table, found.state, f"{found.chosen.kind}, {found.chosen.detail}")


def of_table(table: Any, state: Mapping[str, jax.Array], detail: str) -> Small:
    """A table of the library, whose parameters are trained in float32, and its rotation with them."""
    if isinstance(table, jax_tt.tables.QuantizedTable | jax_tt.tables.MixedTable):
        return _of_quantized(table, state, detail)
    rotation = {n: value for n, value in state.items() if n == "rotation"}
    params = {name: state[name] for name in table.spec.param_shapes} | rotation
    full = _in_float32(dataclasses.replace(table, rotated=False) if rotation else table)

    def rows(params: Mapping[str, Any], constants: Mapping[str, Any], ids: jax.Array) -> jax.Array:
        arrays = {name: value for name, value in constants.items() if name != "ids"}
        arrays |= {name: value for name, value in params.items() if name != "rotation"}
        found, _ = jax_tt.lookup(full, arrays, ids)
        return found @ params["rotation"] if rotation else found

    return _small(
        rows,
        {name: value.astype(jnp.float32) for name, value in params.items()},
        {name: value for name, value in state.items() if name not in params},
        lambda trained: {
            n: x.astype(params[n].dtype).astype(jnp.float32) for n, x in trained.items()
        },
        table.num_embeddings,
        sum(array.nbytes for array in state.values()),
        detail,
    )


def of_bits(rows: np.ndarray, bits: int) -> Small:
    """Numbers of a few bits with uniform levels, from the minimum of a row to its maximum."""
    return _of_quantized(*jax_tt.quantize(rows, bits), f"{bits} bits a number")


def _in_float32(table: Any) -> Any:
    """The table with parameters of this type."""
    if isinstance(table, jax_tt.tables.SumTable):
        return dataclasses.replace(table, tables=tuple(map(_in_float32, table.tables)))
    if isinstance(table, jax_tt.tables.OrderedTable):
        return dataclasses.replace(table, table=_in_float32(table.table))
    if isinstance(table, jax_tt.tables.CodedTable):
        return dataclasses.replace(table, codebooks=_in_float32(table.codebooks))
    return dataclasses.replace(table, param_dtype=jnp.float32)


def _of_quantized(
    table: jax_tt.tables.QuantizedTable | jax_tt.tables.MixedTable,
    state: Mapping[str, jax.Array],
    detail: str,
) -> Small:
    """The scales and offsets of rows are trained, and the rotation with them; numbers and levels are not."""
    if isinstance(table, jax_tt.tables.MixedTable):
        pairs = zip(table.tables, table.separated(state), strict=True)
        # The rows of a part belong to ids in increasing order.
        by_part = np.argsort(np.argsort(np.asarray(table.parts_of(state)), kind="stable"))
    else:
        pairs, by_part = [(table, state)], np.arange(table.num_embeddings)
    parts = zip(*(_numbers(*pair) for pair in pairs), strict=True)
    levels, scale, offset = (np.concatenate(part)[by_part] for part in parts)
    rotation = {n: value for n, value in state.items() if n == "rotation"}

    def found(params: Mapping[str, Any], constants: Mapping[str, Any], ids: jax.Array) -> jax.Array:
        rows = constants["levels"][ids] * params["scale"][ids][:, None]
        rows = rows + params["offset"][ids][:, None]
        return rows @ params["rotation"] if rotation else rows

    def stored(params: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        return {**params, **_rounded(jnp.float16, {n: params[n] for n in ("scale", "offset")})}

    params = {"scale": jnp.asarray(scale), "offset": jnp.asarray(offset), **rotation}
    nbytes = sum(array.nbytes for array in state.values())
    return _small(
        found, params, {"levels": jnp.asarray(levels)}, stored, len(scale), nbytes, detail
    )


def _numbers(
    table: jax_tt.tables.QuantizedTable, state: Mapping[str, jax.Array]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The levels of the numbers [N, features], and the scale and offset of each row."""
    packed = np.asarray(state["packed"])
    scale, offset = np.ascontiguousarray(packed[:, :4]).view("<f2").astype(np.float32).T
    levels = np.asarray(table.levels or range(1 << table.bits), np.float32)
    return levels[unpacked(packed[:, 4:], table.features, table.bits)], scale, offset


def faiss_product(source: Source, max_bytes: int) -> Small:
    """The product quantizer of faiss, with or without a rotation by `OPQMatrix`, whichever has the better metric."""
    import faiss

    features = source.rows.shape[1]
    counts = [m for m in range(1, features + 1) if features % m == 0]
    made = []
    for rotated in (False, True):
        fit = _most_bits(source, max_bytes, "product", counts, rotated)
        if fit is None:
            continue
        rows, drawn, rotation = source.rows, _drawn(source, 256 << fit.bits), {}
        if rotated:
            turn = faiss.OPQMatrix(features, fit.num_codes)
            turn.pq = faiss.ProductQuantizer(features, fit.num_codes, fit.bits)
            turn.train(drawn)
            rows, drawn = turn.apply(rows), turn.apply(drawn)
            matrix = faiss.vector_to_array(turn.A).reshape(features, features)
            rotation = {"rotation": jnp.asarray(matrix)}
        quantizer = faiss.ProductQuantizer(features, fit.num_codes, fit.bits)
        quantizer.train(drawn)
        books = faiss.vector_to_array(quantizer.centroids).reshape(
            fit.spec.param_shapes["codebooks"]
        )
        made.append(_of_faiss(fit, books, quantizer.compute_codes(rows), rotation))
    if not made:
        raise ValueError("no codes are that small")
    return max(made, key=lambda one: source.metric(one.dense()))


def faiss_residual(source: Source, max_bytes: int) -> Small:
    """The residual quantizer of faiss."""
    import faiss

    fit = _most_bits(source, max_bytes, "additive", range(1, _MOST_RESIDUALS + 1))
    if fit is None:
        raise ValueError("no codes are that small")
    quantizer = faiss.ResidualQuantizer(fit.features, fit.num_codes, fit.bits)
    quantizer.train(_drawn(source, 1 << 16))
    books = faiss.vector_to_array(quantizer.codebooks).reshape(-1, fit.features)
    return _of_faiss(fit, books, quantizer.compute_codes(source.rows), {})


def _most_bits(
    source: Source, max_bytes: int, kind: str, counts: Iterable[int], rotated: bool = False
) -> jax_tt.tables.CodedTable | None:
    """The table of codes with the most bits in all that fits; None if there is none."""
    n, features = source.rows.shape
    tables = [
        jax_tt.coded_table(n, features, m, bits, kind=kind, rotated=rotated, param_dtype=HALF)
        for m in counts
        for bits in (8, 7, 6, 5, 4)
    ]
    fit = [one for one in tables if one.nbytes <= max_bytes]
    return max(fit, key=lambda one: (one.num_codes * one.bits, one.bits), default=None)


def _drawn(source: Source, size: int) -> np.ndarray:
    """Rows drawn by weight, as many as `jax_tt.encode` uses."""
    rng = np.random.default_rng(source.seed)
    size = min(size, len(source.rows))
    ids = rng.choice(len(source.rows), size, p=source.weights / source.weights.sum())
    return np.ascontiguousarray(source.rows[ids])


def unpacked(packed: np.ndarray, m: int, bits: int) -> np.ndarray:
    """Codes of faiss, lowest bits first."""
    flat = np.unpackbits(packed, axis=1, bitorder="little")[:, : m * bits]
    return flat.reshape(len(packed), m, bits) @ (1 << np.arange(bits))


def _of_faiss(
    table: jax_tt.tables.CodedTable,
    books: np.ndarray,
    packed: np.ndarray,
    rotation: dict[str, jax.Array],
) -> Small:
    state = {"codebooks": jnp.asarray(books).astype(HALF), **rotation}
    codes = unpacked(packed, table.num_codes, table.bits)
    state = table.with_codes(table.init_rest(state) | state, codes)
    turned = ", rotated" if rotation else ""
    return of_table(table, state, f"{table.num_codes} codes of {table.bits} bits{turned}")


def of_low_rank(source: Source, max_bytes: int) -> Small:
    """The best approximation of low rank, weighted."""
    n, features = source.rows.shape
    k = low_rank(n, features, source.ratio(max_bytes), 2)
    _, _, right = np.linalg.svd(source.weights[:, None] ** 0.5 * source.rows, full_matrices=False)
    params = {"left": source.rows @ right[:k].T, "right": right[:k]}

    def rows(params: Mapping[str, Any], constants: Mapping[str, Any], ids: jax.Array) -> jax.Array:
        del constants
        return params["left"][ids] @ params["right"]

    return _small(rows, params, {}, partial(_rounded, HALF), n, 2 * k * (n + features), f"rank {k}")


def of_hashing(source: Source, max_bytes: int) -> Small:
    """A row for each hash, which starts as the weighted mean of the rows that share it."""
    n, features = source.rows.shape
    size = hashed_rows(n, source.ratio(max_bytes), 2)
    places = mix(jnp.arange(n)) % jnp.uint32(size)
    params = {"rows": _means(source, np.asarray(places), size)}

    def rows(params: Mapping[str, Any], constants: Mapping[str, Any], ids: jax.Array) -> jax.Array:
        return params["rows"][constants["places"][ids]]

    constants = {"places": places.astype(jnp.int32)}
    # The places are computed from the ids.
    return _small(
        rows, params, constants, partial(_rounded, HALF), n, 2 * size * features, f"{size} rows"
    )


def of_remainders(source: Source, max_bytes: int) -> Small:
    """Products of a row for the quotient, which starts as ones, and one for the remainder, as a mean."""
    n, features = source.rows.shape
    m = remainders(n, source.ratio(max_bytes), 2)
    quotients = -(-n // m)
    params = {
        "remainder": _means(source, np.arange(n) % m, m),
        "quotient": np.ones((quotients, features)),
    }

    def rows(params: Mapping[str, Any], constants: Mapping[str, Any], ids: jax.Array) -> jax.Array:
        del constants
        return params["quotient"][ids // m] * params["remainder"][ids % m]

    nbytes = 2 * (m + quotients) * features
    return _small(rows, params, {}, partial(_rounded, HALF), n, nbytes, f"{m} remainders")


def _means(source: Source, places: np.ndarray, size: int) -> np.ndarray:
    sums = np.zeros((size, source.rows.shape[1]))
    np.add.at(sums, places, source.weights[:, None] * source.rows)
    return sums / np.maximum(np.bincount(places, source.weights, size), 1e-9)[:, None]


def _rounded(dtype: Any, params: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: value.astype(dtype).astype(jnp.float32) for name, value in params.items()}


def _small(
    rows: Any, params: Mapping[str, Any], constants: Mapping[str, Any], stored: Any, n: int, nbytes: int,
    detail: str,
) -> Small:  # fmt: skip
    full = {name: jnp.asarray(value, jnp.float32) for name, value in params.items()}
    return Small(rows, full, {**constants, "ids": jnp.zeros((n, 0))}, stored, nbytes, detail)


METHODS: dict[str, Callable[[Source, int], Small]] = {
    "auto": chosen,
    "faiss_product": faiss_product,
    "faiss_residual": faiss_residual,
    "low_rank": of_low_rank,
    "hashing": of_hashing,
    "quotient_remainder": of_remainders,
}
