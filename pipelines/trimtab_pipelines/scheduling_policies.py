"""Registry of the scheduling policies that a pipeline may name: the product's, and those a program registers.

A registered policy is valid in the processes that register it. The CRD and the JSON schema list the product's only.
"""

import os
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated

from pydantic import AfterValidator, WithJsonSchema

MAX_SPLIT_ROWS = 64
"""The most rows of a request whose splits over several operating points are planned."""
POLICY_MODULES = "TRIMTAB_POLICY_MODULES"
"""Environment variable: comma-separated modules to import when a pipeline names a policy that is not registered yet."""


@dataclass(frozen=True, slots=True)
class PolicyTraits:
    """What planning and validation need to know of a scheduling policy."""

    uses_fallbacks: bool = True
    """Whether batches may run at other operating points than the planned one."""
    escalates: bool = False
    """Whether low-confidence rows may run again at a more accurate operating point."""
    max_batch_rows: int | None = None
    enlarges_batches: bool = False
    """Whether batches may be larger than planned while more rows wait."""
    shares_queues: bool = False
    """Whether several replica groups of a stage may serve its queue at once."""


PRODUCT_POLICIES = {
    "EarliestDeadlineFirst": PolicyTraits(uses_fallbacks=False),
    "SlackFit": PolicyTraits(),
    "ModalityMix": PolicyTraits(escalates=True, max_batch_rows=MAX_SPLIT_ROWS),
    "TokenAdaptive": PolicyTraits(escalates=True, enlarges_batches=True, shares_queues=True),
}
"""The policies that every process knows, by name."""
_registered = dict(PRODUCT_POLICIES)


def register_scheduling_policy(name: str, traits: PolicyTraits) -> None:
    """Make `name` a valid `schedulingPolicy` in this process.

    Raises ValueError if the product has a policy of this name.
    """
    if name in PRODUCT_POLICIES:
        raise ValueError(f"{name} is a scheduling policy of the product")
    _registered[name] = traits


def policy_traits(name: str) -> PolicyTraits:
    return _registered[name]


def _validate_name(name: str) -> str:
    if name not in _registered:
        for module in filter(None, os.environ.get(POLICY_MODULES, "").split(",")):
            import_module(module)
    if name not in _registered:
        raise ValueError(f"unknown scheduling policy {name!r}; known: {', '.join(_registered)}")
    return name


SchedulingPolicy = Annotated[
    str, AfterValidator(_validate_name), WithJsonSchema({"enum": list(PRODUCT_POLICIES), "type": "string"})
]
