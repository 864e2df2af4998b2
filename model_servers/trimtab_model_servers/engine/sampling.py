"""Draws the next token of each request from its logits."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab_model_servers.engine.request import Sampling


@dataclass(frozen=True, slots=True, eq=False)
class TokenProbabilities:
    """What each of those who write may write, and what is likeliest.

    Attributes:
        logits: those of barred tokens -inf, [n, vocabulary].
        log_probabilities: before anything is barred, float32 [n, vocabulary]; no numbers where a logit is none.
        likeliest: of the logits, the first of equals, [n].
        log_likeliest: their log_probabilities, [n].
    """

    logits: Tensor
    log_probabilities: Tensor
    likeliest: list[int]
    log_likeliest: list[float]


@torch.inference_mode()
def chances_of(logits: Tensor, barred: Sequence[tuple[int, int]]) -> TokenProbabilities:
    """Work out all rows of ``logits`` [n, vocabulary] together; ``barred`` are (row, token) without a chance."""
    log_probabilities = logits.log_softmax(dim=-1, dtype=torch.float32)
    if barred:
        rows, tokens = torch.tensor(barred, device=logits.device).unbind(dim=1)
        logits = logits.index_put((rows, tokens), logits.new_full((), -torch.inf))
    best = logits.argmax(dim=-1)
    theirs = log_probabilities.gather(1, best[:, None])[:, 0]
    likeliest, log_likeliest = torch.stack((best.double(), theirs.double())).tolist()  # the device is awaited once
    return TokenProbabilities(logits, log_probabilities, [int(token) for token in likeliest], log_likeliest)


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
        kept = _cut(_tempered(logits.float().cpu(), self.sampling.temperature), self.sampling)
        return int(torch.multinomial(kept.softmax(dim=-1), 1, generator=self._random))


def _tempered(logits: Tensor, temperature: float) -> Tensor:
    """Divide by any temperature above 0: the likeliest is 0 then, so that nothing is infinite but what has no chance.

    A temperature that float32 holds as 0 would make no numbers of the likeliest.
    """
    return (logits - logits.max()) / max(temperature, torch.finfo(torch.float32).tiny)


def _cut(logits: Tensor, sampling: Sampling) -> Tensor:
    """Keep the ``top_k`` likeliest, and of those the fewest that hold ``top_p`` together; the likeliest always."""
    if 0 < sampling.top_k < len(logits):
        least = logits.topk(sampling.top_k).values[-1]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits.sort(descending=True)
        shares = ordered.softmax(dim=-1)
        beyond = shares.cumsum(dim=-1) - shares >= sampling.top_p
        beyond[0] = False  # float32 may hold top_p as 0
        logits = logits.scatter(0, order, ordered.masked_fill(beyond, -torch.inf))
    return logits
