"""Values of samples as tensors: numbers, texts, npy files and images."""

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trimtab_pipelines.tensors import TensorSpec
from trimtab_protocol import DTYPES, Tensor

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp"})
MAX_FILE_BYTES = 256 * 2**20
_CHANNELS = {1: "L", 3: "RGB"}


class InvalidValue(ValueError):
    """A value that does not match its tensor."""


def tensor_of(spec: TensorSpec, value: Any) -> Tensor:
    """Convert a value to a tensor of one row. Raises InvalidValue if shape or datatype are not the tensor's."""
    if spec.datatype == "BYTES":
        values = np.asarray(value, dtype=object)
        array = np.array([as_bytes(element) for element in values.ravel()], dtype=object).reshape(1, *values.shape)
    else:
        array = _numbers(spec, value)[np.newaxis]
    if not spec.fits(array.shape):
        raise InvalidValue(f"input {spec.name!r} has shape {[*array.shape[1:]]}; it must be {[*spec.shape]}")
    return Tensor(spec.name, spec.datatype, array)


def as_bytes(value: Any) -> bytes:
    """Convert a value to an element of a BYTES tensor."""
    return value if isinstance(value, bytes) else str(value).encode()


def _numbers(spec: TensorSpec, value: Any) -> NDArray[Any]:
    dtype = DTYPES[spec.datatype]
    try:
        values = np.asarray(value)
        if values.dtype.kind not in "biuf":
            values = np.asarray(value, dtype=np.float64)
        numbers = values.astype(dtype)
    except (ValueError, TypeError) as error:
        raise InvalidValue(f"input {spec.name!r}: {error}; it must be {spec.datatype} {[*spec.shape]}") from error
    if dtype.kind != "f" and not np.array_equal(numbers, values):
        raise InvalidValue(f"input {spec.name!r} has values that are not {spec.datatype}")
    return numbers


def read_value(spec: TensorSpec, value: Any, folder: Path) -> NDArray[Any]:
    """Read a value of a sample: the value itself, or a file in `folder`.

    A string is a file name; for a BYTES tensor it is the value, and `{"file": NAME}` names a file. Raises InvalidValue
    if the file does not exist or cannot be read.
    """
    if isinstance(value, list) and spec.datatype == "BYTES":
        return np.asarray([_element(spec, each, folder) for each in value], dtype=object)
    if _names_file(value):
        content = _from_file(spec, folder / str(value["file"]))
        return content.reshape(1) if spec.datatype == "BYTES" and spec.shape else content
    if isinstance(value, str) and spec.datatype != "BYTES":
        if not spec.shape and Path(value).suffix.lower() not in {*IMAGE_SUFFIXES, ".npy"}:
            try:
                return np.asarray(float(value) if DTYPES[spec.datatype].kind == "f" else int(value))
            except ValueError:
                raise InvalidValue(f"input {spec.name!r}: {value!r} is not {spec.datatype}") from None
        return _from_file(spec, folder / value)
    if isinstance(value, str):
        return np.asarray(value.encode() if not spec.shape else [value.encode()], dtype=object)
    return np.asarray(value) if spec.datatype != "BYTES" else np.asarray(value, dtype=object)


def _element(spec: TensorSpec, value: Any, folder: Path) -> Any:
    return _from_file(spec, folder / str(value["file"]))[()] if _names_file(value) else value


def _names_file(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {"file"}


def _from_file(spec: TensorSpec, path: Path) -> NDArray[Any]:
    if not path.is_file():
        raise InvalidValue(f"input {spec.name!r}: there is no file {path}")
    if path.stat().st_size > MAX_FILE_BYTES:
        raise InvalidValue(f"{path}: larger than {MAX_FILE_BYTES // 2**20} MiB")
    if spec.datatype == "BYTES":
        return np.asarray(path.read_bytes(), dtype=object)
    if path.suffix.lower() in IMAGE_SUFFIXES:
        return _image(spec, path)
    if path.suffix.lower() != ".npy":
        raise InvalidValue(f"{path}: neither .npy nor an image ({', '.join(sorted(IMAGE_SUFFIXES))})")
    try:
        values: NDArray[Any] = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise InvalidValue(f"{path}: {error}") from error
    return values


def _image(spec: TensorSpec, path: Path) -> NDArray[Any]:
    """Read an image in the tensor's layout and size; UINT8 as pixels, floats scaled to 0…1."""
    try:
        pillow: Any = import_module("PIL.Image")  # optional
    except ModuleNotFoundError as error:
        raise InvalidValue(f"{path}: images need pillow: pip install pillow") from error
    last, channels, height, width = _layout(spec)
    try:
        with pillow.open(path) as opened:
            image = opened.convert(_CHANNELS[channels])
    except Exception as error:
        raise InvalidValue(f"{path}: {type(error).__name__}: {error}") from error
    size = (image.width if width == -1 else width, image.height if height == -1 else height)
    if image.size != size:
        image = image.resize(size, pillow.Resampling.BILINEAR)
    pixels = np.asarray(image, dtype=np.uint8).reshape(image.height, image.width, channels)
    array = pixels.reshape(pixels.shape[:2]) if len(spec.shape) == 2 else pixels if last else pixels.transpose(2, 0, 1)
    return array if spec.datatype == "UINT8" else (array / np.float32(255)).astype(np.float32)


def _layout(spec: TensorSpec) -> tuple[bool, int, int, int]:
    """Return whether channels are last, their number, height and width; -1 is any size."""
    shape = spec.shape
    if spec.datatype in {"UINT8", "FP32", "FP16", "FP64"}:
        if len(shape) == 2:
            return False, 1, *shape
        if len(shape) == 3 and shape[0] in _CHANNELS:
            return False, *shape
        if len(shape) == 3 and shape[2] in _CHANNELS:
            return True, shape[2], shape[0], shape[1]
    raise InvalidValue(
        f"input {spec.name!r}, {spec.datatype} {[*shape]}, takes no images; an image input is UINT8 or a float of "
        "[height, width], [channels, height, width] or [height, width, channels], with 1 or 3 channels"
    )
