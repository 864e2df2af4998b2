"""Image preprocessing of pretrained models, by their publishers' settings or those of a stored folder."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from trimtab_model_servers.errors import ModelError, first_problem
from trimtab_model_servers.transformer.config import FIXED
from trimtab_model_servers.weights.files import IMAGES_FILE, PROCESSOR_FILE, read_json

_NESTED: Final = "image_processor"
"""Key within the processor's file (transformers 5); earlier versions write a separate file."""
_REQUIRED_STEPS: Final = ("do_resize", "do_pad", "do_image_splitting")
"""Steps that determine the tiles of an image."""

_Positive = Annotated[FiniteFloat, Field(gt=0)]


class PixelSettings(BaseModel):
    """Settings of pixel values that a folder may override: interpolation, scale and normalization."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    image_mean: tuple[FiniteFloat, FiniteFloat, FiniteFloat] | None = None
    image_std: tuple[_Positive, _Positive, _Positive] | None = None
    rescale_factor: _Positive | None = None
    resample: int | None = Field(default=None, ge=0, le=5, description="Pillow's resampling filter")
    do_rescale: bool | None = None
    do_normalize: bool | None = None


def normalization(name: str) -> dict[str, tuple[float, ...]]:
    mean, deviation = FIXED[name]
    return {"image_mean": mean, "image_std": deviation}


@dataclass(frozen=True, slots=True)
class ImageProcessorConfig:
    """Image settings of a folder, and the file that holds them."""

    file: Path
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ImageProcessing:
    """Image processor of a pretrained model."""

    processor_class: Any
    tiles: Mapping[str, Any]
    """Settings that determine an image's tiles, and so its number of tokens."""
    values: Mapping[str, Any]
    """Further published settings that differ from the class's defaults."""

    def processor(self, stored: ImageProcessorConfig | None = None) -> Any:
        """Create it with the settings of the model's folder; ModelError if they are invalid or change the tiles."""
        if stored is None:
            return self.processor_class(**self.tiles, **self.values)
        self._require_tiles(stored)
        try:
            values = PixelSettings.model_validate(stored.settings).model_dump(exclude_none=True)
        except ValidationError as error:
            raise ModelError(f"{stored.file}: {first_problem(error)}") from error
        return self.processor_class(**{**self.tiles, **self.values, **values})

    def _require_tiles(self, stored: ImageProcessorConfig) -> None:
        settings = stored.settings
        for name, expected in self.tiles.items():
            if settings.get(name) is not None and _canonical(settings[name]) != _canonical(expected):
                setting = str(settings[name])[:200]
                raise ModelError(
                    f"{stored.file}: {name} is {setting}; image tokens of this family are counted by {expected}"
                )
        for name in _REQUIRED_STEPS:
            if settings.get(name) is False and getattr(self.processor_class, name, False):
                raise ModelError(f"{stored.file}: {name} is false; image tokens of this family are counted with it")


def read_image_processor(folder: Path) -> ImageProcessorConfig | None:
    """Image settings of a folder, in transformers' order of precedence; ModelError if a file is invalid."""
    nested = read_json(folder, PROCESSOR_FILE).get(_NESTED)
    if isinstance(nested, dict):
        return ImageProcessorConfig(folder / PROCESSOR_FILE, nested)
    settings = read_json(folder, IMAGES_FILE)
    return ImageProcessorConfig(folder / IMAGES_FILE, settings) if settings else None


def _canonical(setting: Any) -> Any:
    """A comparable form: a single number is a square, null values are omitted, grids are sets."""
    if isinstance(setting, int) and not isinstance(setting, bool):
        return {"height": setting, "width": setting}
    if isinstance(setting, Mapping):
        return {name: value for name, value in setting.items() if value is not None}
    return {json.dumps(entry) for entry in setting} if isinstance(setting, list | tuple) else setting
