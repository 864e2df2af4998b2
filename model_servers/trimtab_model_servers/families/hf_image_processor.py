"""How published models have their images prepared, as their publishers say or a stored folder does."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from trimtab_model_servers.errors import ModelError, problem_of
from trimtab_model_servers.families.hf_files import json_of
from trimtab_model_servers.hf_folder import IMAGES_FILE, PROCESSOR_FILE
from trimtab_model_servers.transformer.image_preprocessing import FIXED

_NESTED: Final = "image_processor"
"""Where transformers 5 writes it, within the processor's own file; before, it had a file of its own."""
_STEPS: Final = ("do_resize", "do_pad", "do_image_splitting")
"""Without one of these, an image would have other tiles."""

_Positive = Annotated[FiniteFloat, Field(gt=0)]


class Values(BaseModel):
    """What a folder may say of pixels' values: how they are interpolated, scaled and shifted. All else is left out."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    image_mean: tuple[FiniteFloat, FiniteFloat, FiniteFloat] | None = None
    image_std: tuple[_Positive, _Positive, _Positive] | None = None
    rescale_factor: _Positive | None = None
    resample: int | None = Field(default=None, ge=0, le=5, description="Pillow's number")
    do_rescale: bool | None = None
    do_normalize: bool | None = None


def scaled(normalisation: str) -> dict[str, tuple[float, ...]]:
    """The settings by which pixels are normalised in a way that has a name."""
    mean, deviation = FIXED[normalisation]
    return {"image_mean": mean, "image_std": deviation}


@dataclass(frozen=True, slots=True)
class ImageProcessorConfig:
    """What a folder says of images: in which file, and its settings."""

    file: Path
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Images:
    """How a published model takes images.

    Attributes:
        kind: the class of its processor, transformers' own.
        tiles: settings that say which tiles an image has, by which its tokens are counted.
        values: further settings that it was published with, where these are not its class's usual ones.
    """

    kind: Any
    tiles: Mapping[str, Any]
    values: Mapping[str, Any]

    def processor(self, stored: ImageProcessorConfig | None = None) -> Any:
        """The processor of a model, by what its folder says where that says anything.

        Raises:
            ModelError: it says what cannot be, or other tiles than tokens are counted by.
        """
        if stored is None:
            return self.kind(**self.tiles, **self.values)
        self._require_tiles(stored)
        try:
            values = Values.model_validate(stored.settings).model_dump(exclude_none=True)
        except ValidationError as error:
            raise ModelError(f"{stored.file}: {problem_of(error)}") from error
        return self.kind(**{**self.tiles, **self.values, **values})

    def _require_tiles(self, stored: ImageProcessorConfig) -> None:
        where, told = stored.file, stored.settings
        for name, ours in self.tiles.items():
            if told.get(name) is not None and _plain(told[name]) != _plain(ours):
                raise ModelError(
                    f"{where}: {name} is {str(told[name])[:200]}; image tokens of this family are counted by {ours}"
                )
        for name in _STEPS:
            if told.get(name) is False and getattr(self.kind, name, False):  # who never takes a step says so, too
                raise ModelError(f"{where}: {name} is false; image tokens of this family are counted with it")


def stored_images(folder: Path) -> ImageProcessorConfig | None:
    """What a folder says of images, the newer form first, as transformers reads them; None where it says nothing.

    Raises:
        ModelError: one of its files is not what it should be.
    """
    nested = json_of(folder, PROCESSOR_FILE).get(_NESTED)
    if isinstance(nested, dict):
        return ImageProcessorConfig(folder / PROCESSOR_FILE, nested)
    settings = json_of(folder, IMAGES_FILE)
    return ImageProcessorConfig(folder / IMAGES_FILE, settings) if settings else None


def _plain(setting: Any) -> Any:
    """A setting such that equal ones are equal: a lone number is a square, what is null is not said, grids are sets."""
    if isinstance(setting, int) and not isinstance(setting, bool):
        return {"height": setting, "width": setting}
    if isinstance(setting, Mapping):
        return {name: value for name, value in setting.items() if value is not None}
    return {json.dumps(one) for one in setting} if isinstance(setting, list | tuple) else setting
