"""Builds a native module in a separate folder, for scripts that inspect it; nothing is installed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def _cmake() -> str:
    # The environment's own, where it has one.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    found = shutil.which("cmake", path=path)
    if found is None:
        sys.exit("cmake is not installed: pip install cmake ninja")
    return found


def configure(folder: Path, options: dict[str, str], source: Path = ROOT) -> str:
    """The output of CMake when configuring for this Python; ends the program if it fails."""
    defines = [f"-D{k}={v}" for k, v in ({"Python_EXECUTABLE": sys.executable} | options).items()]
    done = subprocess.run(
        [_cmake(), "-S", source, "-B", folder, *defines], capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return done.stdout


def build(folder: Path, target: str) -> None:
    """Builds one target on all cores; raises CalledProcessError if it fails."""
    command = [_cmake(), "--build", folder, "--target", target, "--parallel", str(os.cpu_count())]
    subprocess.run(command, check=True)
