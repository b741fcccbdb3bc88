"""The streaming example: streams, budgets, what the variants learn, runs that survive a kill, the report."""

import dataclasses
import json
import lzma
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

pytest.importorskip("flax")
pytest.importorskip("tqdm")
pytest.importorskip("xxhash")

import jax_tt
from examples.dlrm.metrics import auc
from examples.streaming import learners, report, settings, tables, train
from examples.streaming.files import Interactions
from examples.streaming.synthetic import DriftingClicks

pytestmark = pytest.mark.usefixtures("promotion_of_a_user")

ROOT = Path(__file__).parents[2]
TINY = ["--features", "8", "--batch-size", "16", "--budget", "0.008"]
STREAM = DriftingClicks(40, 16, places=100, item_life=20, session=6)


def tiny(variant: str) -> settings.Config:
    return settings.config(settings.parse(TINY), variant)


# --- streams ------------------------------------------------------------------------------------


def ids_of(stream: DriftingClicks, feature: str, first: int, last: int) -> set[int]:
    steps = range(first, last)
    return {int(key) for step in steps for key in stream.batch(step).ids[feature]}


def test_batches_are_functions_of_the_seed_and_the_step() -> None:
    stream = DriftingClicks(30, 8, seed=3)
    for expected, got in zip(list(stream.batches())[20:], stream.batches(20), strict=True):
        jax.tree.map(np.testing.assert_array_equal, expected, got)
    other = DriftingClicks(30, 8, seed=4).batch(20)
    assert not set(other.ids["item"]) & set(stream.batch(20).ids["item"])


def test_items_die_and_users_come_back() -> None:
    stream = DriftingClicks(1000, 256, places=50, item_life=100, session=50, turns=2, returns=2)
    assert not ids_of(stream, "item", 0, 50) & ids_of(stream, "item", 201, 251)
    early, later = ids_of(stream, "user", 0, 20), ids_of(stream, "user", 110, 130)
    assert 0.2 < len(early & later) / len(early) < 0.9
    assert not early & ids_of(stream, "user", 251, 300)
    assert max(ids_of(stream, "user", 0, 9)) > 2**63  # ids have all 64 bits


def test_planted_probability_is_that_of_the_clicks() -> None:
    batches = list(DriftingClicks(60, 512).batches())
    labels = np.concatenate([batch.labels for batch in batches])
    best = np.concatenate([np.asarray(batch.best) for batch in batches])
    p = 1 / (1 + np.exp(-best))
    for low in np.arange(0.1, 0.9, 0.1):
        chosen = (p >= low) & (p < low + 0.1)
        spread = np.sqrt(np.sum(p[chosen] * (1 - p[chosen])))
        assert abs(np.sum(labels[chosen] - p[chosen])) < 4 * spread + 1
    assert 0.75 < auc(best, labels) < 0.9


def test_files_keep_the_order_of_time_and_hash_any_string(tmp_path: Path) -> None:
    path = tmp_path / "pairs.txt.xz"
    with lzma.open(path, "wt") as file:
        file.writelines(f"ü{k % 3} item/{k}\n" for k in range(11))
    stream = Interactions(path, 8)
    assert stream.steps == 2
    second = stream.batch(1)
    np.testing.assert_array_equal(second.labels, [1, 1, 1, 1, 0, 0, 0, 0])
    users = jax_tt.dynamic.hash_ids("user", [f"ü{k % 3}" for k in range(4, 8)])
    items = jax_tt.dynamic.hash_ids("item", [f"item/{k}" for k in range(4, 8)])
    np.testing.assert_array_equal(second.ids["user"], np.tile(users, 2))
    np.testing.assert_array_equal(second.ids["item"][:4], items)
    assert np.isin(second.ids["item"][4:], [stream.batch(k).ids["item"][:4] for k in (0, 1)]).all()
    assert [batch.labels.size for batch in stream.batches(1)] == [8]


