"""What objects of every kind have in common: identity, version, owner. Pure."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

Object = dict[str, Any]
Key = tuple[str, str]
"""Namespace and name."""


def key_of(found: Mapping[str, Any]) -> Key:
    """(namespace, name); no namespace is written as an empty one."""
    metadata = found["metadata"]
    return metadata.get("namespace", ""), metadata["name"]


def version_of(found: Mapping[str, Any]) -> int:
    """The version; those of one server are numbers that grow."""
    return int(found["metadata"].get("resourceVersion") or 0)


def owner_reference(owner: Mapping[str, Any]) -> Object:
    """Point at the one controller of an object, with which it goes."""
    metadata = owner["metadata"]
    identity = {"apiVersion": owner["apiVersion"], "kind": owner["kind"]}
    return {**identity, "name": metadata["name"], "uid": metadata["uid"], "controller": True}


def fingerprint(written: object) -> str:
    """A short hash of what would be written."""
    return hashlib.sha256(json.dumps(written, sort_keys=True).encode()).hexdigest()[:16]
