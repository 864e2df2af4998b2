"""Loads that were searched for, kept in a file, each beside the settings that it was found under.

A later phase takes a load from there rather than search for minutes again. What was found on half a core, or with other
profiles, is none of this run's: it is as if it had never been searched for.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trimtab_pipelines.documents import write_atomically

Settings = Mapping[str, str | float | None]


class KnownLoads:
    """Loads found under some settings, by name.

    Args:
        file: where they are kept, those of other settings too.
        settings: all that a load depends on.
    """

    def __init__(self, file: Path, settings: Settings) -> None:
        self._file = file
        self._settings = dict(settings)

    def get(self, name: str) -> float | None:
        """Requests a second; None where none was found, or only under other settings."""
        found = self._read().get(name)
        if not isinstance(found, dict) or found.get("settings") != self._settings:  # before, it was a number alone
            return None
        return float(found["rps"])

    def keep(self, name: str, rps: float) -> None:
        """Remember one."""
        found = self._read() | {name: {"rps": rps, "settings": self._settings}}
        write_atomically(self._file, json.dumps(found, indent=1))

    def _read(self) -> dict[str, Any]:
        """All that is kept; nothing where the file cannot be read: it can be found again."""
        try:
            read = json.loads(self._file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return read if isinstance(read, dict) else {}


def digest_of(file: Path) -> str:
    """Which contents a file has."""
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]
