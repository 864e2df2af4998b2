"""Identity, version, owner and timestamps of Kubernetes objects. Timestamps are RFC 3339 in UTC."""

import hashlib
import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import orjson

Object = dict[str, Any]
Key = tuple[str, str]
"""Namespace and name."""

MAX_LEVELS = 200
"""Levels that are kept of JSON that is too deep to read; Kubernetes' own objects have about 20."""
_TOKENS = re.compile(rb'"(?:[^"\\]|\\.)*+"|[\[{]|[\]}]')


def without_deep_values(text: bytes) -> bytes:
    """JSON with null in place of the values below MAX_LEVELS."""
    kept, level, resumed_at = list[bytes](), 0, 0
    for token in _TOKENS.finditer(text):
        if token[0] in {b"{", b"["}:
            level += 1
            if level == MAX_LEVELS + 1:
                kept.append(text[resumed_at : token.start()] + b"null")
        elif token[0] in {b"}", b"]"}:
            if level == MAX_LEVELS + 1:
                resumed_at = token.end()
            level -= 1
    return b"".join([*kept, text[resumed_at:]])


def to_json(found: Mapping[str, Any]) -> bytes:
    """JSON to keep: a copy, since orjson's own result occupies up to twice as much memory."""
    try:
        return bytes(memoryview(orjson.dumps(found)))
    except TypeError:  # more than 254 levels, as a field without schema may have
        return json.dumps(found).encode()


def key_of(found: Mapping[str, Any]) -> Key:
    """(namespace, name); cluster-scoped objects have an empty namespace."""
    metadata = found["metadata"]
    return metadata.get("namespace", ""), metadata["name"]


def version_of(found: Mapping[str, Any]) -> int:
    """Resource version as a number; versions of one server increase."""
    return int(found["metadata"].get("resourceVersion") or 0)


def owner_reference(owner: Mapping[str, Any]) -> Object:
    metadata = owner["metadata"]
    identity = {"apiVersion": owner["apiVersion"], "kind": owner["kind"]}
    return {**identity, "name": metadata["name"], "uid": metadata["uid"], "controller": True}


def fingerprint(written: object) -> str:
    return hashlib.sha256(json.dumps(written, sort_keys=True).encode()).hexdigest()[:16]


def rfc3339(seconds: float) -> str:
    """Format Unix seconds as a Time, with whole seconds."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def rfc3339_micro(seconds: float) -> str:
    """Format Unix seconds as a MicroTime, as used in Leases."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def parse_rfc3339(written: str) -> float:
    return datetime.fromisoformat(written).timestamp()
