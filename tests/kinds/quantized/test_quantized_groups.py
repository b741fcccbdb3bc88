"""Quantized tables of a collection in one native call, beside dense tables: bits are those of single calls."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tt
from jax_tt import Bags, Feature, Lookup, optimizers
from jax_tt._table import groups
from tests.conftest import WAYS, method_fixture
from tests.helpers import assert_same_bits, to_dense
from tests.kinds.quantized.test_quantized_tables import random_rows

RULE = optimizers.RowWiseAdagrad(0.1)
# Rows with and without whole words, and columns with and without whole packets.
QUANTIZED = {
    "int8": (50, 16, 8),
    "int4": (41, 24, 4),
    "int3": (30, 32, 3),
    "odd4": (33, 13, 4),
    "odd2": (1, 1, 2),
}
TRAINED = {"trained8": (60, 16, 8), "trained4": (25, 8, 4)}

method = method_fixture(*WAYS[1:])


def collection_of(names):
    """A collection with these tables, and its state."""
    tables, states = {}, {}
    for name in names:
        if name in ("dense", "plain"):
            tables[name] = jax_tt.dense_table(300, 12, optimizer=RULE if name == "dense" else None)
            states[name] = tables[name].init(jax.random.key(1))
            continue
        rows, features, bits = (QUANTIZED | TRAINED)[name]
        update = jax_tt.Update(RULE) if name in TRAINED else None
        tables[name], states[name] = jax_tt.quantize(
            random_rows(rows, features, bits), bits, update=update
        )
    features = {name: Feature(name, combiner="mean" if name == "int3" else "sum") for name in names}
    collection = jax_tt.Collection(tables, features)
    return collection, collection.joined(states)


def batch_of(collection, weighted=True):
    rng = np.random.default_rng(0)
    batch = {}
    for name, table in collection.tables.items():
        lengths = [5, 0, 300, 1] if name in ("int8", "odd4") else [2, 9, 0, 1]
        ids = [rng.integers(0, table.num_embeddings, n).tolist() for n in lengths]
        weights = [rng.normal(size=n).tolist() for n in lengths]
        batch[name] = Bags.from_ragged(ids, weights if weighted and "4" in name else None)
    return jax.tree.map(jnp.asarray, batch)


def step_of(collection, lookup, layout):
    def step(state, batch):
        def loss(trained):
            arrays = collection.replaced(state, trained)
            rows, _ = jax_tt.lookup_features(collection, arrays, batch, lookup, layout=layout)
            return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(rows)), rows

        return jax.grad(loss, has_aux=True)(collection.trained(state))

    return jax.jit(step)


@pytest.mark.parametrize("layout", ["features", "concatenated"])
def test_bits_are_those_of_single_calls(method, layout, monkeypatch):
    collection, state = collection_of([*QUANTIZED, "dense", "plain", *TRAINED])
    batch = batch_of(collection, layout == "features")
    lookup, found = Lookup(method=method), []
    for alone in (False, True):
        if alone:
            monkeypatch.setattr(
                groups,
                "groups_of",
                lambda uses: tuple(
                    groups.Members(None, (k,), "", (use,)) for k, use in enumerate(uses)
                ),
            )
        lowered = step_of(collection, lookup, layout).lower(state, batch)
        text = lowered.as_text()
        prefix = "jax_tt_emulated" if method == "cuda_emulated" else "jax_tt"
        calls = text.count(f"@{prefix}_dense_forward_v1")
        assert calls == (len(collection.tables) if alone else 1)
        found.append(lowered.compile()(state, batch))
    assert_same_bits(*found)


def test_rows_in_one_array(method):
    """One id a bag: the levels themselves, in their columns."""
    collection, state = collection_of(QUANTIZED)
    batch = {
        name: jnp.arange(12, dtype=jnp.int32)[:, None] % table.num_embeddings
        for name, table in collection.tables.items()
    }
    look_up = functools.partial(jax_tt.lookup_features, layout="concatenated")
    rows, _ = jax.jit(
        lambda state, batch: look_up(collection, state, batch, Lookup(method=method))
    )(state, batch)
    states = collection.separated(state)
    want = [
        to_dense(table, states[name])[batch[name][:, 0]]
        for name, table in collection.tables.items()
    ]
    np.testing.assert_array_equal(jax.tree.leaves(rows)[0], jnp.concatenate(want, axis=1))


def test_a_bad_id_in_one_table_is_an_error_that_names_it():
    collection, state = collection_of(["int8", "int4", "plain"])
    batch = {**batch_of(collection), "int4": jnp.array([[0, 41]])}
    with pytest.raises(
        Exception, match=r"lookup_features: id 41 .*is out of range for table .int4 "
    ):
        rows, _ = jax_tt.lookup_features(collection, state, batch, bounds="error")
        jax.block_until_ready(rows)
