"""Whether an object is as we want it. Pure.

What we would write has to stand there unchanged, and nothing that we wrote once and do not want now may remain. The
second is what the hash of the last manifest tells, kept in an annotation. Fields of others are none of our business.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from trimtab_kubernetes.objects import Object, fingerprint
from trimtab_pipelines.cluster import GROUP

APPLIED_HASH = f"{GROUP}/applied-hash"


def stamped(manifest: Object) -> Object:
    """The manifest with its own hash in an annotation."""
    metadata = manifest["metadata"]
    annotations = {**metadata.get("annotations", {}), APPLIED_HASH: fingerprint(manifest)}
    return {**manifest, "metadata": {**metadata, "annotations": annotations}}


def differs(live: Object | None, manifest: Object) -> bool:
    """Whether a stamped manifest has to be applied."""
    return live is None or not contains(live, manifest)


def contains(live: Any, wanted: Any) -> bool:
    """Whether all of `wanted` stands in `live`; what is empty may be left out there."""
    if isinstance(wanted, Mapping):
        return (not wanted and live is None) or (
            isinstance(live, Mapping) and all(contains(live.get(key), value) for key, value in wanted.items())
        )
    if isinstance(wanted, Sequence) and not isinstance(wanted, str):
        return (not wanted and live is None) or (isinstance(live, Sequence) and _contains_all(live, wanted))
    return bool(live == wanted) or (wanted == "" and live is None)


def _contains_all(live: Sequence[Any], wanted: Sequence[Any]) -> bool:
    """Named items may stand among others; a list of anything else is compared whole."""
    key = next((k for k in ("name", "uid", "type") if all(isinstance(w, Mapping) and k in w for w in wanted)), None)
    if key is None or not all(isinstance(item, Mapping) for item in live):
        return len(live) == len(wanted) and all(map(contains, live, wanted))
    by_key = {item.get(key): item for item in live}
    return all(contains(by_key.get(item[key]), item) for item in wanted)


def status_differs(live: Object, wanted: Object, own: Sequence[str]) -> bool:
    """Whether a status has to be applied; `own` names the fields that are ours alone and may have to go."""
    there, asked = live.get("status") or {}, wanted["status"]
    return any((key in there) != (key in asked) for key in own) or any(
        not contains(there.get(key), value) or (isinstance(value, list) and key in own and there.get(key) != value)
        for key, value in asked.items()
    )
