"""What the suite itself relies on: flags of XLA, the Python of the newest stack, the watch for copies in documents."""

import os
import re
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts import test_costs
from tests import xla_flags
from tests.copied_arrays import watching

ROOT = Path(__file__).resolve().parent.parent


def test_only_flags_that_jaxlib_knows_are_set(monkeypatch):
    """With an unknown flag, the first backend would end the process without a message."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    xla_flags.add(
        "--xla_cpu_of_another_release=1",
        "--xla_cpu_parallel_codegen_split_count=1",
        "--xla_cpu_enable_fast_math=true",
    )
    assert os.environ["XLA_FLAGS"].split() == [
        "--xla_cpu_parallel_codegen_split_count=1",
        "--xla_cpu_enable_fast_math=false",
    ]


def _program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_the_newest_python_may_be_one_of_pyenv_that_is_not_active(tmp_path):
    """Shims of versions that are not active fail; 3.13.10 is newer than 3.13.9, and 3.13-dev is no release."""
    for name in ("python3", *(f"python3.{minor}" for minor in (11, 12, 13, 14))):
        _program(tmp_path / "shims" / name, "exit 127")
    for release in ("3.11.7", "3.13-dev", "3.13.10", "3.13.9"):
        # Stands for that release: this Python, which says where it was called.
        _program(
            tmp_path / "versions" / release / "bin" / "python",
            f'case "$2" in *ensurepip*) exit 0 ;; *) echo {release} ;; esac',
        )
    environment = {"PATH": f"{tmp_path}/shims:/usr/bin:/bin"}
    command = ["sh", "scripts/find_python.sh", "--newest"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "3.13.10", done.stderr
    environment["PYTHON"] = sys.executable
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert os.path.samefile(done.stdout.strip(), sys.executable)


PAGE = """
import jax, jax.numpy as jnp
import optax
from flax import nnx
import jax_tt
embed = jax_tt.EmbedBag(50, 8, optimizer=jax_tt.optimizers.SGD(0.1), rngs=nnx.Rngs(0))
ids = jnp.array([[1, 2]])
graph, state = nnx.split(embed)
"""
COPIES = {
    "step": "@jax.jit\ndef step(state):\n    return jax.tree.map(lambda a: a + 1, state)\nstep(state)",
    "look_up": "@nnx.jit\ndef look_up(embed, ids):\n    return embed(ids)\nlook_up(embed, ids)",
    "<lambda>": "look_up = nnx.jit(lambda embed, ids: embed(ids))\nlook_up(embed, ids)",
}
IN_PLACE = {
    "step": COPIES["step"].replace("@jax.jit", "@jax.jit(donate_argnums=0)"),
    "look_up": COPIES["look_up"].replace("@nnx.jit", "@nnx.jit(donate_argnums=0)"),
    "evaluate": "@jax.jit\ndef evaluate(state, ids):\n    return nnx.merge(graph, state)(ids)\nevaluate(state, ids)",
}


@pytest.mark.parametrize("name", COPIES)
def test_a_page_whose_step_or_evaluation_copies_tables_is_noticed(name):
    page = compile(PAGE + COPIES[name], "page.md", "exec")
    message = rf"page.md:\d+: {name} copies 1 arrays float32\[50, 8\]"
    with pytest.raises(AssertionError, match=message), watching("page.md"):
        exec(page, {"__name__": "__main__"})


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_page_that_copies_nothing_passes(name):
    with watching("page.md") as called:
        exec(compile(PAGE + IN_PLACE[name], "page.md", "exec"), {"__name__": "__main__"})
    assert called == [name]


def test_the_whole_check_ends_all_that_it_started_and_says_how_long_it_took(tmp_path):
    """`make` fails in the tests, and has left a process that would go on."""
    checkout, cache = tmp_path / "checkout", tmp_path / "cache"
    for name, text in {
        ".ci/run": (ROOT / ".ci" / "run").read_text().partition("\n")[2],
        "scripts/find_python.sh": f"echo {sys.executable}",
        "bin/ccache": "",
        "bin/make": "case $* in *cuda*) sleep 300 & echo $! > left; wait ;; "
        "*test-ci*) until [ -s left ]; do sleep 0.1; done; exit 1 ;; esac",
    }.items():
        _program(checkout / name, text)
    (cache / "jax_tt").mkdir(parents=True)
    (cache / "jax_tt" / "ci_runs").write_text("a run of yesterday\n")
    path = f"{checkout}/bin:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "XDG_CACHE_HOME": str(cache)}
    command = ["sh", str(checkout / ".ci" / "run")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stdout.startswith("runs before this one:\na run of yesterday\n")
    assert re.search(r"times of the steps.*install.*tests\n *\d+:\d\d  in all", done.stdout, re.S)
    assert (cache / "jax_tt" / "ci_runs").read_text().strip().endswith("failed in: tests")
    left = int((checkout / "left").read_text())
    deadline = time.monotonic() + 10
    while _runs(left):
        assert time.monotonic() < deadline, "what a step had started goes on"
        time.sleep(0.05)


def _runs(process: int) -> bool:
    status = Path(f"/proc/{process}/stat")
    try:
        return status.read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_tests_that_take_long_are_listed_unless_a_mark_says_why():
    names = ("test", "cpu", "programs", "compiled", "dear")
    rows = [
        dict(zip(names, row, strict=True))
        for row in (
            ("tests/tt/test_a.py::test", 21.0, 3, 1, False),
            ("tests/tt/test_b.py::test", 30.0, 1, 0, True),
            ("tests/test_c.py::test", 2.0, 0, 0, False),
        )
    ]
    assert test_costs.unexplained(rows) == ["tests/tt/test_a.py::test"]
    assert test_costs.by_room(rows)[2:] == [
        "| all | 3 | 53 | 4 | 1 |",
        "| tt | 2 | 51 | 4 | 1 |",
        "| (top) | 1 | 2 | 0 | 0 |",
    ]
