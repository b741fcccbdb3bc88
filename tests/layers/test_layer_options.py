"""Constructor arguments of both flavours: each error names argument, value, expectation and fix."""

import inspect
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jax_tt
from jax_tt import optimizers

IDS = jnp.zeros((2, 2), jnp.int32)
SIZES = {"num_embeddings": 60, "features": 8}
TABLE = jax_tt.dense_table(60, 8)


def build(layer: str, **kwargs: Any) -> None:
    getattr(jax_tt, layer)(rngs=nnx.Rngs(0), **(SIZES | kwargs))


TT_ERRORS = [
    ({"tt_ranks": 0}, ValueError, "tt_ranks: got 0; expected ranks >= 1, e.g. tt_ranks=32"),
    ({"tt_ranks": 2.5}, TypeError, "tt_ranks: got 2.5; expected an integer >= 1, or one per pair"),
    ({"tt_ranks": True}, TypeError, "tt_ranks: got True; expected an integer"),
    ({"tt_ranks": ()}, ValueError, "tt_ranks: got 0 ranks"),
    ({"tt_ranks": (2,) * 5}, ValueError, "expected one integer, or 1 to 4 ranks for 2 to 5 cores"),
    (
        {"tt_ranks": (2,), "row_factors": (4, 4, 4)},
        ValueError,
        "tt_ranks: got 1 ranks (2,) for 3 factors; expected one integer or the 2 inner ranks",
    ),
    ({"row_factors": 60}, TypeError, "row_factors: got 60; expected a tuple of 2 to 5 integers"),
    ({"row_factors": (60,)}, ValueError, "row_factors: got 1 factors (60,); expected 2 to 5"),
    (
        {"row_factors": (3, 4, 4)},
        ValueError,
        "row_factors: got 3 x 4 x 4 = 48; expected a product of at least num_embeddings=60, e.g.",
    ),
    (
        {"col_factors": (2, 2, 3)},
        ValueError,
        "col_factors: got 2 x 2 x 3 = 12; expected a product of exactly features=8, e.g.",
    ),
    (
        {"row_factors": (3, 4, 5), "col_factors": (2, 4)},
        ValueError,
        "col_factors: got 2 factors (2, 4) for 3 row_factors (3, 4, 5); expected 3",
    ),
    (
        {"core_init": "gaussian"},
        ValueError,
        "init: got 'gaussian'; expected one of 'approx-normal'",
    ),
    (
        {"core_init": lambda key, shape, dtype: jnp.zeros((1, 1, 1, 1))},
        ValueError,
        "core_0: its initialiser: got float32 of shape (1, 1, 1, 1); expected floats of shape",
    ),
]

SHARED_ERRORS = [
    ({"num_embeddings": 0}, ValueError, "num_embeddings: got 0; expected an integer >= 1"),
    ({"features": -8}, ValueError, "features: got -8; expected an integer >= 1"),
    ({"features": 8.0}, TypeError, "features: got 8.0"),
    ({"bounds": "wrap"}, ValueError, "bounds: got 'wrap'; expected one of 'error', 'warn', 'clip'"),
    ({"method": "cuda"}, ValueError, "method: got 'cuda'; expected one of"),
    ({"param_dtype": "int32"}, ValueError, "param_dtype: got int32; expected one of 'float32'"),
    (
        {"optimizer": optax.adam(1e-3)},
        TypeError,
        "optimizer: got an optax transformation (GradientTransformationExtraArgs); a fused table is "
        "updated inside the backward pass",
    ),
    (
        {"optimizer": optimizers.Adagrad},
        TypeError,
        "optimizer: got the class Adagrad; expected an instance of it, e.g. "
        "optimizer=jax_tt.optimizers.Adagrad(learning_rate=0.05)",
    ),
    ({"optimizer": "adagrad"}, TypeError, "optimizer: got 'adagrad'; expected a rule of"),
    (
        {"optimizer": optimizers.SGD(jnp.float32(0.1))},
        TypeError,
        "optimizer: SGD holds an array in learning_rate; the rule of a table is part of the program",
    ),
]


