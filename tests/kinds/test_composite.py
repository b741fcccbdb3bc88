"""Tables of tables: sums, rows in several tables, and rows with different numbers of bits."""

import dataclasses
import functools
import itertools
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tt
from jax_tt._kinds.quantized import codec
from tests.helpers import rewrite, to_dense

N, D = 60, 8
SIZES = (14, 25, 21)
RNG = np.random.default_rng(0)
ROWS = (RNG.normal(size=(N, D)) * RNG.exponential(size=(N, 1))).astype(np.float32)
TRAIN = jax_tt.tables.TTTable.of_shape(jax_tt.TTShape.suggest(N, D, ranks=3))
ORDER = jax_tt.order.IdOrder(np.random.default_rng(1).permutation(N))
PARTS = RNG.permutation(np.repeat([0, 1, 2], SIZES))


@functools.cache
def of_bits(update=None):
    """A mixed table of 8, 4 and 4 bits a number, with other parts than those of a fresh state, and its state."""
    own = [
        jax_tt.tables.QuantizedTable(size, D, bits, update)
        for size, bits in zip(SIZES, (8, 4, 4), strict=True)
    ]
    table = jax_tt.tables.MixedTable(tuple(own))
    return table, table.with_parts(jax.jit(table.init)(jax.random.key(0)), PARTS)


@functools.cache
def of_trains(update=None):
    table = jax_tt.tables.SumTable((TRAIN, jax_tt.tables.OrderedTable(TRAIN, ORDER)))
    table = jax_tt.extension.with_update(table, update)
    return table, jax.jit(table.init)(jax.random.key(0))


@pytest.fixture(params=[of_bits, of_trains], ids=["mixed", "sum"])
def make(request):
    return request.param


def dense_of(table, state):
    return np.asarray(to_dense(table, state))


def test_rows_are_where_the_parts_say():
    table, state = of_bits()
    dense = dense_of(table, state)
    for k, (one, own) in enumerate(zip(table.tables, table.separated(state), strict=True)):
        np.testing.assert_array_equal(dense[k == PARTS], to_dense(one, own))
    np.testing.assert_array_equal(table.parts_of(state), PARTS)
    assert table.parts_of(state, jnp.array([[3], [N - 1]])).tolist() == [[PARTS[3]], [PARTS[-1]]]
    fresh = jax.jit(table.init)(jax.random.key(0))
    np.testing.assert_array_equal(table.parts_of(fresh), np.repeat([0, 1, 2], SIZES))
    dense = [jax_tt.tables.DenseTable(size, D) for size in SIZES]
    of_dense = jax_tt.tables.MixedTable(tuple(dense))
    eager = of_dense.init(jax.random.key(0))
    np.testing.assert_array_equal(of_dense.parts_of(eager), np.repeat([0, 1, 2], SIZES))
    constants = jax.make_jaxpr(table.init)(jax.random.key(0)).consts
    assert all(np.size(constant) <= 32 for constant in constants)  # none has a number per row


def test_a_sum_is_the_sum():
    table, state = of_trains()
    first, second = table.separated(state)
    want = to_dense(TRAIN, first) + to_dense(TRAIN, second)[ORDER.rows]
    np.testing.assert_allclose(dense_of(table, state), want, rtol=1e-6, atol=1e-7)
    again = table.joined(table.separated(state))
    assert again.keys() == state.keys()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["reference", "auto", "cuda_emulated"])
@pytest.mark.parametrize("bounds", ["zero", "clip", "warn"])
def test_ids_out_of_range(make, bounds, method):
    table, state = make()
    dense = dense_of(table, state)
    ids = np.array([[0, -5, 7, N + 1], [N - 1, 3, 3, 2**31 - 1]])
    lookup = jax_tt.Lookup(bounds=bounds, method=method)
    table = jax_tt.extension.with_name(table, f"{make.__name__} {method}")  # each is warned of once
    run = jax.jit(lambda state: jax_tt.lookup_bags(table, state, ids, lookup)[0])
    if bounds == "warn":
        with pytest.warns(jax_tt.OutOfRangeWarning, match=rf"{N} rows"):
            found = jax.block_until_ready(run(state))
            jax.effects_barrier()
            time.sleep(0.3 if method == "cuda_emulated" else 0)  # which reports later
    else:
        found = run(state)
    if bounds == "clip":
        want = dense[np.clip(ids, 0, N - 1)].sum(1)
    else:
        padded = np.concatenate([dense, np.zeros_like(dense[:1])])
        want = padded[np.where((ids < 0) | (ids >= N), N, ids)].sum(1)
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-5)


