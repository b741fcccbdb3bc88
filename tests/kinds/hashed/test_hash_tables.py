"""Tables of 64-bit keys against a model of Python dicts: keys, rows and optimizer state by key."""

import dataclasses
import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tt
from tests.conftest import method_fixture
from tests.kinds.hashed.hash_model import ModelDirectory, joined

# Elsewhere "auto" chooses the kernels of the CPU.
method = method_fixture("reference", "cuda_emulated", pytest.param("cuda", marks=pytest.mark.gpu))

EXTREMES = [0, 1, 2**64 - 1, 2**63, 2**63 - 1]
RULES = {
    "sgd": jax_tt.optimizers.SGD(0.1),
    "rowwise": jax_tt.optimizers.RowWiseAdagrad(0.1),
    "adam": jax_tt.optimizers.Adam(0.1),
}
D = 4


class Model:
    """A `ModelDirectory`, and a dense table with a row for every key of a pool."""

    def __init__(self, table, pool):
        self.table, self.pool = table, pool
        self.numbers = {key: number for number, key in enumerate(pool)}
        self.directory = ModelDirectory(table.sets, table.ways)
        self.dense = jax_tt.tables.DenseTable(len(pool), D, update=table.update)
        self.state = self.dense.init(jax.random.key(1))
        first = {"embedding": initial_rows(table, pool), **self.dense.init_rest(self.state)}
        self.first = {name: np.asarray(array) for name, array in first.items()}
        self.now = 0

    def insert(self, keys, given, epoch):
        self.now += 1
        here = [True] * len(keys)
        options = (self.table.policy, self.table.min_age)
        entries, counts = self.directory.insert(keys, here, given, self.now, epoch, *options)
        evicted = {old[0]: (old, self.arrays(old[0])) for _, old in entries.values() if old[2]}
        new = [self.numbers[key] for key, _ in entries.values()]
        for name in self.rows():
            self.state[name] = np.array(self.state[name])
            self.state[name][new] = self.first[name][new]
        return evicted, counts

    def rows(self):
        return [name for name, a in self.state.items() if a.ndim and len(a) == len(self.pool)]

    def arrays(self, key):
        return {name: np.asarray(self.state[name][self.numbers[key]]) for name in self.rows()}


def initial_rows(table, keys):
    state = table.init(jax.random.key(0))
    here = np.ones(len(keys), bool)
    initial = jax.jit(lambda keys: table.initial(state, keys, here, jnp.float32, "reference"))
    return initial(keys_of(keys))


def keys_of(keys):
    return np.asarray(jax_tt.dynamic.split_keys(np.array(keys, np.uint64)).digits).view(np.uint32)


@functools.partial(jax.jit, static_argnums=(0, 4))
def step(table, state, ids, weights, method):
    def loss(trained):
        lookup = jax_tt.Lookup(method=method, bounds="zero")
        rows, _ = jax_tt.lookup_bags(table, {**state, **trained}, jax_tt.Bags(ids, None), lookup)
        return jnp.sum(rows * weights), rows

    trained = {name: state[name] for name in table.spec.trained_names}
    (_, rows), new = jax.value_and_grad(loss, has_aux=True)(trained)
    return {**state, **new}, rows


@functools.partial(jax.jit, static_argnums=(0, 5))
def insert(table, state, ids, scores, epoch, method):
    return jax_tt.dynamic.insert(
        table, state, ids, scores=scores, epoch=epoch, method=method, return_evicted=True
    )


remove = jax.jit(jax_tt.dynamic.remove, static_argnums=0, static_argnames=("where", "size"))


def check_rows(model, table, state):
    entries = jax_tt.dynamic.keys_of(table, state)
    there = {entry[0] for own in model.directory.sets for entry in own.values()}
    assert set(entries["key"].tolist()) == there
    numbers = [model.numbers[key] for key in entries["key"].tolist()]
    for name in model.rows():
        mine, theirs = np.asarray(state[name]), np.asarray(model.state[name])
        np.testing.assert_array_equal(mine[entries["slot"]], theirs[numbers], name)


