"""`Bags` on the host and traced."""

import functools
import itertools
import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tt
from jax_tt import Bags

RAGGED = [[3, 1], [], [2, 2, 2], [0]]
WEIGHTS = [[0.5, 1.0], [], [1.0, 2.0, 3.0], [4.0]]


def _rows(bags):
    ids, offsets = np.asarray(bags.ids), np.asarray(bags.offsets)
    pairs = itertools.pairwise(offsets)
    return [ids[start:end].tolist() for start, end in pairs]


@hypothesis.given(
    st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=4), max_size=6), st.integers(0, 3)
)
def test_constructors_agree(rows, spare):
    lengths = list(map(len, rows))
    ids = np.array([i for row in rows for i in row], np.int64)
    total = len(ids)
    ragged = Bags.from_ragged(rows, capacity=total + spare)
    assert _rows(ragged) == rows and ragged.capacity == total + spare
    assert ragged.num_bags == len(rows)
    assert _rows(Bags.from_lengths(ids, lengths)) == rows
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    assert _rows(Bags.from_offsets(ids, offsets)) == rows
    assert _rows(Bags.from_offsets(ids, offsets[:-1], include_last_offset=False)) == (
        rows if rows else []
    )


def test_weights_follow_their_ids():
    bags = Bags.from_ragged(RAGGED, WEIGHTS, capacity=9)
    np.testing.assert_array_equal(bags.weights, [0.5, 1, 1, 2, 3, 4, 0, 0, 0])
    assert bags.weights.dtype == np.float32 and bags.ids.dtype == np.int32


def test_from_padded():
    rectangle = np.array([[4, 0], [5, 6]])
    np.testing.assert_array_equal(Bags.from_padded(rectangle, pad_id=0).ids, [[4, -1], [5, 6]])
    mask = np.array([[True, False], [False, True]])
    np.testing.assert_array_equal(Bags.from_padded(rectangle, mask=mask).ids, [[4, -1], [-1, 6]])
    assert not Bags.from_padded(rectangle, pad_id=None).padded
    unsigned = Bags.from_padded(rectangle.astype(np.uint32), pad_id=0)
    assert unsigned.ids[0, 1] == 2**32 - 1 and unsigned.padded
    shape = jax_tt.TTShape.suggest(100, 4)
    split = Bags.from_padded(shape.split_ids(rectangle), mask=mask)
    assert (np.asarray(split.ids.digits)[0, 1] == -1).all()


def test_traced_equals_host():
    flat, offsets = np.array([3, 1, 2, 2, 2, 0, 9]), np.array([0, 2, 2, 5, 6])
    host = Bags.from_offsets(flat, offsets, np.ones(7), capacity=7)
    traced = jax.jit(lambda i, o, w: Bags.from_offsets(i, o, w, capacity=7))(
        flat.astype(np.int32), offsets.astype(np.int32), np.ones(7, np.float32)
    )
    assert jax.tree.structure(host) == jax.tree.structure(traced)
    jax.tree.map(np.testing.assert_array_equal, host, traced)
    lengths = jax.jit(lambda i, n: Bags.from_lengths(i, n))(jnp.arange(6), jnp.array([2, 0, 3, 1]))
    np.testing.assert_array_equal(lengths.offsets, offsets)
    no_last = jax.jit(lambda i, o: Bags.from_offsets(i, o, include_last_offset=False))(
        jnp.arange(6), jnp.array([0, 2])
    )
    np.testing.assert_array_equal(no_last.offsets, [0, 2, 6])
    padded = jax.jit(lambda i: Bags.from_padded(i, pad_id=0))(jnp.array([[4, 0]]))
    np.testing.assert_array_equal(padded.ids, [[4, -1]])


