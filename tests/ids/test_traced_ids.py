"""Tables with more rows than 32-bit ids can name: traced ids may have been cut, concrete ones are exact."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import jax_tt
from jax_tt import optimizers
from tests.helpers import fused

ROWS = 2**33
SHAPE = jax_tt.TTShape.suggest(ROWS, 4, ranks=2)
CORES = jax_tt.tt.init(jax.random.key(0), SHAPE)
ID = 2**32 + 5
IDS = np.array([[ID]])
RULE = optimizers.SGD(0.1)
FUSED, STATE = fused(CORES, RULE)
LAYER = partial(jax_tt.TTEmbedBag, ROWS, 4, tt_ranks=2)
NNX = LAYER(rngs=nnx.Rngs(0))
FUSED_NNX = LAYER(rngs=nnx.Rngs(0), optimizer=RULE)


class Tower(linen.Module):
    @linen.compact
    def __call__(self, ids):
        return jax_tt.linen.TableEmbed(jax_tt.tt_table(ROWS, 4, tt_ranks=2), combiner="sum")(ids)


CALLS = {
    "lookup": lambda ids: jax_tt.tt.lookup(CORES, ids),
    "bags": lambda ids: jax_tt.tt.embed_bag(CORES, ids),
    "Bags": lambda ids: jax_tt.tt.embed_bag(CORES, jax_tt.Bags(ids)),
    "ragged Bags": lambda ids: jax_tt.tt.embed_bag(
        CORES, jax_tt.Bags.from_lengths(ids[0], np.ones(1, np.int32))
    ),
    "fused lookup": lambda ids: jax_tt.lookup(FUSED, STATE, ids),
    "fused bags": lambda ids: jax_tt.lookup_bags(FUSED, STATE, ids),
    "gradient": jax.grad(lambda ids: jax_tt.tt.lookup(CORES, ids).sum(), allow_int=True),
    "NNX": lambda ids: NNX(ids),
    "fused NNX": lambda ids: FUSED_NNX(ids),
    "linen": lambda ids: Tower().init_with_output(jax.random.key(0), ids),
    "count": lambda ids: jax_tt.functional.count_out_of_range(ids, ROWS),
    "count by shape": lambda ids: jax_tt.functional.count_out_of_range(ids, SHAPE),
}


def test_traced_ids_of_32_bits_are_refused():
    for name, call in CALLS.items():
        with pytest.raises(ValueError, match=r"traced int32 ids .* jax_enable_x64;.*split_ids"):
            pytest.fail(f"{name} gives {jax.jit(call)(IDS)}")
    for transform in (jax.vmap, jax.checkpoint):
        with pytest.raises(ValueError, match="traced int32 ids"):
            transform(CALLS["lookup"])(IDS)


def row(i):
    return jax_tt.tt.lookup(CORES, SHAPE.split_ids(np.array([i])))[0]


def test_the_right_row_every_other_way():
    """Concrete, closed over, and split; the row of the cut id is another one."""
    want = row(ID)
    assert (want != row(5)).any()
    lookup = partial(jax_tt.tt.lookup, CORES)
    closed = jax.jit(lambda cores: jax_tt.tt.lookup(cores, IDS))(CORES)
    for got in (lookup(IDS), closed, jax.jit(lookup)(SHAPE.split_ids(IDS))):
        np.testing.assert_allclose(got[0, 0], want, rtol=1e-6)


def test_traced_ids_with_x64(x64):
    np.testing.assert_allclose(jax.jit(CALLS["lookup"])(IDS)[0, 0], row(ID), rtol=1e-6)
    small = jax.jit(CALLS["lookup"])(np.array([5], np.int32))
    np.testing.assert_allclose(small[0], row(5), rtol=1e-6)


def test_ids_that_hold_every_row_are_taken():
    """No type but the two that JAX cuts to is refused, and these only where there are more rows than numbers."""
    lookup = jax.jit(jax_tt.tt.lookup, static_argnames="num_embeddings")
    for rows, ids in [
        (2**31, np.array([5], np.int32)),
        (2**32, np.array([5], np.uint32)),
        (ROWS, np.array([5], np.int16)),
    ]:
        np.testing.assert_allclose(lookup(CORES, ids, num_embeddings=rows)[0], row(5), rtol=1e-6)
    with pytest.raises(ValueError, match="traced uint32 ids"):
        lookup(CORES, np.array([5], np.uint32), num_embeddings=2**32 + 1)
    with pytest.raises(ValueError, match="or pass uint32 ids"):
        lookup(CORES, np.array([5], np.int32), num_embeddings=2**31 + 1)


def test_counts_of_ids_beyond_32_bits():
    ids = np.array([[-1, 5, ROWS - 1], [ROWS, ID, 2**62]])
    for given in (ids, jax_tt.Bags(ids)):
        assert int(jax_tt.functional.count_out_of_range(given, ROWS)) == 3
    split = SHAPE.split_ids(ids)
    assert int(jax_tt.functional.count_out_of_range(split, SHAPE)) == 3
    assert int(jax_tt.functional.count_out_of_range(np.array([2**62, 7]), 2**63 - 1)) == 0
    for given in (split, jax_tt.Bags(split)):
        with pytest.raises(TypeError, match="the TTShape that they were split with"):
            jax_tt.functional.count_out_of_range(given, ROWS)


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64")
@pytest.mark.parametrize("optimizer", [None, RULE])
def test_dense_tables_beyond_32_bits_take_int32_ids(optimizer):
    """The gradient of a table of 2**31 + 5 rows, which is never made."""
    table = jax_tt.dense_table(2**31 + 5, 4, optimizer=optimizer)
    state, ids = jax.eval_shape(table.init, jax.random.key(0)), jnp.array([[1, 2]])
    for choice in ("reference", "auto"):

        def loss(state, method=choice):
            return jax_tt.lookup_bags(table, state, ids, method=method)[0].sum()

        assert jax.eval_shape(jax.grad(loss), state)["embedding"].shape == (2**31 + 5, 4)


def test_dense_tables_beyond_32_bits_and_traced_ids():
    table = jax.ShapeDtypeStruct((2**31 + 5, 4), jnp.float32)
    ids = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    with pytest.raises(ValueError, match=r"traced int32 ids .* jax_enable_x64; or pass uint32"):
        jax.eval_shape(jax_tt.functional.embed_bag, table, ids)
