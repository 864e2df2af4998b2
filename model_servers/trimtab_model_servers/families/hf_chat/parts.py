"""Loads a pretrained decoder of text, or one part of a multimodal model, vision or language, without the other.

A replica with only the encoder holds a vision tower of some hundred million parameters instead of the billions of the
decoder. A colocated model consists of both parts.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch

from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.families.hf_chat.configs import TRANSFORMERS, VlmConfig, kind_of, read_config
from trimtab_model_servers.weights.files import TOKENIZER_FILE
from trimtab_model_servers.weights.loading import seeded
from trimtab_model_servers.weights.source import RandomSeed

VlmPart = Literal["vision", "language"]
Precision = Literal["float32", "bfloat16", "float16"]
Device = Literal["cpu", "cuda", "auto"]
_ANY_KEY: Final = frozenset({".*"})
_PROBE_TOKENS: Final = 4


@dataclass(frozen=True, slots=True)
class Placement:
    """Dtype and device of a part."""

    dtype: Precision = "float32"
    device: Device = "cpu"

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def torch_device(self) -> torch.device:
        """The device; raises ModelError if a GPU is requested and torch finds none."""
        available = torch.cuda.is_available()
        if self.device == "cuda" and not available:
            raise ModelError("parameter device is 'cuda', but torch finds no GPU; set 'cpu' or 'auto'")
        return torch.device("cuda" if available and self.device != "cpu" else "cpu")


def load_part(config: VlmConfig, part: VlmPart, weights: RandomSeed | Path, placement: Placement) -> Any:
    """A frozen part with random or stored weights; ModelError if these do not fit, or the device is unavailable."""
    device = placement.torch_device
    if isinstance(weights, RandomSeed):
        model = _initialize(config, part, weights, placement)
    else:
        model = _load(config, part, weights, placement)
    for name in [name for name, _ in model.model.named_parameters(recurse=False) if part == "language"]:
        delattr(model.model, name)  # parameters between image rows, which transformers requires while it loads
    return _place(model, device)


def load_text_model(folder: Path, placement: Placement) -> Any:
    """A frozen decoder; ModelError if its weights do not fit, the engine cannot run it, or the device is missing."""
    device = placement.torch_device
    model = _from_folder(TRANSFORMERS.AutoModelForCausalLM, folder, placement)
    if not hasattr(model, "model") or not hasattr(model.config, "num_key_value_heads"):
        raise _unsupported(folder, model)
    model = _place(model, device)
    probe = torch.arange(_PROBE_TOKENS, device=device)[None]
    with torch.inference_mode():
        hidden = model.model(inputs_embeds=model.get_input_embeddings()(probe), use_cache=False).last_hidden_state
        same = torch.allclose(
            model.get_output_embeddings()(hidden), model(input_ids=probe).logits, rtol=0.01, atol=0.01
        )
    if not same:  # the model scales its embeddings or logits outside the parts that the engine runs
        raise _unsupported(folder, model)
    return model


def _unsupported(folder: Path, model: Any) -> ModelError:
    return ModelError(
        f"{folder}: model_type {model.config.model_type!r} is not supported; decoders such as llama, qwen2, qwen3 and "
        "mistral are. Serve others with an engine such as vLLM"
    )


def _place(model: Any, device: torch.device) -> Any:
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)  # it replans for every new length, which takes 12 ms each
    return model.to(device).eval().requires_grad_(requires_grad=False)


def _part_class(config: VlmConfig, part: VlmPart, **attributes: Any) -> Any:
    """The model's class reduced to one part, under the same name, by which transformers finds older weights."""
    model_class = config.model_class

    def init(self: Any, model_config: Any) -> None:
        model_class.__init__(self, model_config)
        if part == "vision":
            delattr(self.model, config.decoder)
            del self.lm_head
            self.all_tied_weights_keys = {}
        else:
            for name in [name for name, _ in self.model.named_children() if name != config.decoder]:
                delattr(self.model, name)
        for name, value in attributes.items():
            setattr(self, name, value)

    return type(model_class.__name__, (model_class,), {"__init__": init, "__module__": model_class.__module__})


def _initialize(config: VlmConfig, part: VlmPart, seed: RandomSeed, placement: Placement) -> Any:
    part_class = _part_class(config, part, _keys_to_ignore_on_load_missing=set(_ANY_KEY))
    with seeded(seed.value):
        return part_class.from_pretrained(None, config=config.config(), state_dict={}, dtype=placement.torch_dtype)


def _load(config: VlmConfig, part: VlmPart, folder: Path, placement: Placement) -> Any:
    stored = kind_of(read_config(folder))
    if stored != config.kind:  # the kind determines the image tokens
        raise ModelError(
            f"{folder}: model_type, image token and image size are {stored}; this family's are {config.kind}"
        )
    part_class = _part_class(config, part, _keys_to_ignore_on_load_unexpected=set(_ANY_KEY))
    return _from_folder(part_class, folder, placement)


def _from_folder(model_class: Any, folder: Path, placement: Placement) -> Any:
    if not (folder / TOKENIZER_FILE).is_file():
        raise ModelError(f"{folder}: there is no {TOKENIZER_FILE}")
    TRANSFORMERS.utils.logging.disable_progress_bar()
    try:
        model, report = model_class.from_pretrained(
            folder, local_files_only=True, use_safetensors=True, output_loading_info=True, dtype=placement.torch_dtype
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelError(f"{folder}: {' '.join(str(error).split())[:300]}") from error
    if missing := sorted(report["missing_keys"]):
        raise ModelError(f"{folder}: {missing[0]} and {len(missing) - 1} others are missing")
    return model
