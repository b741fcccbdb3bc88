"""Batches of data loaders are checked and converted on the host, where 64-bit ids are still whole."""

import itertools
import sys
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_tt
import jax_tt.linen
from jax_tt import Bags, Feature, KeyedBags, Lookup, SplitIds
from jax_tt._base import reports

DENSE = jax_tt.dense_table(10, 4, name="item")
HASH = jax_tt.hash_table(64, 4, name="key")
BIG = jax_tt.tt_table(
    10**12, 4, row_factors=(252,) * 5, col_factors=(4, 1, 1, 1, 1), tt_ranks=1, name="big"
)
COLLECTION = jax_tt.Collection(
    {"item": DENSE, "key": HASH, "big": BIG},
    {
        "clicked": Feature("item"),
        "shown": Feature("item", combiner=None),
        "user": Feature("key"),
        "place": Feature("big"),
    },
)
FAR = 2**32 + 5
EMPTY = {
    "clicked": np.zeros((2, 0), int),
    "shown": np.zeros((2, 0), int),
    "user": [[], []],
    "place": [[], []],
}


@pytest.fixture(autouse=True)
def _new_reports():
    reports.forget()


def keys_of(ids):
    return np.asarray(ids.digits).view(np.uint32).astype(np.uint64) @ np.array(
        [2**32, 1], np.uint64
    )


@pytest.mark.filterwarnings("ignore::jax_tt.OutOfRangeWarning")
def test_an_id_beyond_32_bits_trains_no_row_under_jit():
    table = jax_tt.dense_table(10, 4, optimizer=jax_tt.optimizers.SGD(1.0))
    collection = jax_tt.Collection({"item": table}, {"clicked": Feature("item")})
    lookup = Lookup(bounds="warn", method="reference")

    @jax.jit
    def step(state, batch):
        def loss(trained):
            arrays = collection.replaced(state, trained)
            rows, _ = jax_tt.lookup_features(collection, arrays, batch, lookup)
            return rows["clicked"].sum()

        return collection.overwritten(state, jax.grad(loss)(collection.trained(state)))[0]

    before = collection.init(jax.random.key(0))
    batch = {"clicked": np.array([[FAR, 3], [-1, 3]])}
    after = step(before, collection.host_batch(batch, bounds="warn"))
    changed = np.asarray(before["item"]["embedding"] != after["item"]["embedding"])
    assert np.flatnonzero(changed.any(axis=1)).tolist() == [3]


@pytest.mark.filterwarnings("ignore::jax_tt.OutOfRangeWarning")
def test_an_id_beyond_32_bits_is_counted_under_jit():
    embed = jax_tt.EmbedCollection(
        {"item": jax_tt.dense_table(10, 4)}, {"clicked": Feature("item")}, rngs=nnx.Rngs(0)
    )
    batch = embed.host_batch({"clicked": np.array([[FAR, 3], [-1, 3]])})
    rows = nnx.jit(lambda embed, batch: embed(batch))(embed, batch)["clicked"]
    np.testing.assert_array_equal(rows, embed.tables["item"].embedding[...][jnp.array([3, 3])])
    assert int(embed.tables["item"].out_of_range[...]) == 2


FORMS = {
    "int64 [B, L]": (np.array([[1, 2], [3, 9]]), [[1, 2], [3, 9]]),
    "uint64 [B]": (np.array([1, 9], np.uint64), [[1], [9]]),
    "uint8": (np.array([[1], [9]], np.uint8), [[1], [9]]),
    "other byte order": (np.array([[1], [9]], ">i8"), [[1], [9]]),
    "list of numbers": ([1, 9], [[1], [9]]),
    "JAX array": (jnp.array([[1], [9]]), [[1], [9]]),
    "ragged lists": ([[1, 2, 3], []], [[1, 2, 3], []]),
    "lists of one length": ([[1, 2], [3, 4]], [[1, 2], [3, 4]]),
    "tuples": (((1,), (2, 3)), [[1], [2, 3]]),
    "list of arrays": ([np.array([1, 2]), np.array([], np.int64)], [[1, 2], []]),
    "array of lists": (np.array([[1, 2], [], [3]], object), [[1, 2], [], [3]]),
    "no bags": ([], []),
    "lengths": ({"ids": np.array([1, 2, 3]), "lengths": [2, 1]}, [[1, 2], [3]]),
    "offsets": ({"ids": np.array([1, 2, 3]), "offsets": np.array([0, 0, 3])}, [[], [1, 2, 3]]),
    "pad_id": ({"ids": np.array([[1, 0], [0, 0]]), "pad_id": 0}, [[1], []]),
    "ragged Bags": (Bags.from_ragged([[1, 2], [3]], capacity=7), [[1, 2], [3]]),
    "padded Bags": (Bags.from_padded(np.array([[1, -1], [2, 3]])), [[1], [2, 3]]),
    "JAX Bags": (jax.tree.map(jnp.asarray, Bags.from_ragged([[1, 2], [3]])), [[1, 2], [3]]),
}


