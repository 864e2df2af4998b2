"""API keys, stored as SHA-256 hashes only, so that a leaked file grants no access.

A key has 32 random bytes and cannot be guessed from its hash, unlike a password, so a fast hash suffices.
"""

import base64
import hashlib
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

PREFIX = "tt_"
ALL = "*"
MAX_KEYS = 10_000
_ENTRY_PATTERN = re.compile(r"^sha256:([0-9a-f]{64})((?:\s+(?:\*|[a-z0-9]([-a-z0-9]*[a-z0-9])?))*)$")
_CLIENT_PATTERN = re.compile(r"^[A-Za-z0-9][-A-Za-z0-9_.]{0,62}$")


@dataclass(frozen=True, slots=True)
class HashedKey:
    """API key of a client: hexadecimal SHA-256, and the pipelines it may call."""

    client: str
    digest: str
    pipelines: frozenset[str] = frozenset({ALL})

    def may_call(self, pipeline: str) -> bool:
        return bool(self.pipelines & {ALL, pipeline})


def new_key() -> str:
    return PREFIX + secrets.token_urlsafe(32)


def key_digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def format_entry(key: HashedKey) -> str:
    return " ".join([f"sha256:{key.digest}", *sorted(key.pipelines)])


@dataclass(frozen=True, slots=True)
class ParsedKeys:
    """Valid keys, and problems of the other entries. An invalid entry does not keep another key from being revoked."""

    keys: tuple[HashedKey, ...] = ()
    problems: tuple[str, ...] = ()


def read_entries(entries: Iterable[tuple[str, str]]) -> ParsedKeys:
    """Parse keys by client, as in a Secret. Problems name the client, never the entry, which may be a key."""
    keys: list[HashedKey] = []
    problems: list[str] = []
    for client, text in entries:
        match = _ENTRY_PATTERN.match(text.strip())
        if len(keys) == MAX_KEYS:
            problems.append(f"more than {MAX_KEYS} keys; the rest is ignored")
            break
        if not _CLIENT_PATTERN.match(client):
            problems.append(
                f"client {client[:64]!r}: a name has up to 63 letters, digits, dots, dashes and underscores"
            )
        elif match is None:
            problems.append(f"key of {client}: expected sha256: with 64 hexadecimal digits, then pipelines it may call")
        else:
            keys.append(HashedKey(client, match[1], frozenset(match[2].split()) or frozenset({ALL})))
    return ParsedKeys(tuple(keys), tuple(problems))


def read_file(text: str) -> ParsedKeys:
    """Parse a key file: lines of `CLIENT: sha256:DIGITS [PIPELINE …]`. Empty lines and #-comments are skipped."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return read_entries((client.strip(), rest) for client, _, rest in (line.partition(":") for line in lines if line))


def read_secret(data: Mapping[str, str]) -> ParsedKeys:
    """Parse a Secret's `data`: one base64 entry per client."""
    entries = []
    for client, encoded in data.items():
        try:
            entries.append((client, base64.b64decode(encoded, validate=True).decode()))
        except ValueError:
            entries.append((client, ""))
    return read_entries(entries)
