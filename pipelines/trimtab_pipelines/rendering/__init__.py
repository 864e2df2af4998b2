"""Renderers of generated files, the CRDs and the JSON schemas: written to a folder, or compared with its files."""

import sys
from collections.abc import Mapping
from pathlib import Path


def differing(folder: Path, files: Mapping[str, str | bytes], suffix: str) -> list[str]:
    """Names of the files in a folder that differ, are missing, or are no longer generated."""
    stale = [n for n, new in files.items() if not (folder / n).is_file() or (folder / n).read_bytes() != _bytes(new)]
    return stale + [path.name for path in sorted(folder.glob(f"*{suffix}")) if path.name not in files]


def write_or_check(arguments: list[str], files: Mapping[str, str | bytes], suffix: str) -> int:
    """Write the files to the folder given as argument; with `--check` compare them and return 1 if one differs."""
    folder = Path(next(argument for argument in arguments if not argument.startswith("--")))
    if "--check" in arguments:
        stale = differing(folder, files, suffix)
        if stale:
            sys.stderr.write(f"{folder}: out of date: {', '.join(stale)}; run `make generate`\n")
        return 1 if stale else 0
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(_bytes(content))
    return 0


def _bytes(content: str | bytes) -> bytes:
    return content.encode() if isinstance(content, str) else content
