"""One half of a published model, what sees or what writes; the other half is never in memory.

A replica that only encodes has a tower of some hundred million numbers, not the billions that write. A model that is
whole in its replica is both halves.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch

from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.families.hf_vlm_configs import TRANSFORMERS, VlmConfig
from trimtab_model_servers.hf_folder import TOKENIZER_FILE
from trimtab_model_servers.weights_source import RandomSeed

Half = Literal["sees", "writes"]
Precision = Literal["float32", "bfloat16", "float16"]
Device = Literal["cpu", "cuda", "auto"]
_ANY: Final = frozenset({".*"})


@dataclass(frozen=True, slots=True)
class Placement:
    """How a half is kept: in which numbers, and where."""

    dtype: Precision = "float32"
    device: Device = "cpu"

    @property
    def numbers(self) -> torch.dtype:
        """Its dtype, as torch calls it."""
        kinds: Mapping[str, torch.dtype] = {
            "float32": torch.float32,
            "bfloat16": torch.bfloat16,
            "float16": torch.float16,
        }
        return kinds[self.dtype]

    @property
    def place(self) -> torch.device:
        """The device; raises ModelError where a GPU is asked for and torch sees none."""
        seen = torch.cuda.is_available()
        if self.device == "cuda" and not seen:
            raise ModelError("parameter device is 'cuda', but torch sees no GPU here; write 'cpu' or 'auto'")
        return torch.device("cuda" if seen and self.device != "cpu" else "cpu")


def half_of(shape: VlmConfig, half: Half, weights: RandomSeed | Path, kept: Placement) -> Any:
    """A half with random or stored weights, frozen.

    Raises:
        ModelError: what is stored is another model or lacks a part, or the device is not there.
    """
    place = kept.place
    if place.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for every length, 12 ms each, and lengths grow
    TRANSFORMERS.utils.logging.disable_progress_bar()
    model = (
        _made(shape, half, weights, kept) if isinstance(weights, RandomSeed) else _loaded(shape, half, weights, kept)
    )
    for name in [name for name, _ in model.model.named_parameters(recurse=False) if half == "writes"]:
        delattr(model.model, name)  # what an encoder puts between rows; transformers asks for it while it loads
    return model.to(place).eval().requires_grad_(requires_grad=False)


def _class_of(shape: VlmConfig, half: Half, **told: Any) -> Any:
    """The model's class, made of one half; under its own name and module, by which transformers finds older weights."""
    kind = shape.kind

    def init(self: Any, config: Any) -> None:
        kind.__init__(self, config)
        if half == "sees":
            delattr(self.model, shape.decoder)
            del self.lm_head
            self.all_tied_weights_keys = {}
        else:
            for name in [name for name, _ in self.model.named_children() if name != shape.decoder]:
                delattr(self.model, name)
        for name, value in told.items():
            setattr(self, name, value)

    return type(kind.__name__, (kind,), {"__init__": init, "__module__": kind.__module__})


def _made(shape: VlmConfig, half: Half, seed: RandomSeed, kept: Placement) -> Any:
    none_stored = _class_of(shape, half, _keys_to_ignore_on_load_missing=set(_ANY))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed.value)
        return none_stored.from_pretrained(None, config=shape.config(), state_dict={}, dtype=kept.numbers)


def _loaded(shape: VlmConfig, half: Half, folder: Path, kept: Placement) -> Any:
    """A stored half, from safetensors alone."""
    if not (folder / TOKENIZER_FILE).is_file():
        raise ModelError(f"{folder}: there is no {TOKENIZER_FILE}")
    others_stored = _class_of(shape, half, _keys_to_ignore_on_load_unexpected=set(_ANY))
    try:
        config = shape.kind.config_class.from_pretrained(folder, local_files_only=True)
        _require_kin(shape, config, folder)
        model, told = others_stored.from_pretrained(
            folder, local_files_only=True, use_safetensors=True, output_loading_info=True, dtype=kept.numbers
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelError(f"{folder}: {' '.join(str(error).split())[:300]}") from error
    if missing := sorted(told["missing_keys"]):
        raise ModelError(f"{folder}: {missing[0]} and {len(missing) - 1} others are missing")
    return model


def _require_kin(shape: VlmConfig, config: Any, folder: Path) -> None:
    """Raise ModelError unless a stored model takes images as its family does: that is what their tokens follow from."""
    kind, side = config.model_type, config.vision_config.image_size
    found = (kind, config.image_token_id, side[0] if isinstance(side, list | tuple) else side)
    right = (shape.kind.config_class.model_type, shape.image_id, shape.tile_px)
    if found != right:
        raise ModelError(f"{folder}: model_type, image token and image size are {found}; this family's are {right}")
