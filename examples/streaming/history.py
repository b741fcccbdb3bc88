"""What a run has predicted so far, and how long it took."""

import io
from collections.abc import Mapping

import numpy as np

from examples.dlrm.metrics import auc
from examples.streaming.learners import SERVED, Outcome


class History:
    """Predictions and times of all steps, in arrays by name that can be stored."""

    def __init__(self, arrays: Mapping[str, np.ndarray] | None = None):
        self._parts: dict[str, list[np.ndarray]] = {}
        if arrays is not None:
            self._parts = {name: [array] for name, array in arrays.items()}

    @classmethod
    def from_bytes(cls, data: bytes) -> "History":
        with np.load(io.BytesIO(data)) as file:
            return cls(dict(file))

    def to_bytes(self) -> bytes:
        data = io.BytesIO()
        np.savez(data, allow_pickle=False, **self.arrays())
        return data.getvalue()

    def arrays(self) -> dict[str, np.ndarray]:
        self._parts = {name: [np.concatenate(parts)] for name, parts in self._parts.items()}
        return {name: part for name, (part,) in self._parts.items()}

    @property
    def steps(self) -> int:
        return sum(len(part) for part in self._parts.get("seconds", ()))

    def append(self, outcome: Outcome, seconds: float, waited: float) -> None:
        """Adds a step: its duration, and the part of it that was spent waiting for rows."""
        clicks = outcome.clicks
        best = np.full(len(clicks.labels), np.nan) if clicks.best is None else clicks.best
        served = [outcome.served.get(name, 0) for name in SERVED]
        for name, value in {
            "logits": outcome.logits,
            "labels": clicks.labels,
            "best": best.astype(np.float32),
            "served": np.array([served]),
            "moved": np.array([outcome.moved]),
            "seconds": np.array([seconds]),
            "waited": np.array([waited]),
        }.items():
            self._parts.setdefault(name, []).append(value)

    def quality(self, first: float, last: float) -> dict[str, float]:
        """AUC of the model and of the planted probabilities, from one part of the stream to another, of 0 to 1."""
        arrays = self.arrays()
        count = len(arrays["labels"])
        own = slice(round(first * count), round(last * count))
        labels = arrays["labels"][own]
        return {
            "auc": auc(arrays["logits"][own], labels),
            "best": auc(arrays["best"][own], labels),
        }

    def served(self, first: float, last: float) -> dict[str, float]:
        """Shares of the ids by where their row came from."""
        arrays = self.arrays()
        steps = len(arrays["served"])
        own = arrays["served"][round(first * steps) : round(last * steps)]
        ids = 2 * len(arrays["labels"]) / steps * max(len(own), 1)
        return dict(zip(SERVED, (own.sum(axis=0) / ids).tolist(), strict=True))

    def times(self, first: float, last: float) -> dict[str, float]:
        """The median time of a step, the share of the time spent waiting for rows, and the bytes moved in a step."""
        arrays = self.arrays()
        own = slice(round(first * self.steps), round(last * self.steps))
        seconds, waited = arrays["seconds"][own], arrays["waited"][own]
        return {
            "step_ms": 1e3 * float(np.median(seconds)),
            "waited": float(waited.sum() / seconds.sum()),
            "moved": float(arrays["moved"][own].mean()),
        }
