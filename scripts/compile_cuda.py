"""Compiles jax_tt/_cuda with warnings as errors and imports it; no GPU or driver is needed. Without nvcc it says so.

python scripts/compile_cuda.py "80-real;90-real;90-virtual"
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROBE = """
import sys
sys.path.insert(0, sys.argv[1])
import _cuda
print("imports without a driver:", *sorted(_cuda.registrations()))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("architectures", nargs="?", default="", help="as JAX_TT_CUDA_ARCHITECTURES")
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "cuda")
    arguments = parser.parse_args()
    options = {
        "Python_EXECUTABLE": sys.executable,
        "JAX_TT_CUDA": "AUTO",
        "JAX_TT_WERROR": "ON",
        **(
            {"JAX_TT_CUDA_ARCHITECTURES": arguments.architectures}
            if arguments.architectures
            else {}
        ),
    }
    # The environment's own CMake, where it has one.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    cmake = shutil.which("cmake", path=path)
    if cmake is None:
        sys.exit("cmake is not installed: pip install cmake ninja")
    configure = [
        cmake,
        "-S",
        ROOT,
        "-B",
        arguments.build,
        *(f"-D{k}={v}" for k, v in options.items()),
    ]
    done = subprocess.run(configure, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    for line in re.findall(r"^-- jax_tt: .*(?:\n(?!--).*)*", done.stdout, re.MULTILINE):
        print(line.removeprefix("-- "))
    if "jax_tt: without CUDA" in done.stdout:
        print("nothing to compile")
        return
    build = [
        cmake,
        "--build",
        arguments.build,
        "--target",
        "_cuda",
        "--parallel",
        str(os.cpu_count()),
    ]
    subprocess.run(build, check=True)
    subprocess.run([sys.executable, "-c", PROBE, arguments.build], check=True)


if __name__ == "__main__":
    main()
