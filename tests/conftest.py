"""Settings of the test suite: four CPU devices, strict promotion, warnings as errors, and fixtures of methods."""

import contextlib
import functools
import gc
import os
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import hypothesis
import jax
import pytest
from jax._src import pjit
from jax._src.interpreters import mlir

from tests import program_cache, xla_flags
from tests.costs import Costs
from tests.tiers import TIERS, optimized_last, select

# All of these must be set before any backend starts, hence at import.
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
_gpu = Path("/dev/nvidiactl").exists() and any(
    "cuda" in plugin.name for plugin in entry_points(group="jax_plugins")
)
if _gpu and "JAX_PLATFORMS" not in os.environ:
    # With a GPU, the suite still runs on the CPU by default; tests of the GPU select it.
    jax.config.update("jax_platforms", "cpu,cuda")
# Compiling programs that run once takes most of the time of the suite. Only tests marked `optimized` use all compiler
# passes, unless JAX_TT_TEST_OPTIMIZED=1 is set or there is a GPU.
THRIFTY = not _gpu and os.environ.get("JAX_TT_TEST_OPTIMIZED", "0") == "0"
xla_flags.configure("jax_disable_most_optimizations", THRIFTY)
PROGRAMS = program_cache.folder() if THRIFTY else None
if THRIFTY:
    # XLA's fusion emitters and parallel code generation take three quarters of the compile time of the reference.
    xla_flags.add("--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1")
    if PROGRAMS is not None:
        xla_flags.configure("jax_compilation_cache_dir", str(PROGRAMS))
        xla_flags.configure("jax_persistent_cache_min_compile_time_secs", 0)
        xla_flags.configure("jax_persistent_cache_min_entry_size_bytes", -1)
# Tracing and lowering make so many objects that collections of cycles take a sixth of the time of the suite.
gc.set_threshold(50_000, 20, 50)
# JAX makes an MLIR context for every program, which takes most of the time of lowering a small one.
mlir.make_ir_context = functools.cache(mlir.make_ir_context)
# Test processes share a GPU, so none of them may preallocate most of its memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, max_examples=50)
hypothesis.settings.register_profile("dev", deadline=None, max_examples=50)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")

# Linux allows 65,530 memory mappings per process, and the compiler crashes beyond that; every program in the caches of
# JAX has a few.
MOST_NEW_MAPPINGS = 30_000
# Counting them takes 30 ms.
TESTS_PER_COUNT = 10
_finished = 0
_kept_mappings = 0
# Whether the caches of JAX may have programs that were compiled without most passes.
_kept_thrifty = False


# `make test-peers` runs them, with the packages that they compare with.
collect_ignore = ["peers"]

WAYS = (
    "reference",
    "native",
    "cuda_emulated",
    pytest.param("cuda", marks=pytest.mark.gpu),
)


def pytest_report_header() -> list[str]:
    """The implementations that the tests run on, and the reasons for skipped ones."""
    names = ("native", "cuda_emulated", "cuda")
    return [f"{name}: {why_skipped(name) or 'runs'}" for name in names]


