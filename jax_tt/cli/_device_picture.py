"""A picture of the pages of tables on devices."""

from __future__ import annotations

from typing import Any

import numpy as np

from jax_tt._planning.device_plan import DevicePlan, PlacedTable

_DEVICES = 32  # drawn; others are like them
_CELLS = 24  # of a pool
_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "bytes"))


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
    own = (table >= device * layout.pool) & (table < (device + 1) * layout.pool)
    filled = np.zeros(layout.pool, bool)
    filled[table[own] - device * layout.pool] = True
    replica = np.zeros(layout.pool, bool)
    copies = np.broadcast_to((table >= 0).sum(axis=1, keepdims=True), table.shape)
    replica[table[own] - device * layout.pool] = copies[own] > 1
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
