"""`CodedTable`: a table whose rows are concatenations or sums of codebook rows."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from jax_tt._base.arguments import as_array
from jax_tt._base.host_table import host_table
from jax_tt._ids import places
from jax_tt._ids.batch import Batch
from jax_tt._ids.id_space import digits_of_integers
from jax_tt._jax import backend
from jax_tt._jax.by_platform import by_platform
from jax_tt._jax.gather import gathered
from jax_tt._jax.vma import vary_over, varying_axes
from jax_tt._kinds.coded import codec
from jax_tt._kinds.coded.assign import encoded_rows
from jax_tt._kinds.coded.checks import check_codes, check_constants, check_fields
from jax_tt._kinds.coded.expand import by_part, expanded, of_positions, whole
from jax_tt._kinds.coded.names import CODEBOOKS, CODES, HOT_CODES, HOT_PLACES
from jax_tt._kinds.tensor_train.table import TTTable
from jax_tt._lookup.warn import warn_out_of_range
from jax_tt._native.coded import Forward
from jax_tt._native.operands import sentinel_operand
from jax_tt._native.partition import num_blocks
from jax_tt._native.rows import RowTable
from jax_tt._native.table_call import run
from jax_tt._table import reference
from jax_tt._table.options import IGNORED, Lookup, Update
from jax_tt._table.reference import ReferenceTable
from jax_tt._table.rotation import ROTATION, rotation_of, turned, turned_back
from jax_tt._table.types import Params, Slots, State
from jax_tt._tt.shape import TTShape

# The linen collection of the arrays without gradients.
COLLECTION = "coded"


@dataclasses.dataclass(frozen=True)
class CodedTable(ReferenceTable):
    """A table in which every id has ``m`` codes, and a row is made of the codebook rows that they select.

    A codebook has ``2 ** bits`` rows. A row of the table is the concatenation of one row of each codebook, of ``D / m``
    columns (``"product"``), or their sum (``"additive"``). Between the two, a product may have sums of ``terms`` codes
    for parts. `encode` makes a table of trained rows. In a fresh one, codes are random.

    Its state is the parameter ``codebooks``, ``[m * 2 ** bits, D / m]`` or ``[m * 2 ** bits, D]``, one codebook after
    another, and the constant array ``codes``, uint8 ``[N, ceil(m * bits / 8)]``: the codes of a row, lowest bits first.
    Codebooks are trained like any parameter, by ordinary gradients or, with ``update``, in the backward pass, where a
    codebook row is updated once with the sum of the gradients of all ids that have its code.

    Some ids, such as frequent ones, may have more codes than the others: to each part of the row of a hot id,
    ``hot_terms`` more codebook rows are added. Their codes are the array ``hot_codes``, with a row for each hot id, and
    ``hot_places``, which takes 1.06 bits an id, tells which ids these are.

    With ``codebook_shape``, the rows of all codebooks are those of one tensor train, whose cores ``core_0``, ``core_1``
    and so on are the parameters in place of ``codebooks``. Codes may then be long while codebooks stay small.

    Attributes:
        num_embeddings, features: its sizes.
        num_codes: codes of an id that is not hot, m. Of a product, their number over ``terms`` divides ``features``.
        bits: bits of a code, 1 to 16.
        kind: ``"product"`` or ``"additive"``.
        rotated: whether rows are multiplied by the constant array ``rotation``, float32 ``[D, D]``, in the end.
        param_dtype: type of the codebooks.
        update: `Update` of a fused table, or None.
        name: for error messages.
        codebook_init: initialiser ``(key, shape, dtype) -> codebooks``, or of each core; None for rows of about unit
            length.
        terms: codes of a product that follow each other and whose codebook rows are added in one part of the columns.
        hot: number of ids with more codes than the others.
        hot_terms: how many more each part of their rows has. Their codebooks follow those of the part for all ids.
        codebook_shape: `TTShape` of the rows of all codebooks, which are then a tensor train; None for dense codebooks.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it and the fix.

    >>> import jax, jax.numpy as jnp, jax_tt
    >>> table = jax_tt.CodedTable(100_000, 64, num_codes=16, bits=8)
    >>> state = table.init(jax.random.key(0))
    >>> {name: array.shape for name, array in state.items()}
    {'codebooks': (4096, 4), 'codes': (100000, 16)}
    >>> rows, _ = jax_tt.lookup_rows(table, state, jnp.array([1, 99_999]), jax_tt.Lookup())
    >>> rows.shape, table.nbytes
    ((2, 64), 1665536)
    """

    num_embeddings: int
    features: int
    num_codes: int
    bits: int = 8
    kind: str = "product"
    rotated: bool = False
    param_dtype: Any = jnp.float32
    update: Update | None = None
    name: str | None = None
    codebook_init: Callable[..., Any] | None = None
    terms: int = 1
    hot: int = 0
    hot_terms: int = 0
    codebook_shape: TTShape | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.update is not None:
            self.update.optimizer.check_width(self.width if self.codebook_shape is None else None)

    @property
    def column_parts(self) -> int:
        """Parts into which the columns are divided; each is the sum of as many codes."""
        return self.num_codes // self.terms if self.kind == "product" else 1

    @property
    def part_terms(self) -> int:
        """Codes of a part of the columns of a hot id; of other ids the last ``hot_terms`` are missing."""
        return self.num_codes // self.column_parts + self.hot_terms

    @property
    def all_codes(self) -> int:
        """Codes of a hot id."""
        return self.column_parts * self.part_terms

    @property
    def num_entries(self) -> int:
        """Rows of all codebooks."""
        return self.all_codes << self.bits

    @property
    def width(self) -> int:
        """Columns of a codebook."""
        return self.features // self.column_parts

    @property
    def row_bytes(self) -> int:
        """Bytes of the codes of a row that is not hot."""
        return codec.row_bytes(self.num_codes, self.bits)

    @property
    def hot_bytes(self) -> int:
        """Bytes of the further codes of a hot row."""
        return codec.row_bytes(self.column_parts * self.hot_terms, self.bits)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, places of hot ids, codebooks and rotation, without optimizer state."""
        numbers = sum(map(math.prod, self.param_shapes.values()))
        of_codebooks = numbers * jnp.dtype(self.param_dtype).itemsize
        of_rotation = 4 * self.features**2 if self.rotated else 0
        of_places = 4 * math.prod(places.shape_of(self.num_embeddings)) if self.hot else 0
        of_codes = self.num_embeddings * self.row_bytes + self.hot * self.hot_bytes
        return of_codes + of_places + of_codebooks + of_rotation

    @property
    def param_shapes(self) -> dict[str, tuple[int, ...]]:
        if self.codebook_shape is None:
            return {CODEBOOKS: (self.num_entries, self.width)}
        return self._books.param_shapes

    @functools.cached_property
    def constant_names(self) -> tuple[str, ...]:
        of_hot = (HOT_CODES, HOT_PLACES) if self.hot else ()
        return (CODES, *of_hot, ROTATION) if self.rotated else (CODES, *of_hot)

    @functools.cached_property
    def buffers(self) -> dict[str, str]:
        return dict.fromkeys(self.constant_names, COLLECTION)

    def without_values(self) -> CodedTable:
        # An initialiser may keep a reference to the codebooks that it returns.
        return dataclasses.replace(self, codebook_init=None)

    def init_params(self, key: jax.Array) -> dict[str, Any]:
        # The sum of m rows is as long as the concatenation of m rows of their columns.
        deviation = 1 / math.sqrt(self.width * self.num_codes)
        if self.codebook_shape is None:
            init = self.codebook_init or jax.nn.initializers.normal(deviation)
            return {CODEBOOKS: init(key, self.param_shapes[CODEBOOKS], self.param_dtype)}
        if self.codebook_init is not None:
            return self._books.init_params(key)
        # The default cores of a tensor train are for rows of the variance 1 / (3 N).
        scale = (deviation * math.sqrt(3 * self.num_entries)) ** (1 / self.codebook_shape.d)
        cores = dataclasses.replace(self._books, param_dtype=jnp.float32).init_params(key)
        return {name: (scale * core).astype(self.param_dtype) for name, core in cores.items()}

    def init_rest(self, params: Mapping[str, Any]) -> dict[str, jax.Array]:
        rest = super().init_rest(params) | {
            name: jax.random.bits(jax.random.key(k), shape, "uint8")
            for k, (name, shape) in enumerate(self.code_shapes.items())
        }
        if self.hot:
            rest[HOT_PLACES] = places.of_members(jnp.arange(self.num_embeddings) < self.hot)
        return rest | (
            {ROTATION: jnp.eye(self.features, dtype=jnp.float32)} if self.rotated else {}
        )

    @property
    def code_shapes(self) -> dict[str, tuple[int, int]]:
        """Shapes of the arrays of packed codes by name."""
        of_hot = {HOT_CODES: (self.hot, self.hot_bytes)} if self.hot else {}
        return {CODES: (self.num_embeddings, self.row_bytes), **of_hot}

    def check(self, state: State) -> None:
        self.require(state, (*self.trained_names, *self.constant_names))
        super().check(state)
        check_constants(self, state)

    # Codes

    def codes(self, state: State, ids: Any = None) -> jax.Array:
        """Codes int32 ``[..., m]`` of ids ``[...]``, which must be in range, or of all ids.

        In a table with hot ids, the codes of a part are those of all ids and then those of hot ids, which are -1 where
        an id is not hot.
        """
        own = jnp.arange(self.num_embeddings) if ids is None else jnp.asarray(ids)
        return self._codes(state, own)

    def hot_ids(self, state: State, ids: Any) -> tuple[jax.Array, jax.Array]:
        """Whether ids ``[...]``, which must be in range, are hot, and the rows of ``hot_codes`` of those that are."""
        return places.found(state[HOT_PLACES], jnp.asarray(ids))

    def with_codes(self, state: State, codes: Any) -> dict[str, Any]:
        """The state with other codes, integers ``[N, m]`` as `codes` returns them, which also tell the hot ids.

        Raises:
            ValueError: they have another shape or type, one is no row of its codebook, or other than ``hot`` ids have
                codes of hot ids.
        """
        given = as_array(f"{self.ids.label}codes", codes)
        shape = self.num_embeddings, self.all_codes
        if given.shape != shape or given.dtype.kind not in "iu":
            raise ValueError(
                f"{self.ids.label}codes: got {given.dtype} of shape {given.shape}; expected integers of shape {shape}."
            )
        if not isinstance(given, Tracer):
            check_codes(self, np.asarray(given))
        every, of_hot = self._split(jnp.asarray(given))
        found = {**state, CODES: codec.packed(every, self.bits)}
        if not self.hot:
            return found
        hot = of_hot[:, 0] >= 0
        (rows,) = jnp.nonzero(hot, size=self.hot)
        own = {HOT_CODES: codec.packed(of_hot[rows], self.bits)}
        return found | own | {HOT_PLACES: places.of_members(hot)}

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
        self.check(state)
        given = host_table(f"{self.ids.label}rows", rows)
        at = None if ids is None else np.asarray(as_array(f"{self.ids.label}ids", ids))
        if at is not None and (at.ndim != 1 or at.dtype.kind not in "iu"):
            raise ValueError(
                f"{self.ids.label}ids: got {at.dtype} of shape {at.shape}; expected integers [n]."
            )
        if at is not None and len(at) and not 0 <= at.min() <= at.max() < self.num_embeddings:
            raise ValueError(
                f"{self.ids.label}ids: got ids from {at.min()} to {at.max()}; expected 0 to {self.num_embeddings - 1}."
            )
        shape = self.num_embeddings if at is None else len(at), self.features
        if tuple(given.shape) != shape:
            raise ValueError(
                f"{self.ids.label}rows: got shape {tuple(given.shape)}; expected {shape}."
            )
        at = np.arange(self.num_embeddings) if at is None else at
        if not self.hot:
            codes, _ = encoded_rows(self, state, given, None)
            return {**state, CODES: state[CODES].at[at].set(codes)}
        hot, place = map(np.asarray, self.hot_ids(state, at))
        codes, of_hot = encoded_rows(self, state, given, hot)
        of_hot = state[HOT_CODES].at[place[hot]].set(of_hot)
        return {**state, CODES: state[CODES].at[at].set(codes), HOT_CODES: of_hot}

    def rows(self, params: Params, digits: Sequence[jax.Array], precision: Any) -> jax.Array:
        """`Table.rows` with the codes, and the rotation if there is one, after the parameters."""
        count = len(self.param_names)

        def of_entries(entries: jax.Array) -> jax.Array:
            own, _ = digits_of_integers(self._books.ids, entries)
            return self._books.rows(params[:count], own, precision)

        (ids,) = digits
        return self._combined(of_entries, params[count:], ids, precision)

    def _combined(
        self,
        of_entries: Callable[[jax.Array], jax.Array],
        constants: Params,
        ids: jax.Array,
        precision: Any,
    ) -> jax.Array:
        """Rows ``[..., D]`` of ids, from a function that gives those of codebook rows ``[..., width]``."""
        own = dict(zip(self.constant_names, constants, strict=True))
        entries = self.entries(own, ids)
        terms = (entries[..., k :: self.part_terms] for k in range(self.part_terms))
        found = functools.reduce(
            jnp.add, (self._term(of_entries, *one) for one in enumerate(terms))
        )
        rotation = [own[ROTATION]] if self.rotated else []
        return turned(found.reshape(*ids.shape, self.features), rotation, precision)

    def _term(
        self, of_entries: Callable[[jax.Array], jax.Array], k: int, entries: jax.Array
    ) -> jax.Array:
        """The codebook rows of code k of every part."""
        if k < self.part_terms - self.hot_terms:
            return of_entries(entries)
        return jnp.where((entries >= 0)[..., None], of_entries(jnp.maximum(entries, 0)), 0)

    def codebook_rows(self, state: State) -> jax.Array:
        """The rows of all codebooks ``[m * 2 ** bits, width]``, one codebook after another."""
        return self._books.to_dense(self._of_books(state))

    def to_dense(self, state: State) -> jax.Array:
        of_entries = functools.partial(gathered, self.codebook_rows(state))
        ids = jnp.arange(self.num_embeddings)
        constants = self._arrays(state)[len(self.param_names) :]
        return self._combined(of_entries, constants, ids, lax.Precision.HIGHEST)

    # Lookups

    def method(self, lookup: Lookup, state: State) -> str:
        return backend.choose(lookup.method, self.storage(state))

    def forward(self, state: State, batch: Batch, lookup: Lookup) -> tuple[jax.Array, Any]:
        sentinel = state.get("sentinel")
        if lookup.method == "reference":
            return reference.forward(self, self._arrays(state), batch, lookup, sentinel), ()
        axes = varying_axes(self.params(state), batch)
        # The rotation follows.
        names = (*self.param_names, CODES, HOT_CODES, HOT_PLACES, "sentinel")
        arrays = {name: state[name] for name in names if name in state}
        arrays, batch = vary_over((arrays, batch), axes)

        def native(arrays: State, batch: Batch) -> Any:
            of_call = self, "cpu", (arrays[CODEBOOKS].astype(jnp.float32),), batch, lookup
            sums = run(Forward(*of_call, **self._code_operands(arrays)))
            return vary_over((sums, self._order(sums) if lookup.wanted.names else ()), axes)

        def of_entries(arrays: State, batch: Batch) -> Any:
            if lookup.bounds == "warn":
                warn_out_of_range(self, batch)
            own = expanded(self, arrays, batch, lookup)
            # An error would name one of its rows.
            books = self._books.with_name(f"{self.name or 'a CodedTable'}, codebooks")
            found, residuals = books.forward(self._of_books(arrays), own, _quiet(lookup))
            return vary_over((whole(self, found), residuals), axes)

        if self._runs_natively(lookup):
            sums, residuals = by_platform({"cpu": native}, of_entries, arrays, batch)
        else:
            sums, residuals = of_entries(arrays, batch)
        return turned(sums, rotation_of(self, state), lookup.precision), residuals

    def backward(
        self, state: State, batch: Batch, residuals: Any, g: jax.Array, lookup: Lookup
    ) -> tuple[dict[str, Any], jax.Array | None]:
        own, g = expanded(self, state, batch, lookup), self._of_codes(state, g, lookup)
        grads, dweights = self._books.param_gradients(
            self.params(state), own, residuals, g, _quiet(lookup)
        )
        return dict(zip(self.param_names, grads, strict=True)), of_positions(self, batch, dweights)

    def stepped_params(
        self, state: State, batch: Batch, residuals: Any, g: jax.Array, lookup: Lookup, values: Any
    ) -> tuple[Params, Slots, jax.Array, jax.Array | None]:
        own, g = expanded(self, state, batch, lookup), self._of_codes(state, g, lookup)
        params, slots, applied, dweights = self._books.stepped_params(
            self._of_books(state), own, residuals, g, _quiet(lookup), values
        )
        return params, slots, applied, of_positions(self, batch, dweights)

    def _runs_natively(self, lookup: Lookup) -> bool:
        """Whether programs for the CPU have the op on codes; it reads codebook rows and adds in float32."""
        if self.codebook_shape is not None:
            return False
        of_cpu = "cpu" in backend.native_platforms() and lookup.method != "cuda_emulated"
        return of_cpu and jnp.dtype(self.param_dtype) != jnp.float64

    def _code_operands(self, state: State) -> dict[str, jax.Array]:
        """What the native op takes before the codebooks."""
        _, words = places.shape_of(0)
        return {
            "sentinel": sentinel_operand(state.get("sentinel")),
            CODES: state[CODES],
            HOT_CODES: state.get(HOT_CODES, jnp.zeros((0, 0), jnp.uint8)),
            HOT_PLACES: state.get(HOT_PLACES, jnp.zeros((0, words), jnp.uint32)),
        }

    def _order(self, sums: jax.Array) -> tuple[jax.Array]:
        """The residual of the expanded batch, by which its step comes after the forward pass."""
        own = by_part(self, sums)
        blocks = num_blocks(own.shape[0])
        return (own.reshape(blocks, own.shape[0] // blocks, *own.shape[1:]),)

    @functools.cached_property
    def _books(self) -> RowTable | TTTable:
        """The codebooks as a table, in which the lookup of an id is one of m rows."""
        options = {"param_dtype": self.param_dtype, "update": self.update, "name": self.name}
        if self.codebook_shape is None:
            return RowTable(self.num_entries, self.width, **options)
        init = {} if self.codebook_init is None else {"core_init": self.codebook_init}
        return TTTable.of_shape(self.codebook_shape, **options, **init)

    def _of_books(self, state: State) -> dict[str, Any]:
        """The state of the table of codebooks."""
        return {**state, **dict(zip(self._books.param_names, self.params(state), strict=True))}

    def _arrays(self, state: State) -> Params:
        rest = (lax.stop_gradient(state[name]) for name in self.constant_names)
        return *self.params(state), *rest

    def _codes(self, constants: State, ids: jax.Array) -> jax.Array:
        """Codes int32 ``[..., m]`` of ids, which must be in range; -1 where an id that is not hot has none."""
        codes = codec.unpacked(_rows_at(constants[CODES], ids), self.num_codes, self.bits)
        if not self.hot:
            return codes
        hot, place = self.hot_ids(constants, ids)
        own = _rows_at(constants[HOT_CODES], jnp.where(hot, place, 0))
        more = codec.unpacked(own, self.column_parts * self.hot_terms, self.bits)
        more = jnp.where(hot[..., None], more, -1)
        by_term = [
            own.reshape(*ids.shape, self.column_parts, own.shape[-1] // self.column_parts)
            for own in (codes, more)
        ]
        return jnp.concatenate(by_term, axis=-1).reshape(*ids.shape, self.all_codes)

    def _split(self, codes: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Codes of all ids and those of hot ids, from both."""
        n, terms = len(codes), self.part_terms - self.hot_terms
        parts = codes.reshape(n, self.column_parts, self.part_terms)
        return parts[..., :terms].reshape(n, -1), parts[..., terms:].reshape(n, -1)

    def entries(self, constants: State, ids: jax.Array) -> jax.Array:
        """Codebook rows int32 ``[..., m]`` of ids, which must be in range; -1 where there is no code."""
        codes = self._codes(constants, ids)
        found = codes + (lax.broadcasted_iota(jnp.int32, codes.shape, codes.ndim - 1) << self.bits)
        return jnp.where(codes < 0, -1, found) if self.hot else found

    def _of_codes(self, state: State, g: jax.Array, lookup: Lookup) -> jax.Array:
        """The gradient of the sums of the expanded batch, from that of the sums."""
        return by_part(self, turned_back(g, rotation_of(self, state), lookup.precision))


def _rows_at(codes: jax.Array, ids: jax.Array) -> jax.Array:
    # Wrapping negative ids adds the number of rows, which may overflow the type of the ids.
    return codes.at[ids].get(mode="promise_in_bounds", wrap_negative_indices=False)


def _quiet(lookup: Lookup) -> Lookup:
    """The options of a lookup in the codebooks, after the ids have been checked."""
    return dataclasses.replace(lookup, bounds="zero") if lookup.bounds in IGNORED else lookup
