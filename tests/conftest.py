"""Settings of the whole suite: four CPU devices, strict promotion, warnings of ours as errors."""

import os
from collections.abc import Iterator

import hypothesis
import jax
import pytest

# All three must be set before any backend starts, hence at import.
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, max_examples=50)
hypothesis.settings.register_profile("dev", deadline=None, max_examples=50)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "error:::jax_tt")
    # Without the native module the suite runs on the reference and need not say so in every test.
    config.addinivalue_line("filterwarnings", "ignore:jax_tt. the native module is not available")


def native_available() -> bool:
    from jax_tt._ops._backend import native_platforms

    return jax.default_backend() in ("cpu", "gpu") and bool(native_platforms())


@pytest.fixture(params=["reference", "ffi"])
def method(request: pytest.FixtureRequest) -> str:
    """Every implementation that this machine can run."""
    if request.param == "ffi" and not native_available():
        pytest.skip("the native module is not built")
    return request.param


@pytest.fixture
def x64() -> Iterator[None]:
    """64-bit types for one test."""
    with jax.enable_x64(True):
        yield
