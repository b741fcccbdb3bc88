"""Descriptions of tables from the arguments that users know from the layers."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_tt._base.arguments import as_positive, expect, mismatch
from jax_tt._base.keywords import Function, checks_keywords
from jax_tt._directories.admission import Admission
from jax_tt._directories.row_cache import RowCache
from jax_tt._ids.id_order import IdOrder
from jax_tt._kinds.cached.table import RowCachedTable
from jax_tt._kinds.coded.layout import CodeLayout
from jax_tt._kinds.coded.table import CodedTable
from jax_tt._kinds.dense.table import DenseTable
from jax_tt._kinds.hashed.table import HashTable, Initializer
from jax_tt._kinds.ordered.table import OrderedTable
from jax_tt._kinds.quantized.levels import Levels
from jax_tt._kinds.quantized.table import QuantizedTable
from jax_tt._kinds.tensor_train.table import TTTable
from jax_tt._native.table_group import NativeTable
from jax_tt._table.initial_rows import NormalRows, default_embedding_init
from jax_tt._table.options import Update
from jax_tt._table.table import Table
from jax_tt._tt.initial_cores import CoreInit, GivenCores, ScaledCores, scaled_init
from jax_tt._tt.shape import TTShape
from jax_tt.optimizers import Optimizer

_DEFAULT_CORES = 3
# Entries of dense tables that any ranks are accepted for: 4 MiB in float32, whose ranks matter to nobody's memory.
_SMALL = 2**20


@checks_keywords
def dense_table(
    num_embeddings: int,
    features: int,
    *,
    param_dtype: Any = jnp.float32,
    embedding_init: Callable[..., Any] = default_embedding_init,
    optimizer: Optimizer | None = None,
    skip_nonfinite: bool = False,
    stochastic_rounding: bool = True,
    max_gradient: float | None = None,
    takes_slots: bool = False,
    name: str | None = None,
) -> Table:
    """The description of a dense table, e.g. for a `Collection`, from the arguments of `EmbedBag`.

    Args:
        num_embeddings, features, param_dtype, embedding_init, optimizer, skip_nonfinite, stochastic_rounding,
            max_gradient, name: as in `EmbedBag`.
        takes_slots: whether the table holds the rows on the device of one with `Tiers`. It then takes the slots in the
            batches of `Tiers.prefetch`, and refuses ids, which would be rows of others.

    Returns:
        `DenseTable`.

    >>> import jax_tt
    >>> table = jax_tt.dense_table(1000, 16, optimizer=jax_tt.optimizers.Adagrad(0.05))
    >>> table.spec.trained_names
    ('embedding', 'slot_sum_0', 'step', 'sentinel', 'used')
    """
    update = update_of(optimizer, skip_nonfinite, stochastic_rounding, max_gradient)
    return DenseTable(
        num_embeddings,
        features,
        param_dtype,
        update,
        name,
        embedding_init=embedding_init,
        takes_slots=takes_slots,
    )


@checks_keywords
def quantized_table(
    num_embeddings: int,
    features: int,
    bits: int = 8,
    *,
    levels: Levels = None,
    rotated: bool = False,
    embedding_init: Callable[..., Any] = default_embedding_init,
    optimizer: Optimizer | None = None,
    skip_nonfinite: bool = False,
    stochastic_rounding: bool = True,
    max_gradient: float | None = None,
    name: str | None = None,
) -> QuantizedTable:
    """The description of a table of 8, 4, 3 or 2 bits a number; `quantize` makes one of trained rows.

    Args:
        num_embeddings, features, bits, levels, rotated, embedding_init: as in `QuantizedTable`.
        optimizer: of a table of 8 or 4 bits that is trained; without one, it is read-only.
        skip_nonfinite, stochastic_rounding, max_gradient, name: as in `EmbedBag`.

    Returns:
        `QuantizedTable`.

    >>> import jax_tt
    >>> table = jax_tt.quantized_table(1000, 16, optimizer=jax_tt.optimizers.RowWiseAdagrad(0.05))
    >>> table.row_bytes, table.nbytes
    (20, 20000)
    """
    update = update_of(optimizer, skip_nonfinite, stochastic_rounding, max_gradient)
    return QuantizedTable(
        num_embeddings,
        features,
        bits,
        update,
        name,
        embedding_init,
        levels,
        rotated,
    )


def _check_order(factory: Function) -> Function:
    """Refuses sizes that are given by position and are probably in the wrong order."""

    @functools.wraps(factory)
    def checked(*sizes: Any, **options: Any) -> Any:
        if len(sizes) == 2 and all(isinstance(size, int | np.integer) for size in sizes):
            capacity, features = sizes
            if 0 < capacity < features:
                raise ValueError(
                    f"hash_table: got the capacity {capacity} and {features} features, a table that is wider than "
                    "long; the capacity comes first. If these sizes are meant, name them: "
                    f"hash_table(capacity={capacity}, features={features})."
                )
        return factory(*sizes, **options)

    return checked  # pyright: ignore[reportReturnType]


@checks_keywords
@_check_order
def hash_table(
    capacity: int,
    features: int,
    *,
    policy: str = "lru",
    ways: int = 8,
    min_age: int = 1,
    admission: Admission | int | None = None,
    max_capacity: int | None = None,
    seed: int = 0,
    initializer: Initializer | None = None,
    missing: str | int = "initial",
    safe_check: str = "warn",
    param_dtype: Any = jnp.float32,
    optimizer: Optimizer | None = None,
    skip_nonfinite: bool = False,
    stochastic_rounding: bool = True,
    max_gradient: float | None = None,
    name: str | None = None,
) -> HashTable:
    """The description of a table of 64-bit keys, around a dense table.

    Args:
        capacity: number of rows, a multiple of ``ways``. Less than ``features`` only as a keyword, since the sizes are
            more likely in the wrong order.
        features: number of columns, D.
        policy, ways, min_age, admission, max_capacity, seed, initializer, missing, safe_check: as in `HashTable`.
        param_dtype, optimizer, skip_nonfinite, stochastic_rounding, max_gradient, name: as in `EmbedBag`.

    Returns:
        `HashTable` around a `DenseTable`.

    >>> import jax_tt
    >>> table = jax_tt.hash_table(4096, 16, optimizer=jax_tt.optimizers.Adagrad(0.05), policy="lfu")
    >>> table.num_embeddings, table.features, table.policy
    (4096, 16, 'lfu')
    """
    as_positive("capacity", capacity)
    update = update_of(optimizer, skip_nonfinite, stochastic_rounding, max_gradient)
    # Rows are initialised when they are given to a key.
    zeros = jax.nn.initializers.zeros
    # Whoever looks up the rows themselves has to say that a number is a slot.
    own = {"embedding_init": zeros, "takes_slots": True}
    dense = DenseTable(capacity, features, param_dtype, update, name, **own)
    return HashTable(
        dense,
        policy,
        ways,
        min_age,
        admission,
        max_capacity,
        seed,
        initializer,
        missing,
        safe_check,
    )


@checks_keywords
def coded_table(
    num_embeddings: int,
    features: int,
    num_codes: int,
    bits: int = 8,
    *,
    kind: str = "product",
    terms: int = 1,
    hot: int = 0,
    hot_terms: int = 0,
    rotated: bool = False,
    codebook_shape: TTShape | None = None,
    codebook_init: Callable[..., Any] | None = None,
    param_dtype: Any = jnp.float32,
    optimizer: Optimizer | None = None,
    skip_nonfinite: bool = False,
    stochastic_rounding: bool = True,
    max_gradient: float | None = None,
    name: str | None = None,
) -> CodedTable:
    """The description of a table of codes, which are random at first; `encode` makes one of trained rows.

    Args:
        num_embeddings, features, num_codes, bits, kind, terms, hot, hot_terms, rotated: as in `CodedTable`.
        codebook_shape: `TTShape` of the rows of all codebooks, which are then a tensor train; None for dense codebooks.
        codebook_init: initialiser ``(key, shape, dtype) -> codebooks``, or of each core; None for rows of about unit
            length.
        param_dtype: type of the codebooks.
        optimizer, skip_nonfinite, stochastic_rounding, max_gradient, name: as in `EmbedBag`.

    Returns:
        `CodedTable`.

    >>> import jax_tt
    >>> table = jax_tt.coded_table(1000, 16, num_codes=4, optimizer=jax_tt.optimizers.Adagrad(0.05))
    >>> table.row_bytes, table.spec.param_shapes
    (4, {'codebooks': (1024, 4)})
    """
    layout = CodeLayout(
        num_embeddings, features, num_codes, bits, kind, rotated, terms, hot, hot_terms, name
    )
    update = update_of(optimizer, skip_nonfinite, stochastic_rounding, max_gradient)
    return with_codebooks(layout, codebook_shape, codebook_init, param_dtype, update)


@checks_keywords
def tt_table(
    num_embeddings: int,
    features: int,
    *,
    tt_ranks: int | Sequence[int] = 32,
    row_factors: Sequence[int] | None = None,
    col_factors: Sequence[int] | None = None,
    param_dtype: Any = jnp.float32,
    core_init: CoreInit = "approx-normal",
    stddev: float | None = None,
    optimizer: Optimizer | None = None,
    cache: RowCache | None = None,
    id_order: IdOrder | None = None,
    skip_nonfinite: bool = False,
    stochastic_rounding: bool = True,
    max_gradient: float | None = None,
    name: str | None = None,
) -> Table:
    """The description of a tensor-train table, e.g. for a `Collection`, from the arguments of `TTEmbedBag`.

    Args:
        num_embeddings, features, tt_ranks, row_factors, col_factors, param_dtype, core_init, stddev, optimizer,
            cache, id_order, skip_nonfinite, stochastic_rounding, max_gradient, name: as in `TTEmbedBag`.

    Returns:
        `TTTable`, inside of a `RowCachedTable` and an `OrderedTable` if it has a cache or an order.

    >>> import jax_tt
    >>> table = jax_tt.tt_table(1000, 16, tt_ranks=4, cache=jax_tt.RowCache(50))
    >>> list(table.spec.param_shapes)
    ['core_0', 'core_1', 'core_2', 'cache_rows']
    """
    return described_tt(
        table_shape(num_embeddings, features, tt_ranks, row_factors, col_factors),
        cache,
        id_order,
        param_dtype=param_dtype,
        core_init=scaled_init(core_init, stddev),
        update=update_of(optimizer, skip_nonfinite, stochastic_rounding, max_gradient),
        name=name,
    )


def table_shape(
    num_embeddings: int,
    features: int,
    tt_ranks: int | Sequence[int],
    row_factors: Sequence[int] | None,
    col_factors: Sequence[int] | None,
) -> TTShape:
    """The `TTShape` of a layer; missing factors are suggested, as many as the given factors or ranks say, or 3."""
    ranks = _ranks(tt_ranks)
    d = _num_cores(ranks, row_factors, col_factors)
    if isinstance(ranks, tuple) and len(ranks) != d - 1:
        expected = f"one integer or the {d - 1} inner ranks, e.g. tt_ranks={(32,) * (d - 1)}"
        raise mismatch("tt_ranks", f"{len(ranks)} ranks {ranks} for {d} factors", expected)
    if row_factors is None or col_factors is None:
        suggested = TTShape.suggest(num_embeddings, features, ranks, d=d)
        row_factors = suggested.row_factors if row_factors is None else row_factors
        col_factors = suggested.col_factors if col_factors is None else col_factors
    return TTShape(num_embeddings, features, ranks, row_factors, col_factors)


def _ranks(tt_ranks: Any) -> int | tuple[int, ...]:
    def rank(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            expected = "an integer >= 1, or one per pair of neighbouring cores, e.g. 32 or (32, 32)"
            raise mismatch("tt_ranks", repr(tt_ranks), expected, error=TypeError)
        expect(value >= 1, "tt_ranks", repr(tt_ranks), "ranks >= 1, e.g. tt_ranks=32")
        return operator.index(value)

    if isinstance(tt_ranks, Sequence | np.ndarray) and not isinstance(tt_ranks, str):
        if not 1 <= len(tt_ranks) <= 4:
            expected = "one integer, or 1 to 4 ranks for 2 to 5 cores, e.g. tt_ranks=(32, 32)"
            raise mismatch("tt_ranks", f"{len(tt_ranks)} ranks {tuple(tt_ranks)}", expected)
        return tuple(rank(value) for value in tt_ranks)
    return rank(tt_ranks)


def _num_cores(ranks: int | tuple[int, ...], *factors: Sequence[int] | None) -> int:
    for name, values in zip(("row_factors", "col_factors"), factors, strict=True):
        if values is None:
            continue
        if isinstance(values, str) or not isinstance(values, Sequence | np.ndarray):
            expected = "a tuple of 2 to 5 integers, e.g. (4, 4, 4), or None"
            raise mismatch(name, repr(values), expected, error=TypeError)
        if not 2 <= len(values) <= 5:
            got = f"{len(values)} factors {tuple(values)}"
            raise mismatch(name, got, "2 to 5, one per core, or None to have them suggested")
        return len(values)
    return _DEFAULT_CORES if isinstance(ranks, int) else len(ranks) + 1


def described_tt(
    shape: TTShape, cache: RowCache | None, id_order: IdOrder | None, **fields: Any
) -> Table:
    """The table of a `TTShape`, with its row cache and its order of ids; ``fields`` are arguments of `TTTable`."""
    if not isinstance(fields.get("core_init"), GivenCores):
        _check_smaller(shape)
    table: Table = TTTable.of_shape(shape, **fields)
    if cache is not None:
        table = RowCachedTable(table, cache)
    return table if id_order is None else OrderedTable(table, id_order)


def _check_smaller(shape: TTShape) -> None:
    """Raises for ranks with which a table that takes memory is no smaller than the dense one."""
    dense = shape.num_embeddings * shape.features
    if _SMALL < dense <= shape.num_params:
        raise ValueError(
            f"tt_ranks: cores of ranks {shape.ranks} have {shape.num_params:,} entries, and the dense table has "
            f"{dense:,}; expected lower ranks, e.g. tt_ranks=32. A table without compression is an Embed, EmbedBag or "
            f"dense_table. (Only up to {_SMALL:,} entries of the dense table, any ranks are accepted.)"
        )


def with_codebooks(
    layout: CodeLayout,
    codebook_shape: TTShape | None = None,
    codebook_init: Callable[..., Any] | None = None,
    param_dtype: Any = jnp.float32,
    update: Update | None = None,
) -> CodedTable:
    """The table of a layout; the other arguments are as in `coded_table`."""
    shape = layout.num_entries, layout.width
    # The sum of m rows is as long as the concatenation of m rows of their columns.
    deviation = 1 / math.sqrt(layout.width * layout.num_codes)
    codebooks: NativeTable
    if codebook_shape is None:
        init = codebook_init or NormalRows(deviation)
        codebooks = DenseTable(*shape, param_dtype, update, embedding_init=init)
    elif isinstance(codebook_shape, TTShape):
        init = codebook_init or ScaledCores(deviation)
        fields: dict[str, Any] = {"param_dtype": param_dtype, "update": update}
        codebooks = TTTable.of_shape(codebook_shape, **fields, core_init=init)
    else:
        expected = f"None or a TTShape, jax_tt.TTShape.suggest({shape[0]}, {shape[1]}, ranks)"
        label = f"{layout.label}codebook_shape"
        raise mismatch(label, repr(codebook_shape), expected, error=TypeError)
    return CodedTable(**dataclasses.asdict(layout), codebooks=codebooks)


def update_of(
    optimizer: Optimizer | None,
    skip_nonfinite: bool,
    stochastic_rounding: bool,
    max_gradient: float | None,
) -> Update | None:
    """The `Update` of these arguments of a layer."""
    if optimizer is None:
        if max_gradient is not None:
            got = f"{max_gradient!r} for a table without an optimizer, whose gradients are ordinary"
            raise mismatch("max_gradient", got, "an optimizer, or None and optax.clip")
        return None
    return Update(optimizer, skip_nonfinite, stochastic_rounding, max_gradient)
