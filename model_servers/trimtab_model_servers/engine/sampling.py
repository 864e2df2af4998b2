"""Draws the next token of each request from its logits."""

from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab_model_servers.engine.values import Sampling


@dataclass(frozen=True, slots=True)
class Drawn:
    """A token, and the logarithm of its probability before temperature and cuts."""

    token: int
    log_probability: float


class Sampler:
    """One request's draws; the same ones each time where its sampling has a seed."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self._random = torch.Generator()
        if sampling.seed is None:
            self._random.seed()
        else:
            self._random.manual_seed(sampling.seed % 2**63)

    def draw(self, logits: Tensor) -> int:
        """Draw from ``logits`` [vocabulary] on any device."""
        if self.sampling.temperature == 0:
            return int(logits.argmax())
        kept = _cut(logits.float().cpu() / self.sampling.temperature, self.sampling)
        return int(torch.multinomial(kept.softmax(dim=-1), 1, generator=self._random))


def without(logits: Tensor, forbidden: frozenset[int]) -> Tensor:
    """Logits [vocabulary] that leave some tokens no chance."""
    barred = logits.clone()
    barred[list(forbidden)] = -torch.inf
    return barred


def _cut(logits: Tensor, sampling: Sampling) -> Tensor:
    """Keep the ``top_k`` likeliest, and of those the fewest that hold ``top_p`` together; the likeliest always."""
    if 0 < sampling.top_k < len(logits):
        least = logits.topk(sampling.top_k).values[-1]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits.sort(descending=True)
        shares = ordered.softmax(dim=-1)
        beyond = shares.cumsum(dim=-1) - shares >= sampling.top_p
        logits = logits.scatter(0, order, ordered.masked_fill(beyond, -torch.inf))
    return logits
