"""Compiles jax_tt/_cuda with warnings as errors and imports it; no GPU is needed. Without nvcc it prints a message.

python -m scripts.compile_cuda "80-real;90-real;90-virtual"
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

from scripts.native_build import ROOT, build, configure

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
    options = {"JAX_TT_CUDA": "AUTO", "JAX_TT_WERROR": "ON"}
    if arguments.architectures:
        options["JAX_TT_CUDA_ARCHITECTURES"] = arguments.architectures
    said = configure(arguments.build, options)
    for line in re.findall(r"^-- jax_tt: .*(?:\n(?!--).*)*", said, re.MULTILINE):
        print(line.removeprefix("-- "), flush=True)
    if "jax_tt: without CUDA" in said:
        print("nothing to compile")
        return
    build(arguments.build, "_cuda")
    subprocess.run([sys.executable, "-c", PROBE, arguments.build], check=True)


if __name__ == "__main__":
    main()
