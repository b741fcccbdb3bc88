"""The kinds of tables that are compared on interactions: sizes within a budget, lookups, starts and steps."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

pytest.importorskip("flax")
pytest.importorskip("orbax.checkpoint")

from flax import nnx

import jax_tt
from benchmarks.quality import sizes, tables
from benchmarks.quality.settings import Config
from benchmarks.quality.train import train
from examples.retrieval import data
from examples.retrieval.model import arrays

pytestmark = pytest.mark.usefixtures("promotion_of_a_user")

SMALL = ["hashing", "low_rank", "quotient_remainder"]
COMPRESSED = [*SMALL, "tt", "tt2"]
BYTES = {"float32": 4, "bfloat16": 2}


@pytest.fixture(scope="module")
def interactions(tmp_path_factory: pytest.TempPathFactory) -> data.Interactions:
    path = tmp_path_factory.mktemp("data") / "groups.txt.gz"
    data.write_synthetic(path, num_users=300, num_items=120, groups=6)
    return data.load(path)


def make(kind: str, rows: int, features: int, ratio: float | None, **options: Any) -> Any:
    arguments = {"std": 0.5, "optimizer": None, "tt_rank": 16, "order": lambda shape: None}
    return tables.make_table(
        kind, rows, features, ratio=ratio, rngs=nnx.Rngs(0), **arguments | options
    )


def normal(rows: int, features: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(rows, features)).astype(np.float32)


def num_bytes(table: Any) -> int:
    """Of what is trained, and of the orders of ids."""
    orders = jax.tree.leaves(nnx.state(table, jax_tt.nnx.IdOrderState))
    return sum(array.nbytes for array in [*arrays(table), *orders])


# Sizes


@pytest.mark.parametrize("kind", COMPRESSED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("rows", "features", "ratio"), [(997, 24, 3.0), (2000, 16, 10.0)])
def test_tables_use_their_budget_and_keep_it(kind, dtype, rows, features, ratio):
    """The tables are as large as the ratio allows, but for one step of what determines their size."""
    if kind in ("tt", "tt2"):
        dtype = "float32"
    table = make(kind, rows, features, ratio, dtype=dtype)
    two = jax_tt.TTShape.suggest(rows, features, 1, d=2).row_factors
    budget = rows * features * 4 / ratio
    step = {
        "low_rank": rows * BYTES[dtype] + features * 4,
        "tt": 0.15 * budget,
        "tt2": 4 * (two[0] * features + two[1]),
    }
    assert budget - 2 * step.get(kind, features * BYTES[dtype]) < num_bytes(table) <= budget


@pytest.mark.parametrize(
    ("rows", "features", "ratio", "dtype", "ranks"),
    [(500, 24, 4.0, "bfloat16", [1, 1, 1, 1, 1]), (300, 8, 7.0, "float32", [1])],
)
def test_sums_of_tts_keep_their_budget_with_the_orders(rows, features, ratio, dtype, ranks):
    """What is left over would not hold another rank."""
    table = make("tt_residual", rows, features, ratio, dtype=dtype, start=normal(rows, features))
    terms = [jax_tt.tables.innermost(term) for term in table.table.tables]
    p = terms[0].row_factors
    budget = rows * features * 4 / ratio
    assert budget - (p[0] * features + p[1]) * BYTES[dtype] < num_bytes(table) <= budget
    assert [term.ranks[1] for term in terms] == ranks
    orders = jax.tree.leaves(nnx.state(table, jax_tt.nnx.IdOrderState))
    assert len({order.tobytes() for order in map(np.asarray, orders)}) == len(ranks)


def test_tables_that_are_too_small():
    for kind in (*COMPRESSED, "tt_residual"):
        with pytest.raises(
            ValueError, match=f"ratio: got 200 for {kind}, but .*expected a smaller"
        ):
            sizes.check_fits(kind, 100, 8, 200.0)
        with pytest.raises(ValueError, match=r"ratio: got 1\.0; expected a number above 1"):
            sizes.check_fits(kind, 100, 8, 1.0)
        sizes.check_fits(kind, 100, 8, 3.0)
        if kind == "tt":
            sizes.check_fits(kind, 100, 8, None)  # it may have ranks instead
        else:
            with pytest.raises(ValueError, match="ratio: got None for"):
                sizes.check_fits(kind, 100, 8, None)


def test_two_cores_of_both_tables_take_the_same_bytes():
    """Together they keep the ratio, whatever the numbers of rows."""
    rows = (7000, 2500)
    ratios = sizes.split_ratio("tt2", rows, 64, 10.0)
    shapes = [sizes.tt2_shape(n, 64, ratio) for n, ratio in zip(rows, ratios, strict=True)]
    budget = sum(rows) * 64 / 10
    assert 0.85 * budget < sum(shape.num_params for shape in shapes) <= budget
    assert 0.85 < shapes[0].num_params / shapes[1].num_params < 1.15
    assert sizes.split_ratio("low_rank", rows, 64, 10.0) == [10.0, 10.0]
    assert sizes.split_ratio("tt2", rows, 64, None) == [None, None]


def test_sums_of_both_tables_take_the_same_bytes_beside_an_order_of_each():
    """An order of more than 65,536 ids takes 17 bits an id, 32 ids together, others two bytes."""
    for rows in [(7000, 2500), (70_000, 9000)]:
        orders = [2 * n if n <= 65_536 else -(-n // 32) * 17 * 4 for n in rows]
        ratios = sizes.split_ratio("tt_residual", rows, 64, 10.0)
        budgets = [n * 64 * 4 / ratio for n, ratio in zip(rows, ratios, strict=True)]
        np.testing.assert_allclose(sum(budgets), sum(rows) * 64 * 4 / 10, rtol=1e-12)
        np.testing.assert_allclose(budgets[0] - orders[0], budgets[1] - orders[1], rtol=1e-12)
        message = (
            rf"the orders of \[{rows[0]}, {rows[1]}\] ids take {sum(orders):,} bytes; expected"
        )
        with pytest.raises(ValueError, match=message):
            sizes.split_ratio("tt_residual", rows, 64, 150.0)


# Lookups


def test_low_rank_is_a_product():
    table = make("low_rank", 50, 12, 3.0)
    rows, basis = (np.asarray(array, np.float64) for array in table.arrays())
    assert rows.shape == (50, 3) and basis.shape == (3, 12)
    ids = np.array([0, 49, 7, 7])
    np.testing.assert_allclose(table(jnp.asarray(ids)), (rows @ basis)[ids], rtol=1e-5, atol=1e-6)
    assert table(jnp.zeros(0, jnp.int32)).shape == (0, 12)


def test_quotient_remainder_gives_every_id_a_row_of_its_own():
    table = make("quotient_remainder", 1001, 5, 4.0)
    quotient, remainder = (np.asarray(array, np.float64) for array in table.arrays())
    ids = np.arange(1001)
    expected = quotient[ids // len(remainder)] * remainder[ids % len(remainder)]
    found = np.asarray(table(jnp.asarray(ids)))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert len(np.unique(found, axis=0)) == 1001


def test_a_sum_of_tts_starts_at_the_sum_of_its_terms():
    start, dtype = normal(200, 12), "bfloat16"
    table = make("tt_residual", 200, 12, 4.0, dtype=dtype, start=start)
    shapes = sizes.residual_shapes(200, 12, 4.0, dtype)
    assert len(shapes) > 1
    terms = jax_tt.tt.residuals(start, shapes, dtype=dtype, progress=False)
    expected = np.zeros((200, 12))
    for term in terms:
        cores = [np.asarray(core, np.float64) for core in term.approximation.cores]
        rows = np.einsum("piqr,srjt->psqj", *cores).reshape(-1, 12)
        expected += rows[term.id_order.rows]
    found = table(jnp.arange(200))
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        np.linalg.norm(found - start) / np.linalg.norm(start), terms[-1].relative_error, rtol=1e-3
    )
    assert len(arrays(table)) == 2 * len(terms)
    assert {array.dtype for array in arrays(table)} == {jnp.dtype(dtype)}
    assert table(jnp.zeros(0, jnp.int32)).shape == (0, 12)


# Starts and steps


@pytest.mark.parametrize("kind", ["dense", "tt", "tt2", "low_rank"])
def test_tables_start_from_rows(kind):
    """Rows that the kind can hold, two distinct ones in a table of one vector each, are held to rounding."""
    rng = np.random.default_rng(0)
    rows = np.repeat(rng.normal(size=(2, 6)), [40, 60], axis=0).astype(np.float32)
    mixed = jax_tt.order.IdOrder(rng.permutation(100))
    ratio = None if kind == "dense" else 2.0
    table = make(kind, 100, 6, ratio, order=lambda shape: mixed, start=rows[mixed.rows])
    found = table(jnp.arange(100))
    np.testing.assert_allclose(found, rows[mixed.rows], rtol=1e-4, atol=1e-4)


def test_numbers_of_a_few_bits():
    start, kind, bits = normal(100, 8), "int4", 4
    table = make(kind, 100, 8, None, start=start, optimizer=jax_tt.optimizers.Adam(0.1))
    assert num_bytes(table) == 100 * (4 + bits)
    step = np.ptp(start, axis=1, keepdims=True) / ((1 << bits) - 1)
    found = np.asarray(table(jnp.arange(100)))
    assert (np.abs(found - start) <= 0.6 * step).all()


@pytest.mark.parametrize("kind", ["hashing", "tt_residual"])
def test_steps_change_tables_of_two_bytes_a_number(kind):
    rows = jnp.asarray(normal(96, 8))
    options = {"start": 0.5 * np.asarray(rows)} if kind == "tt_residual" else {}
    fused = jax_tt.optimizers.Adam(0.02)
    table = make(kind, 96, 8, 3.0, dtype="bfloat16", optimizer=fused, **options)
    optimizer = jax_tt.FusedOptimizer(table, optax.adam(0.02))
    before = [np.asarray(array, np.float32) for array in arrays(table)]
    dtypes = [array.dtype for array in arrays(table)]
    assert jnp.bfloat16 in dtypes

    @nnx.jit
    def step(table, optimizer):
        def loss(table):
            return jnp.mean((table(jnp.arange(96)) - rows) ** 2)

        value, grads = jax_tt.value_and_grad(loss)(table)
        optimizer.update(table, grads)
        return value

    losses = [float(step(table, optimizer)) for _ in range(20)]
    assert losses[-1] < 0.9 * losses[0]
    after = arrays(table)
    assert [array.dtype for array in after] == dtypes
    for old, new in zip(before, after, strict=True):
        assert (
            np.mean(old != np.asarray(new, np.float32)) > 0.7
        )  # hashing leaves some rows to no id


def tiny(variant: str, **options: Any) -> Config:
    """Settings of a run on the interactions, with tables that are four times smaller where they can be."""
    ratio = None if variant == "dense_fused" else 4.0
    sizes = {"features": 8, "tt_rank": 16, "batch_size": 256, "negatives": 16, "seed": 0}
    return Config(variant=variant, ratio=ratio, **sizes, **options)


def test_learns(interactions, tmp_path):
    variant = "hashing"
    config = tiny(variant, learning_rate=0.03, l2=0.01, init_std=0.01, epochs=12)
    result = train(config, interactions, tmp_path / "run", k=10)
    assert result["loss_curve"][-1] < 0.97 * result["loss_curve"][0]
    assert 4 <= result["compression"] < 8 and result["order_bytes"] == 0
    # Chance is 10 of about 110 items; ids that share a row by chance hold a user back.
    assert result["recall"] > 0.1


def test_a_spectral_start_knows_the_groups_before_training(interactions, tmp_path):
    options = {"learning_rate": 1e-6, "l2": 0.2, "init_std": 0.25, "epochs": 1}
    config = tiny("tt2_fused", start="spectral", order="start", **options)
    result = train(config, interactions, tmp_path / "run", k=10)
    # Of the 20 items of a user's group 10 are found by guessing among them.
    assert result["recall"] > 0.3
