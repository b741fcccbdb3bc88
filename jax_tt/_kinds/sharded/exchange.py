"""The exchange of messages between devices, for all tables at once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

Carry = TypeVar("Carry")
Inputs = TypeVar("Inputs")


def exchanged(messages: Sequence[jax.Array], axes: Any) -> list[jax.Array]:
    """Sends part k of arrays ``[devices, ...]`` to device k; part k of a result comes from device k.

    An array ``[1, ...]`` goes to all devices.
    """
    sizes = {message.dtype.itemsize for message in messages}
    alike = len({message.dtype for message in messages}) == 1
    # Also alone, 16-bit floats travel as integers: XLA widens collectives of bfloat16 on CPU.
    unit = jnp.uint16 if 2 in sizes else None if alike else jnp.uint32
    parts = [_in_units(message, unit) for message in messages]
    ends = [0, *itertools.accumulate(part.shape[1] for part in parts)]
    if all(part.shape[0] == 1 for part in parts):
        received = lax.all_gather(jnp.concatenate(parts, axis=1), axes, tiled=True)
    else:
        devices = lax.axis_size(axes)
        parts = [jnp.broadcast_to(part, (devices, part.shape[1])) for part in parts]
        received = lax.all_to_all(jnp.concatenate(parts, axis=1), axes, 0, 0, tiled=True)
    pairs = zip(itertools.pairwise(ends), messages, strict=True)
    return [_from_units(received[:, begin:end], message) for (begin, end), message in pairs]


def sums_of(messages: Sequence[jax.Array], axes: Any) -> list[jax.Array]:
    """Sends part k of arrays ``[devices, ...]`` of one type to device k, and adds the parts there, ``[1, ...]``."""
    parts = [_in_units(message, None) for message in messages]
    ends = [0, *itertools.accumulate(part.shape[1] for part in parts)]
    sums = lax.psum_scatter(jnp.concatenate(parts, axis=1), axes, tiled=True)
    return [
        sums[:, begin:end].reshape(1, *message.shape[1:])
        for (begin, end), message in zip(itertools.pairwise(ends), messages, strict=True)
    ]


def other_rounds(
    body: Callable[[jax.Array, Carry], Carry], bits: jax.Array | None, carry: Carry
) -> Carry:
    """``carry = body(k, carry)`` for all rounds but the first, as a rule none; ``bits`` tell them apart."""
    if bits is None:
        return carry
    last = jnp.where(
        bits < 32, (jnp.uint32(1) << bits.astype(jnp.uint32)) - 1, jnp.uint32(2**32 - 1)
    )

    def step(held: Any) -> Any:
        k, carry = held
        return k + 1, body(k + 1, carry)

    start = jnp.zeros((), jnp.uint32), carry
    return lax.while_loop(lambda held: held[0] < last, step, start)[1]


def unless(
    done: jax.Array, body: Callable[[Carry, Inputs], Carry], carry: Carry, inputs: Inputs
) -> tuple[Carry, jax.Array]:
    """``carry`` if it is ``done``, else ``body(carry, inputs)``.

    It is a loop, which XLA runs in place, unlike a conditional. XLA moves what does not depend on the loop out of it,
    where it would always run, so that whatever takes time must depend on ``inputs``, which a barrier ties to the loop.

    Also returns ``done``, as a value that is only known after the loop: what depends on it runs after what the loop
    reads.
    """

    def step(held: Any) -> Any:
        count, carry = held
        count, given = lax.optimization_barrier((count, inputs))
        return count + 1, body(carry, given)

    # Two stands for nothing to do.
    start = jnp.where(done, 2, 0)
    count, carry = lax.while_loop(lambda held: held[0] < 1, step, (start, carry))
    return carry, count == 2


def _in_units(array: jax.Array, unit: Any) -> jax.Array:
    """The array as ``[devices, n]`` of type ``unit``, or of its type for None."""
    if unit is not None:
        array = lax.bitcast_convert_type(array, unit)
    return array.reshape(array.shape[0], math.prod(array.shape[1:]))


def _from_units(units: jax.Array, like: jax.Array) -> jax.Array:
    shape = (units.shape[0], *like.shape[1:])
    if units.dtype == like.dtype:
        return units.reshape(shape)
    ratio = like.dtype.itemsize // units.dtype.itemsize
    split = shape if ratio == 1 else (*shape, ratio)
    return lax.bitcast_convert_type(units.reshape(split), like.dtype)
