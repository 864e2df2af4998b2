"""How both models learn: the tower reads cells; its tokens are aligned to the decoder's characters; both then answer.

Only the third part differs between the two architectures, and only in how a page's tokens reach the decoder.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as fn
from torch import Tensor, nn

from trimtab_model_servers.families.lmm_digits.models import IMAGE_ID, WIDTH, Architecture
from trimtab_model_servers.families.lmm_digits.vision_tower import PAGE_TOKENS, VisionTower
from trimtab_training import optimizer
from trimtab_training.digits.training_pool import invert_some
from trimtab_training.lmm_digits.batches import IGNORED, Batch, Questioner, token_cells
from trimtab_training.lmm_digits.page_generator import EMPTY

Advance = Callable[[float], None]
HINT_WEIGHT: Final = 0.5


@dataclass(frozen=True, slots=True)
class Schedule:
    """How long and how fast a part learns."""

    steps: int
    batch: int
    peak_rate: float
    seed: int


def fit_tower(tower: VisionTower, pages: Tensor, cells: Tensor, schedule: Schedule, advance: Advance) -> None:
    """Teach the tower to say of each of its tokens what the cell around it holds."""
    random = torch.Generator().manual_seed(schedule.seed)
    head = nn.Linear(WIDTH, EMPTY + 1)

    def loss() -> Tensor:
        chosen = torch.randint(len(pages), (schedule.batch,), generator=random)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            seen = head(tower.features(invert_some(pages[chosen], random)))
        wanted = token_cells(cells[chosen])
        return fn.cross_entropy(seen.float().flatten(0, 1), wanted.flatten(), label_smoothing=0.02)

    descend([*tower.parameters(), *head.parameters()], loss, schedule, advance)
    tower.eval()


def features_of(tower: VisionTower, pages: Tensor) -> Tensor:
    """What the tower sees on every page, before places: float16 [n, 16, width]."""
    with torch.inference_mode():
        return torch.cat([tower.features(chunk).half() for chunk in torch.split(pages, 256)])


class Answering:
    """A model beside what it is trained with: what the tower sees on the pool's pages, and the twins' places."""

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
        """Teach the projector to say a cell in the decoder's own characters and the twins' places."""
        random = torch.Generator().manual_seed(schedule.seed)

        def loss() -> Tensor:
            chosen = torch.randint(len(cells), (schedule.batch,), generator=random)
            said = self.projector(self.features[chosen].float() + self.tower.places)
            with torch.no_grad():
                wanted = self._spell(cells[chosen])
            return fn.mse_loss(said, wanted) / wanted.var()

        descend([*self.projector.parameters(), self.tower.places], loss, schedule, advance)

    def answer(self, questioner: Questioner, schedule: Schedule, advance: Advance) -> None:
        """Teach the whole, but for the tower's convolutions, to answer."""
        size = schedule.batch
        frozen = {id(parameter) for parameter in self.tower.stem.parameters()}
        learning = [parameter for parameter in self.model.parameters() if id(parameter) not in frozen]

        def loss() -> Tensor:
            batch = questioner.batch(size, twins=0.4)
            flat = self.logits(batch).flatten(0, 1)  # so small that bfloat16 is no faster
            answers = fn.cross_entropy(flat, batch.labels.flatten())
            if not bool((batch.hints != IGNORED).any()):
                return answers
            return answers + HINT_WEIGHT * fn.cross_entropy(flat, batch.hints.flatten())

        descend([*learning, self.twin_places], loss, schedule, advance)
        self.model.eval()

    def logits(self, batch: Batch) -> Tensor:
        """What the model says comes next at every place, [B, L, vocabulary], as its own ``forward`` would."""
        logits: Tensor = self.model.lm_head(self._hidden(batch))
        return logits

    def _hidden(self, batch: Batch) -> Tensor:
        embedded = self.embed(batch.ids)
        if self.architecture == "cross-attention":
            return self._across(batch, embedded)
        if batch.drawn.shape[1]:
            at = (batch.ids == IMAGE_ID)[..., None]
            embedded = embedded.masked_scatter(at, self._pages(batch).to(embedded.dtype))
        return self._decoded(embedded)

    def _across(self, batch: Batch, embedded: Tensor) -> Tensor:
        if not batch.drawn.shape[1]:
            return self._decoded(embedded)
        visible, some = across_mask(batch.ids, batch.drawn.shape[1])
        return self._decoded(
            embedded,
            cross_attention_states=self._pages(batch).flatten(1, 2),
            cross_attention_mask=visible,
            full_text_row_masked_out_mask=some,
        )

    def _decoded(self, embedded: Tensor, **told: Tensor) -> Tensor:
        decoder = self.model.model.language_model
        hidden: Tensor = decoder(inputs_embeds=embedded, use_cache=False, **told).last_hidden_state
        return hidden

    def _pages(self, batch: Batch) -> Tensor:
        """The pages' tokens, [B, pages, 16, width]: projected where drawn, spelled where twins."""
        seen = self.features[batch.drawn.clamp(min=0)].float() + self.tower.places
        return torch.where((batch.drawn < 0)[..., None, None], self._spell(batch.cells), self.projector(seen).float())

    def _spell(self, cells: Tensor) -> Tensor:
        spelled: Tensor = self.embed(self.characters[token_cells(cells)])
        return spelled + self.twin_places


def across_mask(ids: Tensor, pages: int) -> tuple[Tensor, Tensor]:
    """Which pages each place attends to, as Mllama's processor has it when pages do not stand side by side.

    A page is seen from its placeholder up to the next one. Before the first, every page is attended to, but the
    feed-forward part of the layer is left out.

    Returns:
        the additive mask [B, 1, L, pages * 16], and [B, 1, L, 1], 1 where a page is seen.
    """
    number = (ids == IMAGE_ID).cumsum(dim=1)
    seen = number[..., None] == torch.arange(1, pages + 1)
    some = number > 0
    hidden = torch.finfo(torch.float32).min * (~seen & some[..., None]).float()
    return hidden.repeat_interleave(PAGE_TOKENS, dim=2)[:, None], some.float()[:, None, :, None]


def descend(parameters: list[nn.Parameter], loss: Callable[[], Tensor], schedule: Schedule, advance: Advance) -> None:
    """AdamW along one cycle of the learning rate."""
    optimiser = torch.optim.AdamW(parameters, lr=schedule.peak_rate, weight_decay=0.02, betas=(0.9, 0.98))
    optimizer.train_epochs(optimiser, loss, peak_rate=schedule.peak_rate, steps=schedule.steps, advance=advance)
