"""Native modules for one kind of GPU machine, built on another, so that no time on a GPU is spent on compiling.

    python -m scripts.gpu_bundle --python /path/to/python    # builds build/gpu-bundle for that Python and its jax
    python -m scripts.gpu_bundle --place                     # puts the modules beside the sources, if they fit

Only machine code of compute capability 9.0 (H100 and H200), without line information, and stripped. The bundle names
the sources that it was built from, and is refused by a checkout with others.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from scripts.native_build import ROOT

BUNDLE = ROOT / "build" / "gpu-bundle"
MOST_BYTES = 30 << 20
MODULES = ("_cpu", "_cuda")
OPTIONS = {
    "JAX_TT_CUDA": "ON",
    "JAX_TT_CUDA_ARCHITECTURES": "90-real",
    "JAX_TT_CUDA_LINEINFO": "OFF",
    "JAX_TT_EMULATION": "OFF",
}
ASK = """
import importlib.metadata, json, sysconfig
versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
print(json.dumps({"suffix": sysconfig.get_config_var("EXT_SUFFIX")} | versions))
"""
# Where there is a GPU, the module runs an operation's way to its kernels; elsewhere it is loaded as it stands.
LOAD = """
import jax
from jax_tt._base import ffi as _ffi
assert _ffi.load("cpu") is not None, _ffi.why_unavailable("cpu")
if any(device.platform == "gpu" for device in jax.devices()):
    assert _ffi.load("cuda") is not None, _ffi.why_unavailable("cuda")
    where = jax.devices()[0].device_kind
else:
    from jax_tt import _cuda
    _cuda.plan_size([4, 4, 4], [2, 2, 2], [1, 2, 2, 1], 60, 9, 0)
    where = "no GPU"
from jax_tt import _cuda
print(f"loaded: {len(_cuda.registrations())} operations, {where}")
"""


def sources() -> str:
    """A hash of all that the modules are built from."""
    paths = [ROOT / "CMakeLists.txt", *(ROOT / "cmake").rglob("*"), *(ROOT / "ffi").rglob("*")]
    digest = hashlib.sha256()
    for path in sorted(path for path in paths if path.is_file()):
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def describe(python: str) -> dict[str, str]:
    """For what a bundle is: the suffix of modules, the versions of jax, and the sources."""
    done = subprocess.run([python, "-c", ASK], check=True, capture_output=True, text=True)
    return json.loads(done.stdout) | {"sources": sources()}


def build(python: str, jobs: int) -> None:
    """Builds the modules and puts them into `BUNDLE`; raises RuntimeError where they are too large to travel."""
    folder = ROOT / "build" / "gpu-bundle-build"
    shutil.rmtree(BUNDLE, ignore_errors=True)
    own = describe(python)
    path = os.pathsep.join([str(Path(python).parent), os.environ["PATH"]])
    environment = os.environ | {"PATH": path}
    defines = [f"-D{k}={v}" for k, v in ({"Python_EXECUTABLE": python} | OPTIONS).items()]
    configure = ["cmake", "-S", ROOT, "-B", folder, *defines]
    compile_ = ["cmake", "--build", folder, "--parallel", str(jobs), "--target", *MODULES]
    for command in (configure, compile_):
        subprocess.run(command, check=True, env=environment)
    BUNDLE.mkdir(parents=True)
    for name in MODULES:
        module = BUNDLE / f"{name}{own['suffix']}"
        shutil.copy2(folder / module.name, module)
        subprocess.run(["strip", "--strip-unneeded", module], check=True)
    (BUNDLE / "bundle.json").write_text(json.dumps(own, indent=1) + "\n")
    check_size(BUNDLE)


def check_size(bundle: Path) -> int:
    """Bytes of a bundle; raises RuntimeError where they are too many."""
    size = sum(path.stat().st_size for path in bundle.iterdir())
    print(f"{bundle}: {size / 2**20:.1f} MiB")
    if size >= MOST_BYTES:
        raise RuntimeError(
            f"{bundle} has {size / 2**20:.1f} MiB, but less than {MOST_BYTES >> 20} MiB are to travel; build it for "
            "one architecture, without line information"
        )
    return size


def place(bundle: Path, package: Path = ROOT / "jax_tt") -> None:
    """Puts the modules of a bundle beside the sources of this checkout.

    Raises:
        RuntimeError: there is no bundle, or it was built for another Python or jax, or from other sources.
    """
    description = bundle / "bundle.json"
    if not description.exists():
        raise RuntimeError(f"{bundle} has no bundle.json; `make gpu-bundle` builds one")
    wanted, found = describe(sys.executable), json.loads(description.read_text())
    for key, value in wanted.items():
        if found.get(key) != value:
            raise RuntimeError(
                f"{bundle} was built for {key} {found.get(key)}, and this is {value}; `make gpu-bundle` builds it anew"
            )
    for name in MODULES:
        module = bundle / f"{name}{wanted['suffix']}"
        new = package / f"{module.name}.new"
        shutil.copy2(module, new)
        new.replace(package / module.name)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", default=sys.executable, help="of the machine with the GPU")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers at once")
    parser.add_argument("--place", action="store_true", help="a bundle that is there; build none")
    arguments = parser.parse_args()
    if not arguments.place:
        build(arguments.python, arguments.jobs)
        return
    try:
        place(BUNDLE)
    except RuntimeError as error:
        sys.exit(str(error))
    subprocess.run([sys.executable, "-c", LOAD], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