def ids_of_bags(found):
    bags = found if isinstance(found, Bags) else Bags(found)
    if bags.offsets is not None:
        return [bags.ids[a:b].tolist() for a, b in itertools.pairwise(bags.offsets)]
    return [row[(row != -1) | (not bags.padded)].tolist() for row in bags.ids]


def test_every_form_reads_its_rows():
    for form, (given, rows) in FORMS.items():
        found = jax_tt.pipeline.host_batch(DENSE, given)
        assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {np.dtype(np.int32)}, form
        assert ids_of_bags(found) == rows, form


def test_a_list_without_samples_is_ragged_as_others_of_its_feature():
    for given in ([], {"ids": []}, {"ids": [], "weights": []}):
        found = jax_tt.pipeline.host_batch(DENSE, given)
        assert found.offsets.tolist() == [0], given
        assert (found.weights is None) == ("weights" not in given)


class Column:
    """A column of a data frame, whose type is not always one of numpy."""

    def __init__(self, values: list) -> None:
        self.values = np.empty(len(values), object)
        self.values[:] = values
        self.dtype, self.shape, self.ndim = "string", self.values.shape, 1

    def __len__(self) -> int:
        return len(self.values)

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return self.values


HIGH = 2**63 + 11  # with smaller integers, numpy makes floats of it


def test_integers_in_lists_and_objects_are_exact():
    ragged = np.empty(2, object)
    ragged[:] = [[HIGH, 5], [7]]
    for form in ([[HIGH, 5], [7]], ragged, [np.array([HIGH, 5], np.uint64), np.array([7])]):
        found = jax_tt.pipeline.host_batch(HASH, form)
        assert keys_of(found.ids)[:3].tolist() == [HIGH, 5, 7] and found.offsets.tolist() == [
            0,
            2,
            3,
        ]
    flat = [HIGH, 5, 7]
    state = HASH.init(jax.random.key(0))
    for form in (flat, np.array(flat, object), Column(flat), [np.uint64(HIGH), np.int64(5), 7]):
        assert keys_of(jax_tt.dynamic.split_keys(form)).tolist() == flat
        given = {"ids": form, "lengths": [2, 1]}
        assert keys_of(jax_tt.pipeline.host_batch(HASH, given).ids)[:3].tolist() == flat
        keyed = KeyedBags.from_lengths(["key"], form, [2, 1])
        assert keys_of(keyed["key"].ids).tolist() == flat
        _, after = jax_tt.dynamic.insert(HASH, state, form)
        assert sorted(jax_tt.dynamic.keys_of(HASH, after)["key"].tolist()) == sorted(flat)
    hashed = jax_tt.dynamic.hash_ids(np.array(flat, np.uint64))
    np.testing.assert_array_equal(jax_tt.dynamic.hash_ids(flat), hashed)


def test_small_integers_in_objects_are_ids_of_any_table():
    objects, rows = np.array([[3, 1]], object), jnp.arange(40.0).reshape(10, 4)
    assert jax_tt.pipeline.host_batch(DENSE, objects).tolist() == [[3, 1]]
    assert Bags.from_padded(np.array([[3, -1]], object)).ids.tolist() == [[3, -1]]
    assert Bags.from_ragged([np.array([3], np.uint64), np.array([1])]).ids.tolist() == [3, 1]
    found, _ = jax_tt.lookup(DENSE, {"embedding": rows}, objects[0], method="reference")
    np.testing.assert_array_equal(found, rows[jnp.array([3, 1])])


def test_keys_are_split():
    for form in ("int64 [B, L]", "ragged lists", "lengths", "ragged Bags"):
        given, rows = FORMS[form]
        found = jax_tt.pipeline.host_batch(HASH, given)
        ids = found.ids if isinstance(found, Bags) else found
        used = keys_of(ids).reshape(-1)[: sum(map(len, rows))]
        assert used.tolist() == [i for row in rows for i in row], form


