"""Plans: within the budget, the best of what was measured, and honest about it."""

import dataclasses
import itertools
import threading
import time

import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings

import jax_tt
from jax_tt._base.progress import Progress
from jax_tt._compress.candidate import Candidate
from jax_tt._planning.candidates import DENSE, TENSOR_TRAIN
from jax_tt._planning.plan import _measured, _together, allocate, rivals

N, D = 600, 8


def smooth():
    """Rows change slowly: a tensor train of small ranks, of full rank as a matrix."""
    rng = np.random.default_rng(0)
    phase = np.linspace(0, 20, N)[:, None] * rng.uniform(0, 1, D) + rng.uniform(0, 6, D)
    return (np.sin(phase) + 0.02 * rng.standard_normal(phase.shape)).astype(np.float32)


def of_low_rank():
    rng = np.random.default_rng(1)
    product = rng.standard_normal((N, 2)) @ rng.standard_normal((2, D))
    return (product + 0.02 * rng.standard_normal((N, D))).astype(np.float32)


def clustered():
    """Thirty kinds of rows in no order."""
    rng = np.random.default_rng(2)
    kinds = rng.standard_normal((30, D))
    return (kinds[rng.integers(0, 30, N)] + 0.02 * rng.standard_normal((N, D))).astype(np.float32)


def compressed(planned, table):
    """Error of the planned form by the SVD or TT-SVD, in the planned order, in float64."""
    rows = table if planned.id_order is None else table[planned.id_order.inverse.rows]
    if planned.kind == "low rank":
        u, s, vt = np.linalg.svd(rows.astype(np.float64), full_matrices=False)
        (rank,) = planned.shape.ranks
        approximation = (u[:, :rank] * s[:rank]) @ vt[:rank]
    else:
        cores = jax_tt.tt.from_dense(rows, shape=planned.shape).cores
        approximation = np.asarray(jax_tt.tt.to_dense(cores, len(rows)), np.float64)
    return np.linalg.norm(approximation - rows) / np.linalg.norm(rows)


@pytest.fixture(scope="module")
def trained():
    """Three tables, of which each has another best form, and their plan."""
    tables = {"smooth": smooth(), "of_low_rank": of_low_rank(), "clustered": clustered()}
    return tables, jax_tt.plan(tables, 22_000, kinds=())


def test_each_table_gets_its_form(trained):
    tables, plan = trained
    assert plan.nbytes <= plan.budget_bytes
    assert [planned.kind for planned in plan.values()] == [
        "tensor train",
        "low rank",
        "tensor train",
    ]
    assert plan["clustered"].id_order is not None and plan["smooth"].id_order is None
    for name, planned in plan.items():
        assert planned.measured
        assert abs(compressed(planned, tables[name]) - planned.error) < 0.01


def test_the_rival_of_equal_bytes_is_named(trained):
    tables, plan = trained
    rank = plan["clustered"].nbytes // (4 * (N + D))
    s = np.linalg.svd(tables["clustered"].astype(np.float64), compute_uv=False)
    error = np.sqrt(np.sum(s[rank:] ** 2) / np.sum(s**2))
    assert f"low rank {rank}, of as many bytes, has error {error:.3g}" in plan["clustered"].reason
    assert plan["smooth"].nbytes < 4 * (N + D)
    assert "smaller than any product of low rank" in plan["smooth"].reason
    planned = plan["of_low_rank"]
    train = jax_tt.tt.from_dense(tables["of_low_rank"], max_bytes=planned.nbytes)
    assert train.relative_error > planned.error
    assert f"has error {train.relative_error:.3g}" in planned.reason


def test_bytes_of_an_order_count(trained):
    _, plan = trained
    planned = plan["clustered"]
    assert planned.nbytes == planned.shape.cost().bytes + 2 * N


@pytest.mark.parametrize("name", ["of_low_rank", "clustered"])
def test_layers_take_the_arguments(trained, name):
    tables, plan = trained
    table, planned = tables[name], plan[name]
    layer = jax_tt.TTEmbed(**planned.arguments(), rngs=nnx.Rngs(0))
    rows = table if planned.id_order is None else table[planned.id_order.inverse.rows]
    found = jax_tt.tt.from_dense(rows, shape=planned.shape)
    for k, core in enumerate(found.cores):
        getattr(layer, f"core_{k}")[...] = core
    got = np.asarray(layer(jnp.arange(N)), np.float64)
    error = np.linalg.norm(got - table) / np.linalg.norm(table)
    assert abs(error - planned.error) < 0.01


