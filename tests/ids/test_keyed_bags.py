"""`KeyedBags`: conversions both ways, and errors that name the feature."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tt
from jax_tt import Bags, KeyedBags

IDS, OFFSETS = [3, 1, 7, 7, 2, 9], [0, 2, 2, 3, 6]
COLLECTION = jax_tt.Collection(
    {"item": jax_tt.dense_table(20, 3)}, dict.fromkeys("ab", jax_tt.Feature("item"))
)
STATE = COLLECTION.init(jax.random.key(0))
PARTS = {"clicked": Bags.from_ragged([[3, 1], []]), "carted": Bags.from_ragged([[7], [7, 2, 9]])}


def test_from_offsets_and_lengths():
    """TBE's layout and KeyedJaggedTensor's are the bags of the features."""
    whole = KeyedBags.from_offsets(["clicked", "carted"], IDS, OFFSETS)
    assert whole == KeyedBags.from_lengths(["clicked", "carted"], IDS, [2, 0, 1, 3])
    assert whole == KeyedBags.from_bags(PARTS)
    assert whole.to_bags() == PARTS
    assert (whole.keys, whole.sizes, whole.capacity) == (("clicked", "carted"), (2, 2), 6)
    assert list(whole) == ["clicked", "carted"] and whole.lengths.tolist() == [2, 0, 1, 3]
    assert whole != KeyedBags.from_offsets(["clicked", "bought"], IDS, OFFSETS)


def test_a_batch_size_per_feature():
    whole = KeyedBags.from_offsets(list("abc"), IDS, OFFSETS, batch_sizes=[3, 0, 1])
    assert whole["a"].offsets.tolist() == [0, 2, 2, 3] and whole["a"].ids.tolist() == [3, 1, 7]
    assert whole["b"].offsets.tolist() == [0] and whole["b"].capacity == 0
    assert whole["c"].ids.tolist() == [7, 2, 9]
    assert whole.between(0, 2).num_bags == 3
    assert KeyedBags.from_bags(whole.to_bags()) == whole
    weighted = whole.to_bags() | {"d": Bags.from_ragged([[1, 2]], [[0.5, 0.25]])}
    assert KeyedBags.from_bags(weighted).to_bags() == weighted


def test_weights_padding_and_other_forms_of_bags():
    whole = KeyedBags.from_bags(
        {
            "weighted": Bags.from_ragged([[1], [2, 3]], [[0.5], [1.0, 2.0]], capacity=8),
            "padded": Bags.from_padded(np.array([[4, 255], [255, 5]], np.uint8), pad_id=-1),
            "rectangle": jnp.array([[6, 7], [8, 9]]),
            "single": np.array([10, 11, 12]),
        },
        capacity=20,
    )
    assert whole.ids[:12].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    assert whole.lengths.tolist() == [1, 2, 1, 1, 2, 2, 1, 1, 1]
    assert whole.weights[:4].tolist() == [0.5, 1, 2, 1]
    assert whole["weighted"].weights.tolist() == [0.5, 1, 2] and whole["padded"].weights is None
    assert whole.sizes == (2, 2, 2, 3) and whole.capacity == 20


def test_lists_are_taken_as_bags_take_them():
    empty = KeyedBags.from_lengths(["a", "b"], [], [0, 0])
    assert empty == KeyedBags.from_offsets(["a", "b"], [], [0, 0, 0])
    assert empty.ids.dtype == np.int32
    for ids, offsets in ((IDS, OFFSETS), ([], [0, 0, 0])):
        given = KeyedBags(ids, offsets, keys=("a", "b"))
        want = KeyedBags.from_offsets(["a", "b"], ids, offsets)
        assert given.to_bags() == want.to_bags() and given.capacity == want.capacity
        assert given.sizes == want.sizes and given.lengths.tolist() == want.lengths.tolist()
        assert COLLECTION.host_batch(given) == COLLECTION.host_batch(want)
        rows, _ = jax_tt.lookup_features(COLLECTION, STATE, given, method="reference")
        np.testing.assert_array_equal(
            rows["b"], jax_tt.lookup_features(COLLECTION, STATE, want, method="reference")[0]["b"]
        )


def test_traced_bags_keep_the_capacity():
    whole = KeyedBags.from_offsets(["a", "b"], jnp.array(IDS), jnp.array(OFFSETS))
    parts = jax.jit(KeyedBags.to_bags)(whole)
    assert parts["b"].offsets.tolist() == [0, 1, 4]
    assert parts["b"].ids[:4].tolist() == [7, 7, 2, 9] and parts["b"].capacity == 6


def test_a_pytree_with_static_keys():
    whole = KeyedBags.from_offsets(["a", "b"], IDS, OFFSETS)
    traces = []

    @jax.jit
    def total(batch):
        traces.append(batch.keys)
        return jnp.sum(batch["b"].ids)

    total(whole)
    total(KeyedBags.from_offsets(["a", "b"], IDS, [0, 1, 2, 3, 6]))
    assert traces == [("a", "b")]
    stored = jax.export.export(jax.jit(lambda batch: batch.ids + 1))(whole).serialize()
    assert jax.export.deserialize(stored).call(whole).tolist() == [4, 2, 8, 8, 3, 10]


OFFSETS_ERRORS = {
    "too few": ([0, 2, 3], None, "offsets: got 3, for 2 bags of 3 features .*give batch_sizes"),
    "no bags": ([], None, r"offsets: got .*shape \(0,\); expected \[number of bags \+ 1\]"),
    "sizes": ([0, 6], [1, 1, 1], r"batch_sizes \(a 1, b 1, c 1\) are 3 bags, for which 4"),
    "one size": ([0, 6], [1], "batch_sizes: got 1 for 3 features"),
    "negative": ([0, 6], [2, -1, 0], "batch_sizes: got -1 for feature 'b'"),
    "fall": ([0, 2, 4, 3, 6], [1, 2, 1], "decrease from 4 to 3 .* bag 1 of feature 'b'"),
    "start": ([1, 2, 4, 6], None, "start at 1"),
    "left over": ([0, 1, 2, 5], None, "end at 5, with the last bag of feature 'c'.*left over"),
    "beyond": ([0, 1, 2, 9], None, "end at 9, with the last bag of feature 'c'.* only 6 ids"),
}


def test_bad_offsets():
    for case, (offsets, sizes, message) in OFFSETS_ERRORS.items():
        with pytest.raises(ValueError, match=message):
            KeyedBags.from_offsets(list("abc"), IDS, offsets, batch_sizes=sizes)
            pytest.fail(case)


def test_bad_lengths():
    with pytest.raises(ValueError, match="got -1 for bag 0 of feature 'b'"):
        KeyedBags.from_lengths(["a", "b"], IDS, [2, -1])
    with pytest.raises(ValueError, match="sum to 4, with the last bag of feature 'b'"):
        KeyedBags.from_lengths(["a", "b"], IDS, [2, 2])
    with pytest.raises(ValueError, match=f"sum to {2**64 + 4}, with the last bag of feature 'b'"):
        KeyedBags.from_lengths(["a", "b"], IDS, np.array([2**64 - 1, 5], np.uint64))
    with pytest.raises(ValueError, match="lengths: got 3, for 3 bags of 2 features"):
        KeyedBags.from_lengths(["a", "b"], IDS, [2, 2, 2])
    padded = KeyedBags.from_lengths(["a", "b"], IDS, [2, 2], capacity=6)
    assert padded["b"].offsets.tolist() == [0, 2]


def test_bad_features():
    for keys, error, message in (
        ("clicked", TypeError, "keys: got 'clicked'; expected a list of names"),
        (["a", "a"], ValueError, "'a' more than once"),
        ([], ValueError, r"got \(\); expected names"),
        ([1], ValueError, "expected names of features"),
        (3, TypeError, "expected a list of names"),
    ):
        with pytest.raises(error, match=message):
            KeyedBags.from_offsets(keys, IDS, OFFSETS)
    shape = jax_tt.TTShape.suggest(10, 4, ranks=2)
    for give in (
        lambda ids: KeyedBags.from_offsets(["a"], ids, [0, 3]),
        lambda ids: KeyedBags.from_bags({"a": Bags.from_offsets(ids, [0, 3])}),
    ):
        with pytest.raises(TypeError, match=r"got SplitIds; .* as a dict"):
            give(shape.split_ids([1, 2, 3]))
    with pytest.raises(TypeError, match=r"bags\['a'\]: got a traced array; .* before jit"):
        jax.jit(lambda ids: KeyedBags.from_bags({"a": ids}).ids)(jnp.array([[1]]))
    with pytest.raises(ValueError, match=r"bags\['a'\]: got .*shape \(1, 1, 1\)"):
        KeyedBags.from_bags({"a": np.zeros((1, 1, 1), int)})
    with pytest.raises(KeyError, match="'c'; the features are 'a', 'b'"):
        KeyedBags.from_offsets(["a", "b"], IDS, OFFSETS)["c"]
