"""The cache policy in plain JAX: lookup, counting and replacement.

The native ops compute the same integers. The effect of a batch depends on its ids and their counts, not on their order.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_tt._base.words import bucket_of, bucket_within_set, set_of
from jax_tt._directories.cache_directory import GHOSTS, CacheDirectory
from jax_tt._directories.scores import MOST_COUNTED

_INT_MAX = 2**31 - 1


def probe(tags: jax.Array, keys: jax.Array) -> jax.Array:
    """Slot of every key ``[n, ...]``, int32; -1 for keys that are negative or not cached."""
    sets, ways = tags.shape
    home = set_of(keys, sets)
    same = tags[home] == keys[..., None]
    found = jnp.any(same, axis=-1) & (keys >= 0)
    return jnp.where(found, home * ways + jnp.argmax(same, axis=-1).astype(jnp.int32), -1)


def observe(
    directory: CacheDirectory, keys: jax.Array, slots: jax.Array, stamp: jax.Array, policy: str
) -> tuple[CacheDirectory, jax.Array]:
    """Counts one batch.

    A request for a cached row changes its score and marks it as touched now: LFU adds ``stamp``, LRU sets the score to
    ``stamp`` plus the requests of this batch, at most 1023. A request for another row inserts or updates a ghost in
    the same way. If a bucket has more ghosts than room, LFU ages it as in Misra-Gries: the ghosts are sorted by
    descending score, the score of the first one beyond the room is subtracted from all of them, and ghosts at zero are
    dropped. A ghost's score is therefore never above the sum that its requests added and, as long as `populate` moves
    no row into or out of the bucket, below it by at most 1 / (room + 1) of the sum over all requests of the bucket.
    LRU drops the ghosts with the lowest scores and, at equal scores, the larger ids.

    Args:
        directory: state before; ``clock`` is already that of this batch.
        keys: ids ``[n]``; negative ones are not counted.
        slots: `probe` of the keys.
        stamp: int32 scalar, `jax_tt._directories.scores.stamp`.
        policy: ``"lfu"`` or ``"lru"``.

    Returns:
        The state, and int32 ``[4]``: requests, distinct ids, misses, distinct missed ids.
    """
    now = directory.clock
    sets = directory.tags.shape[0]
    buckets, room = directory.ghost_tags.shape
    hit = (slots >= 0) & (slots < directory.slots)
    occurrences = jnp.zeros(directory.slots, jnp.int32).at[jnp.where(hit, slots, directory.slots)]
    occurrences = occurrences.add(1, mode="drop").reshape(directory.tags.shape)
    here = occurrences > 0
    scores = jnp.where(
        here, _scored(directory.scores, occurrences, stamp, policy), directory.scores
    )
    touched = jnp.where(here, now, directory.touched)

    missed = (keys >= 0) & ~hit
    news, count = _unique(keys, missed)
    home = jnp.where(count > 0, bucket_of(news, sets, buckets), buckets)
    same = directory.ghost_tags.at[home].get(mode="fill", fill_value=-1) == news[:, None]
    known = jnp.any(same, axis=1) & (count > 0)
    place = jnp.where(
        known, home * room + jnp.argmax(same, axis=1).astype(jnp.int32), buckets * room
    )

    def feed(values: jax.Array, new: jax.Array) -> jax.Array:
        return values.reshape(-1).at[place].set(new, mode="drop")

    tags = directory.ghost_tags.reshape(-1)
    old = directory.ghost_scores.reshape(-1).at[place].get(mode="fill", fill_value=0)
    ghost_scores = feed(directory.ghost_scores, _scored(old, count, stamp, policy))
    ghost_touched = feed(directory.ghost_touched, jnp.broadcast_to(now, count.shape))
    ghost_recent = feed(directory.ghost_recent, count)

    # Existing and new ghosts, concatenated.
    fresh = (count > 0) & ~known
    all_tags = jnp.concatenate([tags, jnp.where(fresh, news, -1)])
    all_scores = jnp.concatenate(
        [ghost_scores, _scored(jnp.zeros_like(count), count, stamp, policy)]
    )
    homes = jnp.concatenate([jnp.repeat(jnp.arange(buckets, dtype=jnp.int32), room), home])
    homes = jnp.where(all_tags >= 0, homes, buckets)
    rank = rank_within(homes, buckets, -all_scores, all_tags)
    if policy == "lfu":
        beyond = jnp.where(rank == room, all_scores, 0)
        all_scores = all_scores - jax.ops.segment_max(beyond, homes, buckets + 1)[homes]
        stays = (all_tags >= 0) & (all_scores > 0)
    else:
        stays = (all_tags >= 0) & (rank < room)

    kept = stays[: buckets * room]
    comes = stays[buckets * room :]
    order = rank_within(jnp.where(comes, home, buckets), buckets, news)
    free = jnp.argsort(kept.reshape(buckets, room), axis=1, stable=True).astype(jnp.int32)
    into = home * room + free.at[home, order].get(mode="fill", fill_value=0)
    into = jnp.where(comes, into, buckets * room)

    def settle(values: jax.Array, new: jax.Array, empty: int) -> jax.Array:
        values = jnp.where(kept, values, empty).at[into].set(new.astype(values.dtype), mode="drop")
        return values.reshape(buckets, room)

    counts = jnp.stack(
        [
            jnp.sum(keys >= 0),
            jnp.sum(here) + jnp.sum(count > 0),
            jnp.sum(missed),
            jnp.sum(count > 0),
        ]
    )
    return directory._replace(
        scores=scores,
        touched=touched,
        ghost_tags=settle(tags, news, -1),
        ghost_scores=settle(all_scores[: buckets * room], all_scores[buckets * room :], 0),
        ghost_touched=settle(ghost_touched, jnp.broadcast_to(now, count.shape), 0),
        ghost_recent=settle(ghost_recent, count, 0),
    ), counts.astype(jnp.int32)


def populate(directory: CacheDirectory) -> tuple[CacheDirectory, jax.Array, jax.Array]:
    """Swaps hot ghosts with cold cached rows.

    In every set, the ghosts, hottest first (score, then last request, then smaller id), are paired with the slots,
    coldest first (empty ones, then by score, last request, way); slots touched in this step are left out. A ghost
    takes its slot if this is empty or colder, by score and then by last request, and its own entry becomes empty. The
    exchange ends at the first ghost that is not hotter.

    The evicted rows, in the same order, then become ghosts of their buckets. A row takes the first empty entry or, if
    there is none, replaces the last ghost by score and then by larger id if it precedes this ghost in that order;
    otherwise it is dropped.

    Returns:
        The state; the id evicted from each slot ``[sets, ways]``, or -1; and int32 ``[4]``: rows
        inserted, rows evicted, ghosts touched in this step that were not inserted, and their requests.
    """
    sets, ways = directory.tags.shape
    now = directory.clock
    ghosts = directory.ghost_tags.shape
    directory = _reshape_ghosts(directory, (sets, -1))
    pairs = min(ways, directory.ghost_tags.shape[1])
    ghost = jnp.lexsort(
        (
            directory.ghost_tags,
            -directory.ghost_touched,
            -directory.ghost_scores,
            directory.ghost_tags < 0,
        ),
        axis=-1,
    )[:, :pairs]
    held = directory.tags >= 0
    locked = held & (directory.touched == now)
    slot = jnp.lexsort((directory.touched, directory.scores, held, locked), axis=-1)[:, :pairs]

    def of(values: jax.Array, index: jax.Array) -> jax.Array:
        return jnp.take_along_axis(values, index, axis=1)

    tag, score, seen = (
        of(values, ghost)
        for values in (directory.ghost_tags, directory.ghost_scores, directory.ghost_touched)
    )
    old_tag, old_score, old_seen = (
        of(values, slot) for values in (directory.tags, directory.scores, directory.touched)
    )
    hotter = (score > old_score) | ((score == old_score) & (seen > old_seen))
    wins = (tag >= 0) & ~of(locked, slot) & ((old_tag < 0) | hotter)
    wins = jnp.cumprod(wins, axis=1, dtype=jnp.int32) > 0
    row = jnp.arange(sets)[:, None]

    def trade(values: jax.Array, index: jax.Array, new: jax.Array) -> jax.Array:
        index = jnp.where(wins, index, values.shape[1])
        return values.at[row, index].set(new.astype(values.dtype), mode="drop")

    after = directory._replace(
        tags=trade(directory.tags, slot, tag),
        scores=trade(directory.scores, slot, score),
        touched=trade(directory.touched, slot, seen),
        ghost_tags=trade(directory.ghost_tags, ghost, jnp.full_like(tag, -1)),
        ghost_scores=trade(directory.ghost_scores, ghost, jnp.zeros_like(score)),
        ghost_touched=trade(directory.ghost_touched, ghost, jnp.zeros_like(score)),
        ghost_recent=trade(directory.ghost_recent, ghost, jnp.zeros_like(score)),
    )
    left = jnp.where(wins, old_tag, -1)
    after = _with_ghosts(after, left, old_score, old_seen, ghosts)
    evicted = trade(jnp.full_like(directory.tags, -1), slot, old_tag)
    # Evicted rows are not among them: they were not touched in this step.
    outside = (after.ghost_tags >= 0) & (after.ghost_touched == now)
    counts = jnp.stack(
        [
            jnp.sum(wins),
            jnp.sum(evicted >= 0),
            jnp.sum(outside),
            jnp.sum(jnp.where(outside, after.ghost_recent, 0)),
        ]
    )
    return _reshape_ghosts(after, ghosts), evicted, counts.astype(jnp.int32)


def _with_ghosts(
    directory: CacheDirectory,
    tags: jax.Array,
    scores: jax.Array,
    touched: jax.Array,
    shape: tuple[int, int],
) -> CacheDirectory:
    """Adds evicted rows ``[sets, n]`` to the ghosts, which are ``[sets, -1]`` here."""
    sets, buckets, room = directory.tags.shape[0], *shape
    row = jnp.arange(sets)

    def place(i: jax.Array, ghosts: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        tag, score = tags[:, i], scores[:, i]
        first = bucket_within_set(tag, sets, buckets) * room
        bucket = first[:, None] + jnp.arange(room, dtype=jnp.int32)[None, :]
        there, hot = (values[row[:, None], bucket] for values in ghosts[:2])
        last = jnp.lexsort((-there, hot, there >= 0), axis=-1)[:, 0]
        there, hot = there[row, last], hot[row, last]
        comes = (there < 0) | (score > hot) | ((score == hot) & (tag < there))
        into = jnp.where((tag >= 0) & comes, first + last.astype(jnp.int32), ghosts[0].shape[1])
        new = (tag, score, touched[:, i], jnp.zeros_like(score))
        return tuple(
            values.at[row, into].set(value, mode="drop")
            for values, value in zip(ghosts, new, strict=True)
        )

    ghosts = tuple(getattr(directory, name) for name in GHOSTS)
    ghosts = jax.lax.fori_loop(0, tags.shape[1], place, ghosts)
    return directory._replace(**dict(zip(GHOSTS, ghosts, strict=True)))


def _reshape_ghosts(directory: CacheDirectory, shape: tuple[int, ...]) -> CacheDirectory:
    return directory._replace(**{name: getattr(directory, name).reshape(shape) for name in GHOSTS})


def _scored(scores: jax.Array, count: jax.Array, stamp: jax.Array, policy: str) -> jax.Array:
    if policy == "lru":
        return stamp + jnp.minimum(count, MOST_COUNTED)
    # Saturates instead of overflowing; a stamp is at least 1.
    many = count > (_INT_MAX - jnp.maximum(scores, 0)) // stamp
    return jnp.where(many, _INT_MAX, scores + count * stamp)


def _unique(keys: jax.Array, chosen: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The distinct chosen keys in ascending order and their counts, padded with counts of 0; ``[n]`` each."""
    n = keys.shape[0]
    ordered = jnp.sort(jnp.where(chosen, keys, jnp.iinfo(keys.dtype).max))
    head = jnp.concatenate([jnp.ones_like(ordered[:1], bool), ordered[1:] != ordered[:-1]])
    run = jnp.cumsum(head) - 1
    valid = jnp.arange(n) < jnp.sum(chosen)
    count = jax.ops.segment_sum(valid.astype(jnp.int32), run, n)
    return jnp.zeros_like(keys).at[run].set(ordered), count


def rank_within(groups: jax.Array, num_groups: int, *order: jax.Array) -> jax.Array:
    """Rank of each element in its group by the arrays ``order``, the first one being the primary key; int32."""
    by = jnp.lexsort((*reversed(order), groups))
    sizes = jax.ops.segment_sum(jnp.ones_like(groups), groups, num_groups + 1)
    starts = jnp.cumsum(sizes) - sizes
    place = jnp.arange(groups.shape[0], dtype=jnp.int32) - starts[groups[by]].astype(jnp.int32)
    return jnp.zeros_like(place).at[by].set(place)