def test_keys_with_padding():
    """Any key marks it, if no other key has all bits set."""
    found = jax_tt.pipeline.host_batch(HASH, {"ids": np.array([[FAR, 7], [7, 7]]), "pad_id": 7})
    assert found.padded and keys_of(found.ids).tolist() == [[FAR, 2**64 - 1], [2**64 - 1] * 2]
    padded = Bags.from_padded(np.array([[5, -1]]))
    assert keys_of(jax_tt.pipeline.host_batch(HASH, padded).ids).tolist() == [[5, 2**64 - 1]]


def test_keys_and_large_trains_keep_64_bits():
    batch = {
        **EMPTY,
        "user": np.array([[-1], [FAR]]),
        "place": {"ids": np.array([[10**12 - 1, 0], [7, 0]]), "pad_id": 0},
    }
    found = COLLECTION.host_batch(batch)
    assert keys_of(found["user"]).tolist() == [[2**64 - 1], [FAR]]
    assert found["place"].padded and isinstance(found["place"].ids, SplitIds)
    want = jax_tt.lookup(
        BIG, state := BIG.init(jax.random.key(0)), batch["place"]["ids"][:, 0], Lookup()
    )
    got = jax.jit(lambda bags: jax_tt.lookup_bags(BIG, state, bags)[0])(found["place"])
    np.testing.assert_allclose(got, want[0], rtol=1e-5)


def test_weights_are_padded_with_the_ids():
    found = jax_tt.pipeline.host_batch(
        DENSE, {"ids": [[1, 2, 3], []], "weights": [[0.5, 1, 2], []]}, capacity=5
    )
    assert found.weights.tolist() == [0.5, 1, 2, 0, 0] and found.weights.dtype == np.float32
    rectangle = jax_tt.pipeline.host_batch(
        DENSE, {"ids": np.array([4, 5]), "weights": np.array([1.0, 2.0])}
    )
    assert rectangle.ids.shape == rectangle.weights.shape == (2, 1)


def test_a_large_dense_table_takes_uint32():
    table = jax_tt.dense_table(3 * 10**9, 1)
    found = jax_tt.pipeline.host_batch(table, np.array([5, 3 * 10**9 - 1]))
    assert found.dtype == np.uint32 and found.tolist() == [[5], [3 * 10**9 - 1]]
    kept = jax_tt.pipeline.host_batch(table, np.array([FAR, -1, 3]), bounds="zero")
    assert kept.dtype == np.uint32 and (kept[:2] >= 3 * 10**9).all() and kept[2] == 3
    with pytest.raises(ValueError, match="32 bits do not hold"):
        jax_tt.pipeline.host_batch(table, np.array([-1, 3]), bounds="clip")
    with jax.enable_x64(True):
        assert jax_tt.pipeline.host_batch(table, np.array([-1, 3]), bounds="clip").dtype == np.int64


@pytest.mark.parametrize("bounds", ["warn", "clip"])
@pytest.mark.filterwarnings("ignore::jax_tt.OutOfRangeWarning")
def test_ids_that_are_kept_do_what_they_do_in_eager_calls(bounds):
    """Also beside padding, which another id of -1 is not."""
    ids = np.array([[FAR, 3], [-(2**40), -1], [2**62, 9]])
    table = jnp.arange(1.0, 41).reshape(10, 4)
    options = {"bounds": bounds, "method": "reference", "combiner": "mean"}
    want = jax_tt.functional.embed_bag(table, ids, **options)
    plain = jax_tt.pipeline.host_batch(DENSE, ids, bounds=bounds)
    padded = jax_tt.pipeline.host_batch(
        DENSE,
        {"ids": np.pad(ids, [(0, 0), (0, 1)], constant_values=77), "pad_id": 77},
        bounds=bounds,
    )
    for found in (plain, padded):
        np.testing.assert_array_equal(jax_tt.functional.embed_bag(table, found, **options), want)
        assert int(jax_tt.functional.count_out_of_range(found, 10)) == 4


def test_negative_ids_of_large_trains_are_no_padding():
    given = {"ids": np.array([[-5, 0, 10**12]]), "pad_id": 0}
    found = jax_tt.pipeline.host_batch(BIG, given, bounds="zero")
    digits = found.ids.digits[0]
    assert (digits[1] == -1).all() and digits[0][0] < 0 and not (digits[0] == -1).all()


