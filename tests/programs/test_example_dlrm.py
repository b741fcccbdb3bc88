"""The DLRM example: data, metric, the four variants, checkpoints that survive a kill, the report."""

import dataclasses
import doctest
import functools
import gzip
import itertools
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")
pytest.importorskip("orbax.checkpoint")

from examples.dlrm import data_criteo, devices, main, metrics
from examples.dlrm.config import COMPARED, Config, parse
from examples.dlrm.create import create
from examples.dlrm.data_criteo import CriteoClicks
from examples.dlrm.data_synthetic import SyntheticClicks
from examples.dlrm.learner import start
from examples.dlrm.model import dot_products
from examples.dlrm.result import Result
from examples.dlrm.train import open_data, train

pytestmark = pytest.mark.usefixtures("promotion_of_a_user")

MAIN = Path(__file__).parents[2] / "examples" / "dlrm" / "main.py"
TINY = Config(
    tables="3000,500,7",
    tt_min_rows=1000,
    tt_ranks=4,
    features=8,
    bottom=(16,),
    top=(16,),
    steps=12,
    batch_size=256,
    eval_every=6,
    eval_examples=1024,
)


def flags(config: Config, *more: str) -> list[str]:
    """The command line that gives this configuration."""
    result = []
    for name, value in dataclasses.asdict(config).items():
        if value in (None, False):
            continue
        result.append("--" + name.replace("_", "-"))
        if value is not True:
            result.append(",".join(map(str, value)) if isinstance(value, tuple) else str(value))
    return [*result, *more]


# --- metric -------------------------------------------------------------------------------------


def test_auc_counts_pairs_and_is_nan_without_any() -> None:
    rng = np.random.default_rng(0)
    for levels in (3, 1000):
        scores, labels = rng.integers(0, levels, 200) / 7.0, rng.integers(0, 2, 200)
        pairs = np.sign(scores[labels == 1][:, None] - scores[labels == 0])
        assert metrics.auc(scores, labels) == pytest.approx(np.mean((pairs + 1) / 2), abs=1e-12)
    assert math.isnan(metrics.auc(np.array([1.0, 2.0]), np.array([1, 1])))
    assert math.isnan(metrics.auc(np.array([1.0, np.nan]), np.array([1, 0])))


def test_docstrings() -> None:
    for module in (metrics, data_criteo):
        tested = doctest.testmod(module)
        assert tested.attempted > 0 and tested.failed == 0


# --- synthetic log ------------------------------------------------------------------------------


def synthetic(**changes) -> SyntheticClicks:
    settings = {"table_sizes": (2_000_003, 900, 4), "batch_size": 4096, "evaluation_examples": 8192}
    return SyntheticClicks(**{**settings, **changes})


def test_synthetic_batch_is_a_function_of_seed_and_step() -> None:
    first, second = synthetic(), synthetic()
    after_two = list(itertools.islice(first.stream(first.start), 3))
    again, _ = next(second.stream(after_two[1][1]))
    for a, b in zip(after_two[2][0], again, strict=True):
        np.testing.assert_array_equal(a, b)
    other = synthetic(seed=1).batch(2)
    assert not np.array_equal(other.dense, again.dense)


def test_synthetic_ids_fill_the_tables_by_a_power_law() -> None:
    data = synthetic(zipf=1.2)
    ids = np.concatenate([data.batch(step).ids for step in range(20)])
    assert ids.dtype == np.int32 and ids.min() == 0
    assert (ids.max(axis=0) < np.array(data.table_sizes)).all()
    counts = np.sort(np.unique(ids[:, 0], return_counts=True)[1])[::-1]
    assert counts[0] > 20 * counts[100] > 0 and len(counts) > 10_000
    # Popular ids lie all over the table, not at its start.
    assert np.abs(np.quantile(ids[:, 0] / 2_000_003, [0.1, 0.9]) - [0.1, 0.9]).max() < 0.25


@pytest.mark.parametrize("order", ["clustered", "random"])
def test_synthetic_labels_follow_the_planted_probability(order: str) -> None:
    data = synthetic(id_order=order, evaluation_examples=50_000)
    batches = list(data.evaluation(data.start))
    logits = np.concatenate([data.best_scores(b) for b in batches])
    labels = np.concatenate([b.label for b in batches])
    p = 1 / (1 + np.exp(-logits))
    for low in np.arange(0.0, 1.0, 0.1):  # calibrated in every tenth
        chosen = (p >= low) & (p < low + 0.1)
        spread = np.sqrt(np.sum(p[chosen] * (1 - p[chosen])))
        assert abs(np.sum(labels[chosen] - p[chosen])) < 4 * spread + 1
    best = metrics.auc(logits, labels)
    noisy = metrics.auc(logits + np.random.default_rng(0).normal(size=len(logits)), labels)
    assert 0.75 < best < 0.9 and noisy < best


