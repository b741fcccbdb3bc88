"""`Bags.concatenate` and `Bags.split`: several features in one batch."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tt
from jax_tt import Bags

SHAPE = jax_tt.TTShape.suggest(100, 4, ranks=2)
TABLE = np.arange(100.0, dtype=np.float32)[:, None] ** 1.5


def lists_of(bags):
    """The ids of every bag, and their weights."""
    ids = bags.ids.digits if isinstance(bags.ids, jax_tt.SplitIds) else bags.ids
    ids = np.asarray(ids)
    weights = np.ones(ids.shape[:2] if bags.offsets is None else len(ids))
    weights = weights if bags.weights is None else np.asarray(bags.weights)
    if bags.offsets is None:
        keep = ids != (-1 if ids.dtype.kind == "i" else np.iinfo(ids.dtype).max)
        keep = keep if ids.ndim == 2 else keep.all(-1)
        pairs = [
            (i, w, k if bags.padded else k | True)
            for i, w, k in zip(ids, weights, keep, strict=True)
        ]
        return [(i[k].tolist(), w[k].tolist()) for i, w, k in pairs]
    spans = zip(bags.offsets[:-1], bags.offsets[1:], strict=True)
    return [(ids[b:e].tolist(), weights[b:e].tolist()) for b, e in spans]


def make(form, lists, weighted, spare=0):
    """Bags of the given form, with weights that tell ids apart."""
    if form in ("ragged", "split"):
        weights = [[i / 4 + 1 for i in ids] for ids in lists] if weighted else None
        bags = Bags.from_ragged(lists, weights, capacity=sum(map(len, lists)) + spare)
        if form == "split":
            return Bags(SHAPE.split_ids(bags.ids), bags.offsets, bags.weights)
        return bags
    length = max(map(len, lists), default=0)
    if form == "rectangle":
        ids = np.array([(ids + [7] * length)[:length] for ids in lists], np.int32)
        ids = ids.reshape(len(lists), length)
        return Bags(ids, None, (ids / 4 + 1).astype(np.float32) if weighted else None)
    ids = np.array([ids + [-1] * (length - len(ids)) for ids in lists], np.int32)
    ids = ids.reshape(len(lists), length)
    return Bags.from_padded(ids, weights=ids / 4 + 1 if weighted else None)


FORMS = ["ragged", "split", "rectangle", "padded"]
feature = st.tuples(
    st.lists(st.lists(st.integers(0, 99), max_size=3), max_size=3), st.booleans(), st.integers(0, 2)
)


@hypothesis.settings(max_examples=30)
@hypothesis.given(st.sampled_from(FORMS), st.lists(feature, min_size=1, max_size=3))
def test_round_trip(form, features):
    parts = [make(form, *feature) for feature in features]
    bags = Bags.concatenate(parts)
    assert isinstance(jax.tree.leaves(bags)[0], np.ndarray)
    assert lists_of(bags) == [bag for part in parts for bag in lists_of(part)]
    assert [lists_of(part) for part in Bags.split(bags, parts)] == [
        lists_of(part) for part in parts
    ]
    pooled = np.arange(bags.num_bags)
    halves = Bags.split(pooled, [part.num_bags for part in parts])
    assert [len(half) for half in halves] == [part.num_bags for part in parts]
    np.testing.assert_array_equal(np.concatenate(halves), pooled)


def test_traced_equals_host():
    @jax.jit
    def traced(parts):
        bags = Bags.concatenate(parts)
        return bags, Bags.split(bags, parts)

    for form in FORMS:
        parts = [
            make(form, [[3, 1], [2, 9]], True, 2),
            make(form, [[5, 8]], False),
            make(form, [[1, 2], [99, 0]], True, 1),
        ]
        host = Bags.concatenate(parts)
        bags, back = traced(parts)
        assert bags.capacity == host.capacity and lists_of(bags) == lists_of(host), form
        assert list(map(lists_of, back)) == list(map(lists_of, parts)), form


def test_pooled_rows_of_every_feature():
    """What the documentation told people to do by hand."""
    features = [make("ragged", [[3, 1], [], [2]], True, 2), make("ragged", [[99]], True)]

    @jax.jit
    def pooled(features):
        bags = Bags.concatenate(features)
        rows = jax_tt.functional.embed_bag(jnp.asarray(TABLE), bags, combiner="mean")
        return Bags.split(rows, features)

    alone = [
        jax_tt.functional.embed_bag(TABLE, bags, combiner="mean", method="reference")
        for bags in features
    ]
    for got, want in zip(pooled(features), alone, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.usefixtures("x64")
def test_traced_split_ids_with_64_bit_types():
    shape = jax_tt.TTShape.suggest(100, 8, ranks=2)
    parts = [Bags.from_ragged(rows, capacity=4) for rows in ([[1, 2], []], [[99]])]
    parts = [Bags(shape.split_ids(part.ids), part.offsets) for part in parts]
    joined = jax.jit(lambda parts: Bags.concatenate(parts))(parts)
    np.testing.assert_array_equal(joined.offsets, [0, 2, 2, 3])
    np.testing.assert_array_equal(joined.ids.digits[:3], shape.split_ids([1, 2, 99]).digits)


def test_mixed_forms_without_padding_become_ragged():
    parts = [make("rectangle", [[1, 2], [3, 4]], True), make("ragged", [[5], []], False, 1)]
    bags = Bags.concatenate(parts, capacity=9)
    assert bags.capacity == 9 and bags.offsets.tolist() == [0, 2, 4, 5, 5]
    assert lists_of(bags) == [bag for part in parts for bag in lists_of(part)]
    wide = Bags.concatenate([make("rectangle", [[1, 2]], False), make("rectangle", [[1]], False)])
    assert wide.offsets.tolist() == [0, 2, 3]


def test_host_ids_of_two_types():
    parts = [Bags.from_ragged([[1]]), Bags.from_ragged([[2**31 + 1]])]
    assert [part.ids.dtype for part in parts] == [np.int32, np.uint32]
    bags = Bags.concatenate(parts)
    assert bags.ids.dtype == np.uint32 and bags.ids.tolist() == [1, 2**31 + 1]


PADDED, PLAIN = Bags.from_padded([[1, -1]]), Bags.from_ragged([[1]])
OTHER = jax_tt.TTShape.suggest(100, 4, d=2)


def test_errors_hold_the_fix():
    split, other = (Bags(shape.split_ids([1]), [0, 1]) for shape in (SHAPE, OTHER))
    for parts, options, fix in (
        ([], {}, "at least one"),
        ([PADDED, PLAIN], {}, "all of them with from_padded"),
        ([PLAIN, split], {}, "split all of them"),
        ([split, other], {}, "2 and 3 digits"),
        ([PLAIN, Bags(jnp.ones(1, jnp.uint32), [0, 1])], {}, "to one type"),
        ([PLAIN, PLAIN], {"capacity": 1}, "at least 2"),
        ([PADDED, PADDED], {"capacity": 9}, "or ragged"),
    ):
        with pytest.raises(ValueError, match=fix):
            Bags.concatenate(parts, **options)
    with pytest.raises(ValueError, match="the 3 of values"):
        Bags.split(np.zeros((3, 2)), [PLAIN, PLAIN])


def test_parts_are_a_list_of_bags():
    for given in (PLAIN, [np.zeros((1, 2), np.int32)], 3):
        with pytest.raises(TypeError, match="list of Bags"):
            Bags.concatenate(given)
    once = (Bags.from_ragged([[k]]) for k in range(2))
    assert Bags.concatenate(once) == Bags.from_ragged([[0], [1]])


def test_parts_of_a_split_are_a_list():
    with pytest.raises(TypeError, match="parts: got 2; expected a list"):
        Bags.split(np.ones((2, 3)), 2)
    assert [part.tolist() for part in Bags.split([[1.0], [2.0]], [1, 1])] == [[[1.0]], [[2.0]]]
