"""From what users pass (ids, rectangles, `Bags`, cores) to specs and batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jax_tt._bags import Bags, as_ids
from jax_tt._dtypes import x64_enabled
from jax_tt._ops._batch import Batch
from jax_tt._ops._spec import BOUNDS, DenseSpec, Spec, TTSpec
from jax_tt._split_ids import SplitIds, split_on_host

STORAGE = ("float32", "bfloat16", "float16", "float64")
COMBINERS = ("sum", "mean", "sqrtn")

S = TypeVar("S", bound=Spec)


def tt_spec(
    cores: Sequence[Any],
    num_embeddings: int | None,
    bounds: str = "unchecked",
    name: str | None = None,
) -> TTSpec:
    """Checks cores against each other and describes the table they form."""
    label = _label(name)
    if not isinstance(cores, tuple | list) or not 2 <= len(cores) <= 5:
        what = (
            f"{len(cores)} cores"
            if isinstance(cores, tuple | list)
            else f"a {type(cores).__name__}"
        )
        raise ValueError(
            f"{label}cores: got {what}; expected a tuple of 2 to 5 arrays, e.g. from jax_tt.init_cores."
        )
    shapes = [tuple(np.shape(core)) for core in cores]
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
    _check_storage(label, "cores", {str(core.dtype) for core in cores})
    rows = int(np.prod([shape[0] for shape in shapes], dtype=object))
    n = rows if num_embeddings is None else int(num_embeddings)
    if not 1 <= n <= rows:
        raise ValueError(
            f"{label}num_embeddings: got {n}; expected 1 to {rows}, the rows that these cores address."
        )
    return TTSpec(
        row_factors=tuple(shape[0] for shape in shapes),
        col_factors=tuple(shape[2] for shape in shapes),
        ranks=ranks,
        num_embeddings=n,
        bounds=_check_bounds(bounds),
        padded=False,
        name=name,
    )


def dense_spec(table: Any, bounds: str = "unchecked", name: str | None = None) -> DenseSpec:
    """Checks a dense table and describes it."""
    label = _label(name)
    shape = tuple(np.shape(table))
    if len(shape) != 2 or 0 in shape:
        raise ValueError(
            f"{label}table: got shape {shape}; expected [num_embeddings, features], none 0."
        )
    _check_storage(label, "table", {str(table.dtype)})
    return DenseSpec(shape[0], shape[1], _check_bounds(bounds), False, name)


def lookup_batch(spec: Spec, ids: Any) -> tuple[Batch, tuple[int, ...]]:
    """One segment, position and bag per id, and the shape of the ids."""
    ids = _table_ids(spec, ids)
    shape = ids.shape
    flat = _positions(ids, (int(np.prod(shape)), 1))
    return Batch(flat, _one_bag(flat.shape[0], 1), None, False, True), shape


def bag_batch(spec: S, bags: Any, accum: Any) -> tuple[S, Batch, int]:
    """The spec of this call, the canonical batch of `Bags` or of ``[B, L]`` ids, and the number of bags."""
    if not isinstance(bags, Bags):
        ids = _table_ids(spec, bags, "bags")
        if ids.ndim != 2:
            raise ValueError(
                f"{_label(spec.name)}bags: got ids of shape {ids.shape}; expected Bags or ids [B, L]. "
                "For one id per bag use ids[:, None]; for flat ids use Bags.from_offsets."
            )
        bags = Bags(ids)
    label = _label(spec.name)
    ids = _table_ids(spec, bags.ids, "bags.ids")
    weights = bags.weights
    if weights is not None:
        if tuple(weights.shape) != tuple(ids.shape):
            raise ValueError(
                f"{label}bags.weights: got shape {tuple(weights.shape)}; expected that of ids, {ids.shape}."
            )
        if not jnp.issubdtype(weights.dtype, jnp.floating):
            raise ValueError(f"{label}bags.weights: got dtype {weights.dtype}; expected floats.")
        weights = jnp.asarray(weights).astype(accum)
    if bags.offsets is None:
        if ids.ndim != 2:
            raise ValueError(
                f"{label}bags.ids: got shape {ids.shape} without offsets; expected [B, L]. Extra leading "
                "dimensions go through jax.vmap."
            )
        rows, length = ids.shape
        batch = Batch(
            _positions(ids, ids.shape), _one_bag(rows, length), weights, bags.padded, True
        )
        return dataclasses.replace(spec, padded=bags.padded), batch, rows
    offsets = jnp.asarray(bags.offsets)
    if ids.ndim != 1 or offsets.ndim != 1 or offsets.shape[0] == 0:
        raise ValueError(
            f"{label}bags: got ids {ids.shape} with offsets {offsets.shape}; expected ids [capacity] and "
            "offsets [B + 1]. Extra leading dimensions go through jax.vmap."
        )
    if not jnp.issubdtype(offsets.dtype, jnp.integer):
        raise ValueError(f"{label}bags.offsets: got dtype {offsets.dtype}; expected integers.")
    if bags.padded:
        raise ValueError(
            f"{label}bags: padded=True is for rectangular bags; ragged ones have offsets."
        )
    flat = _positions(ids, (1, *ids.shape))
    offsets = offsets.astype(jnp.int32)[None]
    batch = Batch(flat, offsets, None if weights is None else weights[None], False, False)
    return spec, batch, offsets.shape[1] - 1


def check_combiner(combiner: str) -> str:
    if combiner not in COMBINERS:
        raise ValueError(
            f"combiner: got {combiner!r}; expected one of {', '.join(map(repr, COMBINERS))}."
        )
    return combiner


def _table_ids(spec: Spec, ids: Any, name: str = "ids") -> Any:
    name = _label(spec.name) + name
    # JAX would cut 64-bit host ids to 32 bits without a word; here they are exact, whatever their size.
    cut = isinstance(ids, np.ndarray) and ids.itemsize == 8 and not x64_enabled()
    if cut and ids.dtype.kind in "iu" and ids.size:
        fits = ids.min() >= -(2**31) and ids.max() < 2**31
        if not fits and isinstance(spec, TTSpec):
            ids = split_on_host(ids, spec.num_embeddings, spec.row_factors)
        elif not fits and spec.num_embeddings < 2**31:
            ids = np.clip(ids, -1, 2**31 - 1).astype(np.int32)
    ids = as_ids(ids, name)
    if isinstance(ids, SplitIds) and ids.digits.shape[-1] != spec.d:
        raise ValueError(
            f"{name}: SplitIds with {ids.digits.shape[-1]} digits for a table of {spec.d} cores; split them with "
            "the TTShape of this table."
        )
    if isinstance(ids, SplitIds) and isinstance(spec, DenseSpec):
        raise ValueError(f"{name}: got SplitIds; a dense table takes integer ids.")
    return ids


def _positions(ids: Any, shape: tuple[int, ...]) -> jax.Array:
    if isinstance(ids, SplitIds):
        return jnp.asarray(ids.digits).reshape(*shape, ids.digits.shape[-1])
    array = jnp.asarray(ids)
    if array.dtype.itemsize < 4:  # the native ops know 32 and 64 bits
        array = array.astype(jnp.uint32 if jnp.iinfo(array.dtype).min == 0 else jnp.int32)
    elif array.dtype == jnp.uint64:
        # Only ids beyond every table change, to one that is out of range all the same.
        array = jnp.minimum(array, jnp.asarray(2**63 - 1, jnp.uint64)).astype(jnp.int64)
    return array.reshape(shape)


def _one_bag(rows: int, length: int) -> jax.Array:
    return jnp.broadcast_to(jnp.array([0, length], jnp.int32), (rows, 2))


def _check_bounds(bounds: str) -> str:
    if bounds not in BOUNDS:
        raise ValueError(f"bounds: got {bounds!r}; expected one of {', '.join(map(repr, BOUNDS))}.")
    return bounds


def _check_storage(label: str, what: str, dtypes: set[str]) -> None:
    if len(dtypes) != 1 or not dtypes <= set(STORAGE):
        raise ValueError(
            f"{label}{what}: got dtype {', '.join(sorted(dtypes))}; expected one of {', '.join(STORAGE)}"
            + (" for all of them." if what == "cores" else ".")
        )


def _label(name: str | None) -> str:
    return "" if name is None else f"{name}: "
