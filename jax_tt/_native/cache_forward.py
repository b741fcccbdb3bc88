"""Pooled sums over cached and uncached rows in one native op."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jax_tt._ids.batch import Batch
from jax_tt._native.call import Named, native_call, numbered, types_in, types_of
from jax_tt._native.operands import make_operands, sentinel_operand
from jax_tt._native.partition import Arrays, Split, over_blocks
from jax_tt._native.tt import TrainTable, attributes_with_shape, blocked_sizes
from jax_tt._table.options import Lookup


def cache_forward(
    table: TrainTable,
    cores: Arrays,
    rows: jax.Array,
    misses: Batch,
    slots: jax.Array,
    lookup: Lookup,
    sentinels: tuple[jax.Array | None, jax.Array | None] = (None, None),
) -> tuple[jax.Array, Batch, jax.Array | None, Arrays]:
    """Sums ``[S, nb, D]`` over hits and misses on the CPU, and the residuals of the misses.

    ``misses`` is the batch with its hits marked as padding; ``slots``, int32 ``[S, cap]``, say where the hits are in
    ``rows[slots, D]``, -1 for misses. Cores and rows have the same accumulator type. If gradients are wanted, products
    of the cores are saved for the backward pass. ``sentinels`` belong to the cores and to the rows.

    Returns:
        The sums; the misses packed to the front of their segments; the new position of every miss in its segment, int32
        ``[S, cap]``, or None without weights; plan, saved products and sums in blocks, or an empty tuple if no gradient
        is wanted.
    """
    operands = make_operands(table, cores[0].dtype, misses)
    plan_size, saved_size = blocked_sizes("cpu", operands, table.sizes)
    save = bool(lookup.wanted.names)
    of_cores, of_rows = map(sentinel_operand, sentinels)
    sizes, batch = types_in((operands, misses))

    def local(args: Named, split: Split) -> Named:
        blocks = args["ids"].shape[0]
        packed = {f"packed_{name}": args[name] for name in sizes.arrays}
        return native_call(
            "cpu",
            "cache_forward",
            {name: args[name] for name in order},
            {
                "out": sizes.sums_type(args["ids"].shape[0], table.features),
                **types_of(packed),
                "place": jax.ShapeDtypeStruct(args["weights"].shape, jnp.int32),
                "plan": jax.ShapeDtypeStruct((blocks, plan_size), jnp.int32),
                "saved": jax.ShapeDtypeStruct((blocks, saved_size if save else 0), sizes.accum),
            },
            None,
            attributes_with_shape("cpu", table, batch, lookup, split.axes),
        )

    of_slots = slots.reshape(operands.arrays["ids"].shape[:2])
    named = numbered("core", cores)
    order = ("slots", "rows", "of_rows", *operands.arrays, "of_cores", *named)
    blocked = ["out", "packed_ids", "packed_offsets", "packed_weights", "place", "plan", "saved"]
    results = over_blocks(
        local,
        {"slots": of_slots} | operands.arrays,
        {"rows": rows, "of_rows": of_rows, "of_cores": of_cores} | named,
        blocked,
    )
    weighted = misses.weights is not None
    packed = dataclasses.replace(
        misses,
        # A partitioned call has narrower ids than its batch; on other platforms the residuals are those of the batch.
        ids=results["packed_ids"].reshape(misses.ids.shape).astype(misses.ids.dtype),
        offsets=results["packed_offsets"].reshape(misses.offsets.shape),
        weights=results["packed_weights"].reshape(misses.weights.shape) if weighted else None,
        rectangular=False,
    )
    residuals = (results["plan"], results["saved"], results["out"]) if save else ()
    sums = results["out"].reshape(operands.groups, operands.bags, table.features)
    place = results["place"].reshape(misses.ids.shape[:2]) if weighted else None
    return sums, packed, place, residuals