def test_a_warning_names_the_id_that_was_given():
    batch = {**EMPTY, "clicked": np.array([[1, FAR], [3, 4]])}
    message = (
        r"id 4294967301 at position 1 is out of range for table 'item \(features clicked, shown\)'"
    )
    with pytest.warns(jax_tt.OutOfRangeWarning, match=message):
        COLLECTION.host_batch(batch, bounds="warn")


def test_eager_calls_report_the_id_that_was_given():
    state, ids = DENSE.init(jax.random.key(0)), np.array([3, FAR, -(2**50)])
    message = "id 4294967301 at position 1"
    with pytest.warns(jax_tt.OutOfRangeWarning, match=f"the first of them {message}") as found:
        jax.block_until_ready(jax_tt.lookup(DENSE, state, ids, Lookup(bounds="warn"))[0])
        jax.effects_barrier()
    assert len(found) == 1
    with pytest.raises(ValueError, match=f"item: ids: got {message}; expected 0 to 9"):
        jax_tt.lookup(DENSE, state, ids, bounds="error")
    bags = Bags(np.array([2**40, 2, 3]), np.array([0, 0]))  # unused capacity
    jax_tt.lookup_bags(DENSE, state, bags, bounds="error")


def test_collections_report_the_id_that_was_given():
    collection = jax_tt.Collection(
        {"item": DENSE}, {"a": Feature("item"), "b": Feature("item", combiner=None)}
    )
    state = collection.init(jax.random.key(0))
    batch = {"a": np.array([[1], [2]]), "b": np.array([1, -(2**50)])}
    with pytest.warns(jax_tt.OutOfRangeWarning, match="id -1125899906842624 at position 3 "):
        jax_tt.lookup_features(collection, state, batch, bounds="warn")


CLICKED, SHOWN, CUT = (
    "'clicked' of 'item': ",
    "'shown' of 'item': ",
    "ids: got a JAX array of int32.*whole_keys",
)
MASKED = np.ma.masked_array([[1, 2]], [[False, True]])
SUMS_TO_3 = np.array([2**62] * 4 + [3])  # in 64 bits
# What differs from an empty batch, and the error.
BAD: list[tuple[dict[str, Any], str]] = [
    ({"clicked": np.array([[FAR, 3]])}, CLICKED + "ids: got id 4294967301 at position 0"),
    ({"clicked": np.array([[3, -1], [12, 1]])}, r"got id -1 at position 1 \(2 ids"),
    ({"clicked": np.array([2**63 + 1], np.uint64)}, "got id 9223372036854775809"),
    ({"place": [[10**12]]}, "'place' of 'big': ids: got id 1000000000000"),
    ({"clicked": np.ones((2, 3))}, CLICKED + "ids: got dtype float64"),
    ({"clicked": [True, False]}, "got dtype bool"),
    ({"user": [[2**63], [-1]]}, "'user' of 'key': ids: got -1 and 9223372036854775808"),
    ({"clicked": ["a"]}, "got strings for a table of 10 rows.*hash_table"),
    ({"user": "abc"}, "got 'abc'; expected an array"),
    ({"clicked": None}, CLICKED + "ids: got None"),
    ({"clicked": [[1], None]}, r"ids\[1\]: got None among lists"),
    ({"clicked": [[[1]]]}, CLICKED + "ids: got lists of lists of lists"),
    ({"clicked": np.ones((2, 2, 2), int)}, r"got .*shape \(2, 2, 2\); expected \[B, L\]"),
    ({"shown": [[1], [2, 3]]}, SHOWN + "ids: got lists of different"),
    ({"shown": {"ids": [1], "weights": [1.0]}}, SHOWN + "weights: "),
    ({"clicked": {"ids": [1, 2], "lengths": [1]}}, r"sum to 1, but .* 2 ids.* pass ids\[:1\]"),
    ({"clicked": {"ids": [1, 2], "lengths": [3]}}, "sum to 3, but there are 2 ids; expected 2"),
    ({"clicked": {"ids": [1, 2], "offsets": [0, 1]}}, "end at 1, .*as torch's are by default"),
    ({"clicked": {"ids": [1, 2, 3], "lengths": SUMS_TO_3}}, f"lengths: sum to {2**64 + 3}, but"),
    ({"clicked": MASKED}, CLICKED + "ids: got a masked array"),
    ({"clicked": MASKED[0]}, CLICKED + "ids: got a masked array.*array.compressed"),
    ({"clicked": {"ids": [1, 2], "lengths": MASKED[0]}}, "lengths: got a masked .* masked.$"),
    (
        {"clicked": Bags(np.arange(3), np.array([0, 9]))},
        CLICKED + r"bags.offsets\[1\] is 9 after 0; .* 3 ids. Bags.from_offsets checks",
    ),
    ({"clicked": Bags(np.arange(3), np.array([[0, 3]]))}, r"bags.offsets: got .*shape \(1, 2\)"),
    ({"clicked": {"ids": [1, 2], "lengths": [3, -1]}}, CLICKED + "lengths: got "),
    ({"clicked": {"ids": [1], "lengths": [1], "offsets": [0, 1]}}, "'lengths' and 'offsets'"),
    ({"clicked": {"ids": [1], "length": [1]}}, "got the entry 'length'"),
    ({"clicked": {"lengths": [1]}}, "got a dict without 'ids'"),
    ({"clicked": {"ids": [1, 2], "weights": [1, np.nan]}}, "weights: got nan at position 1"),
    ({"clicked": {"ids": [1, 2], "weights": [1.0]}}, r"weights: got .*shape \(1,\)"),
    ({"clicked": {"ids": [[1, 2], [3]], "weights": [[1.0], [2.0, 3.0]]}}, "lists of other lengths"),
    ({"user": {"ids": [[-1, 7]], "pad_id": 7}}, "all bits set.* at position 0"),
    ({"label": [1]}, "got the feature 'label'"),
    ({"user": jnp.array([[7]])}, "'user' of 'key': " + CUT),
    ({"user": list(jnp.array([7, 8]))}, "'user' of 'key': " + CUT),
]


