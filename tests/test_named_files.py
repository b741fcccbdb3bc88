"""Every source file that a comment, a docstring or a page names exists."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent
COMMENTS = {
    **dict.fromkeys((".h", ".cc", ".cu", ".in"), r"//(.*)"),
    **dict.fromkeys((".cmake", ".txt", ".toml", ".yml", ""), r"#(.*)"),
    ".py": r'#(.*)|"""([\s\S]*?)"""',
    ".md": r"(.*)",
}
# Also `x.{h,cu}`; not `<op>.h`, `{name}.h` or a part of a longer word.
NAME = re.compile(
    r"(?<![\w/.{}*$<-])((?:[\w.-]+/)*\w+)\.(h|cc|cu\.in|cu|py|\{[\w,.]+\})(?![\w{/-])"
)
# Templates of a name, and a file that a copy of the checkout gets.
NOT_FILES = ("x.h", "x.cc", "x.cu", "ffi/planted.h")


def missing(text: str, tracked: list[str]) -> list[str]:
    """The files that a text names, of which none has this path, or ends with it."""
    names = [
        f"{stem}.{suffix}"
        for stem, suffixes in NAME.findall(text)
        for suffix in suffixes.strip("{}").split(",")
    ]
    paths = "".join(f"\n/{path}" for path in tracked) + "\n"
    return [
        name
        for name in names
        if name not in NOT_FILES
        and f"/{name.removeprefix('./').removeprefix('../')}\n" not in paths
    ]


def test_files_that_comments_and_pages_name_exist():
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, check=True, text=True
    ).stdout.split()
    wrong, found = [], 0
    for path in tracked:
        comments = COMMENTS.get(Path(path).suffix)
        if comments is None or path.startswith("tests/") or path == "CHANGELOG.md":
            continue
        parts = re.findall(comments, (ROOT / path).read_text())
        text = "\n".join("".join(part) for part in parts)
        found += len(NAME.findall(text))
        wrong += [f"{path}: {name}" for name in missing(text, tracked)]
    assert found > 100
    assert wrong == []


def test_a_planted_name_is_found():
    tracked = ["ffi/cuda/tt/fast.h", "ffi/cuda/tt/fast.cu", "jax_tt/a.py"]
    assert missing("see fast.{h,cu}, tt/fast.h, jax_tt/a.py and <op>.h", tracked) == []
    assert missing("see tt_fast.{h,cu} or `b.py`", tracked) == ["tt_fast.h", "tt_fast.cu", "b.py"]
