"""The final table and picture that compare the variants."""

import datetime
import os
import platform
import re
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from examples.retrieval.settings import VARIANTS

# Colours that stay apart for colour-blind readers: dense blue, TT orange; optax light, fused dark.
COLOURS = {
    "dense_optax": "#9ecae1",
    "dense_fused": "#2171b5",
    "int8_fused": "#084594",
    "int4_fused": "#6baed6",
    "tt_optax": "#fdae6b",
    "tt_fused": "#d94801",
    "tt2_fused": "#8c2d04",
    "tt_residual_fused": "#dd1c77",
    "low_rank": "#41ab5d",
    "hashing": "#737373",
    "quotient_remainder": "#6a51a3",
}


def conditions() -> dict[str, Any]:
    """The machine, the versions and the date of a measurement."""
    try:
        cpu = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        cpu = None
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu[1] if cpu else platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("jax", "flax", "optax", "numpy")},
    }


def table(results: Sequence[dict[str, Any]], k: int) -> str:
    """One line per result of `train`, as text."""
    rows = [
        (
            "",
            f"recall@{k}",
            "parameters",
            "tables",
            "smaller by",
            "+ optimizer",
            "a step",
            "peak memory",
        )
    ]
    rows += [
        (
            VARIANTS[r["variant"]].label,
            f"{r['recall']:.4f}",
            f"{r['parameters']:,}",
            _bytes(r["bytes"]),
            f"{r['compression']:.1f}x",
            _bytes(r["state_bytes"]),
            f"{r['step_ms']:.2f} ms",
            _bytes(r["peak_bytes"]),
        )
        for r in results
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    start = max(r["start_bytes"] for r in results)
    lines.append(
        f"Recall over all items for {results[0]['test_users']:,} test users, train items left out. Peak memory is that "
        f"of the process in its first epoch; {_bytes(start)} of it are Python, JAX and the interactions."
    )
    return "\n".join(lines)


def picture(path: Path, results: Sequence[dict[str, Any]], k: int) -> None:
    """The same figures as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    figure, axes = plt.subplots(2, 3, figsize=(13, 7), layout="constrained")
    quality, recall, loss, size, time, memory = axes.flat
    _bars(quality, f"recall@{k}", results, "recall", lambda r: f"{r['recall']:.4f}")
    for r in results:
        style = {"color": COLOURS[r["variant"]], "label": VARIANTS[r["variant"]].label}
        epochs, values = np.reshape(r["recall_curve"], (-1, 2)).T
        recall.plot(epochs, values, marker=".", **style)
        loss.plot(range(1, len(r["loss_curve"]) + 1), r["loss_curve"], **style)
    recall.set_title(f"recall@{k} on up to 10,000 of the test users")
    recall.set_ylim(bottom=0)
    loss.set_title("Training loss")
    loss.legend(frameon=False)
    for axis in (recall, loss):
        axis.set_xlabel("epoch")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    _bars(
        size,
        "Tables: bytes (and times smaller)",
        results,
        "bytes",
        lambda r: f"{_bytes(r['bytes'])}\n{r['compression']:.0f}x",
        log=True,
    )
    _bars(time, "Time a step (ms)", results, "step_ms", lambda r: f"{r['step_ms']:.2f}", log=True)
    _bars(
        memory,
        "Peak memory of the process",
        results,
        "peak_bytes",
        lambda r: _bytes(r["peak_bytes"]),
    )
    start = max(r["start_bytes"] for r in results)
    memory.axhline(
        start, color="black", linestyle="--", linewidth=1, label="before the tables are made"
    )
    memory.legend(loc="lower left")
    memory.yaxis.set_major_formatter(lambda value, _: _bytes(value))
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _bars(
    axis: Any,
    title: str,
    results: Sequence[dict[str, Any]],
    key: str,
    label: Any,
    log: bool = False,
) -> None:
    names = [VARIANTS[r["variant"]].label.replace(" ", "\n", 1) for r in results]
    bars = axis.bar(
        names, [r[key] for r in results], color=[COLOURS[r["variant"]] for r in results]
    )
    axis.bar_label(bars, [label(r) for r in results], padding=2, fontsize=9)
    if log:
        axis.set_yscale("log")
    axis.margins(y=0.2)
    axis.set_title(title)


def _bytes(n: float) -> str:
    for unit in ("B", "kB", "MB"):
        if n < 1000:
            return f"{n:.0f} {unit}" if n >= 100 or unit == "B" else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.2f} GB"
