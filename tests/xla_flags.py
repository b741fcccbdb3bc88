"""Options of JAX and flags of XLA, for tests and the processes that they start.

XLA ends the process at a flag that it does not know, and releases drop flags.
"""

import os
import subprocess
import sys

import jax

_START = "from jaxlib import xla_client; xla_client.make_cpu_client()"


def known(flag: str) -> bool:
    """Whether the installed jaxlib starts with ``flag``, which a process of its own tries."""
    environment = os.environ | {"XLA_FLAGS": flag}
    return not subprocess.run(
        [sys.executable, "-c", _START], env=environment, capture_output=True
    ).returncode


def add(*flags: str) -> None:
    """Sets the flags that jaxlib knows and the environment does not set, for this process and those that it starts."""
    given = os.environ.get("XLA_FLAGS", "")
    names = {word.partition("=")[0] for word in given.split()}
    added = [flag for flag in flags if flag.partition("=")[0] not in names and known(flag)]
    os.environ["XLA_FLAGS"] = " ".join([*added, given]).strip()


def configure(option: str, value: bool | int | str) -> None:
    """Sets an option of JAX, for this process and those that it starts."""
    jax.config.update(option, value)
    os.environ[option.upper()] = str(value)