def test_lists_are_spread_over_the_stream(tmp_path: Path) -> None:
    path = tmp_path / "lists.txt"
    lines = [f"{user} " + " ".join(f"{user}_{k}" for k in range(16)) for user in "abcd"]
    path.write_text("\n".join(lines))
    batches = [batch.ids["item"][:16] for batch in Interactions(path, 32).batches()]
    for user in "abcd":
        items = jax_tt.dynamic.hash_ids("item", [f"{user}_{k}" for k in range(16)])
        places = [np.flatnonzero(np.concatenate(batches) == item).item() for item in items]
        assert places == sorted(places)
        assert all(abs(place - 4 * k) < 8 for k, place in enumerate(places))


@pytest.mark.parametrize(
    ("text", "batch_size", "message"),
    [
        ("a b\nc\n", 4, "got 'c' in its non-empty line 2; expected 'user item"),
        ("a b\n", 4, "got 1 interactions; expected at least 2"),
        ("", 4, "got 0 interactions"),
        ("a b\nc d\n", 5, "batch_size: got 5; expected an even number"),
    ],
)
def test_files_refuse(tmp_path: Path, text: str, batch_size: int, message: str) -> None:
    path = tmp_path / "log.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        Interactions(path, batch_size)


# --- budgets ------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", [name for name in settings.VARIANTS if name != "unlimited"])
@pytest.mark.parametrize("features", [8, 33])
def test_tables_fill_the_budget_and_keep_it(variant: str, features: int) -> None:
    config = dataclasses.replace(tiny(variant), budget=100_000, features=features)
    state = jax.eval_shape(tables.make(config).init, jax.random.key(0))
    sizes = jax.tree.map(lambda a: np.broadcast_to(np.zeros((), a.dtype), a.shape), state)
    used = sum(tables.device_bytes(sizes).values())
    used += tables.in_flight_bytes(config) if variant == "tiers" else 0
    assert 0.85 * config.budget < used <= config.budget


def test_too_small_budgets_are_refused() -> None:
    with pytest.raises(ValueError, match="budget: got 1,000 bytes; expected room for at least 16"):
        tables.make(dataclasses.replace(tiny("tiers"), budget=1000))


# --- training -----------------------------------------------------------------------------------


def outcomes(variant: str, workdir: Path, **changes: Any) -> list[learners.Outcome]:
    workdir.mkdir()
    learner = learners.make(dataclasses.replace(tiny(variant), **changes), workdir)
    found = list(learner.outcomes(STREAM.batches()))
    assert sum(learner.device_bytes().values()) <= tiny(variant).budget or variant == "unlimited"
    return found


def test_tiers_predict_what_a_row_for_every_id_predicts(tmp_path: Path) -> None:
    """Bit for bit, although most rows leave the device, and some come back from memory and disk."""
    expected = outcomes("unlimited", tmp_path / "unlimited")
    got = outcomes("tiers", tmp_path / "tiers", host_share=0.5)
    for ours, theirs in zip(got, expected, strict=True):
        np.testing.assert_array_equal(ours.logits, theirs.logits)
    served = {name: sum(o.served[name] for o in got) for name in learners.SERVED}
    assert all(count > 20 for count in served.values()), served
    assert served["new"] == sum(o.served["new"] for o in expected)


@pytest.mark.parametrize("variant", ["hashing", pytest.param("tt", marks=pytest.mark.full)])
def test_training_and_its_figures(tmp_path: Path, variant: str) -> None:
    config = tiny(variant)
    stream = DriftingClicks(120, 16, places=20, item_life=500, session=500)
    figures = train.train(config, stream, 4, tmp_path / "run")
    assert figures["steps"] == 120 and len(figures["windows"]) == 4
    assert 0.55 < figures["last"]["auc"] < figures["last"]["best"] < 0.95
    assert figures["step_ms"] > 0 and figures["waited"] == 0
    assert train.train(config, stream, 4, tmp_path / "run") == figures  # it is not trained again
    with pytest.raises(ValueError, match=r"other settings \(seed: 0 then, 1 now\); use another"):
        train.train(dataclasses.replace(config, seed=1), stream, 4, tmp_path / "run")


