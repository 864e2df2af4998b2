"""Whether an object is as we want it. Pure.

What we would write has to stand there unchanged, and nothing that we wrote once and do not want now may remain. The
second is what the hash of the last manifest tells, kept in an annotation. Fields of others are none of our business.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from trimtab_kubernetes.objects import Object, fingerprint
from trimtab_operator.manifests.objects import TEMPLATE_HASH
from trimtab_pipelines.kubernetes_names import GROUP
from trimtab_pipelines.quantity import parse_quantity

APPLIED_HASH = f"{GROUP}/applied-hash"
_AMOUNTS = ("requests", "limits")
"""Fields of a container whose values are quantities: a cluster keeps 500000000 as 500M, and 333.3m as 334m."""


def with_fingerprint(manifest: Object) -> Object:
    """The manifest with its own hash in an annotation."""
    metadata = manifest["metadata"]
    annotations = {**metadata.get("annotations", {}), APPLIED_HASH: fingerprint(manifest)}
    return {**manifest, "metadata": {**metadata, "annotations": annotations}}


def differs(live: Object | None, manifest: Object) -> bool:
    """Whether a stamped manifest has to be applied."""
    return live is None or not contains(live, manifest)


def is_replaced(live: Object | None, manifest: Object) -> bool:
    """Whether an object has to go before it can be as we want it: a binding of another role, a Job of other pods.

    A cluster changes neither. A Job's pods are told apart by the hash of what we wrote: others may have added to them.
    """
    if live is None:
        return False
    if manifest["kind"] == "Job":
        return bool(_template_hash(live) != _template_hash(manifest))
    return not contains(live.get("roleRef"), manifest.get("roleRef", {}))


def _template_hash(found: Object) -> Any:
    return found["metadata"].get("annotations", {}).get(TEMPLATE_HASH)


def contains(live: Any, wanted: Any) -> bool:
    """Whether all of `wanted` stands in `live`; what is empty may be left out there."""
    return difference(live, wanted) is None


def difference(live: Any, wanted: Any, path: str = "") -> str | None:
    """The path of the first field of `wanted` that does not stand in `live`, None where all of them do."""
    if isinstance(wanted, Mapping):
        return _of_mappings(live, wanted, path)
    if isinstance(wanted, Sequence) and not isinstance(wanted, str):
        return _of_lists(live, wanted, path)
    return None if live == wanted or (wanted == "" and live is None) else path


def _of_mappings(live: Any, wanted: Mapping[str, Any], path: str) -> str | None:
    if not isinstance(live, Mapping):
        return path if wanted or live is not None else None
    for key, value in wanted.items():
        compare = _of_amounts if key in _AMOUNTS else difference
        found = compare(live.get(key), value, f"{path}.{key}" if path else key)
        if found is not None:
            return found
    return None


def _of_lists(live: Any, wanted: Sequence[Any], path: str) -> str | None:
    """Named items may stand among others; a list of anything else is compared whole."""
    if not isinstance(live, Sequence):
        return path if wanted or live is not None else None
    key = next((k for k in ("name", "uid", "type") if all(isinstance(w, Mapping) and k in w for w in wanted)), None)
    if key is None or not all(isinstance(item, Mapping) for item in live):
        if len(live) != len(wanted):
            return path
        pairs = [(found, item, f"{path}[{n}]") for n, (found, item) in enumerate(zip(live, wanted, strict=True))]
    else:
        by_key = {item.get(key): item for item in live}
        pairs = [(by_key.get(item[key]), item, f"{path}[{item[key]}]") for item in wanted]
    return next((found for pair in pairs if (found := difference(*pair)) is not None), None)


def _of_amounts(live: Any, wanted: Any, path: str) -> str | None:
    if not isinstance(live, Mapping) or not isinstance(wanted, Mapping):
        return difference(live, wanted, path)
    return next((f"{path}.{name}" for name in wanted if not _same_amount(live.get(name), wanted[name])), None)


def _same_amount(live: Any, wanted: Any) -> bool:
    """Whether two quantities stand for the same number, once rounded up to thousandths as clusters do."""
    try:
        return _thousandths(live) == _thousandths(wanted)
    except ValueError:
        return bool(live == wanted)


def _thousandths(quantity: Any) -> int:
    """Exact to a millionth of one: 0.1 is 100 thousandths, though its float is a little more."""
    return math.ceil(round(parse_quantity(quantity) * 1000, 6))


def status_differs(live: Object, wanted: Object, own: Sequence[str]) -> bool:
    """Whether a status has to be applied; `own` names the fields that are ours alone and may have to go."""
    there, asked = live.get("status") or {}, wanted["status"]
    return any((key in there) != (key in asked) for key in own) or any(
        not contains(there.get(key), value) or (isinstance(value, list) and key in own and there.get(key) != value)
        for key, value in asked.items()
    )
