"""Checkpoints from which a killed run continues with the same results.

A checkpoint is complete or absent: orbax writes it into a temporary folder and renames that. It
contains the parameters, the optimizer state, the step, and the position in the data. Batches are a
function of that position, so the continued run sees the same batches.
"""

import dataclasses
import fcntl
from pathlib import Path

import jax
import orbax.checkpoint as ocp
from flax import nnx


@dataclasses.dataclass
class Progress:
    """The state of the training loop that is not in arrays; saved as JSON."""

    position: tuple[int, ...]
    step: int = 0
    curve: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    step_ms: list[float] = dataclasses.field(default_factory=list)
    peak_bytes: int = 0

    def advance(self, position: tuple[int, ...], milliseconds: float) -> None:
        """One step further."""
        self.step += 1
        self.position = position
        self.step_ms.append(milliseconds)
        del self.step_ms[:-1000]  # the median needs no more


class Checkpoints:
    """The checkpoints of one run.

    Args:
      directory: created if needed. A second process that opens it waits for the first to end.
      settings: those that a resumed run must share.
      resume: continue from the last checkpoint; otherwise the directory must not contain one.
    """

    def __init__(self, directory: str | Path, settings: dict[str, object], resume: bool):
        directory = Path(directory).absolute()
        directory.mkdir(parents=True, exist_ok=True)
        # Released when the process ends, however it ends.
        self._lock = (directory / "lock").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        options = ocp.CheckpointManagerOptions(
            max_to_keep=2, cleanup_tmp_directories=True, enable_async_checkpointing=False
        )
        self._manager = ocp.CheckpointManager(directory / "steps", options=options)
        self._settings = settings
        self.latest = self._manager.latest_step()
        if self.latest is not None and not resume:
            raise FileExistsError(
                f"--checkpoint-dir: {directory} holds a checkpoint of step {self.latest}; "
                "add --resume to continue from it, or name another folder"
            )

    def save(self, progress: Progress, state: nnx.State) -> None:
        """Writes a checkpoint; returns when it is complete. The state may be donated afterwards."""
        host = {"progress": dataclasses.asdict(progress), "settings": self._settings}
        self._manager.save(
            progress.step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(nnx.to_pure_dict(state)), host=ocp.args.JsonSave(host)
            ),
        )

    def restore(self, abstract: nnx.State) -> tuple[Progress, nnx.State]:
        """The latest checkpoint.

        Args:
          abstract: the state as shapes and dtypes (of `nnx.eval_shape`), or as arrays, which also say where it goes.

        Raises:
          ValueError: it was saved by a run with other settings.
        """
        host = self._manager.restore(
            self.latest, args=ocp.args.Composite(host=ocp.args.JsonRestore())
        )["host"]
        saved = host["settings"]
        differing = [
            f"{name}: {saved.get(name)!r} then, {value!r} now"
            for name, value in self._settings.items()
            if saved.get(name) != value
        ]
        if differing:
            raise ValueError(
                "--resume: the checkpoint was saved with other settings ("
                + "; ".join(differing)
                + "); "
                "repeat the command line of that run, or name another --checkpoint-dir"
            )
        place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        target = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding or place),
            nnx.to_pure_dict(abstract),
        )
        restored = self._manager.restore(
            self.latest, args=ocp.args.Composite(state=ocp.args.StandardRestore(target))
        )["state"]
        nnx.replace_by_pure_dict(abstract, restored)
        progress = Progress(**host["progress"])
        progress.position = tuple(progress.position)
        return progress, abstract
