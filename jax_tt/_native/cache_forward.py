"""Bags of rows some of which are cached, in one native op."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jax_tt._dtypes import accumulator
from jax_tt._native._call import native_call
from jax_tt._native._operands import make_operands
from jax_tt._native.partition import Arrays, over_blocks
from jax_tt._native.tt import Cores, batch_attributes, blocked_sizes
from jax_tt._ops._batch import Batch
from jax_tt._ops._spec import TTSpec


def cache_forward(
    spec: TTSpec,
    cores: Cores,
    rows: jax.Array,
    misses: Batch,
    slots: jax.Array,
    save: bool = False,
    sentinels: tuple[jax.Array | None, jax.Array | None] = (None, None),
    *,
    platform: str,
) -> tuple[jax.Array, Batch, jax.Array | None, Arrays]:
    """Sums ``[S, nb, D]`` of hits and misses, and what the backward pass of the misses takes.

    Args:
        spec: the table.
        cores: its cores, with the accumulator type of the rows.
        rows: cached rows ``[slots, D]``.
        misses: the batch with its hits marked as padding, as `jax_tt._cache.keys.divide` gives it.
        slots: int32 ``[S, cap]``, -1 for misses.
        save: keep the products of the cores for the backward pass.
        sentinels: of the cores and of the rows.
        platform: ``"cpu"``, the only one that has this op.

    Returns:
        The sums; the misses packed to the front of their segments; int32 ``[S, cap]``, where in its segment the miss of
        a position went, None without weights; plan, saved products and sums in blocks, or nothing without ``save``.
    """
    operands = make_operands(spec, cores[0].dtype, misses)
    accum = accumulator(cores[0].dtype)
    plan_size, saved_size = blocked_sizes(platform, operands, spec, cores)
    kept = saved_size if save else 0
    one = jnp.ones((), jnp.float32)
    of_cores, of_rows = (one if sentinel is None else sentinel for sentinel in sentinels)

    def local(
        slots: jax.Array,
        ids: jax.Array,
        offsets: jax.Array,
        weights: jax.Array,
        rows: jax.Array,
        of_rows: jax.Array,
        of_cores: jax.Array,
        *cores: jax.Array,
        axes: Any,
    ) -> Arrays:
        blocks = ids.shape[0]
        return native_call(
            platform,
            "cache_forward",
            (
                jax.ShapeDtypeStruct((blocks, *operands.out_shape(spec.features)[1:]), accum),
                jax.ShapeDtypeStruct(ids.shape, ids.dtype),
                jax.ShapeDtypeStruct(offsets.shape, offsets.dtype),
                jax.ShapeDtypeStruct(weights.shape, weights.dtype),
                jax.ShapeDtypeStruct(weights.shape, jnp.int32),
                jax.ShapeDtypeStruct((blocks, plan_size), jnp.int32),
                jax.ShapeDtypeStruct((blocks, kept), accum),
            ),
            None,
            slots,
            rows,
            of_rows,
            ids,
            offsets,
            weights,
            of_cores,
            *cores,
            **batch_attributes(platform, spec, misses, axes),
        )

    out, ids, offsets, weights, place, plan, saved = over_blocks(
        local,
        (
            slots.reshape(operands.ids.shape[:2]),
            operands.ids,
            operands.offsets,
            operands.weights,
            rows,
            of_rows,
            of_cores,
            *cores,
        ),
        (True, True, True, True, *(False for _ in (rows, of_rows, of_cores, *cores))),
        (True,) * 7,
    )
    packed = dataclasses.replace(
        misses,
        ids=ids.reshape(misses.ids.shape),
        offsets=offsets.reshape(misses.offsets.shape),
        weights=None if misses.weights is None else weights.reshape(misses.weights.shape),
        rectangular=False,
    )
    residuals = (plan, saved, out) if save else ()
    sums = out.reshape(operands.groups, operands.bags, spec.features)
    place = None if misses.weights is None else place.reshape(misses.ids.shape[:2])
    return sums, packed, place, residuals
