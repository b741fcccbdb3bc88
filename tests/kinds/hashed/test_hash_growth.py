"""Growth of a directory: no key is lost, and every one is found in one of its new sets."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_tt._native import hash_backend
from jax_tt._sets.hash_directory import Eviction, init_directory
from jax_tt._sets.hash_reference import doubled
from tests.kinds.hashed.hash_model import joined
from tests.kinds.hashed.test_hash_directory import EXTREMES, words


@pytest.mark.parametrize(("sets", "ways"), [(1, 1), (3, 5)])
def test_every_key_is_found_after_growth(sets, ways):
    draw = random.Random(f"{sets} {ways}")
    before, n = init_directory(sets, ways), 2 * sets * ways
    keys = words([*EXTREMES, *(draw.randrange(2**64) for _ in range(n))])
    present, given = np.ones(len(keys), bool), words(range(5, len(keys) + 5))
    batch = keys, present, given, jnp.int32(1), jnp.uint32(0)
    insert = jax.jit(hash_backend.insert, static_argnums=(6, 7))
    before, _ = insert(before, *batch, Eviction("custom"), "reference")
    after, source = jax.jit(doubled)(before)

    old = np.asarray(source).reshape(2, sets, ways)
    assert np.array_equal(np.sort(old[old >= 0]), np.flatnonzero(before.touched))
    # From one set to two, in the order of its ways, without gaps.
    assert ((old < 0) | (old // ways == np.arange(sets)[:, None])).all()
    assert (np.diff(np.where(old < 0, n, old)) >= 0).all()
    for name in ("keys", "scores"):
        left, right = (
            joined(np.moveaxis(np.asarray(getattr(directory, name)), 1, -1)).reshape(-1)
            for directory in (before, after)
        )
        assert (right == np.where(source < 0, 0, left[source])).all()
    assert (
        after.touched.reshape(-1) == np.where(source < 0, 0, before.touched.reshape(-1)[source])
    ).all()

    slots = hash_backend.find(before, keys, present, "reference")
    moved = np.asarray(hash_backend.find(after, keys, present, "reference"))
    assert (np.where(moved < 0, -1, np.asarray(source)[moved]) == slots).all()
