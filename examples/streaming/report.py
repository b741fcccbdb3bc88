"""The final table and picture that compare the variants."""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from examples.streaming.settings import VARIANTS

Results = Mapping[str, Sequence[dict[str, Any]]]

_TIERS = ("device", "host", "disk", "new")
_TIER_COLOURS = ("#2171b5", "#6baed6", "#c6dbef", "#fdae6b")
_PARTS = ("rows", "optimizer", "directory", "on their way")
_PART_COLOURS = ("#2171b5", "#9ecae1", "#fdae6b", "#d9d9d9")


def table(results: Results) -> str:
    """One line per variant, with means over the seeds, as a Markdown table."""
    header = (
        "",
        "AUC",
        "AUC, last third",
        "MB on device",
        "MB in host memory",
        "MB on disk",
        "rows on device",
        "MB moved a step",
        "a step",
        "waiting",
    )
    lines = [header, tuple(":--" if k == 0 else "--:" for k in range(len(header)))]
    for variant, runs in results.items():
        others = [{"host": 0, "disk": 0} | r["other_bytes"] for r in runs]
        hits = np.mean([r["served"]["device"] for r in runs])
        lines.append(
            (
                VARIANTS[variant].label,
                _spread([r["whole"]["auc"] for r in runs]),
                _spread([r["last"]["auc"] for r in runs]),
                f"{np.mean([device_bytes(r) for r in runs]) / 1e6:.2f}",
                f"{np.mean([o['host'] for o in others]) / 1e6:.2f}",
                f"{np.mean([o['disk'] for o in others]) / 1e6:.2f}",
                "always" if variant == "hashing" else f"{100 * hits:.1f} %",
                f"{np.mean([r['moved'] for r in runs]) / 1e6:.3f}",
                f"{np.mean([r['step_ms'] for r in runs]):.1f} ms",
                f"{100 * np.mean([r['waited'] for r in runs]):.0f} %",
            )
        )
    widths = [max(len(line[k]) for line in lines) for k in range(len(header))]
    text = "\n".join(
        "| "
        + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        + " |"
        for line in lines
    )
    runs = next(iter(results.values()))
    best = [r["whole"]["best"] for r in runs]
    seeds, size = len(runs), runs[0]["config"]["batch_size"]
    about = f"\n\n{seeds} seed{'s' * (seeds > 1)}, {runs[0]['steps']:,} steps of {size} examples."
    if np.isfinite(best).all():
        about += f" Best possible AUC: {_spread(best)}."
    return text + about


def learning_rates(results: Mapping[str, Mapping[float, dict[str, Any]]]) -> str:
    """AUC over the whole stream by variant and learning rate."""
    lines = []
    for variant, by_rate in results.items():
        found = "  ".join(f"{rate}: {r['whole']['auc']:.4f}" for rate, r in by_rate.items())
        best = max(by_rate, key=lambda rate: by_rate[rate]["whole"]["auc"])
        lines.append(f"{VARIANTS[variant].label:20} {found}  best: {best}")
    return "\n".join(lines)


def device_bytes(result: Mapping[str, Any]) -> int:
    """All bytes on the device."""
    return sum(result["device_bytes"].values())


