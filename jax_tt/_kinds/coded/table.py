"""`CodedTable`: a table whose rows are concatenations or sums of codebook rows."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tt._base.arguments import mismatch
from jax_tt._ids import places
from jax_tt._ids.batch import Batch
from jax_tt._ids.id_space import digits_in_range, digits_of_integers
from jax_tt._jax import backend
from jax_tt._jax.backend import by_platform
from jax_tt._jax.rounding import gathered
from jax_tt._jax.vma import vary_over, varying_axes
from jax_tt._kinds.coded.assign import checked_rows, encoded_rows
from jax_tt._kinds.coded.codes import codes_at, constants_of, entries_at
from jax_tt._kinds.coded.expand import by_part, expanded, of_positions, whole
from jax_tt._kinds.coded.layout import CODEBOOKS, CODES, HOT_CODES, HOT_PLACES, CodeLayout
from jax_tt._lookup.best_rows import Queries, best_rows, best_scanned
from jax_tt._lookup.warn import warn_out_of_range
from jax_tt._native.coded import CodedForward
from jax_tt._native.partition import num_blocks
from jax_tt._native.rows import RowTable
from jax_tt._native.scan import scan
from jax_tt._native.table_call import run
from jax_tt._native.table_group import NativeTable, alike, separate_gradients
from jax_tt._table import reference
from jax_tt._table.check import check_state
from jax_tt._table.concat_layout import ConcatLayout
from jax_tt._table.copies import with_name, with_update, without_values
from jax_tt._table.groups import BoundTable, Call, Cotangents, Gradients, of_one_table
from jax_tt._table.options import IGNORED, Lookup, Update
from jax_tt._table.reference import ReferenceTable
from jax_tt._table.rotation import ROTATION, rotation_array, rotation_of, turned, turned_back
from jax_tt._table.state import Array, Params, SlotArrays, State, StateSpec
from jax_tt._table.table import Execution
from jax_tt._table.whole import to_dense

# The linen collection of the arrays without gradients.
COLLECTION = "coded"
_MADE_BY = "jax_tt.encode makes them of rows, CodedTable.with_codes of integers."


@dataclasses.dataclass(frozen=True)
class CodedTable(CodeLayout, ReferenceTable):
    """A table in which every id has ``m`` codes, and a row is made of the codebook rows that they select.

    A codebook has ``2 ** bits`` rows. A row of the table is the concatenation of one row of each codebook, of ``D / m``
    columns (``"product"``), or their sum (``"additive"``). Between the two, a product may have sums of ``terms`` codes
    for parts. `encode` makes a table of trained rows; `coded_table` describes a fresh one, in which codes are random.

    Its state is the parameter ``codebooks``, ``[m * 2 ** bits, D / m]`` or ``[m * 2 ** bits, D]``, one codebook after
    another, and the constant array ``codes``, uint8 ``[N, ceil(m * bits / 8)]``: the codes of a row, lowest bits first.
    Codebooks are trained like any parameter, by ordinary gradients or, with an update, in the backward pass, where a
    codebook row is updated once with the sum of the gradients of all ids that have its code.

    Some ids, such as frequent ones, may have more codes than the others: to each part of the row of a hot id,
    ``hot_terms`` more codebook rows are added. Their codes are the array ``hot_codes``, with a row for each hot id, and
    ``hot_places``, which takes 1.06 bits an id, tells which ids these are.

    The rows of all codebooks are a table themselves. If that is a tensor train, its cores ``core_0``, ``core_1`` and so
    on are the parameters in place of ``codebooks``. Codes may then be long while codebooks stay small.

    Attributes:
        num_embeddings, features: number of rows and columns.
        num_codes: codes of an id that is not hot, m. Of a product, their number over ``terms`` divides ``features``.
        bits: bits of a code, 1 to 16.
        kind: ``"product"`` or ``"additive"``.
        rotated: whether rows are multiplied by the constant array ``rotation``, float32 ``[D, D]``, in the end.
        terms: codes of a product that follow each other and whose codebook rows are added in one part of the columns.
        hot: number of ids with more codes than the others.
        hot_terms: how many more each part of their rows has. Their codebooks follow all others of the part.
        name: for error messages.
        codebooks: the rows of all codebooks, ``num_entries`` of ``width`` columns: a `DenseTable` or a `TTTable` with
            the `Update` of a fused table.

    >>> import jax, jax.numpy as jnp, jax_tt
    >>> table = jax_tt.coded_table(100_000, 64, num_codes=16)
    >>> state = table.init(jax.random.key(0))
    >>> {name: array.shape for name, array in state.items()}
    {'codebooks': (4096, 4), 'codes': (100000, 16)}
    >>> rows, _ = jax_tt.lookup(table, state, jnp.array([1, 99_999]))
    >>> rows.shape, table.nbytes
    ((2, 64), 1665536)
    """

    codebooks: NativeTable = dataclasses.field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        given, shape = self.codebooks, (self.num_entries, self.width)
        if not isinstance(given, NativeTable) or not hasattr(given, "param_dtype"):
            expected = (
                f"a table of {shape[0]} x {shape[1]} trained numbers, as coded_table makes it"
            )
            raise mismatch(f"{self.label}codebooks", repr(given), expected, error=TypeError)
        if (given.num_embeddings, given.features) != shape:
            got = f"{given.num_embeddings} x {given.features}"
            expected = f"{shape[0]} x {shape[1]}, the rows of all codebooks and their columns"
            raise mismatch(f"{self.label}codebooks", got, expected)

    @property
    def update(self) -> Update | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The `Update` of the codebooks."""
        return self.codebooks.update

    @property
    def param_dtype(self) -> Any:
        """Type of the codebooks."""
        codebooks: Any = self.codebooks
        return codebooks.param_dtype

    @functools.cached_property
    def spec(self) -> StateSpec:
        hint = f"Codes have {self.bits} bits: {_MADE_BY}"
        constants = [
            Array(name, "constant", shape, jnp.dtype("uint8"), collection=COLLECTION, hint=hint)
            for name, shape in self.code_shapes.items()
        ]
        if self.hot:
            shape, dtype = places.shape_of(self.num_embeddings), jnp.dtype("uint32")
            constants.append(Array(HOT_PLACES, "constant", shape, dtype, collection=COLLECTION))
        if self.rotated:
            constants.append(rotation_array(self.features, COLLECTION))
        books = self._outer(self.codebooks.spec.param_shapes)
        return StateSpec.of(books, self.update, *constants)

    def init_params(self, key: jax.Array) -> dict[str, Any]:
        return self._outer(self.codebooks.init_params(key))

    def init_rest(self, params: Mapping[str, Any]) -> dict[str, jax.Array]:
        # What is there already is not made: random codes take longer to compile than a small table to encode.
        rest = super().init_rest(params) | {
            name: jax.random.bits(jax.random.key(k), shape, "uint8")
            for k, (name, shape) in enumerate(self.code_shapes.items())
            if name not in params
        }
        if self.hot and HOT_PLACES not in params:
            rest[HOT_PLACES] = places.mark_members(jnp.arange(self.num_embeddings) < self.hot)
        if self.rotated and ROTATION not in params:
            rest[ROTATION] = jnp.eye(self.features, dtype=jnp.float32)
        return rest

    # Codes

    def codes(self, state: State, ids: Any = None) -> jax.Array:
        """Codes int32 ``[..., m]`` of ids ``[...]``, which must be in range, or of all ids.

        In a table with hot ids, the codes of a part are those of all ids and then those of hot ids, which are -1 where
        an id is not hot.
        """
        every = jnp.arange(self.num_embeddings)
        return codes_at(self, state, every if ids is None else jnp.asarray(ids))

    def hot_ids(self, state: State, ids: Any) -> tuple[jax.Array, jax.Array]:
        """Whether ids ``[...]``, which must be in range, are hot, and the rows of ``hot_codes`` of those that are."""
        return places.find_members(state[HOT_PLACES], jnp.asarray(ids))

    def with_codes(self, state: State, codes: Any) -> dict[str, Any]:
        """The state with other codes, integers ``[N, m]`` as `codes` returns them, which also tell the hot ids.

        Raises:
            ValueError: they have another shape or type, one is no row of its codebook, or other than ``hot`` ids have
                codes of hot ids.
        """
        return {**state, **constants_of(self, codes)}

    def assigned(self, state: State, rows: Any, ids: Any = None) -> dict[str, Any]:
        """The state with the codes whose codebook rows are closest to given rows, between two steps.

        It runs on the host. Codes of sums are found code by code, and not always the closest. Hot ids stay the same.

        Args:
            state: of the table.
            rows: ``[N, D]``, or a row for each of ``ids``, ``[n, D]``; may be a memory map.
            ids: distinct ids ``[n]`` whose codes are changed; None for all.

        Raises:
            ValueError: the rows have another shape, or one is not finite; an id is out of range.
        """
        check_state(self, state)
        given, at = checked_rows(self, rows, ids)
        made = self, self.codebook_rows(state), state.get(ROTATION), given
        if not self.hot:
            codes, _ = encoded_rows(*made, None)
            return {**state, CODES: state[CODES].at[at].set(codes)}
        hot, place = map(np.asarray, self.hot_ids(state, at))
        codes, of_hot = encoded_rows(*made, hot)
        of_hot = state[HOT_CODES].at[place[hot]].set(of_hot)
        return {**state, CODES: state[CODES].at[at].set(codes), HOT_CODES: of_hot}

    def rows(self, params: Params, digits: Sequence[jax.Array], precision: Any) -> jax.Array:
        """`Table.rows` with the codes, and the rotation if there is one, after the parameters."""
        count = len(self.spec.param_names)

        def of_entries(entries: jax.Array) -> jax.Array:
            entry_digits, _ = digits_of_integers(self.codebooks.ids, entries)
            return self.codebooks.rows(params[:count], entry_digits, precision)

        (ids,) = digits
        return self._combined(of_entries, params[count:], ids, precision)

    def _combined(
        self,
        of_entries: Callable[[jax.Array], jax.Array],
        constants: Params,
        ids: jax.Array,
        precision: Any,
    ) -> jax.Array:
        """Rows ``[..., D]`` of ids; ``of_entries`` reads codebook rows ``[..., width]``."""
        arrays = dict(zip(self.spec.constant_names, constants, strict=True))
        entries = entries_at(self, arrays, ids)
        terms = (entries[..., k :: self.part_terms] for k in range(self.part_terms))
        rows = functools.reduce(jnp.add, (self._term(of_entries, *one) for one in enumerate(terms)))
        rotation = [arrays[ROTATION]] if self.rotated else []
        return turned(rows.reshape(*ids.shape, self.features), rotation, precision)

    def _term(
        self, of_entries: Callable[[jax.Array], jax.Array], k: int, entries: jax.Array
    ) -> jax.Array:
        """The codebook rows of code k of every part."""
        if k < self.part_terms - self.hot_terms:
            return of_entries(entries)
        return jnp.where((entries >= 0)[..., None], of_entries(jnp.maximum(entries, 0)), 0)

    def codebook_rows(self, state: State) -> jax.Array:
        """The rows of all codebooks ``[m * 2 ** bits, width]``, one codebook after another."""
        return to_dense(self.codebooks, self._of_books(state))

    # Lookups

    @functools.cached_property
    def row_attributes(self) -> dict[str, Any]:
        """What native ops must be told of the form of the rows."""
        return {
            "bits": np.int64(self.bits),
            "terms": np.int64(self.part_terms - self.hot_terms),
            "hot_terms": np.int64(self.hot_terms),
        }

    def execution(self, lookup: Lookup, state: State) -> Execution:
        method = backend.choose(lookup.method, self.spec.storage(state))
        group = CodedGroup(method) if self.reads_codes(method) else None
        differentiable = method == "reference" and self.update is None
        return Execution(method, group, differentiable=differentiable)

    def reads_codes(self, method: str) -> bool:
        """Whether a native op on the CPU reads the codes; it adds codebook rows in float32."""
        on_cpu = method in ("auto", "native") and "cpu" in backend.native_platforms()
        dense = isinstance(self.codebooks, RowTable)
        return on_cpu and dense and jnp.dtype(self.param_dtype) != jnp.float64

    def forward(self, state: State, batch: Batch, lookup: Lookup) -> tuple[jax.Array, Any]:
        if lookup.method == "reference":
            sentinel = state.get("sentinel")
            return reference.forward(self, self._arrays(state), batch, lookup, sentinel), ()
        call = Call(BoundTable(self, lookup), state, batch, ())
        if self.reads_codes(lookup.method):
            (result,) = lookups_of_codes([call])
            return result
        axes = varying_axes(self.spec.params(state), batch)
        sums, residuals = vary_over(self.sums_of_entries(vary_over(call, axes)), axes)
        return turned(sums, rotation_of(self, state), lookup.precision), residuals

    def sums_of_entries(self, call: Call) -> tuple[jax.Array, Params]:
        """Sums before the rotation, and residuals, from a lookup in the codebooks."""
        use, state, batch, *_ = call
        lookup = use.lookup
        if lookup.bounds == "warn":
            warn_out_of_range(self, batch)
        entries = self._expanded(state, batch, lookup)
        # An error names one of the rows of the codebooks.
        books = with_name(self.codebooks, f"{self.name or 'a CodedTable'}, codebooks")
        sums, residuals = books.forward(self._of_books(state), entries, _quiet(lookup))
        return whole(self, sums), residuals

    def backward(
        self, state: State, batch: Batch, residuals: Any, g: jax.Array, lookup: Lookup
    ) -> tuple[dict[str, Any], jax.Array | None]:
        entries, g = self._expanded(state, batch, lookup), self._of_codes(state, g, lookup)
        grads, dweights = self.codebooks.param_gradients(
            self.spec.params(state), entries, residuals, g, _quiet(lookup)
        )
        return dict(zip(self.spec.param_names, grads, strict=True)), of_positions(
            self, batch, dweights
        )

    def stepped_params(
        self, state: State, batch: Batch, residuals: Any, g: jax.Array, lookup: Lookup, values: Any
    ) -> tuple[Params, SlotArrays, jax.Array, jax.Array | None]:
        entries, g = self._expanded(state, batch, lookup), self._of_codes(state, g, lookup)
        params, slots, applied, dweights = self.codebooks.stepped_params(
            self._of_books(state), entries, residuals, g, _quiet(lookup), values
        )
        return params, slots, applied, of_positions(self, batch, dweights)

    def code_operands(self, state: State) -> dict[str, jax.Array]:
        """What the native op takes before the codebooks."""
        _, words = places.shape_of(0)
        return {
            CODES: state[CODES],
            HOT_CODES: state.get(HOT_CODES, jnp.zeros((0, 0), jnp.uint8)),
            HOT_PLACES: state.get(HOT_PLACES, jnp.zeros((0, words), jnp.uint32)),
        }

    def order(self, sums: jax.Array) -> tuple[jax.Array]:
        """The residual of the expanded batch, by which its step comes after the forward pass."""
        parts = by_part(self, sums)
        blocks = num_blocks(parts.shape[0])
        return (parts.reshape(blocks, parts.shape[0] // blocks, *parts.shape[1:]),)

    def _outer(self, of_books: Mapping[str, Any]) -> dict[str, Any]:
        """What the table of codebooks says of its parameters, by their names in the state."""
        return {CODEBOOKS if name == "embedding" else name: one for name, one in of_books.items()}

    def _of_books(self, state: State) -> dict[str, Any]:
        """The state of the table of codebooks."""
        names = self.codebooks.spec.param_names
        return {**state, **dict(zip(names, self.spec.params(state), strict=True))}

    def _arrays(self, state: State) -> Params:
        rest = (lax.stop_gradient(state[name]) for name in self.spec.constant_names)
        return *self.spec.params(state), *rest

    def _expanded(self, state: State, batch: Batch, lookup: Lookup) -> Batch:
        """The batch of codebook rows of a batch of ids."""
        (ids,), ok = digits_in_range(self.ids, batch)
        return expanded(self, state, batch, lookup, ids, ok)

    def _of_codes(self, state: State, g: jax.Array, lookup: Lookup) -> jax.Array:
        """The gradient of the sums of the expanded batch, from the gradient ``g`` of the sums of ids."""
        return by_part(self, turned_back(g, rotation_of(self, state), lookup.precision))


def _quiet(lookup: Lookup) -> Lookup:
    """The options of a lookup in the codebooks, after the ids have been checked."""
    return lookup.replace(bounds="zero") if lookup.bounds in IGNORED else lookup


@to_dense.register(CodedTable)
def expanded_table(table: CodedTable, state: State) -> jax.Array:
    of_entries = functools.partial(gathered, table.codebook_rows(state))
    ids = jnp.arange(table.num_embeddings)
    constants = table._arrays(state)[len(table.spec.param_names) :]
    return table._combined(of_entries, constants, ids, lax.Precision.HIGHEST)


@with_update.register(CodedTable)
def with_update_of_codebooks(table: CodedTable, update: Update | None) -> CodedTable:
    return dataclasses.replace(table, codebooks=with_update(table.codebooks, update))


@without_values.register(CodedTable)
def without_initial_codebooks(table: CodedTable) -> CodedTable:
    return dataclasses.replace(table, codebooks=without_values(table.codebooks))


def in_words(table: CodedTable) -> str:
    """The settings of a table, but for its kind and the sizes of its rows."""
    sums = "" if table.terms == 1 else f", sums of {table.terms}"
    more = f", {table.hot_terms} more in each sum of {table.hot:,} rows" if table.hot else ""
    turned = ", rotated" if table.rotated else ""
    ranks = getattr(table.codebooks, "ranks", ())[1:-1]
    train = f", codebooks of ranks {', '.join(map(str, ranks))}" if ranks else ""
    return f"{table.num_codes} codes of {table.bits} bits{sums}{more}{turned}{train}"


@best_rows.register(CodedTable)
def best_of_codes(table: CodedTable, state: State, queries: Queries) -> tuple[jax.Array, jax.Array]:
    def scanned(state: State, queries: Queries) -> tuple[jax.Array, jax.Array]:
        books = table.codebook_rows(state).astype(jnp.float32)
        vectors = turned_back(queries.vectors, rotation_of(table, state), lax.Precision.HIGHEST)
        asked = vectors, queries.exclude, queries.present, queries.k
        arrays = {**table.code_operands(state), CODEBOOKS: books}
        return scan("coded", arrays, table.row_attributes, *asked)

    return best_scanned(table, state, queries, scanned)


@dataclasses.dataclass(frozen=True)
class CodedGroup:
    """The group of coded tables with one method, for `jax_tt._table.groups`; each is stepped on its own."""

    method: str
    unwraps: ClassVar[bool] = True

    def forward(self, calls: Sequence[Call], wide: ConcatLayout | None) -> tuple[Any, Any]:
        results: dict[int, Any] = {}
        for members in alike(calls):
            found = lookups_of_codes([calls[k] for k in members])
            results.update(zip(members, found, strict=True))
        sums, saved = zip(*(results[k] for k in range(len(calls))), strict=True)
        return (sums if wide is None else wide.joined(sums)), saved

    def backward(
        self, calls: Sequence[Call], residuals: Any, gs: Gradients, wide: ConcatLayout | None
    ) -> list[Cotangents]:
        return list(map(of_one_table, calls, residuals, separate_gradients(calls, gs, wide)))


def lookups_of_codes(calls: Sequence[Call]) -> list[tuple[jax.Array, Any]]:
    """Sums and residuals of each table, all of which have `CodedTable.reads_codes`."""
    tables: list[Any] = [call.use.table for call in calls]
    axes = [
        varying_axes(table.spec.params(call.state), call.batch)
        for table, call in zip(tables, calls, strict=True)
    ]

    def native(calls: Sequence[Call]) -> list[Any]:
        return list(map(vary_over, run([CodedForward("cpu", call) for call in calls]), axes))

    def of_entries(calls: Sequence[Call]) -> list[Any]:
        found = (table.sums_of_entries(call) for table, call in zip(tables, calls, strict=True))
        return list(map(vary_over, found, axes))

    results = by_platform({"cpu": native}, of_entries, list(map(vary_over, calls, axes)))
    return [
        (turned(sums, rotation_of(table, call.state), call.use.lookup.precision), residuals)
        for table, call, (sums, residuals) in zip(tables, calls, results, strict=True)
    ]
