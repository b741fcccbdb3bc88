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

from jax_tt._arguments import as_array, as_int, as_positive, one_of
from jax_tt._coded import codec, places
from jax_tt._coded.assign import encoded_rows
from jax_tt._host_table import host_table
from jax_tt._lookup import _backend
from jax_tt._lookup._batch import Batch, present
from jax_tt._lookup._by_platform import by_platform
from jax_tt._lookup._ids import digits_in_range
from jax_tt._lookup._vma import vary_over, varying_axes
from jax_tt._lookup._warn import warn_out_of_range
from jax_tt._native._operands import MAX_POSITIONS, sentinel_operand
from jax_tt._native._table_call import run
from jax_tt._native.coded import Forward
from jax_tt._native.partition import num_blocks
from jax_tt._tables import reference
from jax_tt._tables.checks import check_param_dtype
from jax_tt._tables.dense import DenseTable, gathered
from jax_tt._tables.options import IGNORED, Lookup, Update, check_update
from jax_tt._tables.rotation import ROTATION, check_rotation, rotation_of, turned, turned_back
from jax_tt._tables.table import Params, Slots, State, Table

CODEBOOKS, CODES = "codebooks", "codes"
# Of the ids that have more codes than the others.
HOT_CODES, HOT_PLACES = "hot_codes", "hot_places"
KINDS = ("product", "additive")
# The linen collection of the arrays without gradients.
COLLECTION = "coded"


