"""`QuantizedTable`: a table whose numbers have 8, 4, 3 or 2 bits."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tt._base.arguments import as_int, as_positive, instance_of, mismatch
from jax_tt._ids.batch import Batch
from jax_tt._jax.rounding import exactly
from jax_tt._kinds.quantized import codec
from jax_tt._kinds.quantized.levels import Levels, as_attribute, check_levels, largest_step
from jax_tt._lookup.best_rows import Queries, best_rows, best_scanned
from jax_tt._native.dense import DENSE
from jax_tt._native.scan import scan
from jax_tt._native.table_call import Calls
from jax_tt._native.table_group import NativeTable
from jax_tt._table import distinct_rows
from jax_tt._table.check import check_arrays, check_state
from jax_tt._table.copies import freeze, with_update, without_values
from jax_tt._table.distinct_rows import RowFormat
from jax_tt._table.initial_rows import check_initializer, default_embedding_init
from jax_tt._table.options import Lookup, Update, check_update
from jax_tt._table.rotation import ROTATION, rotation_array, rotation_of, turned, turned_back
from jax_tt._table.sharding import rows_to_shard
from jax_tt._table.state import Params, SlotArrays, State, StateSpec, parameter
from jax_tt._table.table import Execution
from jax_tt._table.whole import attend, to_dense
from jax_tt.optimizers import ChangesAll, Optimizer, ReadsScaled

PACKED = "packed"
# The linen collection of the rows, which have no gradient.
COLLECTION = "quantized"
TRAINED_BITS = (8, 4)


@dataclasses.dataclass(frozen=True)
class QuantizedTable(NativeTable):
    """A table with 8, 4, 3 or 2 bits a number, and a scale and an offset for each row.

    Its state is the array ``packed``, uint8 ``[N, W]``. A row has ``W = 4 + ceil(bits * D / 8)`` bytes: its scale and
    offset in float16, then its numbers. Number q stands for ``scale * q + offset``, or ``scale * levels[q] + offset``
    if the table has levels, which lookups compute in float32. `quantize` makes a table of trained rows; `init` makes
    one of random rows.

    Without ``update``, the table is read-only and has no gradient. Those with respect to the weights of bags are as for
    other tables.

    With ``update``, for 8 and 4 bits, the backward pass of a lookup steps the rows of the batch: they are decoded, the
    rule steps them in float32, and they are encoded with a new scale and offset. By default, numbers are rounded
    stochastically, such that a row is the exact one in expectation; `jax_tt.optimizers.Adam` makes up for the errors in
    later steps. JAX differentiates only floats. ``packed`` is therefore float32 ``[N, W / 4]``, whose words are the
    same bytes and no numbers, and the state has the optimizer state beside it. `frozen` returns the read-only table.

    Attributes:
        num_embeddings, features: its sizes. With ``update``, 4 divides ``bits * features / 8``.
        bits: 8, 4, 3 or 2; 8 or 4 with ``update``.
        update: `Update` of a table that is trained, or None.
        name: for error messages.
        embedding_init: initialiser ``(key, shape, dtype) -> rows`` of `init`, whose float32 rows are then rounded.
        levels: for 4, 3 and 2 bits, what each number stands for before scale and offset: ``2 ** bits`` increasing
            multiples of 1 / 512 from 0 to ``2 ** bits - 1``. None for uniform levels.
        rotated: whether rows are multiplied by the constant array ``rotation``, float32 ``[D, D]``, in the end.

    >>> import jax, jax.numpy as jnp, jax_tt
    >>> table, state = jax_tt.quantize(jnp.eye(1000, 16), bits=4)
    >>> rows, _ = jax_tt.lookup(table, state, jnp.array([1, 999]))
    >>> rows.shape, table.row_bytes, table.nbytes
    ((2, 16), 12, 12000)
    """

    num_embeddings: int
    features: int
    bits: int = 8
    update: Update | None = None
    name: str | None = None
    embedding_init: Callable[..., Any] = default_embedding_init
    levels: Levels = None
    rotated: bool = False
    calls: ClassVar[Calls] = DENSE

    def __post_init__(self) -> None:
        as_positive("num_embeddings", self.num_embeddings)
        as_positive("features", self.features)
        check_bits(self.bits)
        check_levels(self.ids.label, self.levels, self.bits)
        instance_of(f"{self.ids.label}rotated", self.rotated, bool, "True or False")
        check_initializer(self.ids.label, "embedding_init", self.embedding_init)
        check_update(self.update)
        if self.update is not None:
            _check_trained(self.ids.label, self.features, self.bits, self.update.optimizer)

    @functools.cached_property
    def row_bytes(self) -> int:
        """Bytes of a row, with its scale and offset."""
        return codec.row_bytes(self.features, self.bits)

    @functools.cached_property
    def spec(self) -> StateSpec:
        trains = self.update is not None
        made_by = (
            f"jax_tt.quantize(rows, bits={self.bits}, update=update) makes it of rows, such as those of a read-only "
            "table, jax_tt.tables.to_dense(table, state)."
            if trains
            else "jax_tt.quantize makes it of rows, jax_tt.compression.from_fbgemm of rows of FBGEMM."
        )
        width = self.row_bytes // codec.WORD if trains else self.row_bytes
        packed = parameter(
            PACKED,
            (self.num_embeddings, width),
            dtype=jnp.dtype(jnp.float32 if trains else jnp.uint8),
            stepped_shape=(self.num_embeddings, self.features),
            unit=0 if trains else None,
            collection=None if trains else COLLECTION,
            # Layers cast attended arrays to the type of the queries, which would change the bytes of rows.
            attended=False,
            numbers=jnp.dtype(jnp.float32),
            rounded="uint8",
            hint=f"A row has {self.bits} bits for each of {self.features} numbers, and 4 bytes of scale and offset. "
            f"{made_by}",
        )
        constants = [rotation_array(self.features, COLLECTION)] if self.rotated else []
        return StateSpec.of([packed], self.update, *constants)

    def init_params(self, key: jax.Array) -> dict[str, Any]:
        rows = self.embedding_init(key, (self.num_embeddings, self.features), jnp.float32)
        packed = codec.encoded(rows, self.bits, self.levels)
        return {PACKED: packed if self.update is None else codec.as_words(packed)}

    def init_rest(self, params: Mapping[str, Any]) -> dict[str, jax.Array]:
        rotation = {ROTATION: jnp.eye(self.features, dtype=jnp.float32)} if self.rotated else {}
        return super().init_rest(params) | rotation

    def rows(self, params: Params, digits: Sequence[jax.Array], precision: Any) -> jax.Array:
        """`Table.rows` before the rotation, by which `forward` multiplies their sums."""
        del precision
        (packed,), (ids,) = params, digits
        # Wrapping negative ids adds the number of rows, which may overflow the type of the ids.
        options: Any = {"mode": "promise_in_bounds", "wrap_negative_indices": False}
        return self._decoded(exactly(lambda stored: stored.at[ids].get(**options), packed))

    # Lookups

    @functools.cached_property
    def row_attributes(self) -> Mapping[str, Any]:
        attributes = {"bits": np.int64(self.bits), "dim": np.int64(self.features)}
        return (
            attributes
            if self.levels is None
            else attributes | {"levels": as_attribute(self.levels)}
        )

    def execution(self, lookup: Lookup, state: State) -> Execution:
        execution = super().execution(lookup, state)
        # The operation on many tables may write sums where they cannot be turned.
        return dataclasses.replace(execution, group=None) if self.rotated else execution

    def forward(self, state: State, batch: Batch, lookup: Lookup) -> tuple[jax.Array, Any]:
        sums, residuals = super().forward(state, batch, lookup)
        return turned(sums, rotation_of(self, state), lookup.precision), residuals

    @property
    def steps_natively(self) -> bool:
        return False

    def stepped_params(
        self, state: State, batch: Batch, residuals: Any, g: jax.Array, lookup: Lookup, values: Any
    ) -> tuple[Params, SlotArrays, jax.Array, jax.Array | None]:
        rows_as = RowFormat(self._decoded, self._encoded, self._spacing)
        g = turned_back(g, rotation_of(self, state), lookup.precision)
        return distinct_rows.update(self, state, batch, residuals, g, lookup, values, rows_as)

    def _decoded(self, stored: jax.Array) -> jax.Array:
        """Stored rows before the rotation."""
        return codec.decoded(stored, self.features, self.bits, self.levels)

    def _encoded(
        self, new: jax.Array, rows: jax.Array, dtype: Any, key: jax.Array | None
    ) -> jax.Array:
        del dtype
        if key is None:
            return codec.as_words(codec.encoded(new, self.bits, self.levels))
        keys = distinct_rows.keys_of_rows(key, rows)
        return codec.as_words(codec.encoded_stochastically(new, self.bits, keys, self.levels))

    def _spacing(self, stored: jax.Array) -> jax.Array:
        scale, _ = codec.header(codec.as_bytes(stored))
        return scale if self.levels is None else scale * largest_step(self.levels)


@to_dense.register(QuantizedTable)
def decoded_table(table: QuantizedTable, state: State) -> jax.Array:
    rows = table._decoded(state[PACKED])
    return turned(rows, rotation_of(table, state), lax.Precision.HIGHEST)


@attend.register(QuantizedTable)
def attend_decoded(
    table: QuantizedTable, state: State, query: jax.Array, precision: Any
) -> jax.Array:
    packed = state[PACKED]
    rows = table._decoded(packed) if table.update is None else _scored_rows(table, packed)
    query = turned_back(query.astype(jnp.float32), rotation_of(table, state), precision)
    return jnp.einsum("bd,nd->bn", query, rows, precision=precision)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scored_rows(table: QuantizedTable, packed: jax.Array) -> jax.Array:
    """The rows of a table that is trained; a backward pass that reaches them raises, for bytes have no gradient."""
    return table._decoded(packed)


def _scored_rows_fwd(table: QuantizedTable, packed: jax.Array) -> tuple[jax.Array, None]:
    return _scored_rows(table, packed), None


def _scored_rows_bwd(table: QuantizedTable, residuals: None, g: jax.Array) -> Any:
    del residuals, g
    raise TypeError(
        f"{table.ids.label}attend is part of the loss, but the table is quantized: only lookups train it. Take the "
        "scores of other arrays, jax.lax.stop_gradient(state), or use them outside the loss only."
    )


_scored_rows.defvjp(_scored_rows_fwd, _scored_rows_bwd)


def _check_trained(label: str, features: int, bits: int, rule: Optimizer) -> None:
    """Raises for sizes or rules that a table cannot be trained with."""
    if bits not in TRAINED_BITS:
        fix = "Train a DenseTable, and then jax_tt.quantize(state['embedding'], bits)."
        raise mismatch(f"{label}bits", f"{bits} with an update", "8 or 4", fix)
    multiple = 8 * codec.WORD // bits
    if features % multiple:
        expected = f"a multiple of {multiple} at {bits} bits, so that a row is a whole number of 32-bit words"
        raise mismatch(f"{label}features", f"{features} with an update", expected)
    rule.check_width(features)
    if isinstance(rule, ReadsScaled | ChangesAll):
        got = f"{type(rule).__name__}, which changes rows that a batch does not read, to be rounded"
        expected = "another rule, e.g. jax_tt.optimizers.RowWiseAdagrad(0.05)"
        raise mismatch(f"{label}update", got, expected)


def check_bits(bits: Any) -> int:
    """Raises for a number of bits that no table has."""
    if as_int("bits", bits) not in codec.BITS:
        raise ValueError(f"bits: got {bits}; expected one of {', '.join(map(str, codec.BITS))}.")
    return int(bits)


def require_quantized(table: Any) -> QuantizedTable:
    """The table, or an error for other kinds."""
    expected = "a QuantizedTable, as jax_tt.quantize(rows, bits=8) returns it with its state"
    return instance_of("table", table, QuantizedTable, expected)


@check_state.register(QuantizedTable)
def check_rows(table: QuantizedTable, state: State) -> None:
    arrays = table.spec.arrays
    if table.update is None and PACKED in state:
        packed, words = state[PACKED], (table.num_embeddings, table.row_bytes / codec.WORD)
        if packed.dtype == jnp.float32 and packed.shape == words:
            # A table that is trained has words, of which this is the view for lookups elsewhere.
            arrays = tuple(array for array in arrays if array.name != PACKED)
    check_arrays(table, state, arrays)


@freeze.register(QuantizedTable)
def freeze_rows(table: QuantizedTable, state: State) -> tuple[QuantizedTable, dict[str, Any]]:
    """Packs the rows into bytes."""
    check_state(table, state)
    frozen = with_update(table, None)
    constants = {name: state[name] for name in frozen.spec.constant_names}
    return frozen, constants | {PACKED: codec.as_bytes(state[PACKED])}


@without_values.register(QuantizedTable)
def without_initial_rows(table: QuantizedTable) -> QuantizedTable:
    # An initialiser may keep a reference to the rows that it returns.
    return dataclasses.replace(table, embedding_init=default_embedding_init)


@rows_to_shard.register(QuantizedTable)
def quantized_rows(table: QuantizedTable) -> dict[str, float | None]:
    if table.rotated:
        got = "a table with a rotation, of which every device would need all"
        fix = "Multiply the sums that are looked up by the rotation instead."
        raise mismatch(f"{table.ids.label}rotated", got, "QuantizedTable(..., rotated=False)", fix)
    return {x.name: x.initial for x in table.spec.arrays if x.role in ("parameter", "slot")}


@best_rows.register(QuantizedTable)
def best_of_packed(
    table: QuantizedTable, state: State, queries: Queries
) -> tuple[jax.Array, jax.Array]:
    def scanned(state: State, queries: Queries) -> tuple[jax.Array, jax.Array]:
        # A query that is turned has the same product with a row as the query with the turned row.
        rotation = rotation_of(table, state)
        vectors = turned_back(queries.vectors, rotation, lax.Precision.HIGHEST)
        asked = vectors, queries.exclude, queries.present, queries.k
        return scan("rows", {"rows": state[PACKED]}, table.row_attributes, *asked)

    return best_scanned(table, state, queries, scanned)
