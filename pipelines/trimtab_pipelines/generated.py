"""Files that are rendered from something else and kept beside it: written anew, or compared and stale ones named."""

import sys
from collections.abc import Mapping
from pathlib import Path


def differing(folder: Path, files: Mapping[str, str], suffix: str) -> list[str]:
    """Name the files in a folder that are not as rendered now, and those of the suffix that are rendered no more."""
    stale = [n for n, text in files.items() if not (folder / n).is_file() or (folder / n).read_text() != text]
    return stale + [path.name for path in sorted(folder.glob(f"*{suffix}")) if path.name not in files]


def write_or_check(arguments: list[str], files: Mapping[str, str], suffix: str) -> int:
    """Write the files to the folder named in a command line; with `--check` compare only, 1 where one differs."""
    folder = Path(next(argument for argument in arguments if not argument.startswith("--")))
    if "--check" in arguments:
        stale = differing(folder, files, suffix)
        if stale:
            sys.stderr.write(f"{folder}: out of date: {', '.join(stale)}; run `make generate`\n")
        return 1 if stale else 0
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return 0
