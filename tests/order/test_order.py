"""Orders of ids: bijections, what each method promises, and what it says to bad input."""

import itertools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy
from hypothesis import given

import jax_tt
from jax_tt import order
from jax_tt.order import IdOrder, _edges

SHAPE = jax_tt.TTShape(120, 8, 4, (4, 5, 6), (2, 2, 2))
sizes = st.integers(1, 60)


def factors(n, draw):
    """Row factors that cover n, with slack or without."""
    p = [draw(st.integers(1, 5)), draw(st.integers(1, 5))]
    return (*p, -(-n // (p[0] * p[1])))


def is_permutation(rows):
    return np.array_equal(np.sort(rows), np.arange(len(rows)))


# IdOrder


@given(st.permutations(range(17)))
def test_inverse_and_identity(rows):
    made = IdOrder(rows)
    ids = np.arange(17)
    assert made.apply(ids).tolist() == rows
    assert np.array_equal(made.inverse.apply(made.apply(ids)), ids)
    assert made.inverse.inverse == made and hash(made.inverse.inverse) == hash(made)
    assert np.array_equal(IdOrder.identity(17).apply(ids), ids)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint64"])
def test_apply_on_host_and_device(dtype):
    """Ids of the table are mapped, others stay; the device agrees with the host, traced or not."""
    rows = np.random.default_rng(0).permutation(100)
    made = IdOrder(rows)
    info = np.iinfo(dtype)
    ids = np.array([[0, 99, 100], [57, info.max, info.min]], dtype)
    wanted = [
        [rows[0], rows[99], 100],
        [rows[57], info.max, rows[0] if info.min == 0 else info.min],
    ]
    got = made.apply(ids)
    assert got.dtype == dtype and got.tolist() == wanted
    with jax.enable_x64(True):
        for call in (made.apply, jax.jit(made.apply), jax.vmap(made.apply)):
            assert np.asarray(call(jnp.asarray(ids))).tolist() == wanted


def test_ids_of_a_type_too_small_for_the_rows():
    made = IdOrder(np.arange(1000)[::-1])
    assert made.apply(np.array([-1, 0, 127], np.int8)).tolist() == [-1, 999, 872]
    assert made.apply(jnp.array([-1, 0, 127], jnp.int8)).tolist() == [-1, 999, 872]


def test_an_order_of_many_ids_takes_two_bytes_an_id_as_long_as_they_fit():
    for count, dtype in ((2**16, np.uint16), (2**16 + 1, np.int32)):
        rows = np.random.default_rng(0).permutation(count)
        made = IdOrder(rows)
        assert made.rows.dtype == dtype and made.inverse.rows.dtype == dtype
        ids = np.array([0, count - 1, -1, count, 12345], np.int32)
        wanted = [rows[0], rows[-1], -1, count, rows[12345]]
        assert made.apply(ids).tolist() == wanted
        assert jax.jit(made.apply)(jnp.asarray(ids)).tolist() == wanted
        assert made.apply(jnp.asarray([-1, 5], jnp.int8)).tolist() == [-1, rows[5]]
        assert made.apply(np.asarray([-1, 5], np.int8)).tolist() == [-1, rows[5]]
        inverse = jax.jit(lambda order: order.inverse.rows)(made)
        assert np.array_equal(inverse, made.inverse.rows)
    grown = IdOrder.identity(2**16).grow(2**16 + 5)
    assert grown.rows.dtype == np.int32 and grown.num_embeddings == 2**16 + 5


def test_it_is_a_pytree():
    made = IdOrder([1, 2, 0])
    traced = jax.jit(lambda o, ids: (o, o.inverse, o.apply(ids)))(made, jnp.arange(4))
    assert traced[0] == made and traced[1] == made.inverse
    assert traced[2].tolist() == [1, 2, 0, 3]
    (leaf,) = jax.tree.leaves(made)
    assert leaf.dtype == np.uint16 and not leaf.flags.writeable


def test_saved_and_loaded(tmp_path):
    made = IdOrder(np.random.default_rng(0).permutation(1000))
    made.save(tmp_path / "order.npz")
    assert IdOrder.load(tmp_path / "order.npz") == made
    np.savez(tmp_path / "other.npz", x=1)
    with pytest.raises(ValueError, match=r"other.npz: no array 'rows'; it holds x"):
        IdOrder.load(tmp_path / "other.npz")


def test_what_is_no_bijection():
    for rows, error, message in [
        ([0, 1, 3], ValueError, r"rows: got the row 3; expected 0 to 2, each once"),
        ([0, -1, 1], ValueError, "rows: got the row -1"),
        ([0, 0, 1], ValueError, "rows: the row 2 is missing"),
        ([], TypeError, "expected integers"),
        ([[0, 1]], ValueError, r"rows: got .*shape \(1, 2\)"),
        ([0.0, 1.0], TypeError, "rows: got float64 .*; expected integers"),
    ]:
        with pytest.raises(error, match=message):
            IdOrder(rows)


def test_apply_refuses_what_it_cannot_map():
    made = IdOrder.identity(120)
    with pytest.raises(ValueError, match="expected integers"):
        made.apply(np.ones(3))
    with pytest.raises(TypeError, match=r"ids: got SplitIds .* shape.split_ids\(order.apply"):
        made.apply(SHAPE.split_ids([1, 2]))
    with pytest.raises(TypeError, match="rows: got a traced array"):
        jax.jit(IdOrder)(jnp.arange(3))


# from_counts


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40))
def test_counts(counts):
    rows = order.from_counts(counts).rows
    assert (
        rows.tolist()
        == np.argsort(np.lexsort((np.arange(len(counts)), -np.array(counts)))).tolist()
    )