@pytest.mark.slow
def test_kinds_of_compress():
    """Each table becomes what was measured to be best, and `compress` makes it."""
    rng = np.random.default_rng(3)
    noise = rng.standard_normal((2000, 16)).astype(np.float32)
    tables = {"noise": noise, "sized": (1000, 16)}
    plan = jax_tt.plan(tables, 24_000, kinds=["product"])
    noisy, other = plan.values()
    assert (noisy.kind, noisy.shape, noisy.measured) == ("product", None, True)
    assert isinstance(noisy.table(), jax_tt.tables.CodedTable)
    assert other.kind == TENSOR_TRAIN
    assert plan.nbytes <= 24_000
    found = jax_tt.compress(noise, kind="product", max_bytes=noisy.nbytes, progress=False)
    assert found.table == noisy.table()
    assert 1 - found.chosen.quality == pytest.approx(noisy.error**2, rel=0.1)
    assert (
        f"product, {noisy.detail}" in str(plan)
        and "a tensor train of as many bytes" in noisy.reason
    )
    with pytest.raises(TypeError, match=r"arguments: got a planned table of the kind product"):
        noisy.arguments()
    # Without a table that is trained, there is nothing to round.
    (rounded,) = jax_tt.plan({"noise": noise}, 30_000, kinds=["quantized"]).values()
    assert rounded.kind == "quantized" and rounded.detail.startswith("4 bits a number")
    table = rounded.table(update=jax_tt.Update(jax_tt.optimizers.SGD(0.1)))
    assert table.bits == 4 and table.nbytes == rounded.nbytes
    # Between 3 and 4 bits a number.
    (mixed,) = jax_tt.plan({"noise": noise}, 22_000, kinds=["quantized", "mixed"]).values()
    assert mixed.kind == "mixed" and isinstance(mixed.table(), jax_tt.tables.MixedTable)
    assert (
        mixed.nbytes > jax_tt.tables.QuantizedTable(2000, 16, 3).nbytes
        and mixed.error < noisy.error
    )
    (summed,) = jax_tt.plan({"noise": noise}, 40_000, kinds=["tt_sum"]).values()
    assert summed.kind == "tt_sum" and len(summed.table().tables) > 1
    assert jax_tt.plan({"noise": noise}, 40_000, kinds=())["noise"].error > summed.error
    with pytest.raises(ValueError, match="kinds"):
        jax_tt.plan(tables, 24_000, kinds=["sketch"])
    with pytest.raises(TypeError, match=r"kinds: got 'quantized'; expected a sequence"):
        jax_tt.plan(tables, 24_000, kinds="quantized")


def test_kinds_are_tried_on_a_sample(capfd):
    """The kind without an error is found among all, and what is chosen is measured on all rows."""
    rng = np.random.default_rng(4)
    numbers = rng.integers(-7, 9, (4500, 8)).astype(np.float64)
    numbers[:, :2] = -7, 8
    numbers *= 2.0 ** rng.integers(-5, 6, (4500, 1))
    kinds = ["quantized", "product"]
    (planned,) = jax_tt.plan(
        {"whole": numbers.astype(np.float32)}, 45_000, progress=True, kinds=kinds
    ).values()
    assert (planned.kind, planned.error) == ("quantized", pytest.approx(0, abs=1e-6))
    assert planned.nbytes == planned.small.nbytes
    assert "a sample of whole as quantized, 4 bits a number" in capfd.readouterr().err


def test_bytes_that_remain_are_used():
    """Sizes are a factor of four apart; then larger tables of the kinds that are near are tried."""
    noise = np.random.default_rng(0).normal(size=(600, 8)).astype(np.float32)
    plan = jax_tt.plan({"noise": noise}, 2_300, kinds=["product"])
    (planned,) = plan.values()
    assert planned.kind == "product" and noise.nbytes // 16 < plan.nbytes <= 2_300
    found = jax_tt.compress(noise, kind="product", max_bytes=2_300, progress=False)
    assert planned.detail == found.chosen.detail


def test_kinds_without_a_size_that_fits_are_tried_where_bytes_remain():
    draw = np.random.default_rng(0)
    rows = draw.normal(size=(600, 4)) @ draw.normal(size=(4, 16)) + 0.2 * draw.normal(
        size=(600, 16)
    )
    (planned,) = jax_tt.plan({"rows": rows}, 1_600, kinds=["quantized", "product"]).values()
    assert planned.kind == "product" and planned.error < 0.5


