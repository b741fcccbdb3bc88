"""Scores of a directory: what a request adds to them, and how they age.

Scores are compared as integers, and ties are broken by the later last request. Ageing changes all scores of a directory
alike, when the cache is populated or at the latest before an overflow, and so never reverses the order of two rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_tt._directories.cache_directory import GHOSTS, CacheDirectory

_INT_MAX = 2**31 - 1

# LFU with a half-life: what a request adds at the start of a half-life, and the half-lives after which scores are
# halved even if the cache is not populated.
UNIT = 2**10
MOST_HALVINGS = 4
# LRU: the low bits of a score are the requests in the row's last step, to break ties.
COUNT_BITS = 10
MOST_COUNTED = 2**COUNT_BITS - 1
_MOST_STEPS = _INT_MAX >> COUNT_BITS


class Scoring(NamedTuple):
    """How requests become scores.

    Attributes:
        policy: ``"lfu"`` or ``"lru"``.
        half_life: requests per slot after which a request counts half; None: requests do not age.
    """

    policy: str
    half_life: int | None = None


def stamp(directory: CacheDirectory, scoring: Scoring) -> jax.Array:
    """The weight of a batch in scores, int32: LFU adds it for every request, LRU once to the requests of the batch.

    Under LFU with a half-life, it starts at `UNIT` and doubles with every half-life since scores were last halved.
    Under LRU, it is the number of steps since the cache was last populated.
    """
    if scoring.policy == "lru":
        steps = directory.clock - directory.refreshed
        return jnp.clip(steps, 0, _MOST_STEPS) << COUNT_BITS
    if scoring.half_life is None:
        return jnp.ones_like(directory.clock)
    half_life = _requests(directory, scoring.half_life)
    done = directory.unaged % half_life
    fine = half_life <= _INT_MAX // UNIT
    grown = done * UNIT // half_life if fine else done // (half_life // UNIT)
    return (UNIT + jnp.minimum(grown, UNIT)) << _halvings(directory, half_life)


def counted(directory: CacheDirectory, requests: jax.Array) -> CacheDirectory:
    """The directory with ``requests`` added to ``unaged``."""
    room = _INT_MAX - requests
    unaged = jnp.where(directory.unaged > room, _INT_MAX, directory.unaged + requests)
    return directory._replace(unaged=unaged)


def caught_up(directory: CacheDirectory, scoring: Scoring) -> CacheDirectory:
    """The directory before a batch: scores are halved after so many half-lives that they could overflow int32."""
    if scoring.half_life is None:
        return directory
    half_life = _requests(directory, scoring.half_life)
    # Of a long half-life no more than these pass before `counted` stops at the largest int32.
    most = min(MOST_HALVINGS + 1, _INT_MAX // half_life)
    late = directory.unaged // half_life >= most
    names = ("scores", "ghost_scores", "unaged")

    def halve(scores: jax.Array, ghost_scores: jax.Array, unaged: jax.Array) -> Any:
        halvings = unaged // half_life
        return _halved(scores, halvings), _halved(ghost_scores, halvings), unaged % half_life

    values = (getattr(directory, name) for name in names)
    values = jax.lax.cond(late, halve, lambda *same: same, *values)
    return directory._replace(**dict(zip(names, values, strict=True)))


def aged(directory: CacheDirectory, scoring: Scoring) -> CacheDirectory:
    """The directory after populating: scores are aged up to now, and ``refreshed`` is ``clock``."""

    def age(tags: jax.Array, scores: jax.Array) -> jax.Array:
        if scoring.policy == "lru":
            steps = stamp(directory, scoring)
            return jnp.where(tags >= 0, jnp.maximum(scores, steps - _INT_MAX) - steps, 0)
        if scoring.half_life is None:
            return scores
        return _halved(scores, _halvings(directory, _requests(directory, scoring.half_life)))

    unaged = directory.unaged
    if scoring.half_life is not None:
        unaged = unaged % _requests(directory, scoring.half_life)
    return directory._replace(
        unaged=unaged,
        scores=age(directory.tags, directory.scores),
        ghost_scores=age(directory.ghost_tags, directory.ghost_scores),
        refreshed=jnp.copy(directory.clock),
    )


def converted(directory: CacheDirectory, old: Scoring, new: Scoring) -> CacheDirectory:
    """The directory with its scores converted to another policy; a half-life starts now."""
    directory = caught_up(directory, old)
    now = stamp(directory, old)
    unit = 1 if new.half_life is None else UNIT

    def convert(tags: jax.Array, scores: jax.Array, touched: Any, recent: Any) -> jax.Array:
        if new.policy == old.policy == "lru":
            return scores
        if new.policy == "lru":
            steps = jnp.clip(touched - directory.refreshed, -_MOST_STEPS, _MOST_STEPS)
            scores = (steps << COUNT_BITS) + jnp.minimum(recent, MOST_COUNTED)
        elif old.policy == "lru":
            scores = (scores & MOST_COUNTED) * unit
        else:
            whole = jnp.minimum(scores // now, _INT_MAX // unit - (unit > 1)) * unit
            scores = jnp.maximum(whole + scores % now * unit // now, jnp.minimum(scores, 1))
        return jnp.where(tags >= 0, scores, 0)

    return directory._replace(
        scores=convert(directory.tags, directory.scores, directory.touched, 0),
        ghost_scores=convert(*(getattr(directory, name) for name in GHOSTS)),
        unaged=jnp.zeros_like(directory.unaged),
    )


def _requests(directory: CacheDirectory, half_life: int) -> int:
    """The half-life in requests of the whole cache."""
    return min(half_life * directory.slots, _INT_MAX)


def _halvings(directory: CacheDirectory, half_life: int) -> jax.Array:
    """Half-lives since scores were last halved."""
    return jnp.maximum(directory.unaged // half_life, 0)


def _halved(scores: jax.Array, halvings: jax.Array) -> jax.Array:
    # Positive scores stay positive: a ghost at zero would be dropped.
    return jnp.maximum(scores >> jnp.minimum(halvings, 31), jnp.minimum(scores, 1))