def test_bad_counts():
    for counts in ([], [-1, 2], [np.nan, 1.0], [[1, 2]]):
        with pytest.raises(ValueError, match="counts: got"):
            order.from_counts(counts)


# from_tree


@given(st.data(), sizes)
def test_tree_is_a_bijection(data, n):
    p = factors(n, data.draw)
    paths = data.draw(st.lists(st.tuples(*[st.integers(0, 3)] * 2), min_size=n, max_size=n))
    assert is_permutation(order.from_tree(paths, jax_tt.TTShape(n, 2, 1, p, (1, 1, 2))).rows)


def test_tree_that_fits_is_kept_whole():
    """Four categories of five subcategories of six ids are the digits; others are packed without being torn apart."""
    rng = np.random.default_rng(0)
    paths = np.stack([np.arange(120) // 30, np.arange(120) // 6], 1)[rng.permutation(120)]
    rows = order.from_tree(paths, SHAPE).rows
    for code in range(20):
        assert len(set(rows[paths[:, 1] == code] // 6)) == 1
    for code in range(4):
        assert len(set(rows[paths[:, 0] == code] // 30)) == 1
    # 40 = 30 + 10, and 10 + 20, 25 + 5, 12 + 18 fill the other blocks.
    lengths = {"a": 40, "b": 20, "c": 25, "d": 5, "e": 12, "f": 18}
    labels = rng.permutation([name for name, length in lengths.items() for _ in range(length)])
    rows = order.from_tree(labels, SHAPE).rows
    blocks = {name: len(set(rows[labels == name] // 30)) for name in lengths}
    assert blocks == {"a": 2, "b": 1, "c": 1, "d": 1, "e": 1, "f": 1}


def test_bad_tree():
    with pytest.raises(
        ValueError, match=r"categories: got .*shape \(7, 1\); expected labels \[120"
    ):
        order.from_tree(list("abcdefg"), SHAPE)
    with pytest.raises(TypeError, match=r"shape: got 120; expected the TTShape"):
        order.from_tree(list("abcdefg"), 120)


# from_interactions


def planted(seed=0, users=600, n=12_000, noise=0.1):
    """Users of 4 blocks of 30 ids each; the block of every id, which are scattered."""
    rng = np.random.default_rng(seed)
    user = rng.integers(0, users, n)
    item = user % 4 * 30 + rng.integers(0, 30, n)
    item = np.where(rng.random(n) < noise, rng.integers(0, 120, n), item)
    scattered = rng.permutation(120)
    block = np.empty(120, int)
    block[scattered] = np.arange(120) // 30
    return user, scattered[item], block


def made_from(interactions, **options):
    return order.from_interactions(interactions, SHAPE, progress=False, **options)


def test_planted_blocks_are_found():
    user, item, block = planted()
    digit = made_from((user, item)).rows // 30
    same = (digit[:, None] == digit) == (block[:, None] == block)
    assert same.mean() >= 0.95


def test_every_form_of_interactions_gives_the_same_order(monkeypatch):
    user, item, _ = planted()
    whole = made_from((user, item))
    matrix = scipy.sparse.coo_matrix((np.ones(len(user)), (user, item)), shape=(600, 120))
    cuts = [0, 17, 17, 5000, len(user)]
    chunks = [(user[a:b], item[a:b]) for a, b in itertools.pairwise(cuts)]
    forms = [np.stack([user, item], 1), matrix, chunks, lambda: iter(chunks)]
    forms += [
        [np.stack(chunk, 1) for chunk in chunks],
        (user.astype(np.uint16), item.astype(np.int8)),
    ]
    for form in forms:
        assert made_from(form) == whole
    # Read again for every pass, in pieces: the sums are the same up to rounding, and so are the blocks.
    monkeypatch.setattr("jax_tt.order._edges._CHUNK", 1000)
    monkeypatch.setattr("jax_tt.order._edges._KEPT", 5000)
    streamed = made_from(lambda: iter(chunks))
    assert len(set(zip(streamed.rows // 30, whole.rows // 30, strict=True))) == 4


def test_seed_decides():
    user, item, _ = planted()
    assert made_from((user, item)) == made_from((user, item))
    # The blocks do not depend on the seed.
    digits = [made_from((user, item), seed=seed).rows // 30 for seed in (0, 1)]
    assert len(set(zip(*digits, strict=True))) == 4


@given(st.data(), sizes, st.integers(0, 80))
def test_any_interactions_give_a_bijection_with_the_unseen_last(data, n, count):
    p = factors(n, data.draw)
    rng = np.random.default_rng(count)
    users, items = rng.integers(0, 7, count), rng.integers(0, n, count)
    shape = jax_tt.TTShape(n, 2, 1, p, (1, 1, 2))
    reuse = data.draw(st.sampled_from([0, 0.5]))
    rows = order.from_interactions((users, items), shape, reuse=reuse, progress=False).rows
    assert is_permutation(rows)
    unseen = np.setdiff1d(np.arange(n), items)
    assert rows[unseen].tolist() == list(range(n - len(unseen), n))


def test_reuse_trades_co_occurrence_for_frequency():
    """Distinct prefixes of a batch fall, and with a large weight the first rows are the hottest ids."""
    user, item, block = planted()
    hot = np.random.default_rng(1).zipf(1.5, len(item)) % 120
    item = np.where(np.arange(len(item)) % 2, hot, item)
    batch = np.random.default_rng(2).choice(item, 60)
    prefixes, together = [], []
    for reuse in (0, 1, 100):
        rows = made_from((user, item), reuse=reuse).rows
        prefixes.append(len(np.unique(rows[batch] // 6)))
        digit = rows // 30
        together.append(np.mean((digit[:, None] == digit)[block[:, None] == block]))
    assert prefixes[0] > prefixes[1] >= prefixes[2]
    assert together[0] > together[1] > together[2]
    counts = np.bincount(item, minlength=120)
    first = made_from((user, item), reuse=1e4).rows < 30
    assert counts[first].min() >= counts[~first].max()


def test_bad_interactions():
    for interactions, error, message in [
        (([0, 1], [0, 120]), ValueError, r"got the id 120; expected 0 to 119"),
        (([0, 1], [0, -1]), ValueError, "got the id -1"),
        (([0, -3], [0, 1]), ValueError, "got the context -3"),
        (([0, 1], [0]), ValueError, "expected both"),
        (([0], [0], [1]), ValueError, "a tuple of 3"),
        (([0.5], [0]), TypeError, "contexts of float64; expected integers"),
        (np.zeros((3, 3), int), ValueError, r"shape \(3, 3\); expected pairs"),
        (7, TypeError, "got 7; expected"),
        (iter([]), TypeError, "can be read once only"),
    ]:
        with pytest.raises(error, match=f"interactions: .*{message}"):
            made_from(interactions)


def test_bad_matrices_and_options():
    with pytest.raises(ValueError, match=r"one column per row of the table, 120. Its transpose"):
        made_from(scipy.sparse.eye(5))
    with pytest.raises(ValueError, match="negative or non-finite"):
        made_from(-scipy.sparse.eye(120))
    for options in ({"rank": 0}, {"iterations": 0}, {"reuse": -1.0}, {"reuse": np.inf}):
        with pytest.raises(ValueError, match=f"{next(iter(options))}: got"):
            made_from(([0], [0]), **options)


# spectral_rows


def test_spectral_rows_are_the_singular_vectors():
    """Against the SVD of the whole matrix, up to the signs of the columns."""
    user, item, _ = planted()
    counts = np.zeros((600, 120))
    np.add.at(counts, (user, item), 1)
    of_user, of_item = counts.sum(1, keepdims=True), counts.sum(0, keepdims=True)
    left, values, right = np.linalg.svd(counts / np.sqrt(of_user * of_item))
    expected_users = left[:, :4] * np.sqrt(values[:4])
    expected_users /= np.linalg.norm(expected_users, axis=1, keepdims=True)
    expected_items = right[:4].T * of_item.T**0.25
    expected_items *= np.sqrt(120 / np.square(expected_items).sum())
    users, items = order.spectral_rows((user, item), 120, 4, iterations=8, progress=False)
    assert users.dtype == items.dtype == np.float32
    np.testing.assert_allclose(users @ items.T, expected_users @ expected_items.T, atol=1e-3)


def test_spectral_rows_without_interactions_are_zero():
    users, items = order.spectral_rows(([0, 0, 3], [5, 2, 2]), 9, 4, progress=False)
    assert users.shape == (4, 4) and items.shape == (9, 4)
    assert np.flatnonzero(np.any(users, axis=1)).tolist() == [0, 3]
    assert np.flatnonzero(np.any(items, axis=1)).tolist() == [2, 5]
    # Three interactions have two singular values.
    assert np.isfinite(users).all() and np.linalg.matrix_rank(items, tol=1e-3) == 2
    np.testing.assert_allclose(np.linalg.norm(users[[0, 3]], axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(np.square(items).sum() / 9, 1, rtol=1e-5)
    users, items = order.spectral_rows(([], []), 3, 2, progress=False)
    assert users.shape == (0, 2) and not items.any()


def test_spectral_rows_refuse_what_does_not_fit():
    with pytest.raises(ValueError, match=r"got the id 9; expected 0 to 8"):
        order.spectral_rows(([0], [9]), 9, 4)
    for name in ("num_embeddings", "features", "iterations"):
        sizes = {"num_embeddings": 9, "features": 4, name: 0}
        with pytest.raises(ValueError, match=f"{name}: got 0"):
            order.spectral_rows(([0], [1]), **sizes)


# from_table


@given(st.data(), sizes)
def test_any_table_gives_a_bijection(data, n):
    p = factors(n, data.draw)
    table = np.random.default_rng(n).normal(size=(n, 2)) * data.draw(st.sampled_from([0, 1, 1e30]))
    shape = jax_tt.TTShape(n, 2, 1, p, (1, 1, 2))
    assert is_permutation(order.from_table(table, shape, progress=False).rows)


def test_an_order_lowers_the_error_and_a_refined_one_lowers_it_further():
    """Blocks of one pattern, each turned and shuffled: the pattern is found again."""
    rng = np.random.default_rng(0)
    pattern = rng.normal(size=(12, 2))
    blocks = [5 * rng.normal(size=6) + pattern @ rng.normal(size=(2, 6)) for _ in range(10)]
    table = np.concatenate([block[rng.permutation(12)] for block in blocks]).astype(np.float32)
    table = rng.permutation(table)
    shape = jax_tt.TTShape(120, 6, 3, (10, 12), (6, 1))

    def error(rows):
        return jax_tt.tt.from_dense(rows, shape=shape).relative_error

    errors = {}
    for rounds in (0, 1, 6):
        found = order.from_table(table, shape, refine=rounds, progress=False)
        assert is_permutation(found.rows)
        errors[rounds] = error(table[found.inverse.rows])
    assert errors[0] < 0.8 * error(table)
    assert errors[6] <= errors[1] < errors[0] and errors[6] < 0.9 * errors[0]


def test_refining_keeps_ids_in_their_blocks():
    n = 117
    table = np.random.default_rng(0).normal(size=(n, 4)).astype(np.float32)
    shape = jax_tt.TTShape(n, 4, 2, (10, 12), (4, 1))
    before, after = (
        order.from_table(table, shape, refine=rounds, progress=False).rows for rounds in (0, 2)
    )
    assert is_permutation(after) and not np.array_equal(before, after)
    assert np.array_equal(before // 12, after // 12)


def test_refined_order_does_not_depend_on_the_scale():
    table = np.random.default_rng(0).normal(size=(120, 4)).astype(np.float32)
    shape = jax_tt.TTShape(120, 4, 2, (10, 12), (4, 1))
    plain, *scaled = (
        order.from_table(table * np.float32(scale), shape, refine=np.int64(2), progress=False)
        for scale in (1, 2.0**-80, 2.0**100)
    )
    assert scaled == [plain, plain]


def test_rounds_that_are_no_number_are_refused():
    for refine, error, message in [
        (-1, ValueError, "refine: got -1; expected an integer >= 0"),
        (1.5, TypeError, "refine: got 1.5 of type float; expected an integer"),
        (True, TypeError, "refine: got True of type bool; expected an integer"),
    ]:
        with pytest.raises(error, match=message):
            order.from_table(np.ones((120, 6)), SHAPE, refine=refine, progress=False)


def test_clusters_of_a_wide_table_become_digits():
    rng = np.random.default_rng(0)
    cluster = rng.permutation(np.arange(120) // 30)
    table = 5 * rng.normal(size=(4, 200))[cluster] + rng.normal(size=(120, 200))
    digit = order.from_table(table, SHAPE, rank=16, progress=False).rows // 30
    assert len(set(zip(digit, cluster, strict=True))) == 4


def test_bad_tables():
    with pytest.raises(ValueError, match=r"table: got .*shape \(3, 2\); expected \[120, D\]"):
        order.from_table(np.zeros((3, 2)), SHAPE)
    bad = np.zeros((120, 2))
    bad[7, 1] = np.nan
    with pytest.raises(ValueError, match="table: row 7: got NaN or infinity"):
        order.from_table(bad, SHAPE)


def test_degrees_of_interactions_that_come_in_pieces(monkeypatch):
    monkeypatch.setattr(_edges, "_CHUNK", 3)
    edges = _edges.Edges((np.array([0, 1, 4, 0, 1, 0, 2]), np.array([0, 1, 1, 2, 0, 0, 1])), 3)
    assert edges.context_degrees.tolist() == [3, 2, 1, 0, 1]
    assert edges.item_degrees.tolist() == [3, 3, 1]