def test_rivals_of_other_kinds():
    kinds = {"a": 0.1, "b": 0.13, "c": 0.12, "d": 0.3}
    tried = [Candidate(kind, "", 9, print, error=kinds[kind]) for kind in "bcd"]
    tried += [Candidate("b", "", size, print, error=0.125 - size / 1000) for size in (9, 12, 20)]
    best = Candidate("a", "", 10, error=kinds["a"])
    found = [(one.kind, one.nbytes) for one in rivals([*tried, best], best, 12)]
    assert found == [("b", 12), ("c", 9)]


def test_rivals_of_codes_are_measured_as_samples_are_too_small_for_them():
    def one(kind: str, nbytes: int, error: float, **options) -> Candidate:
        return Candidate(kind, "", nbytes, print, error=error, **options)

    def of_sample(kind: str, nbytes: int, error: float) -> Candidate:
        return one(kind, nbytes, error, sampled=True, of_sample=error)

    best = Candidate("quantized", "", 10, error=0.1)
    sampled = [of_sample("product", 9, 0.29), of_sample("product", 8, 0.25)]
    sampled += [of_sample("additive", 9, 0.71), of_sample("additive", 4, 0.5)]
    assert rivals([best, *sampled], best, 10) == [sampled[1]]
    assert not rivals([best, of_sample("product", 9, 0.36)], best, 10)
    assert not rivals([best, of_sample("mixed", 9, 0.12)], best, 10)
    # After a quick fit of one, others of its kind are not tried.
    for error, expected in ((0.19, True), (0.21, False)):
        quick = one("product", 8, error)
        assert rivals([best, sampled[0], quick], best, 10) == ([quick] if expected else [])
    # One for which there is no room says nothing about these.
    larger = one("product", 11, 0.05)
    assert rivals([best, *sampled, larger], best, 10) == [sampled[1]]


def test_errors_on_a_sample_are_compared_with_each_other():
    def one(kind: str, error: float, of_sample: float, **options) -> Candidate:
        return Candidate(kind, "", 9, error=error, of_sample=of_sample, **options)

    def sampled(kind: str, error: float) -> Candidate:
        return one(kind, error, error, sampled=True, make=print)

    product = sampled("product", 0.2)
    # All rows of the mixed table have a larger error than the sample.
    mixed = one("mixed", 0.07, 0.05)
    assert not rivals([product, mixed], mixed, 10)
    mixed = sampled("mixed", 0.06)
    assert rivals([product, mixed], mixed, 10) == [product]
    # A sample is too small for the codebooks of the product, too.
    quick = one("product", 0.06, 0.1, make=print)
    sums = [sampled("additive", error) for error in (0.21, 0.19)]
    assert not rivals([quick, sums[0]], quick, 10)
    assert rivals([quick, *sums], quick, 10) == [sums[1]]
    # After a full fit, what it reached counts, however far its error on the sample was from that.
    fitted = one("additive", 0.25, 0.3)
    assert rivals([fitted, sampled("product", 0.31)], fitted, 10)
    assert not rivals([fitted, sampled("product", 0.9)], fitted, 10)
    # The error of codes on a sample says too little about rounded numbers.
    assert not rivals([product, one("quantized", 0.2, 0.2, make=print)], product, 10)


def test_what_is_near_is_measured_at_the_same_time_and_nothing_twice():
    measured = []

    def one(kind: str, *errors: float) -> Candidate:
        """Of these errors on a sample and, one after the other, on all rows."""
        options = {"error": errors[0], "of_sample": errors[0], "sampled": True}
        return Candidate(kind, "", 9, print, dict.fromkeys(map(str, errors[1:])), **options)

    class Fits:
        def fitted(self, one: Candidate) -> Candidate:
            measured.append((one.kind, one.error))
            error, *more = one.quick
            later = {"make": print if more else None, "quick": dict.fromkeys(more)}
            return dataclasses.replace(one, error=float(error), sampled=False, **later)

    tried = [one("mixed", 0.05, 0.06), one("product", 0.15, 0.08, 0.03), one("additive", 0.5, 0.1)]
    dense = Candidate("dense", "", 100, error=0.0)
    with Progress(False) as bar:
        chosen = _measured({"a": Fits()}, {"a": [dense, *tried]}, 10, bar)["a"]
    assert (chosen.kind, chosen.error) == ("product", 0.03)
    assert sorted(measured[:2]) == [("mixed", 0.05), ("product", 0.15)]
    assert measured[2:] == [("product", 0.08)]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, of numbers beyond its range
