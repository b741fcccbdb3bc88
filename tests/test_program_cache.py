"""Compiled programs that outlive a checkout: shared by processes, bounded, and never the cause of a failure."""

import os
import threading
from pathlib import Path

import jax
import pytest

from tests import program_cache
from tests.processes import run_python

# Prints how many of its programs a process compiles, and what it computes.
PROCESS = """
import sys
import jax, jax.numpy as jnp
counts = {"requests": 0, "hits": 0}
def count(event, **_):
    if event.endswith("cache_hits"): counts["hits"] += 1
    if event.endswith("compile_requests_use_cache"): counts["requests"] += 1
jax.monitoring.register_event_listener(count)
from pathlib import Path
from tests import program_cache
program_cache.guard(Path(jax.config.jax_compilation_cache_dir))
print(jax.jit(lambda x: jnp.sin(x) @ x)(jnp.arange(3.0)))
print(counts["requests"] - counts["hits"])
"""


def _run(code: str, folder: Path, *arguments: str) -> list[str]:
    settings = {
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "PYTHONWARNINGS": "error:.*persistent.*",
    }
    return run_python("-c", code, *arguments, **settings).splitlines()


def test_a_program_is_compiled_once_and_a_damaged_one_once_more(tmp_path):
    first, compiled = _run(PROCESS, tmp_path)
    assert int(compiled) > 0
    entries = list(tmp_path.glob("*-cache"))
    for number, entry in enumerate(entries):  # foreign bytes, the beginning of an entry, nothing
        whole = entry.read_bytes()
        entry.write_bytes((b"of another program", whole[: len(whole) // 2], b"")[number % 3])
    assert _run(PROCESS, tmp_path) == [first, str(len(entries))]
    assert _run(PROCESS, tmp_path) == [first, "0"]


# Calls the handler of an operation by another name. It refuses the operands, and says how many it expects.
HANDLER = """
import sys
import jax, jax.numpy as jnp
from jax_tt import _cpu
jax.ffi.register_ffi_target("of_a_test", _cpu.registrations()[sys.argv[1]], platform="cpu")
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))
try:
    jax.jit(lambda x: jax.ffi.ffi_call("of_a_test", jax.ShapeDtypeStruct((1,), x.dtype))(x))(1.0)
except Exception as error:
    print(str(error).splitlines()[0])
print(any(event.endswith("cache_hits") for event in hits))
"""


def test_a_stored_program_calls_the_native_module_that_is_there(tmp_path):
    """Custom calls are names: a program that was compiled before the module was is as good as a new one."""
    pytest.importorskip("jax_tt._cpu")
    refused, found = _run(HANDLER, tmp_path, "jax_tt_plan_v1")
    assert "expected 3 but got 1" in refused and found == "False"
    refused, found = _run(HANDLER, tmp_path, "jax_tt_cache_forward_v1")
    assert "expected at least 6 but got 1" in refused and found == "True"


def test_two_that_need_a_program_do_not_both_compile_it(tmp_path):
    """One waits while another holds the lock of a key; other keys are free."""
    order = []
    with program_cache._locked(tmp_path, "program"):
        waiting = threading.Thread(target=lambda: _note(tmp_path, "program", order))
        waiting.start()
        _note(tmp_path, "another program", order)
        waiting.join(timeout=0.2)
        assert waiting.is_alive() and order == ["another program"]
    waiting.join()
    assert order == ["another program", "program"]


def _note(folder: Path, key: str, order: list[str]) -> None:
    with program_cache._locked(folder, key):
        order.append(key)


def test_programs_used_longest_ago_make_room(tmp_path):
    for number in range(4):
        path = tmp_path / "of a processor" / f"{number}-cache"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(100))
        os.utime(path, (1000 + (number + 2) % 4, 1000))
    (tmp_path / "of a processor" / "locks").mkdir()
    program_cache.trim(tmp_path, most_bytes=250)
    assert {path.name for path in tmp_path.rglob("*-cache")} == {"0-cache", "1-cache"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"JAX_TT_TEST_PROGRAMS": "off"}, None),
        ({"JAX_TT_TEST_PROGRAMS": "/tmp/a"}, "/tmp/a"),
        ({"XDG_CACHE_HOME": "/tmp/cache"}, "/tmp/cache/jax_tt/programs"),
        ({"HOME": "/tmp/home"}, "/tmp/home/.cache/jax_tt/programs"),
    ],
)
def test_the_folder_is_the_users_and_can_be_moved(monkeypatch, variables, expected):
    for name in ("JAX_TT_TEST_PROGRAMS", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = program_cache.folder()
    assert (found and str(found.parent)) == expected


@pytest.mark.skipif(jax.config.jax_compilation_cache_dir is None, reason="programs are not kept")
def test_processes_that_tests_start_use_the_same_folder():
    used = run_python("-c", "import jax; print(jax.config.jax_compilation_cache_dir)")
    assert used.strip() == jax.config.jax_compilation_cache_dir == str(program_cache.folder())
