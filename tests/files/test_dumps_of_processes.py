"""Dumps of two processes of which one is killed, or finds the disk full, at any step."""

from collections import Counter

import pytest

from tests.processes import run_python


@pytest.mark.slow
def test_the_last_complete_dump_is_read_whatever_happens_to_one_of_two_processes(tmp_path):
    lines = run_python("-m", "tests.files.two_processes_run", tmp_path).splitlines()
    outcomes: Counter[tuple[str, ...]] = Counter()
    for line in lines:
        failure, number, *ends, there, files, value = line.split()
        mine, other = ends[int(number)], ends[1 - int(number)]
        assert mine in (("-9",) if failure == "killed" else ("1", "2")), line
        assert other == ("0" if mine == "2" else "1"), line  # an error of one is one of both
        assert files == "2" and value in ("1.0", "2.0"), line
        assert value == "2.0" if mine == "2" else there == "True" or value == "1.0", line
        outcomes[failure, number, value] += 1
    # Either dump where the first process gives the new one its name, and the old one before that.
    for failure in ("killed", "full"):
        assert outcomes[failure, "0", "1.0"] > 10 and outcomes[failure, "0", "2.0"] > 5
        assert outcomes[failure, "1", "1.0"] >= 4 and not outcomes[failure, "1", "2.0"]