def pytest_configure(config: pytest.Config) -> None:
    if PROGRAMS is not None:
        program_cache.guard(PROGRAMS)
    config.pluginmanager.register(Costs(config.getoption("--costs")))
    config.addinivalue_line("filterwarnings", "error:::jax_tt")
    # Many tests use ids out of range; tests of the warning enable it themselves.
    config.addinivalue_line("filterwarnings", "ignore:.*Such ids contribute nothing")
    # Many tests compute gradients alone.
    config.addinivalue_line("filterwarnings", "ignore:the next values of the fused tables")
    # Without the native module, the suite runs on the reference, and need not warn in every test.
    config.addinivalue_line("filterwarnings", "ignore:jax_tt. the native module is not available")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tier",
        choices=TIERS,
        default="all",
        help="see tests/tiers.py",
    )
    parser.addoption(
        "--costs", metavar="FILE", help="write what each test cost, see tests/costs.py"
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tier = config.getoption("--tier")
    no_gpu = not _gpu and tier != "all"
    for_gpu = [item for item in items if no_gpu and item.get_closest_marker("gpu")]
    others = [item for item in items if not (no_gpu and item.get_closest_marker("gpu"))]
    chosen, left = select(others, tier)
    config.hook.pytest_deselected(items=[*left, *for_gpu])
    items[:] = optimized_last(chosen)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if PROGRAMS is not None and not hasattr(session.config, "workerinput"):
        program_cache.trim(PROGRAMS.parent)


def pytest_runtest_logfinish() -> None:
    """Drops all compiled programs if a process has accumulated too many.

    Beyond the capacity of its cache, JAX does not remember calls of jitted functions.
    """
    global _finished, _kept_mappings
    mlir.make_ir_context.cache_clear()
    _finished += 1
    if _finished % TESTS_PER_COUNT:
        return
    calls = pjit._cpp_pjit_cache_fun_only
    full = calls.size() > 0.75 * calls.capacity()
    if full or _mappings() - _kept_mappings > MOST_NEW_MAPPINGS:
        jax.clear_caches()
        gc.collect()
        _kept_mappings = _mappings()  # not of JAX programs, e.g. the stacks of emulated threads


def _mappings() -> int:
    listing = Path("/proc/self/maps")
    return listing.read_bytes().count(b"\n") if listing.exists() else 0


def native_available(platform: str = "cpu") -> bool:
    from jax_tt._base.ffi import available

    return available(platform)


def why_skipped(way: str) -> str | None:
    """Why this machine cannot run the ops this way, or None if it can."""
    from jax_tt._base import ffi

    platform = {"native": "cpu"}.get(way, way)
    return (
        None if way == "reference" or native_available(platform) else ffi.why_unavailable(platform)
    )


@pytest.fixture
def one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs are those of a process that has one device, which are not prepared for tables that are sharded."""
    monkeypatch.setattr(jax, "device_count", lambda: 1)


@contextlib.contextmanager
def running(way: str) -> Iterator[str]:
    """``method=`` of a way to run the ops; skips the test if it is not available."""
    reason = why_skipped(way)
    if reason is not None:
        pytest.skip(reason)
    if way != "cuda":
        yield way
        return
    # Full precision: products outside the kernels would otherwise use TF32.
    with jax.default_device(jax.devices("cuda")[0]), jax.default_matmul_precision("highest"):
        yield "native"


def method_fixture(*ways: Any) -> Any:
    """A fixture ``method`` with only these ways, for a module whose tests do not need all of them."""

    @pytest.fixture(name="method", params=ways)
    def fixture(request: pytest.FixtureRequest) -> Iterator[str]:
        with running(request.param) as name:
            yield name

    return fixture


# The tests of the ops run on every available implementation.
method = method_fixture(*WAYS)


@pytest.fixture(autouse=True)
def _optimized(request: pytest.FixtureRequest) -> Iterator[None]:
    global _kept_thrifty
    if request.node.get_closest_marker("optimized") is None:
        _kept_thrifty = THRIFTY
        yield
        return
    if _kept_thrifty:
        # JAX would reuse them in this test, although their last bits may differ.
        jax.clear_caches()
        _kept_thrifty = False
    xla_flags.configure("jax_disable_most_optimizations", False)
    yield
    xla_flags.configure("jax_disable_most_optimizations", THRIFTY)


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes every table of a call a group of its own."""
    from jax_tt._table import groups

    return functools.partial(
        monkeypatch.setattr,
        groups,
        "groups_of",
        lambda uses: tuple(groups.Members(None, (k,), "", (use,)) for k, use in enumerate(uses)),
    )


@pytest.fixture(scope="module")
def promotion_of_a_user() -> Iterator[None]:
    """The suite's strict promotion is for operations of jax_tt; optax and examples need the usual rules."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def x64() -> Iterator[None]:
    """64-bit types for one test."""
    with jax.enable_x64(True):
        yield
