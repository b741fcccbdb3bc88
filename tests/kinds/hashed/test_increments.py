"""Dumps of changes, loaded in the windows in which users make them, are the dumped table."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tt
from jax_tt._directories.batch_clock import KEPT, LAST
from jax_tt._directories.hash_directory import KEYS, WAITING
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

    def __init__(self, path):
        self.draw, self.path = np.random.default_rng(0), path
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
        self.table, self.state = jax_tt.dynamic.grow_if_full(self.table, self.state, max_load=0.3)

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
            # A dump of changes says as much of its table as one of all keys.
            before = "None" if not first else first - 1
            since = None if first is None else self.path / f"{before}-{first}"
            jax_tt.files.dump(self.table, self.state, name, since=since, progress=False)
            names[first] = name
        self.dumps.append(names)


def loaded(table, paths):
    state = table.init(jax.random.key(9))
    for path in paths:
        _, state = jax_tt.files.load_dump(table, state, path, progress=False)
    return state


def test_windows_that_overlap_or_come_again(tmp_path):
    """Changes since the base follow other changes since it; those that are there already change nothing."""
    made = Trained(tmp_path)
    between = made.train, made.set_clock_back, made.grow, made.remove
    for operation in (*[made.train] * 5, made.dump, *between, made.dump, made.train, made.expire):
        operation()
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
    assert made.table.num_embeddings > 64
    assert np.count_nonzero(made.state[WAITING[2]]) > 5
    other = table_of(1024, ways=16)
    same_keys(other, loaded(other, [base, first, last]), made.table, made.state)
    with pytest.raises(ValueError, match="in another state"):
        loaded(made.table, [base, last])
