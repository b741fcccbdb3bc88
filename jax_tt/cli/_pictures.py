"""Pictures of the results of the commands."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jax_tt._base.arguments import mismatch
from jax_tt._base.installed import require
from jax_tt._formats.output import check_output, writing
from jax_tt._formats.stored import FileError
from jax_tt._ids.id_order import IdOrder
from jax_tt._planning.device_plan import DevicePlan, PlacedTable
from jax_tt.cli._inputs import Pairs

_BINS = 64
_SAMPLE = 1 << 20  # interactions drawn
_FORMATS = (".png", ".svg", ".pdf")
_PIXELS = 110
_DEVICES = 32  # drawn; others are like them
_CELLS = 24  # of a pool
_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "bytes"))


def figure(args: argparse.Namespace, columns: int, draw: Callable[[Any], None]) -> None:
    """Writes what ``draw`` draws on axes ``[columns]`` to ``--picture``; nothing where there is none."""
    if args.picture is None:
        return
    # Not pyplot: no window system is asked for, and no state is left behind.
    whole = _figures().Figure(figsize=(5.5 * columns, 4.5), layout="constrained")
    draw(whole.subplots(1, columns, squeeze=False, sharey=True)[0])
    with writing(args.picture, overwrite=args.force) as new:
        whole.savefig(new, format=_suffix(args.picture)[1:], dpi=_PIXELS)
    print(f"drew {args.picture}")


def check_outputs(
    args: argparse.Namespace, inputs: Sequence[str | None], directory: bool = False
) -> None:
    """Refuses, before the work, ``--out`` and ``--picture`` that could not be written, or over one of the inputs."""
    check_picture(args, [*inputs, args.out])
    others = [path for path in inputs if path is not None]
    check_output(args.out, overwrite=args.force, directory=directory, others=others)


def check_picture(args: argparse.Namespace, others: Sequence[str | None]) -> None:
    """Refuses, before the work, a ``--picture`` that could not be written, or over one of the other files."""
    if args.picture is None:
        return
    if _suffix(args.picture) not in _FORMATS:
        expected = f"a name that ends with {', '.join(_FORMATS)}"
        raise mismatch("--picture", args.picture, expected, error=FileError)
    _figures()
    named = [path for path in others if path is not None]
    check_output(args.picture, overwrite=args.force, others=named)


def _figures() -> Any:
    return require("matplotlib.figure", "--picture", "cli")


def _suffix(path: str) -> str:
    return os.path.splitext(path)[1].lower()


def draw_together(axes: Any, pairs: Pairs, order: IdOrder) -> None:
    """How often one context has ids of two blocks of rows, against chance, before and after."""
    contexts, ids = (part[:_SAMPLE] for part in pairs)
    contexts = np.unique(contexts, return_inverse=True)[1]
    count = order.num_embeddings
    images = []
    for rows in (ids, order.apply(ids).astype(np.int64)):
        taken = np.zeros((int(contexts.max(initial=0)) + 1, min(_BINS, count)), np.float32)
        np.add.at(taken, (contexts, rows * taken.shape[1] // count), 1)
        together = taken.T @ taken
        together[np.diag_indices(len(together))] -= taken.sum(axis=0)  # an id beside itself
        alone = together.sum(axis=0)
        chance = alone[:, None] * alone / max(float(alone.sum()), 1)
        ratio = np.divide(together, chance, out=np.ones_like(chance), where=chance > 0)
        images.append(np.log2(np.clip(ratio, 2**-4, 2**4)))
    for axis, title, image in zip(axes, ("original order", "ordered"), images, strict=True):
        shown = axis.imshow(image, cmap="RdBu_r", vmin=-4, vmax=4)
        axis.set(title=title, xlabel="block of rows", ylabel="block of rows of the same context")
        axis.figure.colorbar(shown, ax=axis, label="log2 of (together / by chance)", shrink=0.8)


def draw_counts(axes: Any, counts: np.ndarray, order: IdOrder) -> None:
    """Counts by row, before and after."""
    for axis, title, shown in zip(
        axes, ("original order", "ordered"), (counts, counts[order.inverse.rows]), strict=True
    ):
        axis.plot(_binned(np.asarray(shown, np.float64)[:, None], 4 * _BINS)[:, 0])
        axis.set(title=title, xlabel="block of rows", ylabel="mean count of an id", yscale="symlog")


def draw_rows(axes: Any, table: Any, order: IdOrder) -> None:
    """Means of blocks of rows ``[N, D]``, before and after."""
    rows = np.asarray(table, np.float32)
    for axis, title, shown in zip(
        axes, ("original order", "ordered"), (rows, rows[order.inverse.rows]), strict=True
    ):
        image = axis.imshow(_binned(shown, 4 * _BINS), aspect="auto", interpolation="nearest")
        axis.set(title=title, xlabel="column", ylabel="block of rows")
        axis.figure.colorbar(image, ax=axis, label="mean of the block", shrink=0.8)


def draw_errors(axis: Any, relative: float, row_errors: Mapping[float, float]) -> None:
    """Errors of rows by quantile."""
    at, errors = list(row_errors), list(row_errors.values())
    axis.plot(at, errors, "o-", label="of a row")
    axis.axhline(relative, color="k", linestyle=":", label=f"of the whole table: {relative:.3g}")
    axis.set(xlabel="share of the rows", ylabel="relative error of at most", ylim=(0, None))
    axis.legend()


def draw_terms(axis: Any, errors: Sequence[float]) -> None:
    """Errors of the sums of one term, of two, and so on."""
    axis.plot(range(1, len(errors) + 1), errors, "o-")
    axis.set(xlabel="terms", ylabel="relative error of their sum", ylim=(0, None))
    axis.xaxis.get_major_locator().set_params(integer=True)


def _binned(rows: np.ndarray, bins: int) -> np.ndarray:
    """Means of at most ``bins`` blocks of rows."""
    bins = min(bins, len(rows))
    starts = np.arange(bins) * len(rows) // bins
    return np.add.reduceat(rows, starts) / np.diff(starts, append=len(rows))[:, None]


def draw_devices(axis: Any, plan: DevicePlan) -> None:
    """A bar for every device: the pools of all tables, cut into pages, and the expected time above it."""
    shown = min(plan.devices, _DEVICES)
    scale, unit = next(pair for pair in _UNITS if plan.table_bytes >= pair[0] or pair[0] == 1)
    bottom = 0.0
    for number, (name, placed) in enumerate(plan.tables.items()):
        height = placed.device_bytes / scale
        colour = f"C{number % 10}"
        for device in range(shown):
            _draw_pool(axis, placed, device, plan.devices, (bottom, height, colour))
        axis.bar([0], [0], color=colour, label=name)
        bottom += height
    seconds = np.array(plan.seconds)
    for device in range(shown):
        style = {"color": "C3", "weight": "bold"} if device == plan.slowest else {}
        words = f"{1e3 * seconds[device]:.3g} ms"
        axis.text(device, bottom, words, ha="center", va="bottom", rotation=90, **style)
    axis.set(
        xlabel=f"device, {shown} of {plan.devices:,}" if shown < plan.devices else "device",
        ylabel=f"tables and optimizer state, {unit}",
        xlim=(-0.6, shown - 0.4),
        ylim=(0, 1.25 * bottom),
        title="pages (hatched: replicas) and expected time of a step",
    )
    axis.legend(loc="upper left", bbox_to_anchor=(1, 1))


def _draw_pool(
    axis: Any, placed: PlacedTable, device: int, devices: int, where: tuple[float, float, str]
) -> None:
    bottom, height, colour = where
    layout = placed.layout(devices)
    cells = min(layout.pool, _CELLS)
    table = layout.page_table
    here = (table >= device * layout.pool) & (table < (device + 1) * layout.pool)
    filled = np.zeros(layout.pool, bool)
    filled[table[here] - device * layout.pool] = True
    replica = np.zeros(layout.pool, bool)
    copies = np.broadcast_to((table >= 0).sum(axis=1, keepdims=True), table.shape)
    replica[table[here] - device * layout.pool] = copies[here] > 1
    places = np.arange(cells) * layout.pool // cells
    for cell, place in enumerate(places):
        axis.bar(
            [device],
            [height / cells],
            0.8,
            bottom + cell * height / cells,
            color=colour if filled[place] else "white",
            alpha=0.75 if filled[place] else 1.0,
            hatch="//" if replica[place] else None,
            edgecolor="white" if filled[place] else colour,
            linewidth=0.5,
        )
