"""Comparison of live objects with their manifests.

An object is up to date if it contains the manifest and nothing that an earlier manifest added. The latter is detected
by the manifest's hash in an annotation. Fields of other managers are ignored.
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
"""Container fields with quantities, which the API server normalizes: 500000000 to 500M, and 333.3m to 334m."""


def with_fingerprint(manifest: Object) -> Object:
    metadata = manifest["metadata"]
    annotations = {**metadata.get("annotations", {}), APPLIED_HASH: fingerprint(manifest)}
    return {**manifest, "metadata": {**metadata, "annotations": annotations}}


def differs(live: Object | None, manifest: Object) -> bool:
    return live is None or not contains(live, manifest)


def is_replaced(live: Object | None, manifest: Object) -> bool:
    """Whether an object must be deleted before it can be created as desired, since the field is immutable.

    This applies to the role of a RoleBinding and the pod template of a Job. Job templates are compared by hash, since
    webhooks may have changed the live one.
    """
    if live is None:
        return False
    if manifest["kind"] == "Job":
        return bool(_template_hash(live) != _template_hash(manifest))
    return not contains(live.get("roleRef"), manifest.get("roleRef", {}))


def _template_hash(found: Object) -> Any:
    return found["metadata"].get("annotations", {}).get(TEMPLATE_HASH)


def contains(live: Any, wanted: Any) -> bool:
    """Whether `live` contains all of `wanted`; empty fields may be absent."""
    return difference(live, wanted) is None


def difference(live: Any, wanted: Any, path: str = "") -> str | None:
    """Path of the first field of `wanted` that `live` does not contain; None if there is none."""
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
    """Named items may have others beside them; other lists are compared as a whole."""
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
    """Whether two quantities are equal after rounding up to thousandths, as the API server does."""
    try:
        return _thousandths(live) == _thousandths(wanted)
    except ValueError:
        return bool(live == wanted)


def _thousandths(quantity: Any) -> int:
    """Rounded to a millionth first, since 0.1 is slightly more than 100 thousandths as a float."""
    return math.ceil(round(parse_quantity(quantity) * 1000, 6))


def status_differs(live: Object, wanted: Object, own: Sequence[str]) -> bool:
    """Whether a status must be applied; `own` names the fields that have no other writer and may be removed."""
    current, desired = live.get("status") or {}, wanted["status"]
    return any((key in current) != (key in desired) for key in own) or any(
        not contains(current.get(key), value) or (isinstance(value, list) and key in own and current.get(key) != value)
        for key, value in desired.items()
    )
