"""A planted fault, and how it gets into a copy of the sources, where a switch turns it on.

All faults are in one copy, and so in one build: ``on(k)`` says whether fault ``k`` is active, and notes that its place
was reached. Both are bytes of a file that is mapped into memory (``JAX_TT_MUTANTS``): 4 bytes with the number of the
active fault, then one byte for each fault.
"""

import ast
import dataclasses
import textwrap
from collections.abc import Sequence
from pathlib import Path

NONE = 2**32 - 1


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A fault: ``old``, which occurs once in the file, is replaced by ``new``."""

    name: str
    file: str
    old: str
    new: str

    def place(self, text: str) -> int:
        """Where ``old`` begins; raises ValueError unless it occurs once."""
        if text.count(self.old) != 1:
            raise ValueError(
                f"{self.name}: {self.file}: {self.old!r} occurs {text.count(self.old)} times, not once"
            )
        return text.index(self.old)

    @property
    def native(self) -> bool:
        return not self.file.endswith(".py")


PYTHON_SWITCH = """
import mmap
import os

with open(os.environ["JAX_TT_MUTANTS"], "r+b") as file:
    _bytes = mmap.mmap(file.fileno(), 0)
_active = int.from_bytes(_bytes[:4], "little")


def on(k):
    _bytes[4 + k] = 1
    return k == _active
"""

NATIVE_SWITCH = """
#pragma once
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace jax_tt_mutants {
inline unsigned char* Bytes() {
  static unsigned char* const bytes = [] {
    const int file = open(getenv("JAX_TT_MUTANTS"), O_RDWR);
    struct stat status;
    fstat(file, &status);
    void* mapped = mmap(nullptr, status.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    return static_cast<unsigned char*>(mapped);
  }();
  return bytes;
}
inline bool On(uint32_t k) {
  static const uint32_t active = [] {
    uint32_t number;
    memcpy(&number, Bytes(), sizeof(number));
    return number;
  }();
  if (Bytes()[4 + k] == 0) Bytes()[4 + k] = 1;
  return k == active;
}
}  // namespace jax_tt_mutants
"""


def plant(folder: Path, mutants: Sequence[Mutant]) -> None:
    """Plants all faults, each behind its switch, in a copy of the sources in ``folder``."""
    (folder / "jax_tt" / "_planted.py").write_text(PYTHON_SWITCH)
    (folder / "ffi" / "planted.h").write_text(NATIVE_SWITCH)
    for name in {mutant.file for mutant in mutants}:
        path = folder / name
        here = [(k, mutant) for k, mutant in enumerate(mutants) if mutant.file == name]
        text = path.read_text()
        path.write_text(_in_python(text, here) if path.suffix == ".py" else _in_native(text, here))


def _in_native(text: str, mutants: list[tuple[int, Mutant]]) -> str:
    for k, mutant in sorted(mutants, key=lambda item: item[1].place(text), reverse=True):
        begin = mutant.place(text)
        active = f"::jax_tt_mutants::On({k})"
        if mutant.old.rstrip().endswith((";", "}")):
            planted = f"if ({active}) {{ {mutant.new} }} else {{ {mutant.old} }}"
        else:
            planted = f"({active} ? ({mutant.new}) : ({mutant.old}))"
        text = text[:begin] + planted + text[begin + len(mutant.old) :]
    return f'#include "ffi/planted.h"\n{text}'


def _in_python(text: str, mutants: list[tuple[int, Mutant]]) -> str:
    """Every statement with faults becomes a choice between what it is without any and with one of them."""
    tree = ast.parse(text)
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    spans: dict[tuple[int, int], list[tuple[int, Mutant]]] = {}
    for k, mutant in mutants:
        begin = mutant.place(text)
        span = _statement(tree, text, starts, begin, begin + len(mutant.old.rstrip()))
        spans.setdefault(span, []).append((k, mutant))
    # Of statements within each other, the outermost has the faults of all.
    outermost = [
        s for s in spans if not any(o != s and o[0] <= s[0] and s[1] <= o[1] for o in spans)
    ]
    for first, last in sorted(outermost, reverse=True):
        lines = text[starts[first] : starts[last]]
        indent = lines[: len(lines) - len(lines.lstrip())]
        inside = [i for s, found in spans.items() if first <= s[0] and s[1] <= last for i in found]
        choices = ""
        for k, mutant in inside:
            changed = lines.replace(mutant.old, mutant.new)
            body = textwrap.indent(changed if changed.strip() else f"{indent}pass\n", "    ")
            choices += f"{indent}{'el' if choices else ''}if _planted.on({k}):\n{body}"
        choices += f"{indent}else:\n{textwrap.indent(lines, '    ')}"
        text = text[: starts[first]] + choices + text[starts[last] :]
    head = next(
        node.lineno
        for node in tree.body
        if not (isinstance(node, ast.Expr) or getattr(node, "module", None) == "__future__")
    )
    at = starts[head - 1]
    return f"{text[:at]}from jax_tt import _planted\n{text[at:]}"


def _statement(
    tree: ast.Module, text: str, starts: list[int], begin: int, end: int
) -> tuple[int, int]:
    """Lines [first, last) of the innermost statement that holds [begin, end) and can stand in a block of its own."""
    best = None
    for node in ast.walk(tree):
        if not isinstance(node, ast.stmt):
            continue
        decorators = getattr(node, "decorator_list", [])
        first = min([node.lineno, *(d.lineno for d in decorators)]) - 1
        last = node.end_lineno
        assert last is not None
        if not (starts[first] <= begin and end <= starts[last]):
            continue
        # One that begins a line, and is not the `if` of an `elif`.
        line = text[starts[first] : starts[first + 1]]
        if line[: node.col_offset].strip() or line.lstrip().startswith("elif"):
            continue
        if best is None or last - first <= best[1] - best[0]:
            best = (first, last)
    if best is None:
        raise ValueError(f"no statement around {text[begin:end]!r}")
    return best
