"""Fills the table of device_plans.md with plans for devices that need not exist.

    python -m docs.make_device_plans

Nothing runs on these devices: `jax_tt.planning.plan_placements` predicts what a step would take.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import jax_tt

PAGE = Path(__file__).parent / "device_plans.md"
# Devices, and the rows of all tables together.
SIZES = ((8, 10**9), (64, 10**10), (512, 10**11), (4096, 10**12))
BATCH, LENGTH = 64, 8  # bags of a device, and ids of a bag
WIDTH, MEMORY = 64, 80 * 10**9
_BLOCK = re.compile(r"(<!-- plans:begin -->\n).*?(<!-- plans:end -->)", re.DOTALL)


def main() -> None:
    PAGE.write_text(fill(PAGE.read_text(), list(lines())))


def fill(page: str, found: list[str]) -> str:
    """The page with the table between its markers."""
    return _BLOCK.sub(lambda block: f"{block[1]}\n" + "\n".join(found) + f"\n\n{block[2]}", page)


def lines() -> Iterator[str]:
    """The table of the page."""
    yield "| devices | rows | bytes of tables a device | bytes sent by a device in a step | slowest over mean |"
    yield "|---:|---:|---:|---:|---:|"
    for devices, rows in SIZES:
        yield line(devices, rows)


def line(devices: int, rows: int) -> str:
    """What a plan predicts for tables with this number of rows together."""
    rule = jax_tt.optimizers.RowWiseAdagrad(0.05)
    # Half of the rows are of one table, and the hot rows of all tables are their first ones.
    shares = {"user": rows // 2, "item": rows * 3 // 10, "query": rows // 5}
    tables = {
        name: jax_tt.dense_table(own, WIDTH, optimizer=rule, name=name)
        for name, own in shares.items()
    }
    rng = np.random.default_rng(0)
    shape = devices * BATCH, LENGTH
    samples = {
        name: np.minimum(np.exp(rng.uniform(0, np.log(own), shape)), own - 1).astype(np.int64)
        for name, own in shares.items()
    }
    plan = jax_tt.planning.plan_placements(tables, devices, samples, device_bytes=MEMORY)
    sent = (plan.forward_bytes + plan.backward_bytes) * (devices - 1) // devices
    seconds = plan.seconds
    skew = max(seconds) * devices / sum(seconds)
    return f"| {devices:,} | {rows:,} | {plan.table_bytes:,} | {sent:,} | {skew:.3f} |"


if __name__ == "__main__":
    main()