def test_what_does_not_fit_is_named():
    for changed, message in BAD:
        with pytest.raises((TypeError, ValueError), match=message):
            pytest.fail(
                f"{changed} gives {COLLECTION.host_batch({**EMPTY, **changed}, bounds='error')}"
            )


def test_other_arguments_are_checked():
    with pytest.raises(ValueError, match="got no feature 'shown'"):
        COLLECTION.host_batch({"clicked": [1]})
    with pytest.raises(ValueError, match="bounds: got 'wrap'"):
        COLLECTION.host_batch(EMPTY, bounds="wrap")
    with pytest.raises(ValueError, match="bounds: got the tables 'item'"):
        COLLECTION.host_batch(EMPTY, bounds={"item": "warn"})
    with pytest.raises(ValueError, match="'user' of 'key': capacity: got 1 for 2 ids"):
        COLLECTION.host_batch({**EMPTY, "user": [[1, 2]]}, capacity=1)
    with pytest.raises(ValueError, match="capacity: got the feature 'x'"):
        COLLECTION.host_batch(EMPTY, capacity={"x": 1})
    with pytest.raises(ValueError, match=r"'clicked' of 'item': capacity.*or ragged bags"):
        COLLECTION.host_batch(EMPTY, capacity={"clicked": 4})
    with pytest.raises(TypeError, match=r"table: got a Collection; expected a jax_tt\.Table"):
        jax_tt.pipeline.host_batch(COLLECTION, [1])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="got bags for pooled=False"):
        jax_tt.pipeline.host_batch(DENSE, Bags.from_ragged([[1]]), pooled=False)
    with pytest.raises(TypeError, match="runs on the host, before jit"):
        jax.jit(lambda ids: jax_tt.pipeline.host_batch(DENSE, ids))(jnp.array([1]))


def test_batches_of_many_sizes_are_one_program():
    compiled = []

    @jax.jit
    def step(batch):
        compiled.append(1)
        return jax.tree.leaves(batch)[0]

    rng = np.random.default_rng(0)
    for count in (5, 6, 7, 8):
        lengths = np.bincount(rng.integers(0, 3, count), minlength=3)
        rows = np.split(rng.integers(0, 10, count), np.cumsum(lengths)[:-1])
        step(jax_tt.pipeline.host_batch(DENSE, [row.tolist() for row in rows]))
    assert len(compiled) == 1
    assert jax_tt.pipeline.host_batch(DENSE, [[1] * 9]).ids.shape == (16,)
    assert jax_tt.pipeline.host_batch(DENSE, [[]]).ids.shape == (1,)
    assert jax_tt.pipeline.host_batch(DENSE, np.array([])).shape == (0, 1)
    # Features with few ids have the capacity of their bags in every batch.
    few = [
        jax_tt.pipeline.host_batch(DENSE, [[1]] * n + [[]] * (60 - n)).ids.shape for n in (0, 5, 60)
    ]
    assert few == [(64,)] * 3
    assert jax_tt.pipeline.host_batch(DENSE, [[1] * 9], capacity=20).ids.shape == (20,)


