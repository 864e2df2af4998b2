"""Which architecture a family name stands for. One file a family; each is imported when first asked for."""

from trimtab_model_servers.families.network import Built, Network
from trimtab_model_servers.families.registry import FAMILIES, build

__all__ = ["FAMILIES", "Built", "Network", "build"]
