"""Runs one case in this process and writes its report; `benchmarks.run` starts one such process per case.

In a separate process each case has the whole memory of the machine and a fresh peak.

    python -m benchmarks.one headline report.json --quick
    python -m benchmarks.one gpu_headline report.json --log rows.jsonl    # each row when it is measured
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

from benchmarks.registry import Settings, all_cases


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs one benchmark case in this process.")
    parser.add_argument("case")
    parser.add_argument("report", type=Path)
    parser.add_argument("--log", type=Path, help="JSON lines, to which all parts are added")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    case, log = all_cases()[arguments.case], arguments.log

    def add(kind: str, value: Any) -> None:
        if log is None:
            return
        # What a process has written stays when it is killed.
        with log.open("a") as file:
            file.write(json.dumps({"case": case.name, kind: value}) + "\n")
            file.flush()
            os.fsync(file.fileno())

    add("title", case.title)
    report = case.run(Settings(quick=arguments.quick), add)
    arguments.report.write_text(json.dumps(report.to_json()))
    add("finished", True)


if __name__ == "__main__":
    main()
