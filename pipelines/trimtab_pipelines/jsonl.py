"""JSON lines files: bounded, append-only, and readable after a crash or a full disk truncated a line."""

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
    return lines[len(lines) // 2 :]


def thin_older_half(lines: Sequence[str]) -> Sequence[str]:
    """Drop every second line of the older half."""
    half = len(lines) // 2
    return [*lines[:half:2], *lines[half:]]


class JsonLinesFile:
    """Appends lines to a file and shortens it when it exceeds `max_bytes`; a truncated last line is removed."""

    def __init__(self, path: Path, max_bytes: int, shorten: Shorten = drop_older_half) -> None:
        self._path, self._max_bytes, self._shorten = path, max_bytes, shorten
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _truncate_torn_line(path)

    def append(self, line: str) -> None:
        """Append a line. If the disk refuses, raises OSError and leaves no part of it."""
        content = line.encode() + b"\n"
        # A single append leaves whole lines and at most one truncated line after a crash.
        with self._path.open("ab", buffering=0) as file:
            begins = file.tell()
            try:
                _write_all(file, content)
            except OSError:
                file.truncate(begins)
                raise
        if begins + len(content) > self._max_bytes:
            with suppress(OSError):  # the line is written; the next append retries
                lines = self._path.read_text(errors="replace").splitlines(keepends=True)
                write_atomically(self._path, "".join(self._shorten(lines)))


def _write_all(file: io.FileIO, content: bytes) -> None:
    """Write in one call; raises OSError if the disk has room for a part only."""
    if file.write(content) < len(content):
        raise OSError(errno.ENOSPC, "no room for a whole line")


def _truncate_torn_line(path: Path) -> None:
    content = path.read_bytes()
    if content and not content.endswith(b"\n"):
        os.truncate(path, content.rfind(b"\n") + 1)


def tail_and_sample(count: int, limit: int) -> Sequence[int]:
    """Indices of at most `limit` of `count` lines: half are the newest, the others are spread over the rest."""
    if count <= limit:
        return range(count)
    newest = limit // 2
    older = count - newest
    return [*range(0, older, -(-older // (limit - newest))), *range(older, count)]


def read_lines(path: Path, parse: Callable[[str], Parsed], limit: int | None = None) -> list[Parsed]:
    """Read every line that can be parsed; empty if there is no file.

    With a limit the newest lines and a sample of the others are read. `parse` raises ValueError for an invalid line.
    """
    if not path.exists():
        return []
    parsed = []
    with path.open(errors="replace") as lines:
        chosen = None if limit is None else set(tail_and_sample(sum(1 for _ in lines), limit))
        lines.seek(0)
        for number, line in enumerate(lines):
            if chosen is None or number in chosen:
                with suppress(ValueError):
                    parsed.append(parse(line.rstrip("\n")))
    return parsed