def picture(path: Path, results: Results) -> None:
    """Quality over time, where rows came from, what moved, and memory, as a PNG. Quality is the mean over the seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    dynamic = [variant for variant in results if variant != "hashing"]
    columns = max(3, len(dynamic))
    figure = plt.figure(figsize=(4 * columns, 8), layout="constrained")
    halves = figure.add_gridspec(2, 1, height_ratios=(1.3, 1))
    top, bottom = (figure.add_subfigure(half) for half in halves)
    quality, memory, moves = top.subplots(1, 3, width_ratios=(1.5, 1, 1))
    _quality(quality, results)
    _memory(memory, results)
    _moves(moves, results)
    axes = bottom.subplots(1, columns, sharey=True, squeeze=False)[0]
    for axis in axes[len(dynamic) :]:
        axis.set_axis_off()
    for axis, variant in zip(axes, dynamic, strict=False):
        _served(axis, results[variant][0])
        axis.set_title(VARIANTS[variant].label)
    if dynamic:
        axes[0].set_ylabel("share of the ids")
        axes[0].legend(loc="lower right", fontsize=8)
    bottom.suptitle("Where the rows of a batch came from")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _quality(axis: Any, results: Results) -> None:
    for variant, runs in results.items():
        style = {"color": VARIANTS[variant].colour, "label": VARIANTS[variant].label}
        # Training through tiers gives the numbers of one large table: both lines are to be seen.
        style["linestyle"] = "--" if variant == "unlimited" else "-"
        axis.plot(*_curve(runs, lambda window: window["auc"]), **style)
    best = _curve(next(iter(results.values())), lambda window: window["best"])
    if np.isfinite(best[1]).all():
        axis.plot(*best, color="black", linestyle=":", label="best possible")
    axis.set_title("AUC, each batch predicted before it is trained on")
    axis.set_xlabel("step")
    axis.legend(fontsize=8)


def _curve(
    runs: Sequence[dict[str, Any]], value: Callable[[Any], float]
) -> tuple[np.ndarray, np.ndarray]:
    values = np.mean([[value(window) for window in r["windows"]] for r in runs], axis=0)
    return (np.arange(len(values)) + 0.5) / len(values) * runs[0]["steps"], values


def _served(axis: Any, result: dict[str, Any]) -> None:
    windows = result["served_windows"]
    steps = (np.arange(len(windows)) + 0.5) / len(windows) * result["steps"]
    shares = [[window[name] for window in windows] for name in _TIERS]
    axis.stackplot(steps, shares, labels=_TIERS, colors=_TIER_COLOURS)
    axis.set_ylim(0.5, 1)
    axis.set_xlabel("step")


def _moves(axis: Any, results: Results) -> None:
    """The bytes that move between tiers, and the time that is spent waiting for them."""
    for runs in results.values():
        windows = runs[0]["times_windows"]
        if not any(window["moved"] for window in windows):
            continue
        steps = (np.arange(len(windows)) + 0.5) / len(windows) * runs[0]["steps"]
        axis.plot(steps, [window["moved"] / 1e3 for window in windows], label="kB moved in a step")
        waited = axis.twinx()
        waited.plot(steps, [100 * window["waited"] for window in windows], color="tab:red")
        waited.set_ylim(0, 100)
        waited.set_ylabel("% of the time waiting", color="tab:red")
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=8)
    axis.set_title("Moved between tiers")
    axis.set_xlabel("step")


def _memory(axis: Any, results: Results) -> None:
    names = [textwrap.fill(VARIANTS[variant].label, 10) for variant in results]
    start = np.zeros(len(names))
    for part, colour in zip(_PARTS, _PART_COLOURS, strict=True):
        sizes = [runs[0]["device_bytes"].get(part, 0) / 1e6 for runs in results.values()]
        axis.bar(names, sizes, bottom=start, color=colour, label=part)
        start += np.array(sizes)
    budget = next(iter(results.values()))[0]["config"]["budget"] / 1e6
    axis.axhline(budget, color="black", linestyle=":", linewidth=1)
    # The table without a budget would leave no room for the others.
    top = 1.8 * budget
    axis.set_ylim(0, top)
    for name, total in zip(names, start, strict=True):
        axis.text(name, min(total, 0.94 * top), f"{total:.2f}", ha="center", va="bottom")
    axis.set_title("Bytes on the device (MB)")
    axis.tick_params(axis="x", labelsize=8)
    axis.legend(loc="upper left", fontsize=8)


def _spread(values: Sequence[float]) -> str:
    """The mean, and half the distance of the extremes."""
    mean = f"{np.mean(values):.4f}"
    return mean if len(values) == 1 else f"{mean} ± {(max(values) - min(values)) / 2:.4f}"