# --- Criteo files -------------------------------------------------------------------------------


def criteo_line(i: int) -> bytes:
    counts = [b"" if j == i % 13 else b"%d" % (i * j - 3) for j in range(13)]
    values = [b"" if j == i % 26 else b"%08x" % (i * 2654435761 % 2**32) for j in range(26)]
    return b"\t".join([b"%d" % (i % 2), *counts, *values]) + b"\n"


SIZES = tuple(range(10, 36))


def criteo(path: Path, **changes) -> CriteoClicks:
    settings = {"table_sizes": SIZES, "batch_size": 4, "evaluation_examples": 8}
    return CriteoClicks(path, **{**settings, **changes})


def batches(stream) -> list[list[np.ndarray]]:
    return [list(batch) for batch, _ in stream]


def test_criteo_reads_plain_gzip_and_folders_alike(tmp_path: Path) -> None:
    lines = [criteo_line(i) for i in range(23)]
    plain, packed, folder = tmp_path / "log.txt", tmp_path / "log.gz", tmp_path / "days"
    plain.write_bytes(b"".join(lines))
    packed.write_bytes(gzip.compress(b"".join(lines)))
    folder.mkdir()
    (folder / "day_2").write_bytes(b"".join(lines[:10]))
    (folder / "day_10.gz").write_bytes(gzip.compress(b"".join(lines[10:])))
    expected = batches(criteo(plain).stream((0, 0)))
    assert len(expected) == 5
    for path in (packed, folder):
        data = criteo(path)
        np.testing.assert_equal(batches(data.stream(data.start)), expected)
        # From every position the rest is the same.
        for n, (_, position) in enumerate(data.stream(data.start)):
            np.testing.assert_equal(batches(data.stream(position)), expected[n + 1 :])


def test_criteo_values(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_bytes(b"".join(criteo_line(i) for i in range(8)).replace(b"\n", b"\r\n"))
    dense, ids, label = next(criteo(path).stream((0, 0)))[0]
    assert dense.dtype == np.float32 and ids.dtype == np.int32 and label.dtype == np.float32
    assert dense.shape == (4, 13) and ids.shape == (4, 26)
    np.testing.assert_array_equal(label, [0, 1, 0, 1])
    assert dense[2, 5] == pytest.approx(math.log1p(2 * 5 - 3))
    assert dense[2, 2] == 0.0 and dense[2, 0] == 0.0  # missing, and negative
    for i in range(4):
        assert ids[i, i] == 0  # missing
    assert (ids < np.array(SIZES)).all() and (np.sum(ids == 0, axis=1) == 1).all()


def test_criteo_evaluates_on_the_lines_behind_training_or_on_another_file(tmp_path: Path) -> None:
    path, other = tmp_path / "log.txt", tmp_path / "other.txt"
    path.write_bytes(b"".join(criteo_line(i) for i in range(40)))
    other.write_bytes(b"".join(criteo_line(i) for i in range(100, 140)))
    stream = criteo(path).stream((0, 0))
    position = [position for _, position in itertools.islice(stream, 3)][-1]
    following = batches(itertools.islice(stream, 2))
    held_out = [list(batch) for batch in criteo(path).evaluation(position)]
    np.testing.assert_equal(held_out, following)
    held_out = [list(b) for b in criteo(path, evaluation_path=other).evaluation(position)]
    np.testing.assert_equal(held_out, batches(criteo(other).stream((0, 0)))[:2])


def test_criteo_names_a_bad_line(tmp_path: Path):
    for line, message in [
        (criteo_line(0).split(b"\t", 1)[1], "39 columns, expected 40.*no label"),
        (b"a" + criteo_line(0)[1:], "label b'a', expected 0 or 1"),
        (criteo_line(0).rstrip() + b"0\n", "expected 8 hexadecimal digits"),
    ]:
        path = tmp_path / "log.txt"
        path.write_bytes(criteo_line(0) + line)
        with pytest.raises(ValueError, match=f"at byte {len(criteo_line(0))} has .*{message}"):
            batches(criteo(path, batch_size=1).stream((0, 0)))


def test_criteo_refuses_missing_files_and_sizes(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist"):
        criteo(tmp_path / "absent")
    with pytest.raises(FileNotFoundError, match="is empty"):
        criteo(tmp_path)
    with pytest.raises(ValueError, match="expected 26"):
        criteo(MAIN, table_sizes=(10, 10))


def test_criteo_table_sizes_from_the_command_line() -> None:
    assert data_criteo.parse_table_sizes("1000") == (1000,) * 26
    assert max(data_criteo.parse_table_sizes("kaggle:5000")) == 5000
    assert sum(data_criteo.parse_table_sizes("kaggle")) == 33_762_577


# --- command line -------------------------------------------------------------------------------


def test_command_line_round_trip() -> None:
    assert parse(flags(TINY)).config == TINY


def test_command_line_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["--resume"], ["--tables", "10,x"], ["--tables", "0"], ["--steps", "0"]):
        with pytest.raises(SystemExit):
            parse(argv)
        assert argv[0] in capsys.readouterr().err


# --- training -----------------------------------------------------------------------------------


def test_dot_products_and_their_derivative() -> None:
    rng = np.random.default_rng(0)
    vectors, g = rng.normal(size=(5, 4, 3)), rng.normal(size=(5, 6))
    s, t = np.tril_indices(4, -1)

    def expected(vectors: jax.Array) -> jax.Array:
        return jnp.einsum("bsd,btd->bst", vectors, vectors)[:, s, t]

    with jax.enable_x64(True):
        for got, want in zip(
            jax.vjp(dot_products, vectors), jax.vjp(expected, vectors), strict=True
        ):
            pairs = (got(g), want(g)) if callable(got) else (got, want)
            jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-12), *pairs)