@dataclasses.dataclass(frozen=True)
class CodedTable(Table):
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

    Attributes:
        num_embeddings, features: its sizes.
        num_codes: codes of an id that is not hot, m. Of a product, their number over ``terms`` divides ``features``.
        bits: bits of a code, 1 to 16.
        kind: ``"product"`` or ``"additive"``.
        rotated: whether rows are multiplied by the constant array ``rotation``, float32 ``[D, D]``, in the end.
        param_dtype: type of the codebooks.
        update: `Update` of a fused table, or None.
        name: for error messages.
        codebook_init: initialiser ``(key, shape, dtype) -> codebooks``; None for rows of about unit length.
        terms: codes of a product that follow each other and whose codebook rows are added in one part of the columns.
        hot: number of ids with more codes than the others.
        hot_terms: how many more each part of their rows has. Their codebooks follow those of the part for all ids.

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

    def __post_init__(self) -> None:
        as_positive("num_embeddings", self.num_embeddings)
        as_positive("features", self.features)
        as_positive("num_codes", self.num_codes)
        one_of("kind", self.kind, KINDS)
        check_param_dtype(self.param_dtype)
        check_update(self.update)
        if not 1 <= as_int("bits", self.bits) <= codec.MAX_BITS:
            raise ValueError(f"{self.label}bits: got {self.bits}; expected 1 to {codec.MAX_BITS}.")
        if self.num_codes % as_positive("terms", self.terms):
            raise ValueError(
                f"{self.label}terms: got {self.terms}; expected a divisor of num_codes={self.num_codes}."
            )
        if self.kind == "additive" and self.terms > 1:
            raise ValueError(
                f"{self.label}terms: got {self.terms} with kind='additive', which adds all codes; expected 1."
            )
        if self.features % self.column_parts:
            times = "" if self.terms == 1 else f"{self.terms} times "
            raise ValueError(
                f"{self.label}num_codes: got {self.num_codes}; expected {times}a divisor of features={self.features}, "
                "as every part of a product gives as many columns. Additive codes may be any number."
            )
        if not 0 <= as_int("hot", self.hot) <= self.num_embeddings:
            raise ValueError(
                f"{self.label}hot: got {self.hot}; expected 0 to num_embeddings={self.num_embeddings}."
            )
        if (as_int("hot_terms", self.hot_terms) > 0) != (self.hot > 0) or self.hot_terms < 0:
            raise ValueError(
                f"{self.label}hot_terms: got {self.hot_terms} with hot={self.hot}; expected a positive number with hot "
                "ids, and 0 without."
            )
        if self.all_codes << self.bits > 2**31 - 1:
            of_hot = f" and hot_terms={self.hot_terms}" if self.hot else ""
            raise ValueError(
                f"{self.label}num_codes: got {self.num_codes}{of_hot}, which are {self.all_codes << self.bits} "
                f"codebook rows at {self.bits} bits; expected fewer than 2**31."
            )
        if self.update is not None:
            self.update.optimizer.check_width(self.width)

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
        of_codebooks = (
            math.prod(self.param_shapes[CODEBOOKS]) * jnp.dtype(self.param_dtype).itemsize
        )
        of_rotation = 4 * self.features**2 if self.rotated else 0
        of_places = 4 * math.prod(places.shape_of(self.num_embeddings)) if self.hot else 0
        of_codes = self.num_embeddings * self.row_bytes + self.hot * self.hot_bytes
        return of_codes + of_places + of_codebooks + of_rotation

    @property
    def param_shapes(self) -> dict[str, tuple[int, ...]]:
        return {CODEBOOKS: (self.all_codes << self.bits, self.width)}

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
        init = self.codebook_init or jax.nn.initializers.normal(deviation)
        return {CODEBOOKS: init(key, self.param_shapes[CODEBOOKS], self.param_dtype)}

    def init_rest(self, params: Mapping[str, Any]) -> dict[str, jax.Array]:
        rest = super().init_rest(params) | {
            name: jax.random.bits(jax.random.key(k), shape, "uint8")
            for k, (name, shape) in enumerate(self._code_shapes.items())
        }
        if self.hot:
            rest[HOT_PLACES] = places.of_members(jnp.arange(self.num_embeddings) < self.hot)
        return rest | (
            {ROTATION: jnp.eye(self.features, dtype=jnp.float32)} if self.rotated else {}
        )

    @property
    def _code_shapes(self) -> dict[str, tuple[int, int]]:
        of_hot = {HOT_CODES: (self.hot, self.hot_bytes)} if self.hot else {}
        return {CODES: (self.num_embeddings, self.row_bytes), **of_hot}

    def check(self, state: State) -> None:
        self.require(state, (*self.trained_names, *self.constant_names))
        super().check(state)
        for name, shape in self._code_shapes.items():
            own = state[name]
            if own.dtype != jnp.uint8 or own.shape != shape:
                raise ValueError(
                    f"{self.label}{name}: got {own.dtype} of shape {own.shape}; expected uint8 of shape {shape}, codes "
                    f"of {self.bits} bits. jax_tt.encode makes them of rows, CodedTable.with_codes of integers."
                )
        if self.hot:
            own, shape = state[HOT_PLACES], places.shape_of(self.num_embeddings)
            if own.dtype != jnp.uint32 or own.shape != shape:
                raise ValueError(
                    f"{self.label}{HOT_PLACES}: got {own.dtype} of shape {own.shape}; expected uint32 of shape {shape}."
                )
        check_rotation(self, state)

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
        given = as_array(f"{self.label}codes", codes)
        shape = self.num_embeddings, self.all_codes
        if given.shape != shape or given.dtype.kind not in "iu":
            raise ValueError(
                f"{self.label}codes: got {given.dtype} of shape {given.shape}; expected integers of shape {shape}."
            )
        if not isinstance(given, Tracer):
            self._check_codes(np.asarray(given))
        every, of_hot = self._split(jnp.asarray(given))
        found = {**state, CODES: codec.packed(every, self.bits)}
        if not self.hot:
            return found
        hot = of_hot[:, 0] >= 0
        (rows,) = jnp.nonzero(hot, size=self.hot)
        own = {HOT_CODES: codec.packed(of_hot[rows], self.bits)}
        return found | own | {HOT_PLACES: places.of_members(hot)}

    def _check_codes(self, codes: np.ndarray) -> None:
        # Codes of hot ids may be absent.
        absent = np.zeros(codes.shape, bool)
        if self.hot:
            last = np.arange(self.all_codes) % self.part_terms >= self.part_terms - self.hot_terms
            absent = (codes == -1) & last
            hot = (~absent[:, last]).all(axis=1)
            if hot.sum() != self.hot or not absent[~hot][:, last].all():
                raise ValueError(
                    f"{self.label}codes: got {hot.sum()} ids with all codes of hot ids; expected {self.hot}, and -1 "
                    "for all these codes of the others."
                )
        wrong = ~absent & ((codes < 0) | (codes >= 1 << self.bits))
        if wrong.any():
            row, k = map(int, np.argwhere(wrong)[0])
            raise ValueError(
                f"{self.label}codes: code {k} of row {row} is {codes[row, k]}; expected 0 to "
                f"{(1 << self.bits) - 1}, as codes have {self.bits} bits."
            )

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
        given = host_table(f"{self.label}rows", rows)
        at = None if ids is None else np.asarray(as_array(f"{self.label}ids", ids))
        if at is not None and (at.ndim != 1 or at.dtype.kind not in "iu"):
            raise ValueError(
                f"{self.label}ids: got {at.dtype} of shape {at.shape}; expected integers [n]."
            )
        if at is not None and len(at) and not 0 <= at.min() <= at.max() < self.num_embeddings:
            raise ValueError(
                f"{self.label}ids: got ids from {at.min()} to {at.max()}; expected 0 to {self.num_embeddings - 1}."
            )
        shape = self.num_embeddings if at is None else len(at), self.features
        if tuple(given.shape) != shape:
            raise ValueError(f"{self.label}rows: got shape {tuple(given.shape)}; expected {shape}.")
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
        codebooks, *rest = params
        constants = dict(zip(self.constant_names, rest, strict=True))
        (ids,) = digits
        entries = self._entries(constants, ids)
        found = functools.reduce(
            jnp.add, (self._term(codebooks, entries, k) for k in range(self.part_terms))
        )
        rotation = [constants[ROTATION]] if self.rotated else []
        return turned(found.reshape(*ids.shape, self.features), rotation, precision)

    def _term(self, codebooks: jax.Array, entries: jax.Array, k: int) -> jax.Array:
        """The codebook rows of code k of every part."""
        own = entries[..., k :: self.part_terms]
        if k < self.part_terms - self.hot_terms:
            return gathered(codebooks, own)
        return jnp.where((own >= 0)[..., None], gathered(codebooks, jnp.maximum(own, 0)), 0)

    def to_dense(self, state: State) -> jax.Array:
        ids = jnp.arange(self.num_embeddings)
        return self.rows(self._arrays(state), [ids], lax.Precision.HIGHEST)

    # Lookups

    def method(self, lookup: Lookup, state: State) -> str:
        return _backend.choose(lookup.method, self.storage(state))

    def forward(self, state: State, batch: Batch, lookup: Lookup) -> tuple[jax.Array, Any]:
        sentinel = state.get("sentinel")
        if lookup.method == "reference":
            return reference.forward(self, self._arrays(state), batch, lookup, sentinel), ()
        axes = varying_axes(state[CODEBOOKS], batch)
        # The rotation follows.
        names = (CODEBOOKS, CODES, HOT_CODES, HOT_PLACES, "sentinel")
        arrays = {name: state[name] for name in names if name in state}
        arrays, batch = vary_over((arrays, batch), axes)

        def native(arrays: State, batch: Batch) -> Any:
            of_call = self, "cpu", (arrays[CODEBOOKS].astype(jnp.float32),), batch, lookup
            sums = run(Forward(*of_call, **self._code_operands(arrays)))
            return vary_over((sums, self._order(sums) if lookup.wanted.names else ()), axes)

        def expanded(arrays: State, batch: Batch) -> Any:
            if lookup.bounds == "warn":
                warn_out_of_range(self, batch)
            own = self._expanded(arrays, batch, lookup)
            # An error would name one of its rows.
            dense = dataclasses.replace(
                self._dense, name=f"{self.name or 'a CodedTable'}, codebooks"
            )
            found, residuals = dense.forward(_as_dense(arrays), own, _quiet(lookup))
            return vary_over((self._whole(found), residuals), axes)

        if self._runs_natively(lookup):
            sums, residuals = by_platform({"cpu": native}, expanded, arrays, batch)
        else:
            sums, residuals = expanded(arrays, batch)
        return turned(sums, rotation_of(self, state), lookup.precision), residuals

    def backward(
        self, state: State, batch: Batch, residuals: Any, g: jax.Array, lookup: Lookup
    ) -> tuple[dict[str, Any], jax.Array | None]:
        own, g = self._expanded(state, batch, lookup), self._of_codes(state, g, lookup)
        (grad,), dweights = self._dense.param_gradients(
            (state[CODEBOOKS],), own, residuals, g, _quiet(lookup)
        )
        return {CODEBOOKS: grad}, self._of_positions(batch, dweights)

    def stepped_params(
        self, state: State, batch: Batch, residuals: Any, g: jax.Array, lookup: Lookup, values: Any
    ) -> tuple[Params, Slots, jax.Array, jax.Array | None]:
        own, g = self._expanded(state, batch, lookup), self._of_codes(state, g, lookup)
        params, slots, applied, dweights = self._dense.stepped_params(
            _as_dense(state), own, residuals, g, _quiet(lookup), values
        )
        return params, slots, applied, self._of_positions(batch, dweights)

    def _runs_natively(self, lookup: Lookup) -> bool:
        """Whether programs for the CPU have the op on codes; it adds in float32."""
        of_cpu = "cpu" in _backend.native_platforms() and lookup.method != "cuda_emulated"
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
        own = self._by_part(sums)
        blocks = num_blocks(own.shape[0])
        return (own.reshape(blocks, own.shape[0] // blocks, *own.shape[1:]),)

    @functools.cached_property
    def _dense(self) -> DenseTable:
        """The codebooks as a table, in which the lookup of an id is one of m rows."""
        shape = self.param_shapes[CODEBOOKS]
        return DenseTable(*shape, param_dtype=self.param_dtype, update=self.update, name=self.name)

    def _arrays(self, state: State) -> Params:
        rest = (lax.stop_gradient(state[name]) for name in self.constant_names)
        return state[CODEBOOKS], *rest

    def _codes(self, constants: State, ids: jax.Array) -> jax.Array:
        """Codes int32 ``[..., m]`` of ids, which must be in range; -1 where an id that is not hot has none."""
        codes = codec.unpacked(_rows_at(constants[CODES], ids), self.num_codes, self.bits)
        if not self.hot:
            return codes
        hot, place = self.hot_ids(constants, ids)
        own = _rows_at(constants[HOT_CODES], jnp.where(hot, place, 0))
        more = codec.unpacked(own, self.column_parts * self.hot_terms, self.bits)
        more = jnp.where(hot[..., None], more, -1)
        by_part = (codes, more)
        by_part = [own.reshape(*ids.shape, self.column_parts, -1) for own in by_part]
        return jnp.concatenate(by_part, axis=-1).reshape(*ids.shape, self.all_codes)

    def _split(self, codes: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Codes of all ids and those of hot ids, from both."""
        by_part = codes.reshape(len(codes), self.column_parts, self.part_terms)
        terms = self.part_terms - self.hot_terms
        return by_part[..., :terms].reshape(len(codes), -1), by_part[..., terms:].reshape(
            len(codes), -1
        )

    def _entries(self, constants: State, ids: jax.Array) -> jax.Array:
        """Codebook rows int32 ``[..., m]`` of ids, which must be in range; -1 where there is no code."""
        codes = self._codes(constants, ids)
        found = codes + (lax.broadcasted_iota(jnp.int32, codes.shape, codes.ndim - 1) << self.bits)
        return jnp.where(codes < 0, -1, found) if self.hot else found

    def _expanded(self, state: State, batch: Batch, lookup: Lookup) -> Batch:
        """The batch of codebook rows: a segment for each part, in which an id has a position for each of its codes."""
        self._check_size(batch)
        (ids,), ok = digits_in_range(self, batch)
        here = present(batch)
        if lookup.bounds in IGNORED:
            here &= ok
        entries = self._entries(state, ids)
        if lookup.bounds == "error":
            beyond = self.param_shapes[CODEBOOKS][0]
            entries = jnp.where(ok[..., None], entries, jnp.int32(beyond))
        entries = jnp.where(here[..., None], entries, jnp.int32(-1))
        parts, (segments, capacity) = self.column_parts, here.shape
        terms = self.part_terms
        entries = jnp.moveaxis(entries.reshape(segments, capacity, parts, terms), 2, 1)
        entries = entries.reshape(segments * parts, capacity * terms)
        offsets = jnp.repeat(batch.offsets * terms, parts, axis=0)
        weights = batch.weights
        if weights is not None:
            weights = jnp.repeat(jnp.repeat(weights, parts, axis=0), terms, axis=1)
        return Batch(entries, offsets, weights, padded=True, rectangular=batch.rectangular)

    def _check_size(self, batch: Batch) -> None:
        """Raises for more codes than one call takes, in terms of the batch and not of that of codebook rows."""
        groups, capacity = batch.ids.shape[:2]
        ids, bags = groups * capacity, groups * (batch.offsets.shape[1] - 1)
        sizes = ids * self.all_codes, bags * self.column_parts
        if max((n for n in sizes if isinstance(n, int)), default=0) > MAX_POSITIONS:
            raise ValueError(
                f"{self.label}bags: got {ids} ids in {bags} bags, with {self.all_codes} codes of each id and "
                f"{self.column_parts} parts of each bag; one call takes at most {MAX_POSITIONS} of either. Split the "
                "batch."
            )

    def _whole(self, sums: jax.Array) -> jax.Array:
        """Sums ``[S, nb, D]`` of those of the expanded batch."""
        by_part = sums.reshape(-1, self.column_parts, *sums.shape[1:])
        return jnp.moveaxis(by_part, 1, 2).reshape(by_part.shape[0], -1, self.features)

    def _of_codes(self, state: State, g: jax.Array, lookup: Lookup) -> jax.Array:
        """The gradient of the sums of the expanded batch, from that of the sums."""
        return self._by_part(turned_back(g, rotation_of(self, state), lookup.precision))

    def _by_part(self, sums: jax.Array) -> jax.Array:
        """The inverse of `_whole`."""
        by_part = sums.reshape(*sums.shape[:2], self.column_parts, self.width)
        return jnp.moveaxis(by_part, 2, 1).reshape(-1, sums.shape[1], self.width)

    def _of_positions(self, batch: Batch, dweights: jax.Array | None) -> jax.Array | None:
        """The gradient of the weights, from that of the weights of the expanded batch."""
        if dweights is None:
            return None
        segments, capacity = batch.ids.shape[:2]
        return jnp.sum(dweights.reshape(segments, self.column_parts, capacity, -1), axis=(1, 3))


def _rows_at(codes: jax.Array, ids: jax.Array) -> jax.Array:
    # Wrapping negative ids adds the number of rows, which may overflow the type of the ids.
    return codes.at[ids].get(mode="promise_in_bounds", wrap_negative_indices=False)


def _as_dense(state: State) -> dict[str, Any]:
    """The state of the table of codebooks."""
    return {**state, "embedding": state[CODEBOOKS]}


def _quiet(lookup: Lookup) -> Lookup:
    """The options of a lookup in the codebooks, after the ids have been checked."""
    return dataclasses.replace(lookup, bounds="zero") if lookup.bounds in IGNORED else lookup
