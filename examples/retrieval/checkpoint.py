"""The contents of a run's directory: settings, checkpoints, result."""

import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from flax import nnx

from examples.retrieval.settings import Config


class Run:
    """The directory of one variant.

    Orbax writes a checkpoint under a temporary name and renames it when it is complete, so that a killed run leaves
    either that checkpoint or the previous one.

    Args:
        workdir: created if needed.
        config: settings; a directory that contains a run with other settings is rejected.
    """

    def __init__(self, workdir: Path, config: Config):
        self._workdir = workdir
        _check_config(config, workdir)
        self._manager = ocp.CheckpointManager(
            (workdir / "checkpoints").absolute(),
            options=ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=False),
        )

    @property
    def epoch(self) -> int:
        """The last epoch that was saved; 0 for none."""
        return self._manager.latest_step() or 0

    def save(self, epoch: int, state: nnx.State, history: dict[str, Any]) -> None:
        """Saves the model, the optimizer and the figures collected so far."""
        arrays = ocp.args.StandardSave(nnx.to_pure_dict(state))
        both = ocp.args.Composite(state=arrays, history=ocp.args.JsonSave(history))
        self._manager.save(epoch, args=both)

    def restore(self, state: nnx.State) -> dict[str, Any]:
        """Overwrites `state` with the saved one and returns the history."""
        like = jax.tree.map(ocp.utils.to_shape_dtype_struct, nnx.to_pure_dict(state))
        arrays = ocp.args.StandardRestore(like)
        both = ocp.args.Composite(state=arrays, history=ocp.args.JsonRestore())
        found = self._manager.restore(self.epoch, args=both)
        nnx.replace_by_pure_dict(state, found["state"])
        return found["history"]

    def finish(self, result: dict[str, Any]) -> None:
        """Writes the result."""
        self._manager.close()
        write_json(self._workdir / "result.json", result)


def _check_config(config: Config, workdir: Path) -> None:
    """Raises if the settings of the run in the directory are different."""
    path, new = workdir / "config.json", asdict(config)
    if not path.exists():
        shutil.rmtree(workdir, ignore_errors=True)
        workdir.mkdir(parents=True)
        write_json(path, new)
        return
    old = json.loads(path.read_text())
    changed = {
        name: (old.get(name), value) for name, value in new.items() if old.get(name) != value
    }
    if changed:
        raise ValueError(
            f"workdir: {workdir} holds a run with other settings (old, new): {changed}. "
            "Give another --workdir, or --fresh to delete that run."
        )


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a file. The file is complete or absent, whenever the process is killed."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(_compact(content) + "\n")
    os.replace(unfinished, path)


def _compact(content: dict[str, Any]) -> str:
    """JSON with one line for each field and each run: short files, and diffs that show what changed."""

    def text(value: Any) -> str:
        runs = isinstance(value, dict) and all(isinstance(run, dict) for run in value.values())
        if not (runs and value):
            return json.dumps(value)
        return _object({name: json.dumps(run) for name, run in value.items()}, indent=2)

    return _object({name: text(value) for name, value in content.items()}, indent=1)


def _object(fields: dict[str, str], indent: int) -> str:
    lines = ",\n".join(f"{' ' * indent}{json.dumps(name)}: {text}" for name, text in fields.items())
    return f"{{\n{lines}\n{' ' * (indent - 1)}}}"