@pytest.mark.slow
def test_all_variants_learn_alike() -> None:
    config = dataclasses.replace(TINY, cache=0.0)
    results = {variant: train(config, variant) for variant in COMPARED["dlrm"]}
    for result in results.values():
        assert result.steps == 12 and [step for step, _ in result.curve] == [6, 12]
        assert result.auc is not None and result.best_auc is not None
        assert 0.55 < result.auc < result.best_auc
        assert result.peak_bytes > 0 and result.step_ms > 0
    for tables in ("dense", "tt"):  # the same tables, the same rule: only rounding differs
        optax, fused = results[f"{tables}_optax"], results[f"{tables}_fused"]
        assert fused.table_parameters == optax.table_parameters
        assert fused.auc == pytest.approx(optax.auc, abs=1e-3)
        assert fused.log_loss == pytest.approx(optax.log_loss, abs=1e-4)
    assert results["dense_fused"].table_parameters == 8 * (3000 + 500 + 7)
    assert results["tt_fused"].table_bytes < results["dense_fused"].table_bytes / 4


def test_caches_that_are_filled_once_count_nothing() -> None:
    """Their rows are the most frequent ones of the sample, they are trained, and no others enter."""
    data = open_data(TINY)
    learner, values = start(dataclasses.replace(TINY, cache=0.05), "tt_fused", data)
    sample = np.concatenate([data.batch(step).ids[:, 0] for step in range(50)])
    ids, counts = np.unique(sample, return_counts=True)
    hottest = ids[np.argsort(-counts)[:20]]

    def shared(values: list[jax.Array]) -> dict[str, np.ndarray]:
        table = learner.merge(values)[0].tables.collection.tables["shared"]
        names = ("cache_tags", "cache_totals", "cache_rows")
        return {name: np.asarray(getattr(table, name)[...], np.float32) for name in names}

    before = shared(values)
    assert np.isin(hottest, before["cache_tags"]).all()
    values, _ = learner.step(values, data.batch(0))
    after = shared(values)
    for name in ("cache_tags", "cache_totals"):
        np.testing.assert_array_equal(after[name], before[name])
    changed = np.any(after["cache_rows"] != before["cache_rows"], axis=1)
    tags = before["cache_tags"].reshape(-1)
    np.testing.assert_array_equal(changed, np.isin(tags, data.batch(0).ids[:, 0]))


def test_large_tables_have_tensor_trains_of_their_own_when_told() -> None:
    """By default they share one, see `test_bags_are_sums_of_rows`."""
    config = dataclasses.replace(TINY, tables="3000,2000,7", separate=True, cache=0.0)
    model, _ = create(config, "tt_fused", config.table_sizes)
    tables = model.tables.collection.tables
    sizes = {name: table.num_embeddings for name, table in tables.items()}
    assert sizes == {"table_0": 3000, "table_1": 2000, "table_2": 7}
    rows = tables["table_1"].attend(np.eye(8, dtype=np.float32)).T
    ids = np.array([[4, 1999, 6]], np.int32)
    np.testing.assert_allclose(model.tables(ids)[0, 1], rows[1999], rtol=1e-5, atol=1e-6)


