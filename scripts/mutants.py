"""Mutation testing: plants defects, one at a time, and expects the quick tier of the tests to fail.

python -m scripts.mutants            all of them: about half an hour
python -m scripts.mutants --list     names and places
python -m scripts.mutants adam clip  some of them

The defects are planted in the files of the checkout and removed again. Only the listed test files of the quick tier
are run: if they fail, so does `make test`.
"""

import argparse
import contextlib
import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A defect: `old`, which occurs once in the file, is replaced by `new`, and these test files must fail."""

    file: str
    old: str
    new: str
    tests: str

    @property
    def native(self) -> bool:
        return self.file.startswith("ffi/")

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        path = ROOT / self.file
        text = path.read_text()
        if text.count(self.old) != 1:
            raise ValueError(
                f"{self.file}: {self.old!r} occurs {text.count(self.old)} times, not once"
            )
        path.write_text(text.replace(self.old, self.new))
        try:
            yield
        finally:
            path.write_text(text)


MUTANTS = {
    "adagrad": Mutant(
        "ffi/core/optimizers/adagrad.h", "(SquareRoot(s) + eps)", "SquareRoot(s + eps)", "fused"
    ),
    "adam": Mutant("ffi/core/optimizers/adam.h", "(m / correction1)", "(m / correction2)", "fused"),
    "sums of LAMB": Mutant(
        "ffi/core/optimizers/lamb.h", "sums[1] += r * r;", "sums[1] += g * g;", "rules"
    ),
    "first use": Mutant("ffi/core/optimizers/row_counter.h", "last_step == C{0} || ", "", "rules"),
    "largest norm": Mutant(
        "ffi/core/optimizers/regularized_rowwise_adagrad.h",
        "norm > max_norm ? max_norm / norm : C{1}",
        "C{1}",
        "rules",
    ),
    "rounding": Mutant(
        "ffi/core/stochastic.h", "0x9e3779b97f4a7c15u + column;", "0x9e3779b97f4a7c15u;", "fused"
    ),
    "hotter": Mutant(
        "ffi/core/cache.h", "touched > row_touched)", "touched >= row_touched)", "cache_model"
    ),
    "weights of rows": Mutant(
        "ffi/cpu/dense/dense.cc",
        "rows_.at(), rows_.weight(),",
        "rows_.at(), nullptr,",
        "conformance kinds",
    ),
    "columns": Mutant(
        "ffi/core/bag_vectors.h", "columns[narrow / each]", "columns[0]", "collection_wide"
    ),
    "long bags": Mutant(
        "ffi/cpu/dense/bag_sums.h", "continues_ = true;", "continues_ = false;", "dense_segments"
    ),
    "weights of single TT rows": Mutant(
        "ffi/cpu/tt/row_gradients.h",
        "if (end - begin == 1 && problem_.weights == nullptr) return",
        "if (end - begin == 1) return",
        "conformance kinds",
    ),
    "poison": Mutant(
        "ffi/cpu/dense/pool_bags.h",
        "else if (row == kPoison &&",
        "else if (bag < 0 &&",
        "poisoned_ids",
    ),
    "clip": Mutant(
        "ffi/cpu/plan/plan.cc",
        "id = id < 0 ? 0 : num_embeddings - 1;",
        "id = num_embeddings - 1;",
        "conformance",
    ),
    "ghosts": Mutant(
        "ffi/cpu/cache/bucket.h",
        "(scores[place] == beyond.score) & (tags[place] < beyond.tag));\n      tags[place] = stays",
        "(scores[place] == beyond.score));\n      tags[place] = stays",
        "cache_model",
    ),
    "nonfinite": Mutant(
        "ffi/cpu/dense/row_update.h", "return probe == C{0};", "return true;", "fused"
    ),
    "planned rows": Mutant(
        "ffi/cuda/plan/slices.cu",
        "(rows < own.count || last == own.valid)",
        "(rows < own.count)",
        "cuda_plan",
    ),
    "joined sums": Mutant(
        "ffi/cuda/tt/bags.cu",
        "for (int other = 1; other < groups; ++other)",
        "for (int other = 2; other < groups; ++other)",
        "cuda_tt cuda_fast",
    ),
    "long rows": Mutant(
        "ffi/cuda/dense/rows.h",
        "constexpr int kLooked = 32 + kDensePiece;",
        "constexpr int kLooked = 32;",
        "dense_segments",
    ),
    "gathered gradients": Mutant(
        "jax_tt/_jax/vma.py", "return (lax.psum(g, axis_name),)", "return (g,)", "shard"
    ),
    "touched": Mutant(
        "jax_tt/_table/reference.py",
        "read = [lax.psum(rows.astype(jnp.int32), lookup.axis_name) > 0 for rows in read]",
        "pass",
        "fused_shard",
    ),
    "bias correction": Mutant(
        "jax_tt/optimizers/adam.py", "jnp.float32) + 1", "jnp.float32) + 2", "fused"
    ),
    "empty bags": Mutant(
        "jax_tt/_lookup/combine.py",
        "safe = jnp.where(empty, 1, size)",
        "safe = size",
        "grad",
    ),
    "averages of steps that are not taken": Mutant(
        "jax_tt/_table/between_steps.py", "due & (applied != 0)", "due", "averaged_rules"
    ),
    "unused tables": Mutant(
        "jax_tt/_collection/next_values.py",
        "if skip is True:\n            continue",
        "",
        "unused_tables",
    ),
    "marks of other features": Mutant(
        "jax_tt/_collection/joined.py",
        "with_marks(part) if padded and not part.padded else part",
        "dataclasses.replace(part, padded=padded)",
        "collection",
    ),
    "features apart": Mutant(
        "jax_tt/_collection/joined.py", "rows[begin:end]", "rows[: end - begin]", "collection"
    ),
    "sums that a loss does not use": Mutant(
        "jax_tt/_lookup/rule.py",
        "lambda g: None if isinstance(g, unused) else g",
        "lambda g: jax.numpy.zeros(g.aval.shape) if isinstance(g, unused) else g",
        "collection",
    ),
    "order of columns": Mutant(
        "jax_tt/_kinds/ordered/table.py",
        "return columns_by_id(table._rows(state), attend(table.table, state, query, precision))",
        "return attend(table.table, state, query, precision)",
        "order_layers",
    ),
    "weights of misses": Mutant(
        "jax_tt/_kinds/cached/table.py", "jnp.where(here, missed, 0)", "missed", "cache_lookup"
    ),
    "copies": Mutant(
        "jax_tt/_kinds/cached/table.py",
        "cached = copied + jax.lax.stop_gradient(cached - copied)",
        "pass",
        "cache_lookup cache_layers",
    ),
    "plans before updates": Mutant(
        "ffi/cpu/tables/ops.cc",
        "if (changes == Changes::kNothing)",
        "if (changes == Changes::kNothing || !ops.empty())",
        "parallel",
    ),
}


def caught(mutant: Mutant) -> bool:
    """Whether the tests fail with the defect in place. Exits if the defect does not compile."""
    with mutant.planted():
        if mutant.native:
            _build()
        return _tests(mutant.tests.split()) == pytest.ExitCode.TESTS_FAILED


def _tests(names: list[str]) -> int:
    files = [str(next((ROOT / "tests").rglob(f"test_{name}.py"))) for name in names]
    # In one process: with xdist, the exit status of a failed test is that of a run that was interrupted.
    options = ["--tier=quick", "--exitfirst", "--quiet"]
    command = [sys.executable, "-m", "pytest", *options, *files]
    return subprocess.run(command, cwd=ROOT, capture_output=True).returncode


def _build() -> None:
    done = subprocess.run(["make", "native"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help=f"all by default: {', '.join(MUTANTS)}")
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(MUTANTS):
        parser.error(f"names: got {', '.join(unknown)}; expected some of {', '.join(MUTANTS)}")
    chosen = {name: MUTANTS[name] for name in arguments.names or MUTANTS}
    if arguments.list:
        for name, mutant in chosen.items():
            print(f"{name}: {mutant.file}: {mutant.old} -> {mutant.new}")
        return
    if _tests(sorted({name for mutant in chosen.values() for name in mutant.tests.split()})):
        sys.exit("The tests fail without a defect, or cannot be run: nothing is planted.")
    survivors = []
    try:
        for name, mutant in chosen.items():
            found = caught(mutant)
            print(f"{'caught' if found else 'SURVIVED'}: {name} ({mutant.file})", flush=True)
            if not found:
                survivors.append(name)
    finally:
        if any(mutant.native for mutant in chosen.values()):
            _build()
    sys.exit(f"not caught: {', '.join(survivors)}" if survivors else 0)


if __name__ == "__main__":
    main()
