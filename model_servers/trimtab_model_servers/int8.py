"""Linear layers in INT8 on the CPU: weights are rounded by output, activations by row, so that rows are independent."""

import torch
from torch import Tensor, nn

_LARGEST, _LEAST_SCALE = 127, 1e-12


class Int8Linear(nn.Module):
    """A linear layer with a scale for each output and for each row of its input."""

    weight: Tensor
    scales: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight, scales = _round(linear.weight.detach())
        self.register_buffer("weight", weight.t())
        self.register_buffer("scales", scales.t())
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., inputs] to [..., outputs]."""
        rows, scales = _round(x.flatten(0, -2))
        products = torch._int_mm(rows, self.weight) * (scales * self.scales)  # noqa: SLF001 - no public name
        outputs: Tensor = products if self.bias is None else products + self.bias
        return outputs.view(*x.shape[:-1], -1)


def _round(values: Tensor) -> tuple[Tensor, Tensor]:
    """INT8 [rows, columns] and scales [rows, 1]."""
    scales = values.abs().amax(dim=1, keepdim=True).clamp_min(_LEAST_SCALE) / _LARGEST
    return (values / scales).round().to(torch.int8), scales


def quantize_linear_layers(network: nn.Module) -> int:
    """Replace the linear layers of a network; return their number."""
    layers = [(name, layer) for name, layer in network.named_modules() if type(layer) is nn.Linear]
    for name, layer in layers:
        network.set_submodule(name, Int8Linear(layer))
    return len(layers)