def test_strings_are_keys():
    pytest.importorskip("xxhash")
    keys = jax_tt.dynamic.hash_ids(["red", "blue", "red"])
    for given in (
        [["red", "blue"], ["red"]],
        {"ids": np.array(["red", "blue", "red"]), "lengths": [2, 1]},
        {"ids": np.array(["red", "blue", "red"], object), "offsets": [0, 2, 3]},
    ):
        found = jax_tt.pipeline.host_batch(HASH, given)
        assert keys_of(found.ids)[:3].tolist() == keys.tolist()
    assert keys_of(jax_tt.pipeline.host_batch(HASH, [b"red"])).tolist() == [[int(keys[0])]]
    with pytest.raises(TypeError, match="key: ids: features"):
        jax_tt.pipeline.host_batch(HASH, ["red", None])


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "xxhash", None)
    message = r"hash_ids needs xxhash, which is not installed: pip install 'jax-tt\[keys\]'"
    with pytest.raises(ImportError, match=message):
        jax_tt.dynamic.hash_ids(["red"])


def test_columns_of_data_frames():
    item = jax_tt.dense_table(10, 4)
    lists = [[3, 1], [], [4]]
    for column in (Column(lists), {"ids": Column(lists)}):
        assert jax_tt.pipeline.host_batch(item, column) == jax_tt.pipeline.host_batch(item, lists)
    keys = jax_tt.hash_table(8, 4)
    found, wanted = (
        jax_tt.pipeline.host_batch(keys, names) for names in (Column(["a", "b"]), ["a", "b"])
    )
    np.testing.assert_array_equal(found.digits, wanted.digits)


def test_tensors(monkeypatch):
    class Tensor:
        requires_grad, device, dtype = False, type("Device", (), {"type": "cpu"}), "int64"
        shape, ndim = (2, 1), 2

        def numpy(self):
            return np.array([[1], [2]])

    torch = type("torch", (), {"Tensor": Tensor, "bfloat16": "bfloat16"})
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert jax_tt.pipeline.host_batch(DENSE, Tensor()).tolist() == [[1], [2]]


def test_keyed_bags():
    collection = jax_tt.Collection(
        {"item": DENSE, "user": jax_tt.dense_table(5, 4)},
        {"a": Feature("item"), "b": Feature("user")},
    )
    keyed = KeyedBags.from_lengths(["b", "a"], [4, 1, 9], [1, 0, 1, 1])
    found = collection.host_batch(keyed)
    assert isinstance(found, KeyedBags) and found.ids.tolist() == [4, 1, 9, 0]
    assert found.keys == ("b", "a") and found.offsets.tolist() == [0, 1, 1, 2, 3]
    with pytest.raises(ValueError, match="'b' of 'user': ids: got id 9"):
        wrong = KeyedBags.from_lengths(["b", "a"], [9, 1, 9], [1, 0, 1, 1])
        collection.host_batch(wrong, bounds="error")
    kept = collection.host_batch(keyed, capacity=6)
    assert kept.ids.shape == (6,)
    shifted = KeyedBags(keyed.ids, np.array([1, 1, 1, 2, 3]), None, keyed.keys, (2, 2))
    with pytest.raises(ValueError, match="offsets: start at 1"):
        collection.host_batch(shifted)
    hashed = jax_tt.Collection({"key": HASH}, {"a": Feature("key")})
    by_feature = hashed.host_batch(KeyedBags.from_lengths(["a"], [4, 1], [1, 1]))
    assert keys_of(by_feature["a"].ids).tolist() == [4, 1]


