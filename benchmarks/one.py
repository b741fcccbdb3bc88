"""Runs one case in this process and writes its report; `benchmarks.run` starts one of these a case.

A process of its own gives each case the machine's whole memory and an untouched peak to measure.

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
