"""The final table and picture that compare the variants."""

import math
from collections.abc import Sequence
from pathlib import Path

from examples.dlrm.config import VARIANTS
from examples.dlrm.result import Result

# Colours that stay apart for colour-blind readers: dense cool, TT warm; optax light, fused dark.
COLOURS = {
    "dense_optax": "#9ecae1",
    "dense_fused": "#2171b5",
    "tt_optax": "#fdae6b",
    "tt_fused": "#d94801",
    "mixed_fused": "#6a51a3",
    "int8_fused": "#238b45",
    "narrow_fused": "#525252",
}


def table(
    results: Sequence[Result], big: Sequence[Result | str], big_table: tuple[int, int] | None
) -> str:
    """The figures as text.

    Args:
      results: one per variant, all trained in the same way.
      big: the same variants with one big table; a string is the reason why a result is missing.
      big_table: rows and features of that table.
    """
    rows = [
        (
            "",
            "AUC",
            "log loss",
            "table parameters",
            "tables",
            "smaller",
            "all, with optimizers",
            "a step",
            "peak memory",
        )
    ]
    largest = max(r.table_bytes for r in results)
    for r in results:
        rows.append(
            (
                VARIANTS[r.variant],
                "-" if math.isnan(r.auc) else f"{r.auc:.4f}",
                "-" if math.isnan(r.log_loss) else f"{r.log_loss:.4f}",
                f"{r.table_parameters:,}",
                _bytes(r.table_bytes),
                f"{largest / r.table_bytes:.1f}x",
                _bytes(r.state_bytes),
                f"{r.step_ms:.1f} ms",
                _bytes(r.peak_bytes),
            )
        )
    lines = [
        f"After {results[0].steps:,} steps on {results[0].examples:,} examples:",
        *_align(rows),
    ]
    lines += [
        f"{VARIANTS[r.variant]}: {r.hit_rate:.1%} of held-out lookups are hits of its row caches."
        for r in results
        if r.hit_rate is not None
    ]
    best = results[0].best_auc
    if best is not None:
        lines.append(
            "Best possible AUC (of the planted probability, on the same held-out examples): "
            f"{best:.4f}"
        )
    if big_table is not None:
        rows = [("", "table parameters", "table", "a step", "peak memory")]
        for r, variant in zip(big, (r.variant for r in results), strict=True):
            if isinstance(r, str):
                rows.append((VARIANTS[variant], r, "", "", ""))
            else:
                figures = (
                    f"{r.table_parameters:,}",
                    _bytes(r.table_bytes),
                    f"{r.step_ms:.1f} ms",
                    _bytes(r.peak_bytes),
                )
                rows.append((VARIANTS[variant], *figures))
        lines += [
            "",
            f"One table of {big_table[0]:,} x {big_table[1]}, a few steps of SGD for time and memory:",
            *_align(rows),
        ]
    start = max(r.start_bytes for r in results)
    lines += [
        "",
        "Peak memory is that of the whole process while it trains; "
        f"{_bytes(start)} of it are Python and JAX themselves.",
    ]
    return "\n".join(lines)


def picture(
    path: Path,
    results: Sequence[Result],
    big: Sequence[Result | str],
    big_table: tuple[int, int] | None,
) -> None:
    """The same figures as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(13, 7), layout="constrained")
    quality, learning, size, time, memory, big_time = axes.flat
    best = results[0].best_auc

    scored = [r for r in results if not math.isnan(r.auc)]
    _bars(
        quality,
        "Quality: AUC",
        {r.variant: (r.auc, f"{r.auc:.3f}") for r in scored},
    )
    for r in scored:
        learning.plot(
            *zip(*r.curve, strict=True),
            marker=".",
            color=COLOURS[r.variant],
            label=VARIANTS[r.variant],
        )
    if scored:
        low = min(min(auc for _, auc in r.curve) for r in scored)
        quality.set_ylim(max(0.0, low - 0.02), max([r.auc for r in scored] + [best or 0.0]) + 0.01)
    if best is not None:
        for axis in (quality, learning):
            axis.axhline(best, color="black", linestyle="--", linewidth=1)
        learning.text(
            0.02, best, " best possible", va="bottom", transform=learning.get_yaxis_transform()
        )
        learning.set_ylim(top=best + 0.01)
    learning.set_title("AUC over the steps")
    learning.set_xlabel("step")
    if scored:
        bottom, top = learning.get_ylim()
        learning.set_ylim(bottom=bottom - 0.5 * (top - bottom))  # room for the legend
        learning.legend(frameon=False, loc="lower right")

    label = {r.variant: f"{_bytes(r.table_bytes)}\n{_count(r.table_parameters)}" for r in results}
    _bars(
        size,
        "Tables: bytes and parameters",
        {r.variant: (r.table_bytes, label[r.variant]) for r in results},
    )
    _bars(
        time,
        "Time a step",
        {r.variant: (r.step_ms, f"{r.step_ms:.1f} ms") for r in results},
    )
    _bars(
        memory,
        "Peak memory of the process (GB)",
        {r.variant: (r.peak_bytes / 1e9, _bytes(r.peak_bytes)) for r in results},
    )
    measured = {r.variant: r for r in big if isinstance(r, Result)}
    if measured and big_table is not None:
        values = {
            v: (r.step_ms, f"{r.step_ms:.1f} ms\n{_bytes(r.peak_bytes)}")
            for v, r in measured.items()
        }
        _bars(
            big_time,
            f"One table of {_count(big_table[0])} x {big_table[1]}:\ntime a step, peak memory",
            values,
        )
    else:
        big_time.set_axis_off()

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _bars(axis, title: str, values: dict[str, tuple[float, str]]) -> None:
    """Bars with their labels, on a logarithmic axis if they differ by more than a factor of ten."""
    names = [VARIANTS[variant].replace(" ", "\n", 1) for variant in values]
    heights = [value for value, _ in values.values()]
    bars = axis.bar(names, heights, color=[COLOURS[v] for v in values])
    axis.bar_label(bars, [label for _, label in values.values()], padding=2, fontsize=9)
    axis.margins(y=0.2)
    axis.set_title(title)
    if max(heights) > 10 * min(heights):
        axis.set_yscale("log")
        axis.set_ylabel("logarithmic")
        axis.tick_params(axis="y", which="both", left=False, labelleft=False)  # the bars say it


def _align(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def _bytes(n: float) -> str:
    for unit in ("B", "kB", "MB"):
        if n < 1000:
            return f"{n:.0f} {unit}" if n >= 100 or unit == "B" else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.2f} GB"


def _count(n: float) -> str:
    for unit in ("", "k"):
        if n < 1000:
            return f"{n:.3g}{unit}"
        n /= 1000
    return f"{n:.3g}M"
