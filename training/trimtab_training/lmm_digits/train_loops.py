"""Training loops of the lmm-digits models: classify cells, align page tokens with characters, answer questions.

The architectures differ in the third phase only, in how a page's tokens reach the decoder.
"""

from collections.abc import Callable
from typing import Any, Final

import torch
import torch.nn.functional as fn
from torch import Tensor, nn

from trimtab_model_servers.families.lmm_digits.models import IMAGE_ID, PAGE_TOKENS, WIDTH, Architecture, VisionTower
from trimtab_training.digits.training_pool import invert_some
from trimtab_training.lmm_digits.batches import IGNORED, Batch, Questioner, token_cells
from trimtab_training.lmm_digits.page_generator import EMPTY
from trimtab_training.trainer import Advance, Schedule, minimize

HINT_WEIGHT: Final = 0.5


def fit_tower(tower: VisionTower, pages: Tensor, cells: Tensor, schedule: Schedule, advance: Advance) -> None:
    """Train the tower to classify the cell of each of its tokens, and leave it in evaluation mode."""
    random = torch.Generator().manual_seed(schedule.seed)
    head = nn.Linear(WIDTH, EMPTY + 1)

    def loss() -> Tensor:
        indices = torch.randint(len(pages), (schedule.batch,), generator=random)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = head(tower.features(invert_some(pages[indices], random)))
        targets = token_cells(cells[indices])
        return fn.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), label_smoothing=0.02)

    _train([*tower.parameters(), *head.parameters()], loss, schedule, advance)
    tower.eval()


def compute_features(tower: VisionTower, pages: Tensor) -> Tensor:
    """Tower features of every page, before position embeddings: float16 [n, 16, width]."""
    with torch.inference_mode():
        return torch.cat([tower.features(chunk).half() for chunk in torch.split(pages, 256)])


class AnswerTraining:
    """A model in training, with the tower features of the pool and the position embeddings of twins."""

    def __init__(
        self, model: Any, architecture: Architecture, tower: VisionTower, features: Tensor, characters: Tensor
    ) -> None:
        self.model = model
        self.architecture = architecture
        self.tower = tower
        self.features = features
        self.characters = characters
        self.twin_places = nn.Parameter(0.06 * torch.randn(PAGE_TOKENS, WIDTH))
        self.embed: nn.Embedding = model.get_input_embeddings()
        self.projector: nn.Module = model.model.multi_modal_projector

    def align(self, cells: Tensor, schedule: Schedule, advance: Advance) -> None:
        """Train the projector to map page tokens to the character embeddings of their cells."""
        random = torch.Generator().manual_seed(schedule.seed)

        def loss() -> Tensor:
            indices = torch.randint(len(cells), (schedule.batch,), generator=random)
            projected = self.projector(self.features[indices].float() + self.tower.places)
            with torch.no_grad():
                targets = self._embed_cells(cells[indices])
            return fn.mse_loss(projected, targets) / targets.var()

        _train([*self.projector.parameters(), self.tower.places], loss, schedule, advance)

    def answer(self, questioner: Questioner, schedule: Schedule, advance: Advance) -> None:
        """Train all but the tower's convolutions to answer questions."""
        size = schedule.batch
        frozen = {id(parameter) for parameter in self.tower.stem.parameters()}
        trained = [parameter for parameter in self.model.parameters() if id(parameter) not in frozen]

        def loss() -> Tensor:
            batch = questioner.batch(size, twins=0.4)
            flat = self.logits(batch).flatten(0, 1)  # too small to gain from bfloat16
            answers = fn.cross_entropy(flat, batch.labels.flatten())
            if not bool((batch.hints != IGNORED).any()):
                return answers
            return answers + HINT_WEIGHT * fn.cross_entropy(flat, batch.hints.flatten())

        _train([*trained, self.twin_places], loss, schedule, advance)
        self.model.eval()

    def logits(self, batch: Batch) -> Tensor:
        """Next-token logits [B, L, vocabulary], equal to those of the model's own `forward`."""
        logits: Tensor = self.model.lm_head(self._hidden(batch))
        return logits

    def _hidden(self, batch: Batch) -> Tensor:
        embedded = self.embed(batch.ids)
        if self.architecture == "cross-attention":
            return self._cross_attend(batch, embedded)
        if batch.pool_indices.shape[1]:
            is_image = (batch.ids == IMAGE_ID)[..., None]
            embedded = embedded.masked_scatter(is_image, self._page_tokens(batch).to(embedded.dtype))
        return self._decode(embedded)

    def _cross_attend(self, batch: Batch, embedded: Tensor) -> Tensor:
        if not batch.pool_indices.shape[1]:
            return self._decode(embedded)
        mask, row_mask = cross_attention_mask(batch.ids, batch.pool_indices.shape[1])
        return self._decode(
            embedded,
            cross_attention_states=self._page_tokens(batch).flatten(1, 2),
            cross_attention_mask=mask,
            full_text_row_masked_out_mask=row_mask,
        )

    def _decode(self, embedded: Tensor, **inputs: Tensor) -> Tensor:
        decoder = self.model.model.language_model
        hidden: Tensor = decoder(inputs_embeds=embedded, use_cache=False, **inputs).last_hidden_state
        return hidden

    def _page_tokens(self, batch: Batch) -> Tensor:
        """Page tokens [B, pages, 16, width]: projected features of real pages, character embeddings of twins."""
        features = self.features[batch.pool_indices.clamp(min=0)].float() + self.tower.places
        return torch.where(
            (batch.pool_indices < 0)[..., None, None], self._embed_cells(batch.cells), self.projector(features).float()
        )

    def _embed_cells(self, cells: Tensor) -> Tensor:
        embedded: Tensor = self.embed(self.characters[token_cells(cells)])
        return embedded + self.twin_places


def cross_attention_mask(ids: Tensor, pages: int) -> tuple[Tensor, Tensor]:
    """Cross-attention masks as Mllama's processor makes them for pages that are not adjacent.

    A position attends to the page of the last placeholder before it. Positions before the first placeholder attend to
    every page, but skip the feed-forward part of the layer.

    Returns:
        The additive mask [B, 1, L, pages * 16], and [B, 1, L, 1], 1 for positions with a page.
    """
    number = (ids == IMAGE_ID).cumsum(dim=1)
    visible = number[..., None] == torch.arange(1, pages + 1)
    has_page = number > 0
    additive = torch.finfo(torch.float32).min * (~visible & has_page[..., None]).float()
    return additive.repeat_interleave(PAGE_TOKENS, dim=2)[:, None], has_page.float()[:, None, :, None]


def _train(parameters: list[nn.Parameter], loss: Callable[[], Tensor], schedule: Schedule, advance: Advance) -> None:
    minimize(parameters, loss, schedule, betas=(0.9, 0.98), advance=advance)
