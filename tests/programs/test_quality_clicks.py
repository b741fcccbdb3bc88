"""Small tables in the DLRM example: their bytes, and the file and the table of points."""

import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flax")
pytest.importorskip("orbax.checkpoint")
pytest.importorskip("matplotlib")

from flax import nnx

import jax_tt
from benchmarks.quality import clicks, clicks_report
from examples.dlrm.config import Config
from examples.dlrm.create import create
from examples.dlrm.train import table_arrays, train

pytestmark = pytest.mark.usefixtures("promotion_of_a_user")

CONFIG = Config(tables="30000,2000,60", steps=3, batch_size=256, eval_examples=512)
BYTES = 4 * 16 * sum(CONFIG.table_sizes)


def test_the_largest_cache_that_fits():
    def nbytes(config: Config) -> int:
        model = nnx.eval_shape(lambda: create(config, "tt_fused", config.table_sizes))
        arrays = [x for _, x in table_arrays(nnx.state(model))]
        return sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in arrays)

    own = clicks.cached(CONFIG, BYTES // 20)
    assert own is not None
    assert 0.95 * BYTES // 20 < nbytes(own) <= BYTES // 20
    assert clicks.cached(CONFIG, 1000) is None


@pytest.mark.slow
def test_points_are_measured_once(tmp_path: Path, monkeypatch, capsys):
    """With one kind of small tables, and without training behind a cache, which tests of the example do."""

    def instead(config: Config, variant: str) -> Any:
        if variant == "int8_fused":
            return train(config, variant)
        return SimpleNamespace(auc=0.6, best_auc=0.7, table_bytes=100)

    monkeypatch.setattr(clicks, "train", instead)
    compress = functools.partial(jax_tt.compress, kind="product")
    monkeypatch.setattr(jax_tt, "compress", compress)
    out = tmp_path / "points.json"
    arguments = ["--tables=1200,60", "--steps=3", "--ratios=8", f"--out={out}"]
    clicks.main(arguments)
    points = json.loads(out.read_text())["points"]
    assert [one["way"] for one in points.values()] == ["dense", "int8", "compress", "cache"]
    dense, _, small, _ = points.values()
    assert dense["bytes"] == 4 * 16 * 1260
    assert small["bytes"] <= dense["bytes"] / 8
    # The second table fits as it is.
    assert "dense" not in small["tables"][:1]
    assert abs(small["auc"] - dense["auc"]) < 0.05
    assert clicks_report.table(list(points.values())) in capsys.readouterr().out
    monkeypatch.setattr(clicks, "train", None)
    monkeypatch.setattr(clicks, "Trained", None)
    clicks.main(arguments)
    with pytest.raises(SystemExit, match=r"--out: .*points of other settings"):
        clicks.main(["--tables=1200,61", *arguments[1:]])
