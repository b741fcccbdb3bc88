"""What the scores of a directory mean: what a request adds to them, and how they age.

Scores are compared as integers, and where they are equal the later last request decides. Ageing changes all scores of a
directory alike, when the cache is populated or where that was long ago, so that it never changes which of two rows is
the hotter one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_tt._cache.directory import CacheDirectory

_INT_MAX = 2**31 - 1

# LFU with a half-life: what a request adds at the start of a half-life, and how many half-lives may pass before scores
# are halved at the latest, which they are when the cache is populated.
UNIT = 2**10
MOST_HALVINGS = 4
# LRU: the requests in a row's last step that break ties, in the low bits of its score.
COUNT_BITS = 10
MOST_COUNTED = 2**COUNT_BITS - 1
_MOST_STEPS = _INT_MAX >> COUNT_BITS


class Scoring(NamedTuple):
    """How requests become scores.

    Attributes:
        policy: ``"lfu"`` or ``"lru"``.
        half_life: requests for each slot after which a request counts half; None: it always counts the same.
    """

    policy: str
    half_life: int | None = None


def stamp(directory: CacheDirectory, scoring: Scoring) -> jax.Array:
    """What scores take from a batch, int32: LFU adds it for every request, LRU to the requests of the batch.

    Under LFU with a half-life it doubles in the course of every half-life that scores have not been halved for, from
    `UNIT` on. Under LRU it is the steps since the cache was last populated.
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
    """The directory with so many more requests in its scores."""
    room = _INT_MAX - requests
    unaged = jnp.where(directory.unaged > room, _INT_MAX, directory.unaged + requests)
    return directory._replace(unaged=unaged)


def caught_up(directory: CacheDirectory, scoring: Scoring) -> CacheDirectory:
    """The directory before a batch: scores are halved where so many half-lives passed that they would outgrow int32."""
    if scoring.half_life is None:
        return directory
    half_life = _requests(directory, scoring.half_life)
    late = directory.unaged // half_life > MOST_HALVINGS
    names = ("scores", "ghost_scores", "unaged")

    def halve(scores: jax.Array, ghost_scores: jax.Array, unaged: jax.Array) -> Any:
        halvings = unaged // half_life
        return _halved(scores, halvings), _halved(ghost_scores, halvings), unaged % half_life

    values = (getattr(directory, name) for name in names)
    values = jax.lax.cond(late, halve, lambda *same: same, *values)
    return directory._replace(**dict(zip(names, values, strict=True)))


def aged(directory: CacheDirectory, scoring: Scoring) -> CacheDirectory:
    """The directory once it has been populated: scores are those of a request now, and ``refreshed`` is ``clock``."""

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
    """The directory with the scores of another policy, as if now a half-life began."""
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

    ghosts = (
        directory.ghost_tags,
        directory.ghost_scores,
        directory.ghost_touched,
        directory.ghost_recent,
    )
    return directory._replace(
        scores=convert(directory.tags, directory.scores, directory.touched, 0),
        ghost_scores=convert(*ghosts),
        unaged=jnp.zeros_like(directory.unaged),
    )


def _requests(directory: CacheDirectory, half_life: int) -> int:
    """The half-life in requests of the whole cache."""
    return min(half_life * directory.slots, _INT_MAX)


def _halvings(directory: CacheDirectory, half_life: int) -> jax.Array:
    """Half-lives that scores have not been halved for."""
    return jnp.maximum(directory.unaged // half_life, 0)


def _halved(scores: jax.Array, halvings: jax.Array) -> jax.Array:
    # Never 0: a ghost without a score is none.
    return jnp.maximum(scores >> jnp.minimum(halvings, 31), jnp.minimum(scores, 1))