def test_ids_out_of_range_are_errors(make):
    table, state = make()
    look_up = functools.partial(jax_tt.lookup, table, bounds="error")
    look_up = jax.jit(look_up, static_argnames="method")
    ids = jnp.array([1, N])
    rows, _ = look_up(state, ids, method="reference")
    assert np.isnan(rows[1]).all() and np.isfinite(rows[0]).all()
    with pytest.raises(Exception, match=f"{type(table).__name__}.*, table 0.*"):
        jax.block_until_ready(look_up(state, ids)[0])


@pytest.mark.slow
def test_padding_and_empty_bags(make):
    table, state = make()
    dense = dense_of(table, state)
    ids = np.array([[3, -1], [-1, -1]], np.int32)
    padded = jax_tt.Bags(ids, weights=np.full((2, 2), 2, np.float32), padded=True)
    unsigned = jax_tt.Bags(ids.astype(np.uint32), padded=True)
    nothing = jnp.zeros((0, 3), jnp.int32), jnp.zeros((3, 0), jnp.int32)

    @jax.jit
    def run(state, padded, unsigned, nothing):
        def pooled(bags, bounds="error"):
            return jax_tt.lookup_bags(table, state, bags, bounds=bounds)[0]

        of_unsigned = [pooled(unsigned, bounds) for bounds in ("error", "zero")]
        return pooled(padded), of_unsigned, [pooled(bags) for bags in nothing]

    weighted, of_unsigned, empty = run(state, padded, unsigned, nothing)
    np.testing.assert_allclose(weighted, [2 * dense[3], np.zeros(D)], rtol=1e-5, atol=1e-6)
    for found in of_unsigned:
        np.testing.assert_allclose(found, [dense[3], np.zeros(D)], 1e-5, 1e-6)
    for found, rows in zip(empty, (0, 3), strict=True):
        np.testing.assert_array_equal(found, np.zeros((rows, D)))


