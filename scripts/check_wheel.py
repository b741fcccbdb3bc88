"""Builds the wheel and checks it from the perspective of a user.

Its contents, the instruction sets in its native code, and an import outside the checkout.
"""

import platform
import re
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# What only instruction sets above the x86-64 baseline have: AVX registers and mask registers.
WIDE_REGISTER = re.compile(r"%(ymm|zmm)\d+|%k[0-7]\b")
# The targets in CMakeLists.txt that are compiled for such a set and chosen at run time.
WIDE_TARGETS = ("jax_tt_kernels_x86_64_v3", "jax_tt_kernels_x86_64_v4")
BUILD = ROOT / "build" / "check-wheel"


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """Runs a command and returns its stdout; on failure its whole output goes to stderr."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed ({done.returncode}):\n{done.stdout}")
    return done.stdout


def build_wheel(folder: Path) -> Path:
    """Builds the wheel with the tools of this environment, in a build folder that stays."""
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    # Without CUDA, which `make cuda` compiles: the wheel is the same but for one more module.
    options = (f"build-dir={BUILD.relative_to(ROOT)}", "cmake.define.JAX_TT_CUDA=OFF")
    run(
        *pip,
        *(part for o in options for part in ("--config-settings", o)),
        "--wheel-dir",
        folder,
        ROOT,
    )
    (wheel,) = folder.glob("*.whl")
    return wheel


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
    objects = sorted(BUILD.rglob("*.o"))
    wide = [o for o in objects if any(target in str(o) for target in WIDE_TARGETS)]
    assert len(wide) == len(WIDE_TARGETS), f"expected an object for each of {WIDE_TARGETS}: {wide}"
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


def check_import(wheel: Path, folder: Path) -> None:
    """Installs the wheel with its dependencies into a new environment and imports it from there."""
    environment = folder / "venv"
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", wheel)
    print(
        run(
            python, "-W", "error::UserWarning", ROOT / "scripts" / "check_installed.py", cwd=folder
        ).strip()
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel = build_wheel(folder)
        check_contents(wheel)
        check_instruction_sets()
        check_import(wheel, folder)


if __name__ == "__main__":
    main()