def test_criteo_trains_and_says_when_it_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log.gz"
    path.write_bytes(gzip.compress(b"".join(criteo_line(i) for i in range(300))))
    config = dataclasses.replace(
        TINY, data=str(path), tables="50", steps=10, batch_size=32, eval_every=8, eval_examples=32
    )
    with pytest.raises(SystemExit, match="take --steps 9 or fewer"):
        train(config, "dense_optax")
    assert "AUC=" in capsys.readouterr().err


def test_one_process_divides_batches_and_copies_values() -> None:
    mesh = devices.mesh_of(dataclasses.replace(TINY, devices=4))
    batch = devices.divided(open_data(TINY).batch(0), mesh)
    assert [shard.data.shape for shard in batch.label.addressable_shards] == [(64,)] * 4
    (copied,) = devices.on_all([jnp.arange(3)], mesh)
    assert [shard.data.shape for shard in copied.addressable_shards] == [(3,)] * 4


@pytest.mark.slow
@pytest.mark.dear("starts two processes that train together")
def test_the_program_in_two_processes_of_two_devices_learns_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As one process with one device; and it writes its table and its picture."""
    config = dataclasses.replace(TINY, tables="3000,7", steps=4)
    divided = dataclasses.replace(config, devices=4)
    one = train(config, "dense_fused")
    out, work = tmp_path / "out", main._work

    def work_here(variant: str, argv: list[str], processes: int = 1) -> None:
        if processes > 1:
            work(variant, argv, processes)
        else:
            main.main([*argv, "--worker", variant])

    monkeypatch.setattr(main, "_work", work_here)
    # What the program sets for the processes that it starts is not for those of other tests.
    for name, value in (
        ("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "programs")),
        ("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0"),
    ):
        monkeypatch.setenv(name, os.environ.get(name, value))
    more = ["--variants", "dense_fused", "--big-table", "5000x8"]
    main.main(flags(dataclasses.replace(divided, processes=2, out=str(out)), *more))
    found = Result.load(out / "dense_fused.json")
    assert found.variant == "dense_fused" and found.auc == pytest.approx(one.auc, abs=1e-4)
    # Rounded up to whole rows for every device.
    assert found.table_bytes < one.table_bytes + 2 * 8 * 4 * 4 + 4 * (3000 + 7)
    text = (out / "comparison.txt").read_text()
    stdout, stderr = capfd.readouterr()
    assert text in stdout
    for part in ("dense fused", "Best possible AUC", "One table of 5,000 x 8"):
        assert part in text
    assert (out / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert "loss=" in stderr  # the progress bar


# --- checkpoints --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_killed_run_resumes_to_equal_bits(tmp_path: Path) -> None:
    config = dataclasses.replace(
        TINY, steps=8, eval_every=4, checkpoint_every=1, cache=0.05, cache_refresh=3, resume=True
    )
    broken = dataclasses.replace(config, checkpoint_dir=str(tmp_path / "broken"))
    whole = dataclasses.replace(
        config, checkpoint_dir=str(tmp_path / "whole"), checkpoint_every=config.steps
    )
    # Most of the time goes into saving, so it is often killed in a save.
    command = [sys.executable, str(MAIN), *flags(broken, "--worker", "tt_fused")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    steps = tmp_path / "broken" / "tt_fused" / "steps"

    def saved() -> list[int]:
        return [int(path.name) for path in steps.glob("*") if path.name.isdigit()]

    while process.poll() is None and max(saved(), default=0) < 2:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    _, stderr = process.communicate()
    assert process.returncode == -signal.SIGKILL, stderr.decode()
    assert max(saved()) < config.steps
    resumed, expected = train(broken, "tt_fused"), train(whole, "tt_fused")
    assert resumed.digest == expected.digest and resumed.digest is not None
    assert (resumed.auc, resumed.steps) == (expected.auc, 8)
    assert resumed.curve == expected.curve and len(resumed.curve) == 2
    # The row cache, which is refreshed, serves the hot ids.
    assert expected.hit_rate is not None and 0.3 < expected.hit_rate < 1
    assert expected.auc > 0.55


def test_checkpoints_refuse_to_mix_runs(tmp_path: Path) -> None:
    config = dataclasses.replace(
        TINY, tables="20,7", steps=2, eval_examples=0, checkpoint_dir=str(tmp_path)
    )
    train(config, "dense_optax")
    with pytest.raises(FileExistsError, match="holds a checkpoint of step 2; add --resume"):
        train(config, "dense_optax")
    again = dataclasses.replace(config, resume=True)
    with pytest.raises(ValueError, match=r"seed: 0 then, 5 now"):
        train(dataclasses.replace(again, seed=5), "dense_optax")
    assert train(dataclasses.replace(again, steps=3), "dense_optax").steps == 3