def test_samples_without_an_error_are_not_chosen():
    """Their squares are not finite: a table of codes then says nothing of its quality."""
    rows = np.random.default_rng(0).normal(size=(4300, 8)) * 1e38
    rows = np.clip(rows, -3e38, 3e38).astype(np.float32)
    (planned,) = jax_tt.plan({"rows": rows}, 51_600, kinds=["additive"]).values()
    assert planned.kind == "tensor train" and planned.error < 0.5


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_other_tables_are_not_tried_to_the_end_after_an_error(error):
    bar, begun, stages = Progress(False), threading.Event(), []

    def work(fails: bool) -> None:
        if fails:
            begun.wait()
            raise error
        for _ in range(1_000):
            with bar.stage("another form"):
                stages.append(begun.set())
                time.sleep(0.01)

    with pytest.raises(error):
        _together(bar, work, [True, False])
    assert len(stages) < 1_000


def test_a_small_table_has_no_rival():
    halves = np.random.default_rng(0).normal(size=(2, 16)).astype(np.float32)
    (planned,) = jax_tt.plan({"halves": halves}, 40, kinds=["quantized"]).values()
    assert (planned.kind, planned.reason) == ("quantized", "smaller than any tensor train")


def test_text(trained):
    _, plan = trained
    heading, *lines, total = str(plan).splitlines()
    assert heading.split()[:2] == ["table", "choice"] and heading.endswith("reason")
    assert [line.split()[0] for line in lines] == list(plan)
    assert f"{plan.nbytes:,} of 22,000 bytes" in total
    assert "~" not in "".join(lines)


def test_most_of_a_table_is_lost_is_said_of_predicted_errors_too():
    (planned,) = jax_tt.plan({"items": (10**6, 64)}, 10**5).values()
    assert not planned.measured and planned.error > 0.7
    assert "most of it is lost" in planned.reason


def test_small_tables_are_dense():
    plan = jax_tt.plan({"days": (7, 4), "one": (1, 1), "items": (10**6, 64)}, 10**6)
    assert [planned.kind for planned in plan.values()] == ["dense", "dense", "tensor train"]
    sizes = {"num_embeddings": 7, "features": 4}
    assert plan["days"].arguments() == {**sizes, "param_dtype": jnp.float32}
    assert plan["days"].table(name="days") == jax_tt.tables.DenseTable(**sizes, name="days")
    assert plan["days"].error == 0 and not plan["items"].measured
    assert 0.9 * 10**6 < plan.nbytes <= 10**6
    assert "~" in str(plan).splitlines()[3]


def test_a_large_budget_makes_all_dense():
    plan = jax_tt.plan({"a": (1000, 8), "b": smooth()}, 10**8, kinds=["quantized"])
    assert [planned.kind for planned in plan.values()] == ["dense", "dense"]
    assert plan.nbytes == 4 * 1000 * 8 + 4 * N * D


def test_storage_type_counts():
    sizes = {"a": (100_000, 32)}
    half = jax_tt.plan(sizes, 200_000, dtype=jnp.bfloat16)["a"]
    single = jax_tt.plan(sizes, 200_000)["a"]
    assert half.nbytes == half.shape.num_params * 2 <= 200_000
    assert half.error < single.error


@given(
    st.lists(
        st.lists(st.tuples(st.integers(1, 40), st.integers(0, 8)), min_size=1, max_size=4),
        min_size=1,
        max_size=3,
    ),
    st.integers(1, 100),
)
@settings(max_examples=100)
def test_allocation(tables, budget):
    """Within the budget, and no table has a better candidate that still fits in what is left."""
    candidates = {
        str(k): [Candidate(TENSOR_TRAIN, "", size, error=error / 8) for size, error in some]
        for k, some in enumerate(tables)
    }
    found = allocate(candidates, budget)
    least = sum(min(size for size, _ in some) for some in tables)
    assert (found is None) == (least > budget)
    if found is None:
        return
    taken = sum(one.nbytes for one in found.values())
    assert taken <= budget
    best = min(
        sum(one.error**2 for one in combination)
        for combination in itertools.product(*candidates.values())
        if sum(one.nbytes for one in combination) <= budget
    )
    # The relaxed optimum is missed by at most one step of one table.
    reached = sum(one.error**2 for one in found.values())
    assert best <= reached + 1e-12 and reached <= best + 1


