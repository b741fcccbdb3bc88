"""Files of results."""

import json
import os
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "results" / "quality"


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a file. The file is complete or absent, whenever the process is killed."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(_compact(content) + "\n")
    os.replace(unfinished, path)


def _compact(content: dict[str, Any]) -> str:
    """JSON with one line for each field and each run: short files, and diffs that show what changed."""

    def text(value: Any) -> str:
        runs = isinstance(value, dict) and all(isinstance(run, dict) for run in value.values())
        if not (runs and value):
            return json.dumps(value)
        return _object({name: json.dumps(run) for name, run in value.items()}, indent=2)

    return _object({name: text(value) for name, value in content.items()}, indent=1)


def _object(fields: dict[str, str], indent: int) -> str:
    lines = ",\n".join(f"{' ' * indent}{json.dumps(name)}: {text}" for name, text in fields.items())
    return f"{{\n{lines}\n{' ' * (indent - 1)}}}"
