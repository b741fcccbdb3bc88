"""NNX layers: what they return, which variables they hold, what they refuse."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jax_tt
from jax_tt import optimizers
from tests.conftest import method_fixture
from tests.helpers import dense_table

N, D = 60, 8
FACTORS: dict[str, Any] = {"tt_ranks": 3, "row_factors": (3, 4, 5), "col_factors": (2, 2, 2)}
RAGGED = jax_tt.Bags.from_ragged([[1, 7, 7], [], [59]], [[1.0, 0.5, 2.0], [], [3.0]], capacity=6)
IDS = jnp.array([[0, 1], [59, 1]])

# The layers hold no arithmetic of their own: one implementation beside the reference is enough.
method = method_fixture("reference", "native")


def embed(**kwargs: Any) -> jax_tt.TTEmbed:
    return jax_tt.TTEmbed(N, D, rngs=nnx.Rngs(0), **(FACTORS | kwargs))


def tt_bag(**kwargs: Any) -> jax_tt.TTEmbedBag:
    return jax_tt.TTEmbedBag(N, D, rngs=nnx.Rngs(0), **(FACTORS | kwargs))


def dense_bag(**kwargs: Any) -> jax_tt.EmbedBag:
    return jax_tt.EmbedBag(N, D, rngs=nnx.Rngs(0), **kwargs)


def flax_twin(layer: jax_tt.TTEmbed, **kwargs: Any) -> nnx.Embed:
    """nnx.Embed with the same table."""
    twin = nnx.Embed(N, D, rngs=nnx.Rngs(0), param_dtype=layer.param_dtype, **kwargs)
    twin.embedding[...] = jnp.asarray(dense_table(layer.cores, N), layer.param_dtype)
    return twin


def of_both(call: Any, layer: jax_tt.TTEmbed, **kwargs: Any) -> Any:
    """What a layer gives, and its twin of Flax."""
    layers = layer, flax_twin(layer, **kwargs)
    return nnx.jit(lambda *layers: tuple(map(call, layers)))(*layers)


# --- nnx.Embed's behaviour


def test_signatures_are_those_of_flax():
    ours = inspect.signature(jax_tt.TTEmbed).parameters
    for name, theirs in inspect.signature(nnx.Embed).parameters.items():
        name = name.replace("embedding_", "core_")
        assert name in ours
        assert ours[name].kind == theirs.kind
        if name not in ("core_init", "promote_dtype"):
            assert ours[name].default == theirs.default
    for method in ("__call__", "attend"):
        theirs = list(inspect.signature(getattr(nnx.Embed, method)).parameters.values())
        ours = list(inspect.signature(getattr(jax_tt.TTEmbed, method)).parameters.values())
        assert [(p.name, p.kind) for p in ours[: len(theirs)]] == [(p.name, p.kind) for p in theirs]


@pytest.mark.parametrize("shape", [(), (2, 1, 3), (2, 0)])
@pytest.mark.parametrize("id_type", ["int32", "uint32", "int8"])
def test_lookup_equals_flax(shape, id_type):
    ids = jnp.asarray(np.random.default_rng(0).integers(0, N, shape).astype(id_type))
    rows, want = of_both(lambda layer: layer(ids), embed())
    assert rows.shape == (*shape, D)
    np.testing.assert_allclose(rows, want, rtol=1e-5, atol=1e-7)


def test_attend_equals_flax():
    shapes = ((D,), (2, 3, D), (0, D))
    queries = [np.random.default_rng(1).normal(size=shape).astype(np.float32) for shape in shapes]
    found = of_both(lambda layer: [layer.attend(jnp.asarray(q)) for q in queries], embed())
    for shape, scores, want in zip(shapes, *found, strict=True):
        assert scores.shape == (*shape[:-1], N)
        np.testing.assert_allclose(scores, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16"])
def test_dtypes_are_those_of_flax(param_dtype, dtype):
    layer = embed(param_dtype=param_dtype, dtype=dtype)
    assert {str(core.dtype) for core in layer.cores} == {param_dtype}
    query = jnp.ones((2, D), jnp.float32)
    found = of_both(lambda layer: (layer(IDS), layer.attend(query)), layer, dtype=dtype)
    (rows, scores), (want, of_flax) = found
    assert (rows.dtype, scores.dtype) == (want.dtype, of_flax.dtype)
    as_float = (np.asarray(rows, np.float32), np.asarray(want, np.float32))
    np.testing.assert_allclose(*as_float, rtol=0, atol=1e-2 * np.abs(as_float[1]).max())


def test_promote_dtype_is_called_as_in_flax():
    seen = []

    def promote(arrays, *, dtype=None, inexact=True):
        seen.append((len(arrays), dtype, inexact))
        return arrays

    layer = embed(promote_dtype=promote)
    layer(IDS)
    layer.attend(jnp.ones(D))
    assert seen == [(1, jnp.float32, False), (4, jnp.float32, True)]


def test_float_ids_are_refused_as_by_flax():
    with pytest.raises(ValueError, match="ids: got dtype float32; expected integers"):
        embed()(jnp.ones(3))
    with pytest.raises(ValueError):
        flax_twin(embed())(jnp.ones(3))


def test_out_sharding():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        layer = embed()
        rows = layer(jnp.zeros(8, jnp.int32), out_sharding=P("x"))
        scores = layer.attend(jnp.ones((4, D)), out_sharding=P("x"))
    assert rows.sharding.spec[0] == "x"
    assert scores.sharding.spec[0] == "x"


# --- Bags


@pytest.mark.parametrize("bags", [RAGGED, IDS], ids=["ragged", "rectangle"])
def test_bags_equal_the_functional_ops(bags, method):
    options = {"combiner": "mean_count", "method": method}
    layer, dense = tt_bag(**options), dense_bag(**options)
    want = jax_tt.tt.embed_bag(layer.cores, bags, num_embeddings=N, **options)
    np.testing.assert_array_equal(layer(bags), want)
    want = jax_tt.functional.embed_bag(dense.embedding[...], bags, **options)
    np.testing.assert_array_equal(dense(bags), want)


def test_num_embeddings_bounds_the_rows_that_factors_could_address():
    layer = jax_tt.TTEmbed(50, D, rngs=nnx.Rngs(0), bounds="zero", **FACTORS)
    rows = layer(jnp.array([49, 50, -1]))
    assert bool(jnp.any(rows[0] != 0))
    assert not bool(jnp.any(rows[1:] != 0))


def test_split_ids_reach_a_table_beyond_32_bits():
    layer = jax_tt.TTEmbed(10**12, 16, tt_ranks=(2, 2, 2, 2), rngs=nnx.Rngs(0))
    rows = layer(layer.tt_shape.split_ids(np.array([0, 3 * 10**9, 10**12 - 1])))
    assert layer.tt_shape.d == 5 and rows.shape == (3, 16)
    assert bool(jnp.all(jnp.isfinite(rows)))


# --- Variables


def test_unfused_variables():
    state = nnx.to_flat_state(nnx.state(embed()))
    assert [path for path, _ in state] == [("core_0",), ("core_1",), ("core_2",), ("out_of_range",)]
    kinds = [type(variable) for _, variable in state]
    assert kinds == [nnx.Param, nnx.Param, nnx.Param, jax_tt.nnx.OutOfRange]
    assert list(nnx.to_pure_dict(nnx.state(dense_bag()))) == ["embedding", "out_of_range"]


@pytest.mark.parametrize("rule", [optimizers.SGD(0.1), optimizers.Adam(0.1)], ids=str)
@pytest.mark.parametrize("make", [embed, tt_bag, dense_bag])
def test_fused_variables(make, rule):
    layer = make(optimizer=rule)
    fused, rest = nnx.state(layer, jax_tt.FusedParam, ...)
    assert list(nnx.to_pure_dict(rest)) == ["out_of_range"]
    state = nnx.to_flat_state(fused)
    leaves = jax.tree.leaves(fused)
    assert all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves)
    params = 1 if make is dense_bag else 3
    names = {path[-1] for path, _ in state}
    assert {"step", "sentinel", "used"} < names
    slots = {f"slot_{slot.name}_{k}" for slot in rule.slots for k in range(params)}
    assert slots == {name for name in names if name.startswith("slot")}
    if make is not dense_bag:
        wide = [leaf for leaf in leaves if leaf.ndim == 4]
        assert [leaf.shape for leaf in wide] == list(layer.tt_shape.core_shapes)


def test_core_init_and_metadata():
    def ones(key, shape, dtype):
        return jnp.ones(shape, dtype)

    layer = embed(core_init=ones, core_metadata={"my_axes": "rows"})
    assert layer.core_1.get_metadata("my_axes") == "rows"
    assert bool(jnp.all(layer.core_1[...] == 1))
    fused = embed(core_metadata={"my_axes": "rows"}, optimizer=optimizers.Adagrad(0.1))
    assert fused.core_2.get_metadata("my_axes") == "rows"
    assert fused.slot_sum_2.get_metadata("my_axes", None) is None


def test_partitioned_initialisers():
    axes = (None, None, None, "model")
    boxed = nnx.with_partitioning(nnx.initializers.normal(), axes)
    mesh = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        for layer in (embed(core_init=boxed), embed(core_metadata={"out_sharding": axes})):
            spec = nnx.get_partition_spec(nnx.state(layer))
            assert spec["core_0"].get_value() == P(*axes)
        layer = dense_bag(
            embedding_init=nnx.with_partitioning(nnx.initializers.normal(), ("model", None)),
            optimizer=optimizers.Adagrad(0.1),
        )
        spec = nnx.get_partition_spec(nnx.state(layer))
        for name in ("embedding", "slot_sum_0"):
            assert spec[name].get_value() == P("model", None)
        assert spec["step"].get_value() == P()


# --- Transformations


@pytest.mark.parametrize("make", [embed, dense_bag])
@pytest.mark.parametrize("rule", [None, optimizers.Adam(0.1)], ids=["optax", "fused"])
def test_split_merge_and_eval_shape(make, rule):
    layer = make(optimizer=rule)
    graphdef, state = nnx.split(layer)
    call = nnx.jit(lambda layer: layer(IDS))
    np.testing.assert_array_equal(call(nnx.merge(graphdef, state)), call(layer))
    abstract = nnx.eval_shape(lambda: make(optimizer=rule))
    assert jax.tree.map(jnp.shape, nnx.state(abstract)) == jax.tree.map(jnp.shape, state)
    jitted = nnx.jit(lambda: make(optimizer=rule))()
    np.testing.assert_allclose(call(jitted), call(layer), rtol=1e-5)
