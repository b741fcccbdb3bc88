"""Small tables in the DLRM example: their bytes, and the file and the table of points."""

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flax")
pytest.importorskip("orbax.checkpoint")
pytest.importorskip("matplotlib")

from flax import nnx

from benchmarks.quality import clicks, clicks_report
from examples.dlrm.config import Config
from examples.dlrm.create import create
from examples.dlrm.train import table_arrays

pytestmark = pytest.mark.usefixtures("promotion_of_a_user")

CONFIG = Config(tables="30000,2000,60", steps=3, batch_size=256, eval_examples=512)
BYTES = 4 * 16 * sum(CONFIG.table_sizes)


@pytest.mark.parametrize("ratio", [5, 50])
def test_the_largest_cache_that_fits(ratio):
    own = clicks.cached(CONFIG, BYTES // ratio)
    assert own is not None

    def nbytes(config: Config) -> int:
        model = nnx.eval_shape(lambda: create(config, "tt_fused", config.table_sizes))
        arrays = [x for _, x in table_arrays(nnx.state(model))]
        return sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in arrays)

    assert 0.95 * BYTES // ratio < nbytes(own) <= BYTES // ratio


def test_no_room_for_the_smallest_tables():
    assert clicks.cached(CONFIG, 1000) is None


@pytest.mark.slow
def test_points_are_measured_once(tmp_path: Path, monkeypatch, capsys):
    out = tmp_path / "points.json"
    arguments = ["--tables=3000,800,60", "--steps=3", "--ratios=8", f"--out={out}"]
    clicks.main(arguments)
    points = json.loads(out.read_text())["points"]
    assert [one["way"] for one in points.values()] == ["dense", "int8", "compress"]
    dense, _, small = points.values()
    assert dense["bytes"] == 4 * 16 * 3860
    assert small["bytes"] <= dense["bytes"] / 8
    # The third table fits as it is.
    assert "dense" not in small["tables"][:2]
    assert abs(small["auc"] - dense["auc"]) < 0.05
    assert clicks_report.table(list(points.values())) in capsys.readouterr().out
    monkeypatch.setattr(clicks, "train", None)
    monkeypatch.setattr(clicks, "Trained", None)
    clicks.main(arguments)
    with pytest.raises(SystemExit, match=r"--out: .*points of other settings"):
        clicks.main(["--tables=3000,800,61", *arguments[1:]])


def test_table_and_picture(tmp_path: Path):
    def point(way: str, ratio: float, seed: int, nbytes: int, auc: float) -> dict:
        return {"way": way, "ratio": ratio, "seed": seed, "bytes": nbytes, "auc": auc}

    points = [
        point("dense", 1.0, 0, 1000, 0.75),
        point("dense", 1.0, 1, 1000, 0.77),
        point("cache", 4.0, 0, 250, 0.74),
        point("compress", 4.0, 0, 240, 0.745),
        point("compress", 4.0, 1, 200, 0.765),
    ]
    assert clicks_report.table(points).splitlines()[2:] == [
        "| dense | 1,000 | 1.0x | 0.7600 | +0.0000 | 2 |",
        "| jax_tt.compress, from dense | 220 | 4.6x | 0.7550 | -0.0050 | 2 |",
        "| tensor train with a row cache, from scratch | 250 | 4.0x | 0.7400 | -0.0100 | 1 |",
    ]
    clicks_report.picture(tmp_path / "clicks.png", points)
    assert (tmp_path / "clicks.png").read_bytes().startswith(b"\x89PNG")
