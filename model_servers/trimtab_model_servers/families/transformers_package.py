"""The package transformers, an optional dependency that takes seconds to import."""

from importlib import import_module
from typing import Any

from trimtab_model_servers.errors import ModelError

try:
    TRANSFORMERS: Any = import_module("transformers")  # by name: checking its types takes mypy minutes
except ModuleNotFoundError as error:
    raise ModelError(
        "families hf/… and multimodal/… need transformers: "
        "pip install '.[transformers]' in a clone, else 'trimtab[transformers]'"
    ) from error
