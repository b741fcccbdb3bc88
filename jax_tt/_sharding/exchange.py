"""The messages that devices exchange, those of all tables at once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

Carry = TypeVar("Carry")


def exchanged(messages: Sequence[jax.Array], axes: Any) -> list[jax.Array]:
    """Arrays ``[devices, ...]``, of which part k goes to device k; part k of a result comes from device k."""
    alike = len({message.dtype for message in messages}) == 1
    parts = [_flat(message) if alike else _words(message) for message in messages]
    ends = [0, *itertools.accumulate(part.shape[1] for part in parts)]
    received = lax.all_to_all(jnp.concatenate(parts, axis=1), axes, 0, 0, tiled=True)
    pairs = zip(itertools.pairwise(ends), messages, strict=True)
    own = [(received[:, begin:end], message) for (begin, end), message in pairs]
    return [
        part.reshape(message.shape) if alike else _from_words(part, message)
        for part, message in own
    ]


def other_rounds(body: Callable[[jax.Array, Carry], Carry], bits: jax.Array, carry: Carry) -> Carry:
    """``carry = body(k, carry)`` for the rounds that leading bits tell apart but the first, as a rule none."""
    last = jnp.where(
        bits < 32, (jnp.uint32(1) << bits.astype(jnp.uint32)) - 1, jnp.uint32(2**32 - 1)
    )

    def step(held: Any) -> Any:
        k, carry = held
        return k + 1, body(k + 1, carry)

    start = jnp.zeros((), jnp.uint32), carry
    return lax.while_loop(lambda held: held[0] < last, step, start)[1]


def _flat(array: jax.Array) -> jax.Array:
    return array.reshape(array.shape[0], math.prod(array.shape[1:]))


def _words(array: jax.Array) -> jax.Array:
    """uint32 ``[devices, words]``."""
    return _flat(lax.bitcast_convert_type(array, jnp.uint32))


def _from_words(words: jax.Array, like: jax.Array) -> jax.Array:
    ratio = like.dtype.itemsize // 4
    shape = like.shape if ratio == 1 else (*like.shape, ratio)
    return lax.bitcast_convert_type(words.reshape(shape), like.dtype)
