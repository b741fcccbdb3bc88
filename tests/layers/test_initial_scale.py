"""The scale of the rows that layers start with."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_tt
import jax_tt.linen
from tests.helpers import dense_table, to_dense

N, D = 3000, 64
TRAIN = jax_tt.tt_table(N, D, tt_ranks=8)
ORDERED = jax_tt.tt_table(N, D, tt_ranks=8, id_order=jax_tt.order.IdOrder.identity(N))
CACHED = jax_tt.tt_table(N, D, tt_ranks=8, cache=jax_tt.RowCache(50, ways=5))
SUM = jax_tt.tables.SumTable((TRAIN, ORDERED))
OF_FLAX, OF_BAGS = D**-0.5, (3 * N) ** -0.5


def of_layer(layer: Any) -> float:
    """The standard deviation of its rows."""
    return float(np.std(to_dense(layer.table, layer.state())))


def of_cores(cores: Any, first: int = 0, end: int = N) -> float:
    """The standard deviation of the rows of a tensor train."""
    return float(dense_table(cores, end)[first:].std())


def near(value: float, target: float) -> bool:
    return abs(value / target - 1) < 0.03


@pytest.mark.parametrize("table", [TRAIN, ORDERED, CACHED, SUM], ids=lambda t: type(t).__name__)
def test_rows_start_as_in_flax_and_bags_do_not(table: Any) -> None:
    flax = nnx.Embed(N, D, rngs=nnx.Rngs(0)).embedding[...]
    assert near(float(flax.std()), OF_FLAX)
    assert near(of_layer(jax_tt.TableEmbed(table, rngs=nnx.Rngs(0))), OF_FLAX)
    of_bags = OF_BAGS * 2**0.5 if table is SUM else OF_BAGS
    assert near(of_layer(jax_tt.TableEmbedBag(table, rngs=nnx.Rngs(0))), of_bags)


@pytest.mark.parametrize("d", [2, 3, 4])
@pytest.mark.parametrize("init", ["approx-normal", "uniform"])
def test_tt_embed(d: int, init: str) -> None:
    options: dict[str, Any] = {"tt_ranks": (4,) * (d - 1), "core_init": init, "rngs": nnx.Rngs(0)}
    assert near(of_cores(jax_tt.TTEmbed(N, D, **options).cores), OF_FLAX)
    assert near(of_cores(jax_tt.TTEmbed(N, D, stddev=0.02, **options).cores), 0.02)
    assert near(of_cores(jax_tt.TTEmbedBag(N, D, **options).cores), OF_BAGS)
    assert near(of_cores(jax_tt.TTEmbedBag(N, D, stddev=3, **options).cores), 3)


def test_a_chosen_scale_stays() -> None:
    table = jax_tt.tt_table(N, D, tt_ranks=8, stddev=0.5)
    assert near(of_layer(jax_tt.TableEmbed(table, rngs=nnx.Rngs(0))), 0.5)
    ones = jax_tt.TTEmbed(N, D, core_init=jax.nn.initializers.ones, rngs=nnx.Rngs(0))
    assert all((core == 1).all() for core in ones.cores)


def test_tables_of_a_collection_are_bags() -> None:
    tables, features = {"words": TRAIN}, {"word": jax_tt.Feature("words")}
    embed = jax_tt.EmbedCollection(tables, features, rngs=nnx.Rngs(0))
    assert near(of_layer(embed.tables["words"]), OF_BAGS)
    linen = jax_tt.linen.EmbedCollection(tables, features)
    params = jax.jit(linen.init)(jax.random.key(0), {"word": jnp.array([[1]])})["params"]["words"]
    assert near(of_cores(params.values()), OF_BAGS)


def test_linen() -> None:
    ids = jnp.array([[1]])
    for layer, target in (
        (jax_tt.linen.TableEmbed(TRAIN), OF_FLAX),
        (jax_tt.linen.TableEmbed(jax_tt.tt_table(N, D, tt_ranks=8, stddev=0.02)), 0.02),
        (jax_tt.linen.TableEmbed(TRAIN, combiner="sum"), OF_BAGS),
    ):
        params = jax.jit(layer.init)(jax.random.key(0), ids)["params"]
        assert near(of_cores(params.values()), target)


def test_new_rows_have_the_scale_of_the_layer() -> None:
    layer = jax_tt.TTEmbed(N, D, tt_ranks=4, stddev=0.1, rngs=nnx.Rngs(0))
    given = jax_tt.TTEmbed.from_pretrained(layer.cores, stddev=0.1)
    for grown in (layer, given):
        before = grown.num_embeddings
        grown.grow(2 * before, rngs=nnx.Rngs(1))
        assert near(of_cores(grown.cores, before, 2 * before), 0.1)
    linen = jax_tt.linen.TableEmbed(jax_tt.tt_table(N, D, tt_ranks=4, stddev=0.1))
    variables = jax.jit(linen.init)(jax.random.key(0), jnp.array([1]))
    _, variables = jax_tt.linen.update_table(
        linen,
        variables,
        lambda table, state: jax_tt.tables.grow(table, state, 2 * N, key=jax.random.key(1)),
    )
    assert near(of_cores(variables["params"].values(), N, 2 * N), 0.1)


def test_refused() -> None:
    bad: Any
    for bad in (0, -1.0, float("nan"), float("inf"), "1", True):
        with pytest.raises(ValueError, match=r"stddev: got .*; expected a positive number"):
            jax_tt.tt_table(N, D, stddev=bad)
    with pytest.raises(
        ValueError, match=r"stddev: got 0.1 with the initialiser .*expected a named one"
    ):
        jax_tt.TTEmbed(N, D, stddev=0.1, core_init=jax.nn.initializers.ones, rngs=nnx.Rngs(0))


def test_initialisers_can_be_hashed() -> None:
    class Zeros:
        def __eq__(self, other: object) -> bool:
            return isinstance(other, Zeros)

    for make in (jax_tt.dense_table, jax_tt.quantized_table):
        with pytest.raises(TypeError, match="embedding_init: got a Zeros, which defines __eq__"):
            make(20, 4, embedding_init=Zeros(), name="words")
