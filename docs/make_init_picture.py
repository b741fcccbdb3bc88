"""Draws docs/images/init.png: the table entries of each initialiser against the targets.

Run from the root of the repository: ``python docs/make_init_picture.py``.
"""

from pathlib import Path

import jax
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

import jax_tt

NAMES = ("approx-normal", "approx-uniform", "normal", "uniform")
RANKS = (1, 4, 32)
ROWS, FEATURES = 1_000_000, 64


def entries(name: str, rank: int) -> np.ndarray:
    """Entries of random rows, in units of the target's standard deviation."""
    shape = jax_tt.TTShape.suggest(ROWS, FEATURES, rank)
    cores = jax_tt.tt.init(jax.random.key(0), shape, name)
    ids = np.random.default_rng(0).integers(0, ROWS, 20_000).astype(np.int32)
    rows = jax_tt.tt.lookup(cores, ids, method="reference")
    return np.asarray(rows, np.float64).ravel() * np.sqrt(3 * ROWS)


def main() -> None:
    x = np.linspace(-4, 4, 401)
    normal = np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi)
    uniform = np.where(np.abs(x) < np.sqrt(3), 1 / (2 * np.sqrt(3)), 0)
    figure, axes = plt.subplots(1, 4, figsize=(13, 3.2), sharey=True, layout="constrained")
    for axis, name in zip(axes, NAMES, strict=True):
        for rank in RANKS:
            values = entries(name, rank)
            label = f"rank {rank}, variance {values.var():.2f}"
            axis.hist(values, bins=160, range=(-4, 4), density=True, histtype="step", label=label)
        axis.plot(x, normal, "k--", linewidth=1, label="N(0, 1/3N)")
        if "uniform" in name:
            axis.plot(x, uniform, "k:", linewidth=1, label="U(±1/√N)")
        axis.set(title=name, xlabel="table entry × √(3N)", xlim=(-4, 4), ylim=(0, 0.9))
        axis.legend(fontsize=6.5, loc="upper right")
    axes[0].set_ylabel("density")
    target = Path(__file__).parent / "images" / "init.png"
    target.parent.mkdir(exist_ok=True)
    figure.savefig(target, dpi=110)
    print(f"wrote {target}")


if __name__ == "__main__":
    main()
