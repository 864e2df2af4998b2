"""Image processing follows the settings of a stored model's folder, else those of its publisher."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pillow

from tests.model_servers.chat.test_hf_vlm import SIZES, a_photo
from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.families.hf_vlm.configs import CONFIGS
from trimtab_model_servers.families.hf_vlm.image_processor import read_image_processor

OWN = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "resample": 0, "rescale_factor": 0.01}


def written(folder: Path, settings: dict[str, Any], *, nested: bool = False) -> Path:
    """A folder that says so of images, in a file of its own or, as transformers 5 has it, within the processor's."""
    file = "processor_config.json" if nested else "preprocessor_config.json"
    (folder / file).write_text(json.dumps({"image_processor": settings} if nested else settings))
    return folder


def pixels(processor: Any) -> np.ndarray:
    photo = Pillow.open(io.BytesIO(a_photo(*SIZES[1])))
    return np.asarray(processor(images=[[photo]], return_tensors="np")["pixel_values"])


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_pixels_equal_those_of_the_folders_processor(name, tmp_path, nested):
    assert read_image_processor(tmp_path) is None
    images = CONFIGS[name]("tiny").image_processing
    theirs = images.processor_class(**{**images.tiles, **images.values, **OWN})
    settings = json.loads(theirs.to_json_string())
    written(tmp_path, {"image_mean": [0.9, 0.9, 0.9]})  # what the newer form says counts
    stored = read_image_processor(written(tmp_path, settings, nested=nested))

    ours = images.processor(stored)

    assert np.array_equal(pixels(ours), pixels(theirs))
    assert not np.array_equal(pixels(ours), pixels(images.processor()))


@pytest.mark.parametrize("name", CONFIGS)
def test_settings_that_change_tiles_are_rejected(name, tmp_path):
    images = CONFIGS[name]("published").image_processing
    same = json.loads(images.processor_class(**images.tiles).to_json_string())
    for said in (same, same | {"do_center_crop": False, "do_sample_frames": False, "crop_to_patches": False}):
        images.processor(read_image_processor(written(tmp_path, said)))
    for setting, other in [("size", {"height": 77, "width": 77}), ("do_resize", False)]:
        with pytest.raises(ModelError, match=f"preprocessor_config.json: {setting} is "):
            images.processor(read_image_processor(written(tmp_path, same | {setting: other})))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"image_std": [0.5, 0.0, 0.5]}, "image_std.1: Input should be greater than 0"),
        ({"image_mean": [0.5, 0.5]}, "image_mean"),
        ({"resample": 9}, "resample: Input should be less than or equal to 5"),
        ({"rescale_factor": "a lot"}, "rescale_factor"),
        ({"size": [[1], {"a": 2}]}, "size is"),
        ({"max_patches": 40}, "max_patches is 40; image tokens of this family are counted by 12"),
    ],
)
def test_invalid_image_settings_are_rejected(settings, why, tmp_path):
    with pytest.raises(ModelError, match=f"preprocessor_config.json: {why}"):
        CONFIGS["internvl3-8b"]("tiny").image_processing.processor(read_image_processor(written(tmp_path, settings)))
