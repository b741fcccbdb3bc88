"""A table that one process must not hold trains on two with the same limit of memory."""

import sys

import numpy as np
import pytest

from tests.kinds.sharded.memory_run import STEPS
from tests.processes import free_port, launch, outputs_of, started

pytestmark = [
    pytest.mark.slow,
    pytest.mark.dear("a table whose rows are drawn in parts has more than 256 MiB"),
    pytest.mark.skipif(sys.platform != "linux", reason="the limit of memory is that of Linux"),
]


def test_a_table_beyond_the_memory_of_one_process_trains_on_two(tmp_path):
    first, second = launch(tmp_path, 2, "kinds.sharded.memory_run")
    np.testing.assert_array_equal(first["losses"], second["losses"])
    assert len(first["losses"]) == STEPS
    assert np.all(np.diff(first["losses"]) < 0)

    alone = started("kinds.sharded.memory_run", "0", "1", free_port(), str(tmp_path / "none.npz"))
    (output,) = outputs_of([alone])
    assert alone.returncode != 0
    assert any(text in output for text in ("RESOURCE_EXHAUSTED", "Out of memory", "bad_alloc")), (
        output[-4000:]
    )
