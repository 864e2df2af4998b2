"""Files of one JSON document a line, written as it goes: bounded, and read past what a crash or a full disk tore."""

import errno
import io
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from trimtab_pipelines.documents import write_atomically

Parsed = TypeVar("Parsed")
Shorten = Callable[[Sequence[str]], Sequence[str]]


def drop_older_half(lines: Sequence[str]) -> Sequence[str]:
    """Keep the newer half."""
    return lines[len(lines) // 2 :]


def thin_older_half(lines: Sequence[str]) -> Sequence[str]:
    """Keep every second line of the older half, the first among them, and all of the newer: the whole stays told."""
    half = len(lines) // 2
    return [*lines[:half:2], *lines[half:]]


class JsonLinesFile:
    """Appends lines; when the file outgrows its bound, it is shortened.

    Args:
        path: the file; what an earlier crash tore at its end is cut.
        most_bytes: the bound.
        shorten: which lines stay when it is passed.
    """

    def __init__(self, path: Path, most_bytes: int, shorten: Shorten = drop_older_half) -> None:
        self._path, self._most_bytes, self._shorten = path, most_bytes, shorten
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _truncate_torn_line(path)

    def append(self, line: str) -> None:
        """Write a line, without its end. Raises OSError where the disk refuses: then nothing of it stays."""
        content = line.encode() + b"\n"
        # One write to a file opened for appending: a crash leaves whole lines and at most one torn end.
        with self._path.open("ab", buffering=0) as file:
            begins = file.tell()
            try:
                _write_all(file, content)
            except OSError:
                file.truncate(begins)
                raise
        if begins + len(content) > self._most_bytes:
            with suppress(OSError):  # the line is written; the next one tries again
                lines = self._path.read_text(errors="replace").splitlines(keepends=True)
                write_atomically(self._path, "".join(self._shorten(lines)))


def _write_all(file: io.FileIO, content: bytes) -> None:
    """Write in one piece; raises OSError also where the disk has room for a part only."""
    if file.write(content) < len(content):
        raise OSError(errno.ENOSPC, "no room for a whole line")


def _truncate_torn_line(path: Path) -> None:
    """Cut what an earlier crash left of a line."""
    content = path.read_bytes()
    if content and not content.endswith(b"\n"):
        os.truncate(path, content.rfind(b"\n") + 1)


def tail_and_sample(count: int, most: int) -> Sequence[int]:
    """Choose so many of `count` lines at most: half of them the newest, the others evenly from all before."""
    if count <= most:
        return range(count)
    newest = most // 2
    older = count - newest
    return [*range(0, older, -(-older // (most - newest))), *range(older, count)]


def read_lines(path: Path, read: Callable[[str], Parsed], most: int | None = None) -> list[Parsed]:
    """Read every line that can be; those that were torn are left out. Empty where there is no file.

    Args:
        path: the file.
        read: reads one line; raises ValueError where it is none.
        most: where there are more lines, only the newest and some of the others are read, and no others held.
    """
    if not path.exists():
        return []
    found = []
    with path.open(errors="replace") as lines:
        chosen = None if most is None else set(tail_and_sample(sum(1 for _ in lines), most))
        lines.seek(0)
        for number, line in enumerate(lines):
            if chosen is None or number in chosen:
                with suppress(ValueError):
                    found.append(read(line.rstrip("\n")))
    return found