def test_batches_of_sharded_tables_are_on_their_mesh():
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    embed = jax_tt.EmbedCollection(
        {"item": jax_tt.dense_table(64, 4)},
        {"clicked": Feature("item"), "shown": Feature("item"), "seen": Feature("item")},
        mesh=mesh,
        axis="model",
        rngs=nnx.Rngs(0),
    )
    rng = np.random.default_rng(0)
    given = {
        "clicked": rng.integers(0, 64, (8, 2)),
        "shown": [row.tolist() for row in rng.integers(0, 64, (8, 3))],
        "seen": rng.integers(0, 64, (6, 2)),
    }
    found = embed.host_batch(given)
    assert found["clicked"].sharding.is_equivalent_to(NamedSharding(mesh, P(("data", "model"))), 2)
    assert found["shown"].ids.sharding.is_fully_replicated
    assert found["seen"].sharding.is_fully_replicated
    rows = nnx.jit(lambda embed, batch: embed(batch))(embed, found)
    table = np.asarray(embed.states()["item"]["embedding"])
    for name, ids in given.items():
        np.testing.assert_allclose(rows[name], table[np.array(ids)].sum(axis=1), rtol=1e-5)
    elsewhere = embed.host_batch(given, sharding=jax.devices()[3])
    assert all(leaf.devices() == {jax.devices()[3]} for leaf in jax.tree.leaves(elsewhere))
    by_hand = embed.host_batch(given, sharding=NamedSharding(mesh, P("model", None)))
    assert by_hand["clicked"].sharding.spec == P("model")


def test_layers_have_the_same_door():
    ten = jax_tt.dense_table(10, 4)
    of_nnx, of_linen = jax_tt.EmbedBag(10, 4, rngs=nnx.Rngs(0)), jax_tt.linen.TableEmbed
    for layer in (of_nnx, of_linen(ten, combiner="sum")):
        with pytest.warns(jax_tt.OutOfRangeWarning, match=f"id {FAR} at position 1.*Embed"):
            bags = layer.host_batch([[1, FAR], []], capacity=4)
        assert bags.ids.shape == (4,)
        reports.forget()
    assert jax_tt.Embed(10, 4, rngs=nnx.Rngs(0)).host_batch([[1, 2]]).shape == (1, 2)
    assert of_linen(ten).host_batch([1, 2]).shape == (2,)
    embed = jax_tt.linen.EmbedCollection({"item": DENSE}, {"clicked": Feature("item")})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert embed.host_batch({"clicked": [1, 2]})["clicked"].shape == (2, 1)


def test_32_bit_arrays_of_jax_are_no_keys_unless_said():
    cut = jax.device_put(np.array([2**40 + 7, 7]))
    state = HASH.init(jax.random.key(0))
    for ids in (cut, cut.astype(jnp.uint32), Bags(cut, np.array([0, 2]))):
        with pytest.raises(
            ValueError, match=r"key: .*JAX array of u?int32.*host_batch.*whole_keys"
        ):
            jax_tt.dynamic.insert(HASH, state, ids)
    with pytest.raises(ValueError, match="JAX array of int32"):
        jax_tt.dynamic.split_keys(cut)
    with pytest.raises(ValueError, match="JAX array of int32"):
        jax_tt.dynamic.remove(HASH, state, cut)
    with pytest.raises(ValueError, match="traced int32"):
        jax.jit(lambda ids: jax_tt.dynamic.insert(HASH, state, ids)[1])(np.array([2**40 + 7, 7]))

    @jax.jit
    def insert(state, ids):
        return jax_tt.dynamic.insert(HASH, state, jax_tt.dynamic.whole_keys(ids))

    inserted, state = insert(state, np.array([7, -1, 7], np.int32))
    assert int(inserted.counts["inserted"]) == 2
    keys = np.array([-1, 7])
    inserted, state = jax_tt.dynamic.insert(HASH, state, keys)  # whole on the host
    assert int(inserted.counts["hits"]) == 2
    assert keys_of(jax_tt.dynamic.whole_keys(np.array([2**32 - 1], np.uint32))).tolist() == [
        2**32 - 1
    ]
    for given in (keys, keys.tolist()):
        assert jax_tt.dynamic.whole_keys(given) == jax_tt.dynamic.split_keys(keys)
    for given in ([7, 2**32], [-(2**31) - 1], np.array([2**64 - 1], np.uint64)):
        with pytest.raises(ValueError, match=f"got {given[-1]}; expected integers of at most 32"):
            jax_tt.dynamic.whole_keys(given)
    with jax.enable_x64(True):
        with pytest.raises(ValueError, match="got dtype int64; expected integers of at most 32"):
            jax_tt.dynamic.whole_keys(jnp.array([7]))
        assert jax_tt.dynamic.split_keys(jnp.array([2**40])).digits.tolist() == [[256, 0]]