def test_errors_hold_the_fix():
    for make, fix in (
        (lambda: Bags.from_offsets([1, 2], [1, 2]), "start at 0"),
        (lambda: Bags.from_offsets([1, 2], [0, 2, 1]), "decrease from 2 to 1 at position 2"),
        (lambda: Bags.from_offsets([1, 2], [0, 5]), "include_last_offset=False"),
        (lambda: Bags.from_offsets([1, 2], []), "expected [B + 1]"),
        (
            lambda: Bags.from_offsets([1, 2], [], include_last_offset=False),
            "offsets: got none, but there are 2 ids",
        ),
        (lambda: Bags.from_offsets([1, 2], [0, 2], [1.0]), "one weight per id"),
        (lambda: Bags.from_offsets([1, 2], [0, 2], capacity=1), "at least 2"),
        (lambda: Bags.from_offsets([[1, 2]], [0, 2]), "Bags.from_padded"),
        (lambda: Bags.from_offsets([1.5], [0, 1]), "ids: got dtype float64; expected integers"),
        (lambda: Bags.from_offsets([1], [0.0, 1.0]), "expected integers"),
        (lambda: Bags.from_lengths([1, 2], [-1, 3]), "non-negative"),
        (lambda: Bags.from_lengths([1, 2], [3]), "only 2 ids"),
        (lambda: Bags.from_lengths([1, 2, 3], [2**62] * 4 + [3]), f"lengths: sum to {2**64 + 3}"),
        (
            lambda: Bags.from_lengths([1, 2, 3], np.array([2**64 - 1, 4], np.uint64)),
            f"lengths: sum to {2**64 + 3}, but there are only 3 ids",
        ),
        (
            lambda: Bags.from_offsets([1, 2, 3], np.array([0, 2**64 - 1, 3], np.uint64)),
            f"decrease from {2**64 - 1} to 3",
        ),
        (
            lambda: Bags.from_offsets([1, 2], [0, 5], include_last_offset=False),
            "the last bag starts at 5, but there are only 2 ids",
        ),
        (lambda: Bags.from_lengths(np.arange(5), [2, 2]), "capacity=5"),
        (lambda: Bags.from_lengths(np.arange(5), [2, 2], capacity=8), "lengths: sum to 4"),
        (lambda: Bags.from_offsets(np.arange(5), [0, 3], capacity=8), "capacity=5"),
        (lambda: Bags.from_offsets(jnp.arange(5), [0, 3]), "there are 5 ids"),
        (lambda: Bags.from_ragged([[1], [2]], [[1.0], []]), "one weight per id"),
        (lambda: Bags.from_ragged([[1, 2]], capacity=1), "at least 2"),
        (lambda: Bags.from_padded([1, 2]), "Bags.from_offsets"),
        (lambda: Bags.from_padded([[1]], mask=np.array([True])), "shape of ids"),
        (lambda: Bags.from_padded(np.array([[1]], np.uint32), pad_id=-2), "mask="),
        (lambda: Bags.from_ragged([[2**40]]), "split_ids"),
    ):
        with pytest.raises(ValueError, match=re.escape(fix)):
            pytest.fail(f"gives {make()}, and not {fix}")


def test_ids_that_are_padded_already():
    for bags in (
        Bags.from_lengths([5, 6, 7, 0, 0], [2, 1], capacity=5),
        Bags.from_offsets([5, 6, 7, 0, 0], [0, 2, 3], capacity=5),
    ):
        assert bags.capacity == 5 and _rows(bags) == [[5, 6], [7]]


def test_equality_is_by_value():
    bags = Bags.from_ragged(RAGGED, WEIGHTS)
    assert bags == Bags.from_ragged(RAGGED, WEIGHTS)
    assert bags == jax.tree.map(jnp.asarray, bags)
    assert bags != Bags.from_ragged(RAGGED) and bags != Bags.from_ragged(
        RAGGED, WEIGHTS, capacity=9
    )
    assert bags != Bags.from_ragged(RAGGED[::-1], WEIGHTS[::-1]) and bags != "bags"
    rectangle = np.zeros((2, 2), np.int32)
    assert Bags(rectangle) == Bags(rectangle) != Bags(rectangle, padded=True)
    shape = jax_tt.TTShape.suggest(100, 4)
    assert shape.split_ids([1, 2]) == shape.split_ids([1, 2]) != shape.split_ids([1, 3])
    with pytest.raises(TypeError, match="unhashable"):
        hash(bags)