def run(policy, rule, steps, method, seed, larger=None):
    draw = random.Random(seed)
    table = jax_tt.hash_table(
        16,
        D,
        ways=4,
        policy=policy,
        min_age=draw.choice([1, 2]),
        optimizer=RULES[rule],
        safe_check="ignore",
        max_capacity=64 if larger else None,
    )
    pool = EXTREMES + [draw.randrange(2**64) for _ in range(45)]
    model, state = Model(table, pool), table.init(jax.random.key(0))
    for number in range(steps):
        keys = [draw.choice(pool) for _ in range(12)]
        given = [draw.choice([0, 2**40, draw.randrange(2**64)]) for _ in keys]
        own = policy == "custom"
        epoch = number // 4 if policy.startswith("epoch") else None
        done, state = insert(
            table,
            state,
            jax_tt.dynamic.split_keys(np.array(keys, np.uint64).reshape(4, 3)),
            jax_tt.dynamic.split_keys(np.array(given, np.uint64).reshape(4, 3)) if own else None,
            None if epoch is None else np.int32(epoch),
            method,
        )
        evicted, counts = model.insert(keys, given, epoch or 0)
        assert {name: int(count) for name, count in done.counts.items()} == counts
        check_evicted(done.evicted, evicted)
        asked = [draw.choice(keys + pool) for _ in range(12)]
        state = check_step(model, table, state, asked, method)
        if number % 5 == 4:
            gone = [draw.choice(pool) for _ in range(4)]
            slots = sorted({model.directory.find(key) for key in gone} - {-1})
            entries = [model.directory.entry(slot)[0] for slot in slots]
            expected = [(key, model.arrays(key)["embedding"]) for key in entries]
            removed, state = remove(
                table, state, jax_tt.dynamic.split_keys(np.array(gone, np.uint64))
            )
            model.directory.erase(slots)
            assert joined(removed.keys)[: len(slots)].tolist() == [key for key, _ in expected]
            for k, (_, row) in enumerate(expected):
                np.testing.assert_array_equal(removed.arrays["embedding"][k], row)
        if larger and number == 5:
            before = {entry[0]: entry for entry in jax_tt.dynamic.keys_of(table, state)}
            table, state = larger(table, state)
            model.table, model.directory = table, ModelDirectory(table.sets, table.ways)
            assert table.num_embeddings == 64
            entries = jax_tt.dynamic.keys_of(table, state)
            assert {entry[0] for entry in entries} == set(before)
            for key, slot, score, touched in entries.tolist():
                assert (score, touched) == (before[key][2], before[key][3])
                model.directory.sets[slot // 4][slot % 4] = [key, score, touched]
                assert model.directory.find(key) == slot
        check_rows(model, table, state)


def check_evicted(found, expected):
    there = np.asarray(found.touched) > 0
    keys = joined(found.keys)[there].tolist()
    assert sorted(keys) == sorted(expected)
    for k, key in zip(np.flatnonzero(there), keys, strict=True):
        (_, score, touched), arrays = expected[key]
        assert (joined(found.scores)[k], found.touched[k]) == (score, touched)
        assert set(found.arrays) == set(arrays)
        for name, array in arrays.items():
            np.testing.assert_array_equal(found.arrays[name][k], array)


def check_step(model, table, state, asked, method):
    weights = np.random.default_rng(len(asked)).normal(size=(4, D)).astype(np.float32)
    missing = [model.directory.find(key) < 0 for key in asked]
    numbers = [model.numbers[key] for key in asked]
    ids = np.where(missing, len(model.pool), numbers).astype(np.int32)
    state, rows = step(
        table,
        state,
        jax_tt.dynamic.split_keys(np.array(asked, np.uint64).reshape(4, 3)),
        weights,
        method,
    )
    model.state, expected = step(model.dense, model.state, ids.reshape(4, 3), weights, method)
    first = (
        np.where(np.array(missing)[:, None], model.first["embedding"][numbers], 0)
        .reshape(4, 3, D)
        .sum(1)
    )
    np.testing.assert_allclose(rows, expected + first, rtol=1e-5, atol=1e-6)
    return state


@pytest.mark.parametrize(
    ("policy", "rule"),
    [("lfu", "rowwise"), ("epoch_lru", "adam"), ("epoch_lfu", "sgd"), ("none", "rowwise")],
)
def test_equals_model(policy, rule):
    run(policy, rule, 10, "auto", policy + rule)


def test_equals_model_while_it_grows():
    def grown(table, state):
        return jax_tt.dynamic.grow_if_full(table, state, max_load=0)

    run("lru", "adam", 10, "auto", "adam", grown)


def test_equals_model_through_files(tmp_path):
    def loaded(table, state):
        jax_tt.files.dump(table, state, tmp_path / "keys", rows_per_file=5)
        other = dataclasses.replace(
            table, table=dataclasses.replace(table.table, num_embeddings=64)
        )
        counts, state = jax_tt.files.load_dump(
            other, other.init(jax.random.key(3)), tmp_path / "keys"
        )
        assert counts.evicted == 0
        return other, state

    run("custom", "adam", 10, "auto", "custom", loaded)


def test_other_methods_equal_model(method):
    run("lfu", "adam", 10, method, 7)


def test_keys_are_removed_by_their_scores():
    table = jax_tt.hash_table(64, D, policy="lfu", safe_check="ignore")
    ids = jax_tt.dynamic.split_keys(np.array([1, 1, 2, 3, 3, 3]))
    _, state = insert(table, table.init(jax.random.key(0)), ids, None, None, "auto")
    gone, state = remove(table, state, where=lambda view: view.scores[:, 1] < 2, size=4)
    assert sorted(jax_tt.dynamic.keys_of(table, state)["key"].tolist()) == [1, 3]
    assert joined(gone.keys)[np.asarray(gone.touched) > 0].tolist() == [2]
