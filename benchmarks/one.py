"""Runs one case in this process and writes its report; `benchmarks.run` starts one such process per case.

In a separate process each case has the whole memory of the machine and a fresh peak.

    python -m benchmarks.one headline report.json --quick
"""

import argparse
import json
from pathlib import Path

from benchmarks.registry import Settings, all_cases


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs one benchmark case in this process.")
    parser.add_argument("case")
    parser.add_argument("report", type=Path)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    report = all_cases()[arguments.case].run(Settings(quick=arguments.quick))
    arguments.report.write_text(json.dumps(report.to_json()))


if __name__ == "__main__":
    main()
