"""How often and when a row was used, in slots of float32."""

import math

import jax
import jax.numpy as jnp

# The largest number up to which float32 has every integer.
MOST_STEPS = 2.0**24


def one_more(count: jax.Array) -> jax.Array:
    """A counter of steps after one more."""
    return jnp.minimum(count + 1, MOST_STEPS)


def interval(last_step: jax.Array, step: jax.Array) -> jax.Array:
    """Steps since the last use of a row; 1 if there was none, and where steps are no longer counted."""
    return jnp.where(last_step == 0, 1, jnp.maximum(step - last_step, 1))


def count_use(count: jax.Array, halflife: jax.Array, since: jax.Array) -> jax.Array:
    """Uses of a row after one more: all of them, only this one (halflife 0), or with older ones counting less."""
    decay = jnp.exp(-since * math.log(2) / jnp.where(halflife > 0, halflife, 1))
    decayed = jnp.where(halflife > 0, 1 + decay * count, 1)
    return jnp.where(halflife < 0, one_more(count), decayed)


def this_step(step: jax.Array) -> jax.Array:
    """The number of a step counted from 1, so that 0 in a slot says that a row was never used."""
    return jnp.minimum(jnp.asarray(step, jnp.float32) + 1, MOST_STEPS)
