"""A transformer whose linear layers compute in whole numbers of eight bits. On cores alone."""

import warnings

import torch

from trimtab_model_servers.transformer.transformer import VisionTransformer


def quantize(transformer: VisionTransformer) -> VisionTransformer:
    """A twin with weights of eight bits; what goes into each layer is rounded batch by batch, by its own range.

    The twin's linear layers take a quarter of the memory, beside those of the transformer, which stays as it is.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # its successor lives in a package of its own
        warnings.simplefilter("ignore", UserWarning)  # and so it is said of its tensors
        twin: VisionTransformer = torch.ao.quantization.quantize_dynamic(  # type: ignore[no-untyped-call]
            transformer, {torch.nn.Linear}, dtype=torch.qint8
        )
    return twin
