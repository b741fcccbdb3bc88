"""Tiers of tables over devices of several processes: the same numbers as in one, and one save whatever is killed."""

import itertools
from collections import Counter

import numpy as np
import pytest

import jax_tt
from tests.processes import launch, run_python
from tests.row_tiers import processes_run
from tests.row_tiers.test_sharded_tiers import collection_of


@pytest.mark.slow
@pytest.mark.dear("two processes and this one trace what tiers do on two meshes")
@pytest.mark.usefixtures("promotion_of_a_user")
def test_two_processes_train_save_remove_and_dump_as_one(tmp_path):
    for folder in "one", "two":
        (tmp_path / folder).mkdir()
    with processes_run.small_pieces():
        alone = processes_run.results(0, 1, tmp_path / "one")
    runs = launch(tmp_path, 2, "row_tiers.processes_run", str(tmp_path / "two"))
    for own in runs:
        for name, array in alone.items():
            # After an error, all rows on the device are equally old.
            other = name.startswith("after") and name.endswith("counts")
            if not other and not name.startswith(("disk", "error")):
                np.testing.assert_array_equal(own[name], array, err_msg=name)
        for name in ("disk changed item", "disk changed word"):
            assert (own[name] > 0).all() and (own[name] == runs[0][name]).all()
    np.testing.assert_array_equal(runs[0]["grown"], runs[1]["grown"])
    errors = [{k: v for k, v in own.items() if k.startswith("error")} for own in runs]
    for own in errors:
        assert "got other ids in process 1 than in process 0" in str(own["error ids"])
        assert "got no more of them in process 1, and more in process 0" in str(own["error end"])
        for name in ("seed", "depth"):
            assert "process 1 has other settings than process 0" in str(own[f"error {name}"])
        assert "is missing, and process-" in str(own["error disks"])
        assert "was written by 1 processes; expected 2" in str(own["error number"])
        assert "got 'item' on devices of the processes [0, 1], and 'plain'" in str(
            own["error mixed"]
        )
        assert len(own["error full"]) == 1
    assert "process 1 failed, and this one stopped" in str(errors[0]["error failed"])
    assert str(errors[1]["error failed"]) == "no such file"
    assert any("rows in host memory are full" in str(own["error full"]) for own in errors)
    with pytest.raises(jax_tt.files.StoreError, match="was written by 2 processes; expected 1"):
        jax_tt.Tiers(collection_of(48), {"item": jax_tt.Tier()}, path=tmp_path / "two" / "tiers")


@pytest.mark.slow
def test_all_processes_open_the_same_save_whatever_happens_to_one_of_them(tmp_path):
    lines = run_python("-m", "tests.row_tiers.commits_run", tmp_path).splitlines()
    outcomes: Counter[tuple[str, ...]] = Counter()
    for line in lines:
        failure, number, *ends, first, second = line.split()
        mine, other = ends[int(number)], ends[1 - int(number)]
        assert mine in (("-9",) if failure == "killed" else ("3",)), line
        assert other == "3", line  # an error of one is one of both
        assert first == second and first in ("1", "2"), line
        outcomes[failure, number, first] += 1
    for case in itertools.product(("killed", "full"), "01", "12"):
        assert outcomes[case] > 0, case
