"""From the cores or the table that users pass to specs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_tt._arguments import as_array, as_int, one_of
from jax_tt._ops._spec import BOUNDS, DenseSpec, TTSpec
from jax_tt._precision import resolve_precision

STORAGE = ("float32", "bfloat16", "float16", "float64")
COMBINERS = ("sum", "mean", "mean_count", "sqrtn", "max")

_MAX_COLUMNS = 2**31 - 1


def tt_table(
    cores: Sequence[Any],
    num_embeddings: int | None,
    bounds: str = "unchecked",
    name: str | None = None,
    precision: Any = None,
) -> tuple[TTSpec, tuple[jax.Array, ...]]:
    """Checks cores against each other; the table they form, and the cores as JAX arrays."""
    label = table_label(name)
    refuse_tables(cores, f"{label}cores", ".cores")
    if not isinstance(cores, tuple | list) or not 2 <= len(cores) <= 5:
        what = (
            f"{len(cores)} cores"
            if isinstance(cores, tuple | list)
            else f"a {type(cores).__name__}"
        )
        raise ValueError(
            f"{label}cores: got {what}; expected a tuple of 2 to 5 arrays, e.g. from jax_tt.init_cores."
        )
    arrays = [as_array(f"{label}cores[{k}]", core) for k, core in enumerate(cores)]
    shapes = [tuple(core.shape) for core in arrays]
    for k, shape in enumerate(shapes):
        if len(shape) != 4 or 0 in shape:
            raise ValueError(
                f"{label}cores[{k}]: got shape {shape}; expected [p, r_left, q, r_right], none of them 0."
            )
    ranks = (shapes[0][1], *(shape[3] for shape in shapes))
    for k, shape in enumerate(shapes):
        if shape[1] != ranks[k]:
            raise ValueError(
                f"{label}cores[{k}]: left rank {shape[1]} does not meet the right rank {ranks[k]} of "
                f"cores[{k - 1}]; expected equal ranks. Shapes: {shapes}."
            )
    if ranks[0] != 1 or ranks[-1] != 1:
        raise ValueError(
            f"{label}cores: outer ranks are {ranks[0]} and {ranks[-1]}; expected 1 and 1."
        )
    _check_storage(label, "cores", {str(core.dtype) for core in arrays})
    rows = math.prod(shape[0] for shape in shapes)
    columns = math.prod(shape[2] for shape in shapes)
    if rows >= 2**63 or columns > _MAX_COLUMNS:
        raise ValueError(
            f"{label}cores: address {rows} rows of {columns} columns; expected fewer than 2**63 rows and 2**31 "
            f"columns. Shapes: {shapes}."
        )
    n = rows if num_embeddings is None else as_int(f"{label}num_embeddings", num_embeddings)
    if not 1 <= n <= rows:
        raise ValueError(
            f"{label}num_embeddings: got {n}; expected 1 to {rows}, the rows that these cores address."
        )
    spec = TTSpec(
        row_factors=tuple(shape[0] for shape in shapes),
        col_factors=tuple(shape[2] for shape in shapes),
        ranks=ranks,
        num_embeddings=n,
        bounds=one_of("bounds", bounds, BOUNDS),
        padded=False,
        name=name,
        precision=resolve_precision(precision),
    )
    # Cores read from a file are numpy arrays, which a traced index cannot index.
    return spec, tuple(map(jnp.asarray, arrays))


def dense_table(
    table: Any, bounds: str = "unchecked", name: str | None = None, argument: str = "table"
) -> tuple[DenseSpec, jax.Array]:
    """Checks a dense table, passed as ``argument``; its description, and the table as a JAX array."""
    label = table_label(name)
    refuse_tables(table, f"{label}{argument}", ".cores[0]")
    table = as_array(f"{label}{argument}", table)
    shape = tuple(table.shape)
    if len(shape) != 2 or 0 in shape or shape[1] > _MAX_COLUMNS:
        raise ValueError(
            f"{label}{argument}: got shape {shape}; expected [num_embeddings, features], none 0, and fewer than 2**31 "
            "features."
        )
    _check_storage(label, argument, {str(table.dtype)})
    spec = DenseSpec(shape[0], shape[1], one_of("bounds", bounds, BOUNDS), False, name)
    return spec, jnp.asarray(table)


def refuse_tables(given: Any, argument: str, arrays: str) -> None:
    """Raises for a `FusedTable` or a `CachedTable` where its arrays belong."""
    kind = type(given).__name__
    if kind not in ("FusedTable", "CachedTable"):
        return
    ops = "fused_*" if kind == "FusedTable" else "cached_*"
    raise TypeError(
        f"{argument}: got a {kind}; expected its arrays, table{arrays}. The table itself goes to the {ops} ops, which "
        "also train it."
    )


def check_combiner(combiner: str) -> str:
    return one_of("combiner", combiner, COMBINERS)


def table_label(name: str | None) -> str:
    """What messages about a table begin with."""
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name: got {name!r} of type {type(name).__name__}; expected a string.")
    return "" if name is None else f"{name}: "


def _check_storage(label: str, what: str, dtypes: set[str]) -> None:
    if len(dtypes) != 1 or not dtypes <= set(STORAGE):
        raise ValueError(
            f"{label}{what}: got dtype {', '.join(sorted(dtypes))}; expected one of {', '.join(STORAGE)}"
            + (" for all of them." if len(dtypes) > 1 else ".")
        )
