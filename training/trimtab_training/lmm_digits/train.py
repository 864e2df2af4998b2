"""Training of the lmm-digits pipeline: `python -m trimtab_training.lmm_digits.train -o DIR`.

Writes `DIR/weights/{decoder-only,cross-attention}.safetensors` and `DIR/weights/tokenizer.json`. Seeds are fixed. Both
models share one vision tower, which is trained once: it classifies cells, then each model's projector aligns page
tokens with characters, then the model answers questions. The architectures differ in the last phase only, in how a
page's tokens reach the decoder. `trimtab evaluate` measures them.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as fn
from rich.progress import Progress
from tokenizers import Tokenizer
from torch import Tensor, nn

from trimtab_model_servers.families.lmm_digits import models
from trimtab_model_servers.families.lmm_digits.models import (
    ARCHITECTURES,
    IMAGE_ID,
    PAGE_TOKENS,
    WIDTH,
    Architecture,
    VisionTower,
)
from trimtab_model_servers.families.lmm_digits.tokenizer import load_default_tokenizer
from trimtab_training.digits.train import invert_some
from trimtab_training.lmm_digits.batches import IGNORED, Batch, Questioner, character_ids, token_cells
from trimtab_training.lmm_digits.page_generator import EMPTY, CellPageSource
from trimtab_training.trainer import (
    Advance,
    Schedule,
    argument_parser,
    loss_bar,
    minimize,
    training_progress,
)

TRAINING_PAGES: Final = 20_000
TRAINING_SEED: Final = 21
TOWER: Final = Schedule(steps=1_800, batch=64, peak_rate=4e-3, seed=1)
ALIGNMENT: Final = Schedule(steps=400, batch=64, peak_rate=3e-3, seed=2)
ANSWERS: Final[dict[Architecture, Schedule]] = {
    "decoder-only": Schedule(steps=2_600, batch=64, peak_rate=2e-3, seed=3),
    "cross-attention": Schedule(steps=2_600, batch=64, peak_rate=2e-3, seed=4),
}
HINT_WEIGHT: Final = 0.5
TWINS: Final = 0.4
"""Share of questions about twins."""
BETAS: Final = (0.9, 0.98)


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

    minimize([*tower.parameters(), *head.parameters()], loss, schedule, betas=BETAS, advance=advance)
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

        minimize([*self.projector.parameters(), self.tower.places], loss, schedule, betas=BETAS, advance=advance)

    def answer(self, questioner: Questioner, schedule: Schedule, advance: Advance) -> None:
        """Train all but the tower's convolutions to answer questions."""
        frozen = {id(parameter) for parameter in self.tower.stem.parameters()}
        trained = [parameter for parameter in self.model.parameters() if id(parameter) not in frozen]

        def loss() -> Tensor:
            batch = questioner.batch(schedule.batch, twins=TWINS)
            flat = self.logits(batch).flatten(0, 1)  # too small to gain from bfloat16
            answers = fn.cross_entropy(flat, batch.labels.flatten())
            if not bool((batch.hints != IGNORED).any()):
                return answers
            return answers + HINT_WEIGHT * fn.cross_entropy(flat, batch.hints.flatten())

        minimize([*trained, self.twin_places], loss, schedule, betas=BETAS, advance=advance)
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
    """Masks as of Mllama's processor: additive [B, 1, L, pages * 16], and [B, 1, L, 1], 1 for positions with a page.

    A position attends to the page of the last placeholder before it. Positions before the first placeholder attend to
    every page, but skip the feed-forward part of the layer.
    """
    number = (ids == IMAGE_ID).cumsum(dim=1)
    visible = number[..., None] == torch.arange(1, pages + 1)
    has_page = number > 0
    additive = torch.finfo(torch.float32).min * (~visible & has_page[..., None]).float()
    return additive.repeat_interleave(PAGE_TOKENS, dim=2)[:, None], has_page.float()[:, None, :, None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Train the chosen models."""
    options = argument_parser("Train the models of the lmm-digits pipeline.", ARCHITECTURES).parse_args(arguments)
    with training_progress(options.threads) as progress:
        _train(options.only or ARCHITECTURES, options.output / "weights", progress)
    return 0


def _train(architectures: Sequence[Architecture], weights: Path, progress: Progress) -> None:
    """Train the tower, then each model with it."""
    weights.mkdir(parents=True, exist_ok=True)
    tokenizer = load_default_tokenizer()
    tokenizer.save(str(weights / "tokenizer.json"))
    pages, cells = _draw_pages(progress)
    started = time.process_time()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(TOWER.seed)
        tower = VisionTower(models.WIDTH).to(memory_format=torch.channels_last)
    fit_tower(tower, pages, cells, TOWER, loss_bar(progress, "tower", TOWER.steps))
    features = compute_features(tower, pages)
    tower_seconds = time.process_time() - started
    for architecture in architectures:
        started, schedule = time.process_time(), ANSWERS[architecture]
        model = _train_model(architecture, tokenizer, tower, features, cells, progress)
        seconds = tower_seconds + time.process_time() - started
        training = schedule.metadata() | {"processor_seconds": f"{seconds:.0f}"}
        models.save(model, architecture, tokenizer, weights / f"{architecture}.safetensors", training)
        progress.console.print(
            f"{architecture} trained in {seconds:.0f} s of processor time, including {tower_seconds:.0f} s of the tower"
        )


def _train_model(
    architecture: Architecture,
    tokenizer: Tokenizer,
    tower: VisionTower,
    features: Tensor,
    cells: Tensor,
    progress: Progress,
) -> Any:
    schedule = ANSWERS[architecture]
    model = models.build(architecture, seed=schedule.seed)
    model_tower = models.tower(model)
    model_tower.load_state_dict(tower.state_dict())
    model_tower.eval()
    training = AnswerTraining(model, architecture, model_tower, features, character_ids(tokenizer))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(schedule.seed)
        training.align(cells, ALIGNMENT, loss_bar(progress, "align", ALIGNMENT.steps))
        page_tokens = models.placeholders(architecture)
        questioner = Questioner(tokenizer, cells.numpy(), page_tokens=page_tokens, seed=schedule.seed)
        training.answer(questioner, schedule, loss_bar(progress, architecture, schedule.steps))
    return models.prepare_for_serving(model)


def _draw_pages(progress: Progress) -> tuple[Tensor, Tensor]:
    source = CellPageSource("train", TRAINING_SEED)
    indices = progress.track(range(TRAINING_PAGES), task_id=progress.add_task("draw pages", note=""))
    pages = [source.page(index) for index in indices]
    return torch.from_numpy(np.stack([page.pixels for page in pages])), torch.tensor([page.cells for page in pages])


if __name__ == "__main__":
    sys.exit(main())
