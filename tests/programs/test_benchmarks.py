"""The benchmarks run, count what they say they count, and the documents quote nothing else."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tt
from benchmarks import ids, memory, registry, render, results, run, timing
from benchmarks.contenders import by_hand, ours
from benchmarks.results import Report
from benchmarks.work import LEARNING_RATE, Work
from jax_tt import optimizers

ALL = (
    "cache_policies cache_rank cache_step cache_streams headline sweep_cores sweep_rank sweep_features sweep_batch "
    "two_cores layer_calls collection_step collection_mixed collection_mlperf collection_memory dense_by_hand "
    "dense_step temporaries dlrm_step dlrm_peers hash hash_step quantized quantized_tables coded compress_kinds "
    "serving tiers sharding top_k"
)
GPU = "gpu_peaks gpu_headline gpu_dense gpu_tables gpu_hash gpu_bags gpu_elrec gpu_ecorec"


def test_every_case_is_registered():
    cases = registry.all_cases()
    assert {name for name, case in cases.items() if not case.gpu} == set(ALL.split())
    assert {name for name, case in cases.items() if case.gpu} == set(GPU.split())


def test_gpu_cases_need_a_gpu(monkeypatch):
    monkeypatch.setattr(run.machine, "gpu_name", lambda: None)
    with pytest.raises(SystemExit, match="JAX sees no GPU here"):
        run.main(["--gpu"])


@pytest.mark.slow
def test_quick_run_writes_what_it_prints(tmp_path, capsys):
    out = tmp_path / "quick.json"
    for name in ("headline", "dense_step"):
        assert run.main(["--quick", "--only", name, "--out", str(out)]) == 0
    data = json.loads(out.read_text())
    assert set(data["cases"]) == {"headline", "dense_step"}
    assert data["machine"]["cores"] >= 1 and data["machine"]["versions"]["jax"]
    printed = capsys.readouterr().out
    for case in data["cases"].values():
        assert case["quick"] and case["commit"] and case["date"]
        for row in case["rows"]:
            assert 0 < row["fastest_ms"] <= row["lower_ms"] <= row["median_ms"] <= row["upper_ms"]
            assert results.number(row["median_ms"]) in printed
    figures = {figure["name"]: figure for figure in data["cases"]["dense_step"]["figures"]}
    assert figures["moved"]["value"] == 0


def test_unknown_case_names_the_known_ones(tmp_path):
    with pytest.raises(SystemExit, match=r"no case called nothing; there are .*headline"):
        run.main(["--only", "nothing", "--out", str(tmp_path / "x.json")])


def test_the_rival_by_hand_computes_the_same_step():
    rule, program = optimizers.RowWiseAdagrad(LEARNING_RATE), by_hand.rowwise_adagrad_program
    batch = np.random.default_rng(0).integers(40, size=32)  # 40 rows, so that ids repeat
    work = Work(jax_tt.TTShape.suggest(40, 16, ranks=2), bags=8, bag_size=4, batches=[batch])
    step, state = program(work)
    compiled = jax.jit(step, donate_argnums=0).lower(state, jnp.asarray(batch, np.int32)).compile()
    assert not re.findall(r"= f32\[40,16\]\S* copy\(", compiled.as_text())
    state = compiled(state, jnp.asarray(batch, np.int32))
    ours_step, start = ours.dense_fused_program(work, rule)
    _, after = ours_step(start, ours.bags_of(work)[0])
    expected = after["embedding"], after["slot_sum_0"]
    for got, wanted in zip(jax.tree.leaves(state), expected, strict=True):
        np.testing.assert_allclose(got, np.reshape(wanted, got.shape), rtol=1e-4, atol=1e-10)


def test_another_machine_gets_a_file_of_its_own(tmp_path):
    out = tmp_path / "other.json"
    results.save(out, {"machine": {"cpu": "abacus", "cores": 10}, "cases": {}})
    with pytest.raises(SystemExit, match=r"measured on abacus; give this machine another --name"):
        run.main(["--quick", "--only", "headline", "--out", str(out)])


def test_headline_work_is_the_published_one():
    work = Work.headline()
    assert work.nnz == 10_240
    assert work.step_flops == 3 * 10_240 * 36_864
    assert len(np.unique(work.batches[0])) > 10_000  # almost no duplicates


def test_zipf_ids_repeat_prefixes_by_half():
    work = Work.headline("zipf")
    assert all(batch.min() >= 0 and batch.max() < 11_000_000 for batch in work.batches)
    prefixes = np.mean([len(np.unique(batch // 250)) for batch in work.batches])
    assert prefixes == pytest.approx(5_100, rel=0.03)
    assert np.array_equal(ids.batches("zipf", 1000, 50)[0], ids.batches("zipf", 1000, 50)[0])


def test_contenders_take_turns():
    turns: list[str] = []
    calls = {name: lambda i, name=name: turns.append(name) for name in "ab"}
    found = timing.interleave(calls, timing.Budget(rounds=3, turn_seconds=1.0, turn_calls=2))
    assert found["a"].calls == found["b"].calls == 3 * 2
    # Two calls each to size the turns, then three rounds of one uncounted and two counted calls.
    assert "".join(turns) == "aabb" + 3 * "aaabbb"


def test_timing_summarises():
    found = timing.Timing.of([4.0, 1.0, 2.0, 3.0, 100.0])
    assert (found.median, found.fastest, found.calls) == (3.0, 1.0, 5)
    assert found.lower == 2.0 and found.upper == 4.0


def test_growth_sees_memory_that_is_gone_again():
    with memory.Growth() as growth:
        np.ones(2**23).sum()  # 64 MiB, freed at once
    assert 2**26 * 0.9 < growth.bytes < 2**27


def report() -> Report:
    made = Report("title")
    made.timings({("uniform", "us"): timing.Timing(0.00123, 0.001, 0.002, 0.001, 9)})
    made.figure("speedup", 31.26, "x", "us over them", at_least=28)
    return made


@pytest.fixture
def folder(tmp_path):
    case = report().to_json() | {"quick": False}
    machine = {"cpu": "abacus", "cores": 2, "versions": {"jax": "0.10.2"}}
    results.save(tmp_path / "m.json", {"machine": machine, "cases": {"c": case}})
    return tmp_path


def test_render_fills_markers(folder):
    text = (
        "<!-- bench:figure m c.speedup -->?<!-- bench:end --> and "
        "<!-- bench:figure m c.uniform/us -->?<!-- bench:end --> on "
        "<!-- bench:machine m --><!-- bench:end -->\n\n"
        "<!-- bench:table m c figures -->old<!-- bench:end -->\n"
        "<!-- bench:table m absent rows -->old<!-- bench:end -->\n"
    )
    filled = render.render(text, folder)
    assert "-->31.3 x<!--" in filled and "-->1.23 ms<!--" in filled
    assert "-->abacus, 2 cores, jax 0.10.2<!--" in filled
    assert "| us over them | 31.3 x | >= 28 | yes |" in filled
    assert "absent rows -->(not measured yet)<!--" in filled
    assert render.render(filled, folder) == filled


def test_render_refuses_unknown_and_quick_figures(folder):
    with pytest.raises(ValueError, match="no such figure"):
        render.render("<!-- bench:figure m c.typo --><!-- bench:end -->", folder)
    data = results.load(folder / "m.json")
    data["cases"]["c"]["quick"] = True
    results.save(folder / "m.json", data)
    with pytest.raises(ValueError, match="quick run"):
        render.render("<!-- bench:figure m c.speedup --><!-- bench:end -->", folder)


def test_claims_outside_markers_are_found():
    text = "12.5 ms, 30x faster, 190 GFLOP/s; <!-- bench:figure m c.s -->7 ms<!-- bench:end -->\n```\n9 ms\n```"
    assert render.unsourced(text) == ["12.5 ms", "30x faster", "190 GFLOP/s"]


def test_documents_quote_only_results():
    for path in render.documents():
        text = path.read_text()
        assert render.unsourced(text) == [], path
        assert render.render(text) == text, f"{path}: run: python -m benchmarks.render"
        assert render.named_cases(text) <= set(registry.all_cases()), path
        # A comment that opens a line ends the paragraph before it, and its line is shown as raw text.
        assert not re.search(r"^\s*<!-- bench:(figure|machine)", text, re.MULTILINE), path


def test_numbers_have_three_digits():
    for value, text in [
        (0, "0"),
        (0.01234, "0.0123"),
        (4.5678, "4.57"),
        (789.4, "789"),
        (12345, "12,300"),
        (1e-5, "0.00001"),
    ]:
        assert results.number(value) == text


def test_the_picture_of_readme_shows_the_results():
    pytest.importorskip("matplotlib")
    from docs import make_results_picture as picture

    data = results.load(picture.RESULTS / f"{picture.MACHINE}.json")
    bars = [bar for group in picture.STEPS.values() for bar in picture.measured(data, group)]
    assert len(bars) >= 7
    for theme in picture.INKS:
        drawn = (picture.IMAGES / f"results-{theme}.svg").read_text()
        for label, time in bars:  # matplotlib leaves the text of each label in a comment
            assert f"<!-- {label} -->" in drawn, "run: python -m docs.make_results_picture"
            assert f"<!-- {results.number(time)} ms -->" in drawn


def test_the_picture_of_the_first_page_shows_the_results():
    pytest.importorskip("matplotlib")
    from docs import make_choice_picture as picture

    labels = [
        *picture.lines(),
        *picture.TABLES,
        *(picture.text(*s) for s in picture.bars().values()),
    ]
    assert len(labels) == 4 + 2 * 7
    for theme in picture.INKS:
        drawn = (picture.IMAGES / f"choice-{theme}.svg").read_text()
        for label in labels:
            assert f"<!-- {label} -->" in drawn, "run: python -m docs.make_choice_picture"