def test_allocation_prefers_dense_where_it_is_cheap():
    small = [Candidate(DENSE, "", 10, error=0.0), Candidate(TENSOR_TRAIN, "", 8, error=0.9)]
    large = [Candidate(TENSOR_TRAIN, "", n, error=10 / n) for n in (20, 40, 80)]
    found = allocate({"small": small, "large": large}, 51)
    assert found is not None
    assert (found["small"].kind, found["large"].nbytes) == (DENSE, 40)


# Caches


def test_caches_of_hot_rows():
    rng = np.random.default_rng(0)
    hot = np.where(rng.random((500, 20)) < 0.7, rng.integers(0, 200, (500, 20)), -1)
    cold = rng.integers(0, 100_000, (500, 20))
    ids = np.where(hot >= 0, 499 * hot, cold)
    sizes = {"hot": (100_000, 32), "even": (100_000, 32), "days": (7, 4)}
    samples = {"hot": ids, "even": cold, "days": ids % 7}
    plan = jax_tt.plan(sizes, 1_000_000, samples)
    cache = plan["hot"].cache
    assert cache is not None and 150 <= cache.capacity <= 1000
    assert "the cache takes" in plan["hot"].reason
    assert plan["even"].cache is None and "no cache" in plan["even"].reason
    assert plan["days"].cache is None and plan["days"].kind == "dense"
    assert plan.nbytes <= 1_000_000
    counters = 16 * cache.counters
    rows = cache.capacity * (32 * 4 + 12)
    assert plan["hot"].nbytes == plan["hot"].shape.cost().bytes + rows + counters
    layer = jax_tt.TTEmbedBag(**plan["hot"].arguments(), rngs=nnx.Rngs(0))
    assert jax_tt.extension.with_name(layer.table, None) == plan["hot"].table()
    assert layer.cache == cache


def test_padding_of_a_sample_is_left_out():
    sample = np.where(np.arange(4000) % 2, -1, np.arange(4000) % 40)
    plain = jax_tt.plan({"a": (10**5, 16)}, 10**5, {"a": sample[sample >= 0]})
    assert jax_tt.plan({"a": (10**5, 16)}, 10**5, {"a": sample})["a"].cache == plain["a"].cache


# Errors


def test_errors():
    for tables, options, error, message in [
        ({}, {}, TypeError, "tables: got {}"),
        ([(3, 4)], {}, TypeError, "tables: got"),
        ({"a": (3,)}, {}, TypeError, r"tables\['a'\]: got \(3,\); expected"),
        ({"a": (3, 2.5)}, {}, TypeError, r"tables\['a'\]\[1\]: got 2.5"),
        ({"a": (0, 4)}, {}, ValueError, r"tables\['a'\]: got 0 x 4"),
        ({"a": np.ones((3, 4), int)}, {}, TypeError, "got int64 of shape"),
        ({"a": np.ones(3)}, {}, TypeError, r"shape \(3,\)"),
        ({"a": np.full((9, 4), np.nan)}, {}, ValueError, r"tables\['a'\]: got NaN"),
        ({"a": (10**6, 64)}, {"budget_bytes": 100}, ValueError, "expected at least 7"),
        # Before anything is fitted, which would find the NaN.
        (
            {"a": np.full((900, 4), np.nan)},
            {"budget_bytes": 4},
            ValueError,
            "got 4 bytes; expected",
        ),
        ({"a": (9, 4)}, {"id_samples": {"b": [1]}}, ValueError, "id_samples: got 'b'"),
        ({"a": (9, 4)}, {"id_samples": {"a": [1, 9]}}, ValueError, "got the id 9"),
        ({"a": (9, 4)}, {"id_samples": {"a": [-1]}}, ValueError, "fewer than two ids"),
        ({"a": (9, 4)}, {"id_samples": {"a": [0.5, 1]}}, TypeError, r"id_samples\['a'\]: ids"),
        ({"a": (9, 4)}, {"dtype": int}, ValueError, "dtype"),
        ({"a": (9, 4)}, {"budget_bytes": 1.5}, TypeError, "budget_bytes"),
    ]:
        with pytest.raises(error, match=message):
            jax_tt.plan(tables, **{"budget_bytes": 10_000, **options})
