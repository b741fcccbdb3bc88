"""Dumps of changes, loaded in the windows in which users make them, are the dumped table."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tt
from jax_tt._sets.batch_clock import KEPT, LAST
from jax_tt._sets.hash_directory import KEYS, WAITING, directory_of
from jax_tt._sets.placing import entries_of
from tests.kinds.hashed.test_hash_moves import same_keys

BATCH, POOL = 24, 300


def table_of(rows, **options):
    return jax_tt.hash_table(
        rows,
        4,
        optimizer=jax_tt.optimizers.Adagrad(0.1),
        admission=jax_tt.dynamic.AdmitAfter(2, waiting=64),
        max_capacity=1024,
        safe_check="ignore",
        **options,
    )


@functools.partial(jax.jit, static_argnums=0)
def insert(table, state, keys):
    return jax_tt.dynamic.insert(table, state, keys)[1]


class Trained:
    """A table that is dumped between random operations, and the dumps: a base, and changes since each earlier one."""

    def __init__(self, path, seed):
        self.draw, self.path = np.random.default_rng(seed), path
        self.table = table_of(64)
        self.state = self.table.init(jax.random.key(0))
        self.dumps = []

    def train(self):
        """Inserts keys, which evict others, and changes rows of keys that are there."""
        keys = self.draw.zipf(1.2, BATCH) * 7 % POOL << 33
        self.state = insert(self.table, self.state, jax_tt.dynamic.split_keys(keys))
        slots = jax_tt.dynamic.keys_of(self.table, self.state)["slot"][::3]
        for name in self.table.table.spec.row_arrays:
            array = np.array(self.state[name])
            array[slots] += self.draw.integers(1, 9)
            self.state = {**self.state, name: jnp.asarray(array)}

    def remove(self):
        keys = jax_tt.dynamic.keys_of(self.table, self.state)["key"]
        some = self.draw.choice(keys, min(len(keys), 6), replace=False)
        given = jax_tt.dynamic.split_keys(some)
        _, self.state = jax_tt.dynamic.remove(self.table, self.state, given)

    def expire(self):
        _, self.state = jax_tt.dynamic.remove(
            self.table, self.state, where=lambda view: view.age >= 4
        )

    def grow(self):
        self.table, self.state = jax_tt.dynamic.grow_if_full(self.table, self.state, max_load=0.8)

    def set_clock_back(self):
        """The next insertion finds the last number of a batch."""
        self.state = {**self.state, "hash_clock": jnp.int32(LAST)}
        self.train()
        assert int(self.state["hash_clock"]) == KEPT + 1

    def dump(self):
        number = len(self.dumps)
        names = {}
        for first in (None, *range(number)):
            name = self.path / f"{first}-{number}"
            since = None if first is None else self.path / f"None-{first}"
            if (
                first is not None and self.draw.random() < 0.5
            ):  # a dump of changes says as much of its table
                since = self.path / f"{self.draw.integers(first)}-{first}" if first else since
            jax_tt.files.dump(self.table, self.state, name, since=since, progress=False)
            names[first] = name
        self.dumps.append(names)


def loaded(table, paths):
    state = table.init(jax.random.key(9))
    for path in paths:
        _, state = jax_tt.files.load_dump(table, state, path, progress=False)
    return state


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_base_and_changes_are_the_table(tmp_path, seed):
    made = Trained(tmp_path, seed)
    rare = [made.remove, made.expire, made.grow, made.set_clock_back]
    for _ in range(4):
        for operation in (*made.draw.permutation(rare)[:2], *[made.train] * 4):
            operation()
        made.dump()
    windows = [
        [None, *chosen, 3]
        for count in range(4)
        for chosen in itertools.combinations(range(3), count)
    ]
    other = table_of(1024, ways=16)
    for dumps in windows:
        paths = [made.dumps[last][first] for first, last in itertools.pairwise(dumps)]
        state = loaded(made.table, paths)
        for name, array in made.state.items():
            rows: Any = ...
            if name in made.table.table.spec.row_arrays:
                rows = jax_tt.dynamic.keys_of(made.table, made.state)["slot"]
            np.testing.assert_array_equal(state[name][rows], array[rows], err_msg=name)
    state = loaded(other, paths)
    same_keys(other, state, made.table, made.state)
    waiting = [np.sort(entries_of(directory_of(s, WAITING))) for s in (state, made.state)]
    for name in ("key", "score", "touched"):
        np.testing.assert_array_equal(*(entries[name] for entries in waiting))
    assert len(waiting[0]) > 5


def test_windows_that_overlap_or_come_again(tmp_path):
    """Changes since the base follow other changes since it; those that are there already change nothing."""
    made = Trained(tmp_path, 5)
    for operation in (*[made.train] * 4, made.dump, made.train, made.remove, made.dump, made.train):
        operation()
    made.expire()
    made.dump()
    (base,), (_, first), (_, both, last) = (list(names.values()) for names in made.dumps)
    states = [
        loaded(made.table, [base, *paths])
        for paths in ([first, last], [both], [first, both], [first, first, last, last, both])
    ]
    for state in states:
        same_keys(made.table, state, made.table, made.state)
        for name in (*KEYS, *WAITING, "hash_clock"):
            np.testing.assert_array_equal(state[name], made.state[name], err_msg=name)
    with pytest.raises(ValueError, match="in another state"):
        loaded(made.table, [base, last])
