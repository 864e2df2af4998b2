"""API keys as the door keeps them: only their SHA-256, so that who reads them cannot call.

A key is made of 32 random bytes: unlike a password it cannot be guessed from its hash, so a fast hash is enough.
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
_HASHED = re.compile(r"^sha256:([0-9a-f]{64})((?:\s+(?:\*|[a-z0-9]([-a-z0-9]*[a-z0-9])?))*)$")
_CLIENT = re.compile(r"^[A-Za-z0-9][-A-Za-z0-9_.]{0,62}$")


@dataclass(frozen=True, slots=True)
class HashedKey:
    """A client's key: the hash's hexadecimal digits, and the pipelines it may call."""

    client: str
    digest: str
    pipelines: frozenset[str] = frozenset({ALL})

    def may_call(self, pipeline: str) -> bool:
        """Whether the client may call this pipeline."""
        return bool(self.pipelines & {ALL, pipeline})


def new_key() -> str:
    """Make a key that nobody can guess."""
    return PREFIX + secrets.token_urlsafe(32)


def digest_of(key: str) -> str:
    """The SHA-256 of a key in hexadecimal digits."""
    return hashlib.sha256(key.encode()).hexdigest()


def entry_of(key: HashedKey) -> str:
    """A key as it stands in a Secret or, after its client's name, in a file."""
    return " ".join([f"sha256:{key.digest}", *sorted(key.pipelines)])


@dataclass(frozen=True, slots=True)
class ParsedKeys:
    """The keys that could be read, and what is wrong with the rest: one bad entry keeps no other from being revoked."""

    keys: tuple[HashedKey, ...] = ()
    problems: tuple[str, ...] = ()


def read_entries(entries: Iterable[tuple[str, str]]) -> ParsedKeys:
    """Read keys by client, as a Secret has them. Problems name the client, never what stands there: it may be a key."""
    keys: list[HashedKey] = []
    problems: list[str] = []
    for client, text in entries:
        match = _HASHED.match(text.strip())
        if len(keys) == MAX_KEYS:
            problems.append(f"more than {MAX_KEYS} keys; the rest is not taken")
            break
        if not _CLIENT.match(client):
            problems.append(
                f"client {client[:64]!r}: a name has up to 63 letters, digits, dots, dashes and underscores"
            )
        elif match is None:
            problems.append(f"key of {client}: expected sha256: with 64 hexadecimal digits, then pipelines it may call")
        else:
            keys.append(HashedKey(client, match[1], frozenset(match[2].split()) or frozenset({ALL})))
    return ParsedKeys(tuple(keys), tuple(problems))


def read_file(text: str) -> ParsedKeys:
    """Read keys of a file: a line `CLIENT: sha256:DIGITS [PIPELINE …]` each; empty lines and #-comments are skipped."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return read_entries((client.strip(), rest) for client, _, rest in (line.partition(":") for line in lines if line))


def read_secret(data: Mapping[str, str]) -> ParsedKeys:
    """Read keys of a Secret's `data`: an entry a client, in base 64."""
    entries = []
    for client, encoded in data.items():
        try:
            entries.append((client, base64.b64decode(encoded, validate=True).decode()))
        except ValueError:
            entries.append((client, ""))
    return read_entries(entries)
