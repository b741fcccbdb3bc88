"""Frozen tables of keys: unknown keys read what ``missing`` says, and nobody is told of training."""

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_tt
from jax_tt import Placement
from jax_tt._base import reports
from jax_tt._layers.nnx.collection import write_arrays
from jax_tt.tables import ShardedTable

KNOWN, UNKNOWN = np.arange(8) * 2**40, np.arange(3) - 10**15
RULE = jax_tt.optimizers.Adagrad(0.1)


@pytest.fixture(autouse=True)
def silent():
    """Warnings of anything are errors, also where the same one was given before."""
    reports.forget()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
        jax.effects_barrier()


@functools.partial(jax.jit, static_argnums=0)
def started(table, keys):
    """A state with some keys."""
    return jax_tt.dynamic.insert(table, table.init(jax.random.key(0)), keys)[1]


@functools.partial(jax.jit, static_argnums=(0, 3))
def look_up(table, state, keys, train=True):
    return jax_tt.lookup(table, state, keys, train=train)[0]


def source(missing, optimizer=RULE):
    table = jax_tt.hash_table(64, 4, optimizer=optimizer, missing=missing, safe_check="error")
    return table, started(table, jax_tt.dynamic.split_keys(KNOWN))


def keys():
    return jax_tt.dynamic.split_keys(np.concatenate([KNOWN, UNKNOWN]))


def check(rows, state, missing):
    rows = np.asarray(rows)
    assert np.abs(rows[:8]).min() > 0
    if missing == "zeros":
        assert (rows[8:] == 0).all()
    elif missing == "initial":
        assert np.abs(rows[8:]).min() > 0
    else:
        assert (rows[8:] == np.asarray(state["embedding"])[missing]).all()


@pytest.mark.parametrize("missing", ["zeros", "initial", 5])
@pytest.mark.parametrize("train", [True, False])
def test_single_tables(missing, train):
    table, state = source(missing)
    served, arrays = jax_tt.extension.freeze(table, state)
    check(look_up(served, arrays, keys(), train), state, missing)


def test_tables_without_an_optimizer():
    """Optax trains them until they are frozen, which nothing but the flag says."""
    table, state = source("zeros", optimizer=None)
    assert not jax_tt.extension.with_update(table, None).frozen
    served, arrays = jax_tt.extension.freeze(table, state)
    assert served.frozen and arrays.keys() == state.keys()
    check(look_up(served, arrays, keys()), state, "zeros")
    quiet = dataclasses.replace(table, safe_check="ignore")
    check(look_up(quiet, state, keys()), state, "initial")


def test_tables_behind_an_order_of_ids():
    inner = jax_tt.tt_table(64, 4, tt_ranks=2, optimizer=RULE)
    ordered = jax_tt.tables.OrderedTable(inner, jax_tt.order.IdOrder(np.arange(64)[::-1]))
    table = jax_tt.tables.HashTable(ordered, missing="zeros", safe_check="error")
    state = started(table, jax_tt.dynamic.split_keys(KNOWN))
    served, arrays = jax_tt.extension.freeze(table, state)
    check(look_up(served, arrays, keys()), state, "zeros")


def test_tables_on_several_devices():
    mesh = jax.make_mesh((2,), ("model",), devices=jax.devices()[:2])
    plain = jax_tt.hash_table(64, 4, optimizer=RULE, missing="zeros", safe_check="error")
    table = ShardedTable(plain, mesh, "model", Placement.hashed())
    with jax.set_mesh(mesh):
        state = started(table, jax_tt.dynamic.split_keys(KNOWN))
    served, arrays = jax_tt.extension.freeze(table, state)
    ids = jax_tt.dynamic.split_keys(np.concatenate([KNOWN, UNKNOWN, KNOWN[:1]]))
    check(look_up(served, arrays, ids)[:11], state, "zeros")


def test_collections_layers_and_exported_programs():
    table, _ = source("zeros")
    features = {"item": jax_tt.Feature("item", combiner=None)}
    collection = jax_tt.Collection({"item": table}, features)
    state = collection.init(jax.random.key(0))
    batch = {"item": keys()}
    known = {"item": jax_tt.dynamic.split_keys(KNOWN)}
    _, state = jax.jit(functools.partial(jax_tt.dynamic.insert, collection))(state, known)
    served, arrays = collection.frozen(state)

    @jax.jit
    def rows_of(arrays, digits):
        own = {"item": jax_tt.SplitIds(digits)}
        return jax_tt.lookup_features(served, arrays, own)[0]["item"]

    digits = jnp.asarray(batch["item"].digits)
    check(rows_of(arrays, digits), state["item"], "zeros")
    export = jax.export.export(rows_of, disabled_checks=jax_tt.export.checks())
    loaded = jax.export.deserialize(export(arrays, digits).serialize())
    check(loaded.call(arrays, digits), state["item"], "zeros")

    layer = jax_tt.EmbedCollection(served.tables, features, rngs=nnx.Rngs(0))
    write_arrays(layer, arrays)
    check(nnx.jit(lambda layer: layer(batch)["item"])(layer), state["item"], "zeros")
    alone = jax_tt.TableEmbed(served.tables["item"], rngs=nnx.Rngs(0))
    for name, array in arrays["item"].items():
        getattr(alone, name).set_value(array)
    check(nnx.jit(lambda layer: layer(batch["item"]))(alone), state["item"], "zeros")


def test_a_program_takes_the_keys_of_a_model_that_is_trained_further():
    """The keys are variables of the model as its rows are, and no constants of the program."""
    table = jax_tt.hash_table(64, 4, optimizer=RULE, missing="zeros")
    model = jax_tt.TableEmbed(table, rngs=nnx.Rngs(0))
    model(KNOWN[:4])
    model.eval()
    graph, state = nnx.split(model)

    def serve(params, keys):
        return nnx.merge(graph, params)(keys)

    given = keys()
    exporter = jax.export.export(jax.jit(serve), disabled_checks=jax_tt.export.checks())
    program = exporter(nnx.to_pure_dict(state), given)
    model.train()
    model(KNOWN[4:])
    check(program.call(nnx.to_pure_dict(nnx.state(model)), given), {}, "zeros")
