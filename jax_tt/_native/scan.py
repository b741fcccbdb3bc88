"""Scans of whole tables for the best rows of queries, on the native kernels of the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tt._jax.vma import vary_over, varying_axes
from jax_tt._native.call import Named, native_call
from jax_tt._native.partition import Dimensions, Split, num_blocks, over_blocks

_ROWS = "rows"


def scan(
    op: str,
    arrays: Named,
    attributes: Mapping[str, Any],
    vectors: jax.Array,
    exclude: jax.Array,
    present: jax.Array | None,
    k: int,
) -> tuple[jax.Array, jax.Array]:
    """Scores float32 ``[B, k]`` and ids int32 ``[B, k]`` of the rows with the largest inner products.

    Args:
        op: ``"rows"``, ``"coded"`` or ``"train"``.
        arrays: those of the table, in the order of the target.
        attributes: static values of the table.
        vectors: queries float32 ``[B, D]``.
        exclude: int32 ``[B, E]``, rows that a query leaves out; those out of range have no effect.
        present: bool ``[N]``, the rows that exist; None for all.
        k: the number of rows for each query.
    """
    if present is None:
        present = jnp.zeros(0, bool)
    axes = varying_axes(arrays, vectors, exclude, present)
    queries = vectors.shape[0]
    blocks = num_blocks(queries)

    def local(args: Named, split: Split) -> Named:
        over = split.of.get(_ROWS, ())
        start = lax.axis_index(over) * args[_ROWS].shape[0] if over else 0
        if over:
            args = {**args, "exclude": args["exclude"] - start}
        shape = (*args["vectors"].shape[:2], k)
        results = {
            "scores": jax.ShapeDtypeStruct(shape, jnp.float32),
            "ids": jax.ShapeDtypeStruct(shape, jnp.int32),
        }
        found = native_call(
            "cpu", f"scan_{op}", args, results, None, {**attributes, "k": np.int64(k)}
        )
        if not over:
            return found
        ids = jnp.where(found["ids"] < 0, -1, found["ids"] + start)
        # Shards are in the order of ids, and of equal scores the first is taken.
        every = [lax.all_gather(x, over, axis=2, tiled=True) for x in (found["scores"], ids)]
        scores, places = lax.top_k(every[0], k)
        return {"scores": scores, "ids": jnp.take_along_axis(every[1], places, axis=2)}

    def dimensions() -> dict[str, Dimensions]:
        """Devices that have shards of an array of rows scan these."""
        rows = [name for name in (_ROWS, "present") if name in whole and whole[name].size]
        return dict.fromkeys(rows, (_ROWS,)) if _ROWS in arrays else {}

    blocked = {
        name: array.reshape(blocks, queries // blocks, array.shape[1])
        for name, array in (("vectors", vectors), ("exclude", exclude))
    }
    whole = {"present": present, **arrays}
    found = over_blocks(local, *vary_over((blocked, whole), axes), ["scores", "ids"], dimensions)
    scores, ids = (found[name].reshape(queries, k) for name in ("scores", "ids"))
    return vary_over((scores, ids), axes)