@pytest.mark.parametrize("layer", ["TTEmbed", "TTEmbedBag", "EmbedBag"])
def test_arguments(layer):
    for kwargs, error, message in SHARED_ERRORS + TT_ERRORS * layer.startswith("TT"):
        with pytest.raises(error, match=re.escape(message)):
            build(layer, **kwargs)
    if layer.endswith("Bag"):
        with pytest.raises(ValueError, match="combiner: got 'min'; expected one of 'sum', 'mean'"):
            build(layer, combiner="min")


def test_what_is_left_out_is_suggested():
    for kwargs, d, ranks in (
        ({}, 3, (20, 15)),
        ({"tt_ranks": 4}, 3, (4, 4)),
        ({"tt_ranks": (2, 3, 2)}, 4, (2, 3, 2)),
        ({"tt_ranks": 2, "col_factors": (2, 4)}, 2, (2,)),
        ({"tt_ranks": 2, "row_factors": (2, 3, 2, 5)}, 4, (2, 2, 2)),
    ):
        layer = jax_tt.TTEmbed(60, 8, rngs=nnx.Rngs(0), **kwargs)
        assert layer.tt_shape.d == len(layer.cores) == d
        assert len(layer.tt_shape.ranks) == d - 1
        if "tt_ranks" in kwargs:
            assert layer.tt_shape.ranks == ranks
        for name in ("row_factors", "col_factors"):
            assert getattr(layer.tt_shape, name) == kwargs.get(name, getattr(layer.tt_shape, name))


def test_arguments_of_the_linen_layer():
    given = {"optimizer": optimizers.SGD(jnp.float32(0.1))}, {"embedding_init": lambda *_: IDS}
    arrays, ints = (jax_tt.dense_table(60, 8, **options) for options in given)
    for options, error, message in (
        ({"combiner": "min"}, ValueError, "combiner: got 'min'; .* or None for one row per id"),
        ({"lookup": "mean"}, TypeError, "lookup: got 'mean'; expected a jax_tt.Lookup"),
        ({"lookup": jax_tt.Lookup("mean")}, ValueError, "to the layer, combiner='mean'"),
        ({"table": arrays}, TypeError, "optimizer: SGD holds an array in learning_rate; the rule"),
        (
            {"table": ints},
            ValueError,
            "embedding: its initialiser: got int32 of shape .2, 2.; expected",
        ),
    ):
        with pytest.raises(error, match=message):
            jax_tt.linen.TableEmbed(**{"table": TABLE, **options}).init(jax.random.key(0), IDS)


def test_schedules_are_hyper_parameters_of_a_layer():
    rule = optimizers.Adam(optax.cosine_decay_schedule(0.05, 100))
    build("TTEmbed", optimizer=rule)
    layer = jax_tt.linen.TableEmbed(jax_tt.tt_table(60, 8, optimizer=rule))
    layer.init(jax.random.key(0), IDS)


def test_layers_of_bags_show_all_arguments():
    for layer in (jax_tt.TTEmbedBag, jax_tt.EmbedBag):
        shown = list(inspect.signature(layer.__init__).parameters)[1:]
        assert shown[:3] == ["num_embeddings", "features", "combiner"]
        assert {"bounds", "optimizer", "rngs"} <= set(shown)
        with pytest.raises(TypeError, match="promote_dtype"):
            layer(100, 8, promote_dtype=None, rngs=nnx.Rngs(0))


def test_ids_out_of_range_are_counted_from_when_the_bounds_say_so():
    layer = jax_tt.EmbedBag(10, 2, bounds="error", rngs=nnx.Rngs(0))
    layer.bounds = "warn"
    with pytest.warns(jax_tt.OutOfRangeWarning):
        assert not jax.block_until_ready(layer(np.array([[10]]))).any()
    assert int(layer.out_of_range[...]) == 1
