"""Builds the wheel and checks it as a user meets it.

Its contents, the instruction sets in its native code, and an import outside the checkout.
"""

import re
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Looked for in the installed wheel, in a directory that is not the checkout.
PROBE = """
import jax_tt
from jax_tt import _native
print("imported", jax_tt.__file__, "native CPU module:", _native.available("cpu"))
assert _native.available("cpu"), "the wheel's native module did not load"
"""

# Names that only instruction sets above the x86-64 baseline have: AVX registers and mask registers.
WIDE_REGISTER = re.compile(r"%(ymm|zmm)\d+|%k[0-7]\b")
FUNCTION = re.compile(r"^[0-9a-f]+ <(.+)>:$")


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
    # strip=false keeps the symbol table, by which instructions are told apart below.
    run(
        sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", folder,
        "-C", "install.strip=false", "-C", "build-dir=build/check-wheel", ROOT,
    )  # fmt: skip
    (wheel,) = folder.glob("*.whl")
    return wheel


def check_contents(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    foreign = [n for n in names if not n.startswith(("jax_tt/", "jax_tt-"))]
    assert not foreign, f"the wheel holds files outside jax_tt/: {foreign}"
    assert any(re.match(r"jax_tt/_cpu\..*so$", n) for n in names), (
        "the wheel holds no native module"
    )
    assert "jax_tt/py.typed" in names, "the wheel holds no py.typed"
    assert any(n.endswith("/LICENSE") for n in names), "the wheel holds no LICENSE"
    print(f"{wheel.name}: {wheel.stat().st_size / 2**20:.1f} MiB, {len(names)} files")


def check_instruction_sets(module: Path) -> None:
    """Only the dispatched kernels may use registers that a plain x86-64 does not have."""
    wide: set[str] = set()
    name = ""
    for line in run("objdump", "-d", "--no-show-raw-insn", module).splitlines():
        if match := FUNCTION.match(line):
            name = match[1]
        elif WIDE_REGISTER.search(line):
            wide.add(name)
    stray = sorted(n for n in wide if "x86_64_v3" not in n and "x86_64_v4" not in n)
    assert not stray, f"functions outside the dispatched kernels use AVX: {stray[:10]}"
    print(f"instruction sets: {len(wide)} functions use AVX, all in the dispatched kernels")


def check_import(wheel: Path, folder: Path) -> None:
    """Installs the wheel with its dependencies into a new environment and imports it from there."""
    environment = folder / "venv"
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", wheel)
    print(run(python, "-W", "error::UserWarning", "-c", PROBE, cwd=folder).strip())


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel = build_wheel(folder)
        check_contents(wheel)
        zipfile.ZipFile(wheel).extractall(folder / "contents")
        for module in (folder / "contents").glob("jax_tt/_cpu.*so"):
            check_instruction_sets(module)
        check_import(wheel, folder)


if __name__ == "__main__":
    main()
