"""Commands that run one after another within a budget of time, such that a kill at any time loses nothing.

The output of all commands goes into one log, outcomes are written after each command, and a later run continues.
"""

import contextlib
import ctypes
import dataclasses
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_PR_SET_PDEATHSIG = 1
# What ends a group of processes and writes the report.
RESERVE_SECONDS = 8.0
_LIBC = ctypes.CDLL(None)


@dataclasses.dataclass(frozen=True)
class Stage:
    """A command.

    Attributes:
        name: of the stage.
        command: program and arguments; several commands run until one fails.
        seconds: it is expected to take. Unless half of them are left, it is not started.
        environment: variables beside those of this process.
    """

    name: str
    command: Sequence[str]
    seconds: float
    environment: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Outcome:
    """How a stage ended: passed, FAILED, stopped or skipped; `detail` is the end of what it printed."""

    name: str
    outcome: str
    seconds: float = 0.0
    detail: str = ""

    @property
    def failed(self) -> bool:
        return self.outcome in ("FAILED", "stopped")


class Run:
    """Runs stages within one budget, and writes their outcomes after each.

    Args:
        seconds: for all stages.
        out: folder of ``stages.json`` and ``log.txt``.
        about: what was run; outcomes of another one are not continued.
        earlier: the ``stages.json`` of the run to continue.
    """

    def __init__(
        self, seconds: float, out: Path, about: Mapping[str, object], earlier: Path | None = None
    ) -> None:
        self._end = time.monotonic() + seconds
        self.out, self._about = out, dict(about)
        self.outcomes: dict[str, Outcome] = {}
        self.listener: Callable[[], None] = lambda: None  # called after each stage
        out.mkdir(parents=True, exist_ok=True)
        if earlier is not None and earlier.exists():
            known = json.loads(earlier.read_text())
            if known["about"] == self._about:
                self.outcomes = {each["name"]: Outcome(**each) for each in known["stages"]}

    @property
    def left(self) -> float:
        return self._end - time.monotonic() - RESERVE_SECONDS

    @property
    def failed(self) -> bool:
        return any(outcome.failed for outcome in self.outcomes.values())

    def passed(self, name: str) -> bool:
        return name in self.outcomes and self.outcomes[name].outcome == "passed"

    def order(self, stages: Iterable[Stage]) -> list[Stage]:
        """Those that have not passed: first those that never ran, in their order, then those that failed."""
        waiting = [stage for stage in stages if not self.passed(stage.name)]
        return sorted(
            waiting, key=lambda s: s.name in self.outcomes and self.outcomes[s.name].failed
        )

    def all(self, stages: Sequence[Stage]) -> None:
        """Runs what has not passed. What a stage leaves of its time may be used by any later one."""
        waiting = self.order(stages)
        for k, stage in enumerate(waiting):
            later = sum(each.seconds for each in waiting[k + 1 :])
            self.run(stage, max(stage.seconds, self.left - later))

    def run(self, stage: Stage, limit: float) -> bool:
        """Runs one stage for `limit` seconds at most, and its processes no longer; whether it passed."""
        if self.left < stage.seconds / 2:
            self.note(Outcome(stage.name, "skipped", detail="no time left"))
            return False
        limit = min(limit, self.left)
        log, start = self.out / "log.txt", time.monotonic()
        print(f"==> {stage.name}, {limit:.0f} s at most", flush=True)
        with log.open("a") as output:
            output.write(f"\n==> {stage.name}\n")
            output.flush()
            begin = output.tell()
            process = subprocess.Popen(
                [str(part) for part in stage.command],
                cwd=ROOT,
                env=os.environ
                | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
                | stage.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                process_group=0,
                preexec_fn=_die_with_parent,
            )
            try:
                status = process.wait(limit)
                outcome, said = "FAILED" if status else "passed", f"exit status {status}"
            except subprocess.TimeoutExpired:
                outcome, said = "stopped", f"stopped after {limit:.0f} s"
            finally:
                _end_group(process)
        with log.open("rb") as file:
            file.seek(begin)
            lines = file.read().decode(errors="replace").splitlines()
        tail = lines[-15:] if outcome != "passed" else lines[-3:]
        detail = "\n".join([said, *tail])
        print(detail, flush=True)
        self.note(Outcome(stage.name, outcome, time.monotonic() - start, detail))
        return outcome == "passed"

    def note(self, outcome: Outcome) -> None:
        """Writes an outcome; a stage that is skipped now keeps what it came to before."""
        before = self.outcomes.get(outcome.name)
        if outcome.outcome == "skipped" and before is not None and before.failed:
            return
        self.outcomes.pop(outcome.name, None)
        self.outcomes[outcome.name] = outcome
        known = {
            "about": self._about,
            "stages": [dataclasses.asdict(each) for each in self.outcomes.values()],
        }
        replace(self.out / "stages.json", json.dumps(known, indent=1))
        self.listener()


def replace(path: Path, text: str) -> None:
    """Writes a file that a kill cannot leave half written."""
    part = path.with_suffix(".part")
    part.write_text(text)
    part.replace(path)


def _die_with_parent() -> None:
    """In a new process: it is killed when its parent is, so that none keeps the memory of a GPU."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends all processes of a group, those that its first one has left behind too."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
