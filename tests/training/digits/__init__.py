"""Helpers for tests of the digits pipeline."""

from typing import Literal

from trimtab_model_servers.families.digits.family import VARIANTS

Family = Literal["locate", "read"]


def variants_of(family: Family) -> tuple[str, ...]:
    """Variants of one stage, lightest first."""
    return tuple(name for name in VARIANTS if name.startswith(family))
