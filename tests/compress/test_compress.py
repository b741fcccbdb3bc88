"""`compress`: which table it returns, what it measures, and what it says of bad arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tt
from jax_tt._base.progress import Progress
from jax_tt._compress.candidate import Candidate, estimates
from jax_tt._compress.candidates import candidates, smallest
from jax_tt._compress.compress import leading
from jax_tt._compress.source import Source
from jax_tt.cli import main
from tests.cli.cli_case import QUIET, folder, ran, refused, table
from tests.helpers import to_dense

__all__ = ["folder", "table"]  # fixtures

TRAINS = ("low_rank", "tt", "tt_sum")
KINDS = ("quantized", "mixed", "product", "additive", "low_rank", "tt", "tt_sum")
N, D = 600, 8
RNG = np.random.default_rng(0)
# Near a few directions, with noise.
ROWS = (RNG.normal(size=(N, 3)) @ RNG.normal(size=(3, D)) + 0.1 * RNG.normal(size=(N, D))).astype(
    np.float32
)
DENSE = ROWS.nbytes


def explained(found, rows=ROWS, weights=None):
    weights = np.ones(len(rows)) if weights is None else weights
    ids, lookup = jnp.arange(len(rows)), jax_tt.Lookup(dtype=jnp.float32)
    error = np.asarray(jax_tt.lookup(found.table, found.state, ids, lookup)[0]) - rows
    squares = weights @ (rows.astype(np.float64) ** 2).sum(1)
    return 1 - weights @ (error**2).sum(1) / squares


def small(rows=ROWS, **options):
    return jax_tt.compress(rows, progress=False, **options)


def test_the_best_table_of_all_kinds():
    found = small(max_bytes=DENSE // 5)
    assert {one.kind for one in found.measured} == {*KINDS}
    assert found.chosen.quality == max(one.quality for one in found.measured)
    assert all(one.nbytes <= DENSE // 5 for one in found.measured)
    assert found.chosen.nbytes == sum(array.nbytes for array in found.state.values())
    assert found.chosen.quality == pytest.approx(explained(found), abs=1e-6)
    assert (found.dense.quality, found.dense.nbytes) == (1.0, DENSE)
    text = str(found).splitlines()
    assert len(text) == 2 + len(found.measured)
    assert sum("*" in line for line in text[1:]) == 1


@pytest.mark.slow(but="mixed")
@pytest.mark.parametrize("kind", ["mixed", "additive", "low_rank", "tt_sum"])
def test_one_kind(kind):
    found = small(kind=kind, max_bytes=DENSE // 4)
    assert {one.kind for one in found.measured} == {kind}
    assert found.chosen.quality == pytest.approx(explained(found), abs=1e-6)
    again = small(kind=kind, max_bytes=DENSE // 4)
    for name, array in found.state.items():
        np.testing.assert_array_equal(array, again.state[name])
    rows, _ = jax_tt.lookup(found.table, found.state, jnp.array([0, N - 1]))
    assert rows.shape == (2, D)


def test_large_tables_are_tried_on_a_sample():
    rows = np.random.default_rng(5).normal(size=(4500, 8)).astype(np.float32)
    kinds = ["quantized", "low_rank"]
    found = small(rows, kind=[*kinds, "product"], max_bytes=rows.nbytes // 6)
    assert found.chosen.quality == pytest.approx(explained(found, rows), abs=1e-6)
    assert {one.kind for one in found.measured if one.sampled} >= {"low_rank"}
    assert not found.chosen.sampled
    assert found.chosen.quality >= max(one.quality for one in found.measured if not one.sampled)
    assert "sample of the rows" in str(found)
    options = {"kind": [*kinds, "product"], "max_bytes": rows.nbytes // 6}
    by_metric = small(rows, metric=lambda table, state: 7.0, **options)
    assert {(one.sampled, one.quality) for one in by_metric.measured} == {
        (False, 7.0),
        (True, -np.inf),
    }
    goal = found.chosen.quality - 0.01
    smallest = small(rows, kind=kinds, min_quality=goal)
    assert smallest.chosen.quality >= goal
    with pytest.raises(ValueError, match=r"min_quality: got 0.9999, but at most 0\.\d+ was found"):
        small(rows, kind="low_rank", min_quality=0.9999)


def test_the_leading_tables_are_of_several_kinds():
    tables = [Candidate(kind, str(k), 9, small) for k, kind in enumerate("aaabc")]
    qualities = [0.9, 0.8, 0.7, 0.6, 0.1]
    assert leading(tables, qualities, 2) == tables[:2]
    assert leading(tables, qualities, 2, lambda _, quality: quality > 0.5) == [
        *tables[:2],
        tables[3],
    ]


def test_variations_of_tables_that_are_far_from_the_best_are_not_tried():
    def made(quality):
        rows = ROWS * (1 - (1 - quality) ** 0.5)
        return lambda source: (jax_tt.tables.DenseTable(N, D), {"embedding": jnp.asarray(rows)})

    far, near = (Candidate("a", f"plain {x}", 9, made(x)) for x in (0.0, 0.8))
    tables = [far, near, Candidate("b", "", 9, made(0.99))]
    tables += [Candidate("a", f"of {one.label}", 9, made(0.9), plain=one) for one in (far, near)]
    with Progress(False) as bar:
        tried = estimates(tables, Source(ROWS, None, jnp.bfloat16, 0), bar)
    assert [one.quality for one in tried] == pytest.approx([0.0, 0.8, 0.99, -np.inf, 0.9], abs=1e-5)


def test_the_smallest_size_of_a_kind():
    for shape in [(50, 8), (777, 30)]:
        for kind in KINDS:
            source = Source(np.ones(shape, np.float32), None, jnp.bfloat16, 0)
            least = smallest(source, kind)
            assert candidates(source, kind, least)
            assert not candidates(source, kind, least - 1)


def test_some_kinds():
    found = small(kind=("quantized", "low_rank"), max_bytes=DENSE // 4)
    assert {one.kind for one in found.measured} == {"quantized", "low_rank"}
    with pytest.raises(ValueError, match="kind: got 'hashing'; expected one of 'auto'"):
        small(kind=["quantized", "hashing"], max_bytes=DENSE // 4)


def test_low_rank_is_the_svd():
    found = small(kind="low_rank", max_bytes=4 * 2 * (N + D), param_dtype=jnp.float32)
    values = np.linalg.svd(ROWS, compute_uv=False) ** 2
    assert found.chosen.detail == "rank 2"
    assert found.chosen.quality == pytest.approx(values[:2].sum() / values.sum(), abs=1e-5)


def test_the_smallest_table_that_is_good_enough():
    found = small(kind=("quantized", "additive", "low_rank"), min_quality=0.95)
    good = [one for one in found.measured if one.quality >= 0.95]
    assert found.chosen.nbytes == min(one.nbytes for one in good)
    assert explained(found) >= 0.95 - 1e-6
    # Smaller ones of the kind were tried.
    assert any(one.quality < 0.95 for one in found.measured)


def test_the_metric_decides():
    calls = []

    def metric(table, state):
        calls.append(type(table).__name__)
        return -float(sum(array.nbytes for array in state.values()))

    found = small(max_bytes=DENSE // 4, metric=metric)
    assert found.chosen.nbytes == min(one.nbytes for one in found.measured)
    assert found.dense.quality == -DENSE
    # Errors are in another column than what the metric says, which no table of a sample has.
    *_, error, quality = str(found).splitlines()[0].split()
    *_, dense_error, dense_quality = str(found).splitlines()[-1].split()
    assert (error, quality, dense_error) == ("error", "quality", "0")
    assert float(dense_quality) == -DENSE
    # The best two and the best one of another kind are made twice.
    assert len(calls) == len(found.measured) + 4
    assert calls[-1] == "DenseTable"


@pytest.mark.parametrize("kind", ["additive", "low_rank"])
def test_weights(kind):
    weights = np.where(np.arange(N) < 100, 1.0, 1e-4)
    found, plain = (small(kind=kind, max_bytes=DENSE // 12, weights=own) for own in (weights, None))
    assert found.chosen.quality == pytest.approx(explained(found, weights=weights), abs=1e-6)
    assert found.chosen.quality > explained(plain, weights=weights)


def test_rows_in_a_memory_map(tmp_path):
    np.save(tmp_path / "rows.npy", ROWS)
    mapped = np.load(tmp_path / "rows.npy", mmap_mode="r")
    options = {"kind": ("quantized", "product"), "max_bytes": DENSE // 8}
    assert small(mapped, **options).chosen == small(**options).chosen


def test_picture():
    figure = pytest.importorskip("matplotlib.figure").Figure()
    found = small(kind="additive", max_bytes=DENSE // 5)
    axis = figure.subplots()
    found.draw(axis)
    assert [text.get_text() for text in axis.get_legend().get_texts()] == [
        "additive",
        "chosen",
        "dense",
    ]


def test_bad_arguments():
    for options, message in [
        ({}, "max_bytes, min_quality: got none of them"),
        ({"max_bytes": 10**4, "min_quality": 0.5}, "max_bytes, min_quality: got max_bytes and"),
        (
            {"max_bytes": 8},
            r"max_bytes: got 8 bytes, but the smallest tables of 600 x 8 take.*tt [0-9]",
        ),
        ({"max_bytes": 100, "kind": "quantized"}, "take: quantized 3,600 bytes. Expected"),
        ({"max_bytes": 0}, "max_bytes: got 0"),
        ({"max_bytes": 10**4, "kind": "hashing"}, "kind: got 'hashing'; expected one of 'auto', "),
        ({"min_quality": float("nan")}, "min_quality: got NaN"),
        ({"min_quality": 2.0, "kind": "quantized"}, "at most 0.9.* was found.*have 1. Expected"),
        ({"max_bytes": 10**4, "weights": np.ones(3)}, r"weights: got .*shape \(3,\)"),
        ({"max_bytes": 10**4, "kind": "tt", "param_dtype": "int8"}, "int8"),
        (
            {"max_bytes": 10**4, "kind": "quantized", "metric": lambda table, state: np.nan},
            "metric: for quantized with 8 bits a number: got NaN|metric: for quantized.*got NaN",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            small(**options)


def test_arguments_of_other_types():
    table = jax_tt.dense_table(4, 2)
    for rows in (None, table, (table, {})):
        with pytest.raises(
            TypeError, match=r"rows: got .*; expected floats .*to_dense\(table, state"
        ):
            small(rows, max_bytes=10**4)
    for size in (1.5, "1MB"):
        with pytest.raises(TypeError, match=r"max_bytes: got .*; expected an integer\.$"):
            small(max_bytes=size)
    with pytest.raises(TypeError, match="metric: got a float; expected a function"):
        small(max_bytes=10**4, metric=0.5)
    with pytest.raises(
        TypeError, match=r"metric: for .* got float32 of shape \(2,\); expected one"
    ):
        small(max_bytes=10**4, kind="quantized", metric=lambda table, state: jnp.ones(2))
    with pytest.raises(ValueError, match="NaN or infinity"):
        small(np.full((20, 4), np.nan, np.float32), max_bytes=10**3, kind="quantized")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, of numbers beyond its range
def test_kinds_that_do_not_hold_the_rows_are_left_out():
    rows = ROWS[:40] * np.float32(7e37 / np.abs(ROWS[:40]).max())
    found = small(rows, kind=("quantized", "product", "low_rank"), max_bytes=900)
    assert found.chosen.kind == "low_rank" and len(found.measured) == 1
    for kind, message in (
        ("product", "rows: row .* holds numbers of size .*e.37; expected at most"),
        ("quantized", "rows"),
    ):
        with pytest.raises(ValueError, match=message):
            small(rows, kind=kind, max_bytes=900)
    (planned,) = jax_tt.plan({"rows": rows}, 900, kinds=["product"]).values()
    assert planned.kind in ("tensor train", "low rank") and planned.error < 1


def test_threads_compute_on_the_device_of_the_caller(monkeypatch):
    devices, types = set(), set()

    def made(source):
        array = jnp.asarray(source.rows) * np.float64(1)
        devices.update(array.devices())
        types.add(array.dtype)
        return jax_tt.tables.DenseTable(N, D), {"embedding": jnp.asarray(ROWS)}

    device = jax.devices()[1]
    with jax.default_device(device), Progress(False) as bar:
        source = Source(ROWS, None, jnp.bfloat16, 0)
        estimates([Candidate("a", "", 9, made), Candidate("b", "", 9, made)], source, bar)
    assert devices == {device} and types == {np.dtype(np.float32)}


@pytest.mark.slow
def test_one_row_and_one_column():
    for rows in (np.ones((1, 1), np.float32), np.zeros((3, 1), np.float32)):
        assert small(rows, max_bytes=10**4).chosen.quality > 0.99


# The command line


@pytest.mark.slow(but="auto")
@pytest.mark.parametrize("kind", ["auto", "mixed", "tt_sum"])
def test_command(table, capsys, kind):
    size = table.nbytes // (5 if kind == "mixed" else 2)
    of_kind = [] if kind == "auto" else ["--kind", kind]  # the default of Python, too
    ran("compress", "table.npy", "--out", "o.safetensors", *of_kind, "--max-bytes", f"{size}", QUIET)  # fmt: skip
    lines = capsys.readouterr().out.splitlines()
    chosen = lines[-1].partition(": ")[2].partition(" with ")[0]
    assert kind in ("auto", chosen)
    ((small, state),) = jax_tt.files.load("o.safetensors").values()
    rows = to_dense(small, state)
    best = max(float(line.split()[-1]) for line in lines[1:-2])
    if kind == "auto":
        again = jax_tt.compress(table, max_bytes=size, progress=False)
        assert chosen == again.chosen.kind and small == again.table
        for name, array in again.state.items():
            np.testing.assert_array_equal(state[name], array)
    error = np.sum((np.asarray(rows, np.float32) - table) ** 2) / np.sum(table**2)
    assert 1 - error == pytest.approx(best, abs=1e-3)
    ran("info", "o.safetensors", "--against", "table.npy", QUIET)
    _, line = capsys.readouterr().out.strip().splitlines()
    *_, nbytes, ratio, found, _, _ = line.split()
    if chosen in TRAINS:
        assert float(found) < 1.1 * np.sqrt(error)  # `rows` are computed from cores in 16 bits
    else:
        assert float(found) == pytest.approx(np.sqrt(error), rel=1e-2)
        size = sum(array.nbytes for array in state.values())
        assert nbytes == f"{size:,}" and ratio == f"{table.nbytes / size:,.1f}x"
        of_kind = {"quantized": "bits a number", "mixed": " rows"}
        assert of_kind.get(chosen, "codes of") in line


def test_info_of_several_tables(table, capsys):
    small = {f"t{bits}": jax_tt.quantize(table, bits) for bits in (8, 4)}
    jax_tt.files.save("o.safetensors", small)
    ran("info", "o.safetensors", QUIET)
    _, *lines = capsys.readouterr().out.strip().splitlines()
    assert [line.split()[-3:] for line in lines] == [["?"] * 3] * 2
    ran("info", "o.safetensors", "--against", "table.npy", "--name", "t4", QUIET)
    line = capsys.readouterr().out.strip().splitlines()[2]
    errors = np.linalg.norm(to_dense(small["t4"][0], small["t4"][1]) - table, axis=1)
    relative = errors / np.linalg.norm(table, axis=1)
    assert line.split()[-2:] == [f"{np.quantile(relative, at):.3g}" for at in (0.5, 0.99)]
    message = refused(capsys, "info", "o.safetensors", "--against", "table.npy", QUIET)
    assert "got 2 compressed tables; expected one, or --name to say which: t8, t4" in message
    np.save("other.npy", table[1:])
    argv = ["info", "o.safetensors", "--against", "other.npy", "--name", "t8", QUIET]
    assert f"of shape {table[1:].shape}; expected {table.shape}, as 't8'" in refused(capsys, *argv)


def test_command_errors(table, capsys):
    argv = ["compress", "table.npy", "--out", "o.safetensors", QUIET]
    line = refused(capsys, *argv, "--min-quality", "0.9", "--row-factors", "20,15")
    assert "--min-quality: got with --row-factors; expected none" in line
    line = refused(capsys, *argv, "--kind", "auto", "--ranks", "2")
    assert "--ranks: got with --kind" in line
    line = refused(capsys, *argv, "--kind", "auto", "--max-bytes", "1")
    assert "max_bytes: got 1 bytes, but" in line
    with pytest.raises(SystemExit):
        main([*argv, "--kind", "auto", "--residuals", "--max-bytes", "1MB"])


def test_most_of_a_table_is_lost_is_said_of_every_result(folder, capsys):
    np.save("noise.npy", np.random.default_rng(0).normal(size=(300, 16)).astype(np.float32))
    for more in (
        ["--ranks", "1"],
        ["--residuals", "--dtype", "bfloat16", "--max-bytes", "1200"],
        ["--kind", "low_rank", "--max-bytes", "1kB"],
    ):
        ran("compress", "noise.npy", "--out", "o.safetensors", "--force", *more, QUIET)
        (warning,) = capsys.readouterr().err.strip().splitlines()
        assert warning.startswith(
            "jax-tt: warning: table: most of it is lost, with a relative error of 0."
        )
    rows = np.load("noise.npy")
    found = small(rows, kind="low_rank", max_bytes=1000)
    assert found.chosen.error > 0.7 and "most of it is lost" in str(found).splitlines()[-1]
    assert "most of it is lost" not in str(small(rows, kind="quantized", max_bytes=4000))


def test_agreement_of_the_best_rows():
    rows = np.random.default_rng(0).normal(size=(200, 8)).astype(np.float32)
    queries = np.random.default_rng(1).normal(size=(2, 3, 8)).astype(np.float32)
    metric = jax_tt.compression.top_k_agreement(rows, queries, k=5)
    dense = jax_tt.dense_table(200, 8)
    assert metric(dense, {"embedding": jnp.asarray(rows)}) == 1
    assert metric(dense, {"embedding": jnp.asarray(-rows)}) == 0
    table, state = jax_tt.quantize(rows, bits=2)
    smaller = np.asarray(jax_tt.tables.to_dense(table, state))
    first = [np.argsort(-(queries.reshape(6, 8) @ x.T), axis=1)[:, :5] for x in (rows, smaller)]
    want = np.mean([len(np.intersect1d(*pair)) / 5 for pair in zip(*first, strict=True)])
    assert 0 < want < 1
    np.testing.assert_allclose(metric(table, state), want)
    assert jax_tt.compression.top_k_agreement(rows, queries, k=300)(table, state) == 1
    with pytest.raises(ValueError, match=r"queries: got .*shape \(0, 8\); expected at least one"):
        jax_tt.compression.top_k_agreement(rows, queries[0, :0], k=5)