def worker(workdir: Path, variant: str) -> subprocess.Popen[bytes]:
    flags = [*TINY, "--steps", "400", "--windows", "50", "--worker", variant]
    command = [sys.executable, "-m", "examples.streaming.main", *flags, "--workdir", str(workdir)]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE)


def figures_of(process: subprocess.Popen[bytes], workdir: Path) -> dict[str, Any]:
    _, stderr = process.communicate()
    assert process.returncode == 0, stderr.decode()
    return json.loads((workdir / "result.json").read_text())


@pytest.mark.full
@pytest.mark.parametrize("variant", ["hashing", "dynamic", "tiers", "unlimited"])
def test_killed_run_ends_with_the_same_numbers(tmp_path: Path, variant: str) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    expected = figures_of(worker(whole, variant), whole)
    saved = broken / ("disk/blocks" if variant == "tiers" else "checkpoint.npz")
    process = worker(broken, variant)
    least = 60_000 if variant == "tiers" else 1  # of blocks that are full of records
    while process.poll() is None and not (saved.exists() and saved.stat().st_size >= least):
        time.sleep(0.01)
    if process.poll() is None:
        os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert not (broken / "result.json").exists()
    got = figures_of(worker(broken, variant), broken)
    for name in ("whole", "last", "windows", "steps", "config"):
        assert got[name] == expected[name]


# --- command line and report --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--variants", "hashing,x"], "--variants: got 'x'; expected some of hashing"),
        (["--budget", "0"], "--budget: got 0.0; expected a number above 0"),
        (["--seeds", "0"], "--seeds: got 0; expected at least 1"),
        (["--depth", "-1"], "--depth: got -1"),
    ],
)
def test_command_line_refuses(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        settings.parse(argv)
    assert message in capsys.readouterr().err


def figures(score: float, best: float) -> dict[str, Any]:
    quality = {"auc": score, "best": best}
    served = {"device": 0.9, "host": 0.05, "disk": 0.02, "new": 0.03}
    times = {"step_ms": 1.5, "waited": 0.25, "moved": 3e6}
    return {
        "config": {"batch_size": 16, "budget": 1_000_000},
        "steps": 10,
        "whole": quality,
        "last": quality,
        "windows": [quality, quality],
        "served": served,
        "served_windows": [served, served],
        "device_bytes": {"rows": 900_000, "optimizer": 50_000, "directory": 40_000},
        "other_bytes": {"host": 2_000_000},
        "times_windows": [times, times],
        **times,
    }


@pytest.mark.parametrize("best", [0.85, float("nan")])
def test_report(tmp_path: Path, best: float) -> None:
    pytest.importorskip("matplotlib")
    results = {
        "hashing": [figures(0.6, best), figures(0.62, best)],
        "tiers": [figures(0.7, best), figures(0.7, best)],
    }
    text = report.table(results)
    for part in ("0.6100 ± 0.0100", "0.99", "2.00", "90.0 %", "3.000", "25 %", "2 seeds, 10 steps"):
        assert part in text
    assert ("Best possible AUC: 0.8500" in text) == np.isfinite(best)
    report.picture(tmp_path / "picture.png", results)
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    rates = {"tiers": {0.1: figures(0.7, best), 0.2: figures(0.71, best)}}
    assert "0.1: 0.7000  0.2: 0.7100  best: 0.2" in report.learning_rates(rates)


@pytest.mark.full
def test_program_writes_table_and_picture(tmp_path: Path) -> None:
    flags = [*TINY, "--steps", "12", "--windows", "3", "--workdir", str(tmp_path)]
    command = [sys.executable, "-m", "examples.streaming.main", *flags]
    for more in (["--variants", "hashing,dynamic"], ["--variants", "hashing", "--tune"]):
        done = subprocess.run(
            [*command, *more], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    assert "best: 0." in done.stdout
    assert "| dynamic" in (tmp_path / "comparison.txt").read_text()
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert len(json.loads((tmp_path / "comparison.json").read_text())["results"]) == 2