@pytest.mark.slow
def test_scores_of_all_rows(make):
    table, state = make()
    query = np.random.default_rng(2).normal(size=(3, D)).astype(np.float32)
    attend = functools.partial(jax_tt.extension.attend, table)
    scores = jax.jit(attend, static_argnums=2)(state, query, jax.lax.Precision.HIGHEST)
    np.testing.assert_allclose(scores, query @ dense_of(table, state).T, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_quantized_rows_of_different_precision_are_trained():
    update = jax_tt.Update(jax_tt.optimizers.SGD(0.5), stochastic_rounding=False)
    table, state = of_bits(update)
    target = jnp.asarray(ROWS)

    @jax.jit
    @jax.value_and_grad
    def step(trained, rest):
        ids = jnp.arange(N)
        rows, _ = jax_tt.lookup(table, {**rest, **trained}, ids)
        return 0.5 * jnp.sum((rows - target) ** 2)

    errors = []
    for _ in range(8):
        trained = {name: state[name] for name in table.spec.trained_names}
        error, new = step(trained, state)
        state = {**state, **new}
        errors.append(float(error))
    assert errors[-1] < 0.05 * errors[0]
    assert float(state["step"]) == 8
    frozen, kept = jax_tt.extension.freeze(table, state)
    assert frozen.update is None and set(kept) == {
        *(f"table_{k}_packed" for k in range(3)),
        "places_0",
        "places_1",
    }
    np.testing.assert_array_equal(dense_of(frozen, kept), dense_of(table, state))
    errors = np.square(dense_of(table, state) - ROWS).sum(1)
    assert errors[PARTS == 0].mean() < 0.1 * errors[PARTS > 0].mean()


def test_members_of_a_kind_are_one_call():
    update = jax_tt.Update(jax_tt.optimizers.RowWiseAdagrad(0.1))
    table, state = of_trains(update)
    trained = {name: state[name] for name in table.spec.trained_names}

    def loss(trained):
        rest = {**state, **trained}
        return jax_tt.lookup_bags(table, rest, jnp.ones((2, 3), jnp.int32))[0].sum()

    text = jax.jit(jax.grad(loss)).lower(trained).as_text()
    assert len(re.findall("jax_tt_forward", text)) == 1
    assert len(re.findall("jax_tt_update", text)) == 1


@pytest.mark.slow
def test_terms_are_rounded_at_random_by_themselves():
    """With the same random numbers, the errors of equal terms would add up."""
    dense = jax_tt.tables.DenseTable(N, D, param_dtype=jnp.bfloat16)
    table = jax_tt.extension.with_update(
        jax_tt.tables.SumTable((dense, dense)), jax_tt.Update(jax_tt.optimizers.SGD(1e-3))
    )
    state = table.init(jax.random.key(0))
    state = {**state, "table_1_embedding": state["table_0_embedding"] + 0}
    trained = {name: state[name] for name in table.spec.trained_names}

    @jax.jit
    @jax.grad
    def step(trained):
        rows, _ = jax_tt.lookup(table, {**state, **trained}, jnp.arange(N))
        return jnp.sum(jnp.sin(rows.astype(jnp.float32)))

    new = step(trained)
    assert (new["table_0_embedding"] != new["table_1_embedding"]).any()


def test_a_skipped_step_changes_nothing():
    update = jax_tt.Update(jax_tt.optimizers.SGD(0.1), skip_nonfinite=True)
    table, state = of_trains(update)
    trained = {name: state[name] for name in table.spec.trained_names}

    @jax.jit
    @jax.grad
    def step(trained, scale):
        rest = {**state, **trained}
        return scale * jax_tt.lookup(table, rest, jnp.arange(4))[0].sum()

    new = step(trained, jnp.float32(jnp.inf))
    jax.tree.map(np.testing.assert_array_equal, new, trained)
    assert float(step(trained, jnp.float32(1))["step"]) == 1


def test_tables_that_do_not_fit():
    for arguments, error, message in [
        ((), ValueError, "tables: got none; expected at least one"),
        ((TRAIN, "dense"), TypeError, r"tables\[1\]: got 'dense'; expected a jax_tt.Table"),
        (
            (TRAIN, jax_tt.tables.DenseTable(N, 4)),
            ValueError,
            r"tables\[1\]: got 60 x 4; expected 60 x 8, as tables\[0\] has",
        ),
        (
            (TRAIN, jax_tt.extension.with_update(TRAIN, jax_tt.Update(jax_tt.optimizers.SGD(0.1)))),
            ValueError,
            r"tables\[1\]: got update=Update.*; expected that of tables\[0\], None",
        ),
        (
            (TRAIN, jax_tt.tables.RowCachedTable(TRAIN, jax_tt.RowCache(8))),
            TypeError,
            r"tables\[1\]: got a RowCachedTable; expected a table without a row cache",
        ),
        (
            (jax_tt.tables.HashTable(jax_tt.tables.DenseTable(N, 8), ways=10), TRAIN),
            TypeError,
            r"tables\[0\]: got a HashTable",
        ),
    ]:
        with pytest.raises(error, match=message):
            jax_tt.tables.SumTable(arguments)


def test_rules_that_scale_reads_are_refused():
    rule = jax_tt.optimizers.GlobalDecayRowWiseAdagrad(0.1)
    dense = jax_tt.tables.DenseTable(N, D, update=jax_tt.Update(rule))
    with pytest.raises(ValueError, match="got the rule GlobalDecayRowWiseAdagrad, which scales"):
        jax_tt.tables.SumTable((dense, dense))


def test_parts_that_do_not_fit():
    table, state = of_bits()
    with pytest.raises(ValueError, match=r"parts: got \[60, 0, 0\] ids with the numbers 0 to 2"):
        table.with_parts(state, np.zeros(N, np.int32))
    with pytest.raises(ValueError, match=r"parts: got int64 of shape \(3,\); expected integers"):
        table.with_parts(state, np.zeros(3, np.int64))
    with pytest.raises(TypeError, match="parts: got a traced array"):
        jax.jit(table.with_parts)(state, PARTS)
    with pytest.raises(ValueError, match="places_1: got uint32 of shape"):
        jax_tt.extension.check_state(table, {**state, "places_1": state["places_1"][:, :3]})
    with pytest.raises(ValueError, match="expected at most 2147483647"):
        jax_tt.tables.MixedTable(
            (jax_tt.tables.QuantizedTable(2**31 - 1, 8), jax_tt.tables.QuantizedTable(9, 8))
        )
    with pytest.raises(TypeError, match="SplitIds"):
        ids = jax_tt.TTShape(N, D, 2, (10, 6), (2, 4)).split_ids(np.arange(3))
        jax_tt.lookup(of_trains()[0], of_trains()[1], ids)


# The number of bits of every row


def errors_of(rows, bits, weights):
    table, state = jax_tt.quantize(rows, bits)
    return weights * np.square(np.asarray(to_dense(table, state)) - rows).sum(1)


def test_the_bytes_are_where_they_matter():
    weights = np.random.default_rng(2).exponential(size=N)
    widths = (8, 4, 3, 2)
    costs = np.array([codec.row_bytes(D, bits) for bits in widths])
    errors = np.stack([errors_of(ROWS, bits, weights) for bits in widths])
    for room in (440, 520, 600, 640):
        table, state = jax_tt.compression.quantize_mixed(ROWS, room, weights=weights)
        assert sum(array.nbytes for array in state.values()) <= room
        chosen = [
            widths.index(table.tables[part].bits) for part in np.asarray(table.parts_of(state))
        ]
        found = errors[chosen, np.arange(N)].sum()
        dense = np.square(dense_of(table, state) - ROWS).sum(1) @ weights
        assert dense == pytest.approx(found, rel=1e-3)
        # No multiplier gives a smaller error with as many bytes.
        for multiplier in np.geomspace(1e-6, 10, 200):
            other = np.argmin(errors + multiplier * costs[:, None], axis=0)
            of_places = 68 * (len(np.unique(other)) - 1)
            if costs[other].sum() + of_places <= room:
                assert found <= errors[other, np.arange(N)].sum() * (1 + 1e-6)


@pytest.mark.parametrize("bits", [4, 3])
def test_no_worse_than_a_single_number_of_bits(bits):
    rows = np.random.default_rng(3).normal(size=(3000, D)).astype(np.float32)
    alone, state = jax_tt.quantize(rows, bits)
    table, own = jax_tt.compression.quantize_mixed(rows, alone.nbytes)
    errors = [np.sum((dense_of(*pair) - rows) ** 2) for pair in ((table, own), (alone, state))]
    assert errors[0] <= errors[1] * (1 + 1e-6)


def test_weights_of_any_scale_and_outliers():
    weights = np.random.default_rng(2).exponential(size=N)
    found = [
        jax_tt.compression.quantize_mixed(ROWS, 520, weights=w * weights)
        for w in (1.0, 1e-18, 1e18)
    ]
    for table, state in found[1:]:
        assert table == found[0][0]
        np.testing.assert_array_equal(table.parts_of(state), found[0][0].parts_of(found[0][1]))
    rows = ROWS.copy()
    rows[0] *= 5e3
    table, state = jax_tt.compression.quantize_mixed(rows, 520)
    nbytes = sum(array.nbytes for array in state.values())
    assert 520 - nbytes < codec.row_bytes(D, 8)


def test_a_single_number_of_bits():
    for room, bits in ((10**6, 8), (N * codec.row_bytes(D, 2), 2)):
        table, state = jax_tt.compression.quantize_mixed(ROWS, room)
        assert table.tables == (jax_tt.tables.QuantizedTable(N, D, bits),)
        (own,) = table.separated(state)
        np.testing.assert_array_equal(own["packed"], jax_tt.quantize(ROWS, bits)[1]["packed"])
        np.testing.assert_array_equal(dense_of(table, state), to_dense(table.tables[0], own))


def test_rows_of_no_importance_get_the_fewest_bits():
    weights = np.where(np.arange(N) % 3, 1.0, 0.0)
    table, state = jax_tt.compression.quantize_mixed(ROWS, 700, weights=weights, bits=(8, 2))
    assert [own.bits for own in table.tables] == [8, 2]
    parts = np.asarray(table.parts_of(state))
    assert (parts[weights == 0] == 1).all() and (parts[weights > 0] == 0).mean() > 0.5


def test_bad_arguments():
    for options, message in [
        (
            {"max_bytes": 10},
            "max_bytes: got 10 bytes; expected at least 360 bytes, the size of 60 rows with",
        ),
        ({"max_bytes": 500, "bits": (8, 5)}, "bits: got 5; expected one of 8, 4, 3, 2"),
        ({"max_bytes": 500, "levels": "normal"}, "levels: got 'normal'; expected one of"),
        ({"max_bytes": 500, "bits": ()}, "bits: got none; expected some of 8, 4, 3 and 2"),
        ({"max_bytes": 0}, "max_bytes: got 0"),
        ({"max_bytes": 500, "weights": -np.ones(N)}, "weights: got some that are negative"),
    ]:
        with pytest.raises(ValueError, match=message):
            jax_tt.compression.quantize_mixed(ROWS, **options)


def test_rows_that_are_not_finite_are_refused():
    rows = ROWS.copy()
    rows[5, 2] = np.nan
    with pytest.raises(ValueError, match="row 5"):
        jax_tt.compression.quantize_mixed(rows, 500)


# Files


@pytest.fixture
def stored(tmp_path):
    path = tmp_path / "small.safetensors"
    rows = RNG.normal(size=(500, D)).astype(np.float32)
    pair = jax_tt.compression.quantize_mixed(rows, 3800)
    assert len(pair[0].tables) > 1
    jax_tt.files.save(path, {"items": pair})
    return path, pair


def test_files(stored):
    path, (table, state) = stored
    found, arrays = jax_tt.files.load(path)["items"]
    assert found == table
    jax.tree.map(np.testing.assert_array_equal, arrays, dict(state))
    small = jax_tt.quantize(np.ones((3, 4), np.float32))
    summed = jax_tt.tables.SumTable((small[0], small[0]))
    with pytest.raises(
        TypeError, match=r"got a SumTable of QuantizedTable; expected one of tensor trains"
    ):
        jax_tt.files.save(path, {"items": (summed, summed.joined([small[1]] * 2))})
    dense = jax_tt.tables.SumTable((jax_tt.tables.DenseTable(3, 4),))
    with pytest.raises(TypeError, match=r"got a DenseTable; expected a tensor train.* or a mixed"):
        jax_tt.files.save(path, {"items": (dense, dense.init(jax.random.key(0)))})


def damage_places(arrays, notes):
    arrays["items.places_0"][0, :4] ^= 16


def damage_rows(arrays, notes):
    arrays["items.table_0_packed"][0, :4] = 255


def forget_a_table(arrays, notes):
    notes["tables"].pop()


def rotate(arrays, notes):
    notes["tables"][0]["rotated"] = "no"


def test_damaged_files(stored):
    path, _ = stored
    whole = path.read_bytes()
    for change in [damage_places, damage_rows, forget_a_table, rotate]:
        path.write_bytes(whole)
        rewrite(path, lambda arrays, notes, change=change: change(arrays, notes["mixed"]["items"]))
        with pytest.raises(jax_tt.FileError, match=r"'items': (its|rotated: got 'no')"):
            jax_tt.files.load(path)


def test_descriptions_are_static_and_have_names(make):
    table, state = make()
    assert hash(jax_tt.extension.without_values(table)) == hash(
        jax_tt.extension.without_values(table)
    )
    named = jax_tt.extension.with_name(table, "items")
    assert dataclasses.replace(named, name=None) == table
    with pytest.raises(ValueError, match=r"items( of 60 rows)?, table 1: "):
        name = next(name for name in state if name.startswith("table_1"))
        jax_tt.extension.check_state(named, {**state, name: state[name][:-1]})
    with pytest.raises(ValueError, match="items: state: has no table_1"):
        jax_tt.extension.check_state(
            named, {name: x for name, x in state.items() if not name.startswith("table_1")}
        )
    assert list(itertools.chain(*(own.keys() for own in table.separated(state))))


def test_the_table_of_residuals():
    shapes = jax_tt.tt.residual_shapes(N, D, 1500)
    terms = jax_tt.tt.residuals(ROWS, shapes, refine=0, progress=False)
    update = jax_tt.Update(jax_tt.optimizers.RowWiseAdagrad(0.1))
    table, state = jax_tt.compression.residual_table(terms, update=update, name="items")
    assert len(table.tables) == len(shapes) > 1
    error = np.linalg.norm(dense_of(table, state) - ROWS) / np.linalg.norm(ROWS)
    assert error == pytest.approx(terms[-1].relative_error, rel=1e-4)
    assert set(state) == set(table.init(jax.random.key(0)))
    alone, _ = jax_tt.compression.residual_table(terms[:1])
    assert len(alone.tables) == 1
    with pytest.raises(ValueError, match="tables: got none; expected at least one"):
        jax_tt.compression.residual_table(())
    with pytest.raises(
        TypeError, match=r"terms\[0\]: got a SumTable; expected a jax_tt.tt.Residual"
    ):
        jax_tt.compression.residual_table([table])  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="terms: got None; expected the result of"):
        jax_tt.compression.residual_table(None)  # pyright: ignore[reportArgumentType]


def test_padding_reads_nothing_where_ids_are_clipped():
    table, state = of_trains()
    bags = jax_tt.Bags.from_padded([[1, -1, N + 5], [-1, -1, -1]])
    got, _ = jax_tt.lookup_bags(table, state, bags, jax_tt.Lookup(bounds="clip"))
    dense = dense_of(table, state)
    np.testing.assert_allclose(got[0], dense[1] + dense[-1], rtol=1e-5, atol=1e-6)
    assert not np.any(got[1])
