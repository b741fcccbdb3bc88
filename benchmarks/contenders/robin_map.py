"""`tsl::robin_map`, a hash map in C++ whose header comes with nanobind, searched by two threads."""

import ctypes
import importlib.util
import shutil
import subprocess
from pathlib import Path

import numpy as np

SOURCE = Path(__file__).with_suffix(".cc")
LIBRARY = Path(__file__).parents[2] / "build" / "benchmarks" / "librobin_map.so"


def compiled() -> ctypes.CDLL | None:
    """The map's library, compiled with the first C++ compiler in the path; None without one or without nanobind."""
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    nanobind = importlib.util.find_spec("nanobind")
    if compiler is None or nanobind is None or nanobind.origin is None:
        return None
    if not LIBRARY.exists() or LIBRARY.stat().st_mtime < SOURCE.stat().st_mtime:
        LIBRARY.parent.mkdir(parents=True, exist_ok=True)
        headers = Path(nanobind.origin).parent / "ext" / "robin_map" / "include"
        options = ["-O3", "-std=c++17", "-shared", "-fPIC", "-fopenmp", f"-I{headers}"]
        subprocess.run([compiler, *options, str(SOURCE), "-o", str(LIBRARY)], check=True)
    library = ctypes.CDLL(str(LIBRARY))
    library.make_map.restype = ctypes.c_void_p
    return library


class RobinMap:
    """A map of keys, uint64 ``[n]``, to their positions."""

    def __init__(self, library: ctypes.CDLL, keys: np.ndarray):
        self._library = library
        self._map = ctypes.c_void_p(library.make_map(_pointer(keys), ctypes.c_int64(keys.size)))

    def __del__(self):
        self._library.free_map(self._map)

    def find(self, keys: np.ndarray, rows: np.ndarray) -> None:
        """Writes the positions of the keys into ``rows``, int32 ``[n]``; -1 for those that are not there."""
        self._library.find(self._map, _pointer(keys), ctypes.c_int64(keys.size), _pointer(rows))


def _pointer(array: np.ndarray) -> ctypes.c_void_p:
    assert array.flags.c_contiguous
    return ctypes.c_void_p(array.ctypes.data)