def test_ops_check_their_bags():
    shape = jax_tt.TTShape.suggest(100, 4)
    cores = jax_tt.tt.init(jax.random.key(0), shape)
    for bags, fix in [
        (np.zeros(3, np.int32), "ids[:, None]"),
        (np.zeros((2, 2), np.float32), "bags: got dtype float32; expected integers"),
        (Bags(np.zeros(3, np.int32)), "[B, L]"),
        (Bags(np.zeros((2, 3), np.int32), np.zeros(3, np.int32)), "vmap"),
        (Bags(np.zeros((2, 3), np.int32), None, np.zeros((3, 2), np.float32)), "weights"),
        (Bags(jax_tt.SplitIds(np.zeros((2, 3, 2), np.int32))), "TTShape of this table"),
    ]:
        with pytest.raises(ValueError) as error:
            jax_tt.tt.embed_bag(cores, bags, method="reference")
        assert fix in str(error.value)
    with pytest.raises(ValueError, match="'sum', 'mean', 'mean_count', 'sqrtn', 'max'"):
        jax_tt.tt.embed_bag(cores, np.zeros((2, 2), np.int32), combiner="min")
    with pytest.raises(ValueError, match="clip"):
        jax_tt.tt.lookup(cores, np.zeros(2, np.int32), bounds="wrap")
    with pytest.raises(ValueError, match="reference"):
        jax_tt.tt.lookup(cores, np.zeros(2, np.int32), method="cuda")
    with pytest.raises(ValueError, match="items: num_embeddings"):
        jax_tt.tt.lookup(cores, np.zeros(2, np.int32), num_embeddings=10**6, name="items")
    with pytest.raises(ValueError, match="left rank"):
        jax_tt.tt.lookup((cores[0], cores[1][:, 1:], cores[2]), np.zeros(2, np.int32))


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint32", "int32", "uint64"])
@pytest.mark.parametrize("on_host", [True, False])
def test_padding_of_every_integer_type(x64, method, dtype, on_host):
    table = jnp.arange(1.0, 70_001, dtype=jnp.float32)[:, None]
    rectangle = np.array([[1, 2, 3]], dtype)
    rectangle = rectangle if on_host else jnp.asarray(rectangle)
    mask = np.array([[True, False, True]])
    mark = np.asarray(np.iinfo(dtype).max if dtype[0] == "u" else -1, dtype)
    marked = rectangle.at[0, 1].set(mark) if not on_host else np.where(mask, rectangle, mark)
    forms = (
        Bags.from_padded(rectangle, mask=mask),
        Bags.from_padded(marked),
        Bags(marked, padded=True),
    )
    pool = functools.partial(jax_tt.functional.embed_bag, combiner="mean", method=method)
    for out in jax.jit(lambda table: [pool(table, bags) for bags in forms])(table):
        np.testing.assert_array_equal(out, [[3.0]])


def test_an_id_of_all_bits_beside_a_mask():
    ids = jnp.array([[255, 1]], jnp.uint8)
    bags = Bags.from_padded(ids, mask=np.array([[True, False]]))
    table = jnp.arange(300.0)[:, None]
    assert jax_tt.functional.embed_bag(table, bags, method="reference").item() == 255


def test_traced_bags_are_not_compared():
    bags = Bags.from_ragged([[1], [2, 3]])
    assert jax.jit(lambda bags: bags == bags)(bags)
    with pytest.raises(jax.errors.TracerArrayConversionError):
        jax.jit(lambda left, right: left == right)(bags, bags)
