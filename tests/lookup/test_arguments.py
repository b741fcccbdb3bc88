"""Arguments that do not fit: the error names them, whatever they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tt
from jax_tt import Bags, SplitIds, TTShape, optimizers
from jax_tt._base.arguments import narrow, type_of
from tests.helpers import fused

SHAPE = TTShape(120, 8, (4, 4), (4, 5, 6), (2, 2, 2))
CORES = tuple(np.full(shape, 0.5, np.float32) for shape in SHAPE.core_shapes)
TABLE = np.ones((9, 4), np.float32)
IDS = np.array([[1, 2]])
RULE = optimizers.Adagrad(0.1)
FUSED, STATE = fused(TABLE, RULE)


def test_numpy_tables_under_jit(method):
    cores = list(CORES)
    table, state = fused(CORES, RULE)
    state = jax.tree.map(np.asarray, state)

    @jax.jit
    def lookups(ids):
        return [
            jax_tt.tt.lookup(cores, ids, method=method),
            jax_tt.tt.embed_bag(cores, ids.reshape(2, 1), method=method)[None],
            jax_tt.lookup(table, state, ids, method=method)[0],
            jax_tt.tt.to_dense(cores, 120, method=method)[ids],
        ]

    # All entries of the cores are a half.
    wanted = np.full((1, 2, 8), 0.5**3 * 4 * 4)
    for rows in lookups(IDS):
        np.testing.assert_allclose(rows, wanted, rtol=1e-6)
    new = jax.jit(jax.grad(lambda s: jax_tt.lookup(table, s, IDS, method=method)[0].sum()))(state)
    assert new["step"] == 1 and new["sentinel"] == 1


def test_axis_names_are_hashable():
    with pytest.raises(TypeError, match="axis_name: got an ndarray"):
        jax_tt.functional.embed_bag(TABLE, IDS, axis_name=np.ones(2))
    with pytest.raises(TypeError, match="axis_name"):
        jax_tt.tt.lookup(CORES, IDS, axis_name=["data", {}])


def test_types_have_their_article():
    values = 1, "x", None, IDS, [1], SHAPE, RULE, np.uint8(1), jax_tt.Update(RULE)
    assert [type_of(value) for value in values] == [
        "an int", "a str", "None", "an ndarray", "a list", "a TTShape", "an Adagrad", "a uint8", "an Update",
    ]  # fmt: skip


def test_ids_that_are_no_integers_of_64_bits():
    floats = r"ids: got dtype float(32|64); expected integers, e.g. ids.astype\(np.int64\)\.$"
    for ids, message in (
        ([1.5], floats),
        (jnp.ones(1), floats),
        ([2**64 + 5, 7], r"ids: got 18446744073709551621; expected integers from -2\*\*63 to"),
        (np.array([-(2**63) - 1], object), "ids: got -9223372036854775809; expected integers"),
        ([2**63, -1], "ids: got -1 and 9223372036854775808, .*pass key % 2"),
    ):
        for table in (jax_tt.dense_table(9, 4), jax_tt.hash_table(8, 4)):
            with pytest.raises((TypeError, ValueError), match=message):
                jax_tt.lookup(table, table.init(jax.random.key(0)), ids)


def test_sizes_are_exact_integers():
    calls = [
        ("num_embeddings", lambda x: jax_tt.functional.count_out_of_range(IDS, x)),
        ("num_embeddings", lambda x: TTShape(x, 8, 4, (4, 5, 6), (2, 2, 2))),
        ("features", lambda x: TTShape.suggest(100, x)),
        ("d: ", lambda x: TTShape.suggest(100, 8, d=x)),
    ]
    optional = [
        ("num_embeddings", lambda x: jax_tt.tt.lookup(CORES, IDS, num_embeddings=x)),
        ("num_embeddings", lambda x: jax_tt.tt.attend(CORES, np.ones(8), x)),
        ("num_embeddings", lambda x: jax_tt.tt.to_dense(CORES, x)),
        ("capacity", lambda x: Bags.from_ragged([[1]], capacity=x)),
        ("pad_id", lambda x: Bags.from_padded(IDS, pad_id=x)),
    ]
    for value in (3.5, np.float32(2), "x", True, None, np.ones(2), [3]):
        for name, call in calls if value is None else calls + optional:
            with pytest.raises(TypeError, match=name):
                call(value)


def test_arrays_hold_numbers():
    def bags(**fields):
        return jax_tt.functional.embed_bag(TABLE, Bags(**{"ids": IDS} | fields))

    calls = [
        ("ids", lambda x: jax_tt.tt.lookup(CORES, x)),
        ("ids.digits", lambda x: jax_tt.tt.lookup(CORES, SplitIds(x))),
        ("split_ids", SHAPE.split_ids),
        ("ids", lambda x: bags(ids=x)),
        (r"cores\[1\]", lambda x: jax_tt.tt.to_dense((CORES[0], x, CORES[2]))),
        ("table", lambda x: jax_tt.functional.embed_bag(x, IDS)),
        ("query", lambda x: jax_tt.tt.attend(CORES, x)),
        ("offsets", lambda x: Bags.from_offsets([1], x)),
        ("lengths", lambda x: Bags.from_lengths([1], x)),
        ("step", lambda x: jax_tt.lookup_bags(FUSED, STATE | {"step": x}, IDS)),
    ]
    optional = [
        ("bags.offsets", lambda x: bags(ids=IDS[0], offsets=x)),
        ("bags.weights", lambda x: bags(weights=x)),
        ("weights", lambda x: Bags.from_ragged([[1]], x)),
        ("weights", lambda x: Bags.from_padded(IDS, weights=x)),
        ("mask", lambda x: Bags.from_padded(IDS, mask=x)),
        ("grad_scale", lambda x: jax_tt.lookup_bags(FUSED, STATE, IDS, grad_scale=x)),
    ]
    for value in ("x", None, 2**70, [[1], [2, 3]], object(), {}, np.array("a")):
        for name, call in calls if value is None else calls + optional:
            with pytest.raises((TypeError, ValueError), match=name):
                call(value)


def test_words_and_names_are_strings():
    for value in (5, np.ones((2, 2)), None, ["sum"], 3.5):
        for name in ("bounds", "method", "combiner"):
            with pytest.raises(ValueError, match=f"{name}: got"):
                jax_tt.functional.embed_bag(TABLE, IDS, **{name: value})
    for value in (5, ["a"], b"x"):
        with pytest.raises(TypeError, match="name: got"):
            jax_tt.functional.embed_bag(TABLE, IDS, name=value)
        with pytest.raises(TypeError, match="name: got"):
            jax_tt.tt.lookup(CORES, IDS, name=value)


def test_result_types():
    for value in ("x", [[1], [2, 3]]):
        with pytest.raises(TypeError, match="dtype: got"):
            jax_tt.tt.lookup(CORES, IDS, dtype=value)
    with pytest.raises(ValueError, match="dtype: got int32"):
        jax_tt.functional.embed_bag(TABLE, IDS, dtype=jnp.int32)


def test_start_of_a_fused_table():
    mixed = (CORES[0], CORES[2], CORES[1])
    for cores in (CORES[:1], CORES[0], (), None, mixed, np.array("x"), TABLE.astype(int), [IDS]):
        with pytest.raises((TypeError, ValueError), match=r"^cores"):
            jax_tt.tt.to_table(cores, update=jax_tt.Update(RULE))
    for rows in (5, "x", [5], np.array(5), [[[1]]]):
        with pytest.raises((TypeError, ValueError), match="rows"):
            Bags.from_ragged(rows)
    with pytest.raises(TypeError, match="shape: got"):
        jax_tt.tt.init(jax.random.key(0), (4, 5))
    with pytest.raises(ValueError, match="init: got"):
        jax_tt.tt.init(jax.random.key(0), SHAPE, init=[])
    with pytest.raises(TypeError, match="key: got"):
        jax_tt.tt.init(2**70, SHAPE)
    with pytest.raises(TypeError, match="key: got"):
        jax_tt.lookup_bags(FUSED, STATE, IDS, key=7)


def test_hyper_parameters_are_scalars():
    for value in ("x", None, object(), True, [0.1], np.array("a")):
        with pytest.raises(TypeError, match="learning_rate: got"):
            optimizers.SGD(value)
    with pytest.raises(ValueError, match="b2"):
        optimizers.Adam(0.1, b2=jnp.zeros(3))
    with pytest.raises(ValueError, match="eps"):
        optimizers.Adagrad(0.1, eps=np.float32("nan"))
    with pytest.raises(TypeError, match="initial_accumulator_value"):
        optimizers.Adagrad(0.1, initial_accumulator_value=lambda step: step)
    optimizers.Adam(np.float32(0.1), b2=jnp.array(0.9), eps=lambda step: 1e-8)


def test_sizes_beyond_the_integers():
    wide = [jax.ShapeDtypeStruct((1, 1, 8192, 1), jnp.float32)] * 5
    tall = [jax.ShapeDtypeStruct((2**20, 1, 1, 1), jnp.float32)] * 4
    for cores in (wide, tall):
        with pytest.raises(ValueError, match=r"cores: got .* rows of .* columns"):
            jax.eval_shape(lambda *c: jax_tt.tt.lookup(c, IDS, method="reference"), *cores)
    for size in (2**31, 2**70):
        with pytest.raises(ValueError, match="features: got"):
            TTShape.suggest(100, size)


def test_offsets_keep_out_of_range(x64):
    far = np.array([0, 2**32 + 3, -(2**32)])
    for values in (far, jnp.asarray(far)):
        assert narrow(values).tolist() == [0, 2**31 - 1, -(2**31)]
    unsigned = np.array([3, 2**64 - 1], np.uint64)
    assert narrow(unsigned).tolist() == [3, 2**31 - 1]
    ids = jnp.arange(4)
    traced = jax.jit(lambda o: Bags.from_offsets(ids, o))(jnp.array([0, 2**32 + 3]))
    assert traced.offsets.tolist() == [0, 2**31 - 1] and traced.offsets.dtype == jnp.int32


def test_wide_host_offsets_reach_the_op(method):
    # Without 64-bit types JAX would cut them to [0, 3].
    bags = Bags(np.arange(4, dtype=np.int32), np.array([0, 2**32 + 3]))
    with pytest.raises(ValueError, match=r"offsets\[1\] is 4294967299 after 0"):
        jax_tt.functional.embed_bag(TABLE, bags, bounds="error", method=method)


def test_rows_have_the_type_of_the_call():
    table = jax_tt.dense_table(10, 4, param_dtype=jnp.bfloat16)
    state, ids = table.init(jax.random.key(0)), jnp.arange(3)
    for given, found in ((None, jnp.bfloat16), (jnp.float32, jnp.float32)):
        rows, _ = jax_tt.lookup(table, state, ids, dtype=given)
        assert rows.dtype == found
        np.testing.assert_array_equal(rows, state["embedding"][:3].astype(found))
