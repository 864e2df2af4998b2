"""Token sampling: greedy tokens of a whole batch, and random draws per request."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab_model_servers.engine.request import Sampling


@dataclass(frozen=True, slots=True, eq=False)
class TokenProbabilities:
    """Next-token distributions of a batch of n requests."""

    logits: Tensor
    """[n, vocabulary]; -inf for banned tokens."""
    log_probabilities: Tensor
    """float32 [n, vocabulary], before tokens are banned; NaN in rows whose logits are not finite."""
    greedy_tokens: list[int]
    """[n]; the first token of equally likely ones."""
    greedy_log_probabilities: list[float]


@torch.inference_mode()
def token_probabilities(logits: Tensor, banned: Sequence[tuple[int, int]]) -> TokenProbabilities:
    """Compute the distributions of ``logits`` [n, vocabulary]; ``banned`` lists (row, token) with probability 0."""
    log_probabilities = logits.log_softmax(dim=-1, dtype=torch.float32)
    if banned:
        rows, tokens = torch.tensor(banned, device=logits.device).unbind(dim=1)
        logits = logits.index_put((rows, tokens), logits.new_full((), -torch.inf))
    best = logits.argmax(dim=-1)
    best_log_probabilities = log_probabilities.gather(1, best[:, None])[:, 0]
    tokens_of_rows, log_of_rows = torch.stack((best.double(), best_log_probabilities.double())).tolist()  # one sync
    return TokenProbabilities(logits, log_probabilities, [int(token) for token in tokens_of_rows], log_of_rows)


class Sampler:
    """Random draws of one request; reproducible if its sampling has a seed."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self._generator = torch.Generator()
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed % 2**63)

    def sample(self, logits: Tensor) -> int:
        """Draw a token from ``logits`` [vocabulary] on any device."""
        if self.sampling.temperature == 0:
            return int(logits.argmax())
        filtered = _filter(_scale(logits.float().cpu(), self.sampling.temperature), self.sampling)
        return int(torch.multinomial(filtered.softmax(dim=-1), 1, generator=self._generator))


def _scale(logits: Tensor, temperature: float) -> Tensor:
    """Divide by a temperature above 0, after the maximum is shifted to 0 so that no finite logit overflows.

    A temperature that float32 rounds to 0 would turn the maximum into NaN; the smallest normal number replaces it.
    """
    return (logits - logits.max()) / max(temperature, torch.finfo(torch.float32).tiny)


def _filter(logits: Tensor, sampling: Sampling) -> Tensor:
    """Keep the ``top_k`` likeliest tokens, then the smallest set of them whose probability reaches ``top_p``."""
    if 0 < sampling.top_k < len(logits):
        threshold = logits.topk(sampling.top_k).values[-1]
        logits = logits.masked_fill(logits < threshold, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits.sort(descending=True)
        probabilities = ordered.softmax(dim=-1)
        excluded = probabilities.cumsum(dim=-1) - probabilities >= sampling.top_p
        excluded[0] = False  # float32 may round top_p to 0
        logits = logits.scatter(0, order, ordered.masked_fill(excluded, -torch.inf))
    return logits
