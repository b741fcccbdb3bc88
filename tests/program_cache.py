"""Programs that XLA has compiled, kept for other workers, for processes that tests start, and for later runs.

They are in the user's cache, so that a new checkout begins with them. JAX's key of a program has the program, the
versions and the flags; a folder for each kind of processor adds what the compiler asks of the machine itself. Custom
calls are bound by name when a program is loaded: a native module that was compiled anew needs no new programs.
"""

import contextlib
import fcntl
import hashlib
import inspect
import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax._src import compilation_cache, compiler

# A folder, or "off".
VARIABLE = "JAX_TT_TEST_PROGRAMS"
MOST_BYTES = 2 * 2**30
_LOCKS = 256


def folder() -> Path | None:
    """Where the programs of this kind of processor are, beside other kinds; None if programs are not kept."""
    given = os.environ.get(VARIABLE)
    if given == "off":
        return None
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    base = Path(given) if given else Path(cache) / "jax_tt" / "programs"
    return base / _processor()


def _processor() -> str:
    """What tells processors apart for which the compiler makes other programs."""
    information = Path("/proc/cpuinfo")
    text = information.read_text() if information.exists() else platform.processor()
    first = text.partition("\n\n")[0]
    names = r"^(vendor_id|cpu family|model|flags|Features|CPU \w+)\s*:.*$"
    lines = [match.group() for match in re.finditer(names, first, re.MULTILINE)] or [first]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return f"{platform.machine()}-{digest[:16]}"


def trim(folder: Path, most_bytes: int = MOST_BYTES) -> None:
    """Removes the programs that were used longest ago until the others fit."""
    entries = []
    for path in folder.rglob("*-cache"):
        with contextlib.suppress(FileNotFoundError):  # by another run
            status = path.stat()
            entries.append((max(status.st_atime, status.st_mtime), status.st_size, path))
    excess = sum(size for _, size, _ in entries) - most_bytes
    for _, size, path in sorted(entries):
        if excess <= 0:
            break
        path.unlink(missing_ok=True)
        excess -= size


@contextlib.contextmanager
def _locked(folder: Path, key: str) -> Iterator[None]:
    """Among all processes; the system unlocks what a process held that died."""
    number = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "little") % _LOCKS
    path = folder / "locks" / str(number)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def guard(folder: Path) -> None:
    """Lets one process compile a program that several need, and removes entries that cannot be read.

    JAX by itself compiles in each of them, warns of a damaged entry, and keeps it.
    """
    read, compile_and_write = (
        compilation_cache.get_executable_and_time,
        compiler._compile_and_write_cache,
    )
    signature = inspect.signature(compile_and_write)

    def read_or_remove(cache_key: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return read(cache_key, *args, **kwargs)
        except Exception:  # whatever bytes are in the file
            (folder / f"{cache_key}-cache").unlink(missing_ok=True)
            return None, None

    def compile_once(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs).arguments
        names = ("cache_key", "compile_options", "backend", "executable_devices")
        with _locked(folder, call["cache_key"]):
            found, _ = read_or_remove(*(call[name] for name in names))
            if found is None:
                return compile_and_write(*args, **kwargs)
            jax.monitoring.record_event("/jax/compilation_cache/cache_hits")
            return found

    compilation_cache.get_executable_and_time = read_or_remove
    compiler._compile_and_write_cache = compile_once
