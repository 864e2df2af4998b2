"""Dynamic INT8 quantization of a transformer's linear layers, on CPUs."""

import warnings

import torch

from trimtab_model_servers.transformer.transformer import VisionTransformer


def quantize(transformer: VisionTransformer) -> VisionTransformer:
    """Return an INT8 copy, whose activations are quantized per batch; the transformer does not change."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torchao replaces it
        warnings.simplefilter("ignore", UserWarning)  # of its tensors
        quantized: VisionTransformer = torch.ao.quantization.quantize_dynamic(  # type: ignore[no-untyped-call]
            transformer, {torch.nn.Linear}, dtype=torch.qint8
        )
    return quantized
