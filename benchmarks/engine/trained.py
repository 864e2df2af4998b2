"""The trained models in the engine beside transformers' ``generate``: the same chats about real pages, both ways."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from benchmarks.engine.race import answered
from trimtab_model_servers.engine.core import EngineCore, EngineEvent
from trimtab_model_servers.engine.model_adapters import adapt_model
from trimtab_model_servers.engine.request import FinishReason, Image, Request, RequestDone, TokenChunk
from trimtab_model_servers.engine.scheduler import EngineLimits
from trimtab_model_servers.families.lmm_digits import models
from trimtab_model_servers.families.lmm_digits.models import END_ID, IMAGE_ID, PAD_ID, PAGE_TOKENS, Architecture
from trimtab_training.lmm_digits import evaluate
from trimtab_training.lmm_digits.page_generator import CellPageSource
from trimtab_training.lmm_digits.questions import PAGES, Kind, ask, fits

WEIGHTS: Final = Path("pipelines/lmm-digits/weights")
PAGE_SEED: Final = 91
PAGE_POOL: Final = 150
"""Fewer pages than questions, so that prefixes are shared."""

STEP_TOKENS: Final = 23
"""Fewer than two pages' tokens, so that prompts are cut inside images."""

CANCELLED_SHARE: Final = 0.2


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """One chat: its prompt, its pages' pixels [pages, 1, 96, 96] and which of the pool they are."""

    ids: tuple[int, ...]
    pixels: Tensor
    pages: tuple[int, ...]
    written: int

    @property
    def key(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The same for the same question about the same pages."""
        return self.ids, self.pages


class Trained:
    """One trained model twice: as ``generate`` runs it, and in the engine."""

    def __init__(self, architecture: Architecture, device: str = "cpu") -> None:
        path = WEIGHTS / f"{architecture}.safetensors"
        self.stored = models.load(path)
        self.alone = self.stored.model.to(device)
        self.family = adapt_model(models.load(path).model.to(device))
        self.architecture = architecture

    def chats(self, count: int, written: tuple[int, int], seed: int) -> list[Asked]:
        """Draw chats of every kind about a pool of held-out pages; answers of ``written`` tokens at most."""
        source, random = CellPageSource("held-out", PAGE_SEED), np.random.default_rng(seed)
        pool = [source.page(index) for index in range(PAGE_POOL)]
        drawn: list[Asked] = []
        while len(drawn) < count:
            kind = list(Kind)[int(random.integers(len(Kind)))]
            least, most = PAGES[kind]
            chosen = random.integers(PAGE_POOL, size=int(random.integers(least, most + 1))).tolist()
            pages = [pool[page] for page in chosen]
            if fits(kind, [page.cells for page in pages]):
                question = ask(kind, [page.cells for page in pages], random)
                exercise = evaluate.Exercise(question, tuple(pages))
                inputs = evaluate.generate_inputs(self.architecture, self.stored.tokenizer, exercise)
                pixels = [torch.from_numpy(page.pixels) for page in pages]
                stacked = torch.stack(pixels) if pixels else torch.zeros(0, 1, 96, 96)
                ids = tuple(inputs["input_ids"][0].tolist())
                drawn.append(Asked(ids, stacked, tuple(chosen), int(random.integers(*written))))
        return drawn

    def raced(self, count: int, written: tuple[int, int], seed: int) -> list[Asked]:
        """Draw chats that ``generate`` can answer in batches.

        It takes the length of padded prompts from what the first layer keeps. Where that one attends to pages it is
        theirs, so that only prompts go together that are equally long and about equally many pages.
        """
        if not self.family.cross_attention:
            return self.chats(count, written, seed)
        drawn = self.chats(8 * count, written, seed)
        shapes = Counter((len(each.ids), len(each.pages)) for each in drawn)
        commonest, found = shapes.most_common(1)[0]
        if found < count:
            raise RuntimeError(f"{found} of {8 * count} chats are alike, {count} are needed; ask for fewer requests")
        return [each for each in drawn if (len(each.ids), len(each.pages)) == commonest][:count]

    @torch.inference_mode()
    def generate(self, batch: Sequence[Asked], written: int, *, to_the_end: bool) -> list[list[int]]:
        """Answer a batch with transformers' own ``generate``, padded to the left."""
        inputs = {name: tensor.to(self.alone.device) for name, tensor in self._inputs(batch).items()}
        least = written if to_the_end else None
        wrote = self.alone.generate(**inputs, max_new_tokens=written, min_new_tokens=least)
        return [row[inputs["input_ids"].shape[1] :].tolist() for row in wrote]

    @torch.inference_mode()
    def encode(self, pixels: Tensor) -> list[Tensor]:
        """What the engine is given of pages."""
        if not len(pixels):
            return []
        seen = models.tower(self.alone)(pixels.to(self.alone.device)).last_hidden_state
        return list(self.alone.model.multi_modal_projector(seen))

    def request(self, name: str, asked: Asked, written: int, *, to_the_end: bool) -> Request:
        """A chat as the engine takes it."""
        placeholders = models.placeholders(self.architecture)
        places = [place for place, token in enumerate(asked.ids) if token == IMAGE_ID][::placeholders]
        images = tuple(
            Image(str(page), place, placeholders, PAGE_TOKENS) for page, place in zip(asked.pages, places, strict=True)
        )
        least = written if to_the_end else 0
        return Request(name, asked.ids, images, written, least, end_ids=frozenset({END_ID}))

    def core(self, slots: int, step_tokens: int) -> EngineCore:
        """An engine for it."""
        return EngineCore(
            self.family,
            EngineLimits(slots, 320, step_tokens, 100_000, 3 * PAGE_TOKENS if self.family.cross_attention else 0),
        )

    def _inputs(self, batch: Sequence[Asked]) -> dict[str, Tensor]:
        longest = max(len(asked.ids) for asked in batch)
        padding = [longest - len(asked.ids) for asked in batch]
        ids = torch.tensor([[PAD_ID] * pad + list(asked.ids) for pad, asked in zip(padding, batch, strict=True)])
        mask = torch.tensor([[0] * pad + [1] * len(asked.ids) for pad, asked in zip(padding, batch, strict=True)])
        told = {"input_ids": ids, "attention_mask": mask}
        most = max(len(asked.pages) for asked in batch)
        if not most:
            return told
        if self.architecture == "decoder-only":
            return told | {"pixel_values": torch.cat([asked.pixels for asked in batch])}
        return told | _across(batch, ids, most)


def _across(batch: Sequence[Asked], ids: Tensor, most: int) -> dict[str, Tensor]:
    """Mllama's further inputs; who has fewer pages has blank ones that nothing sees."""
    pixels = torch.zeros(len(batch), most, 1, 1, 96, 96)
    for row, asked in enumerate(batch):
        pixels[row, : len(asked.pages), 0] = asked.pixels
    number = (ids == IMAGE_ID).cumsum(dim=1)
    seen = (number[..., None] == torch.arange(1, most + 1)).long()
    return {
        "pixel_values": pixels,
        "aspect_ratio_ids": torch.ones(len(batch), most, dtype=torch.int64),
        "aspect_ratio_mask": torch.ones(len(batch), most, 1, dtype=torch.int64),
        "cross_attention_mask": seen[..., None],
    }


def static_batches(model: Trained, asked: Sequence[Asked], size: int) -> list[list[int]]:
    """Batches of ``size``, each until its longest answer is written."""
    answers = []
    for start in range(0, len(asked), size):
        batch = asked[start : start + size]
        wrote = model.generate(batch, max(each.written for each in batch), to_the_end=True)
        answers += [row[: each.written] for row, each in zip(wrote, batch, strict=True)]
    return answers


def continuous(model: Trained, asked: Sequence[Asked], slots: int) -> list[list[int]]:
    """The engine, ``slots`` streams at once, the next chat when one ends."""
    chats = (
        (model.request(str(number), each, each.written, to_the_end=True), model.encode(each.pixels))
        for number, each in enumerate(asked)
    )
    return answered(model.core(slots, 256), chats)


@dataclass(frozen=True, slots=True)
class Identity:
    """How many answers were compared, differed, were cancelled, and how much of the prompts was not computed again."""

    compared: int
    differing: int
    cancelled: int
    reused_tokens: int
    prompt_tokens: int
    chunks_inside_images: int


def identity(model: Trained, count: int, advance: Callable[[], None]) -> Identity:
    """Ask ``count`` chats that come while others are under way, some cancelled, and compare with ``generate``."""
    asked, random = model.chats(count, (6, 7), seed=17), np.random.default_rng(18)
    cancels = random.random(count) < CANCELLED_SHARE
    core, said, ended = model.core(8, STEP_TOKENS), [list[int]() for _ in asked], dict[str, RequestDone]()

    def hear(event: EngineEvent) -> None:
        if isinstance(event, TokenChunk):
            said[int(event.request_id)].append(event.token)
        else:
            ended[event.request_id] = event

    for number, each in enumerate(asked):
        core.submit(model.request(str(number), each, 6, to_the_end=False), model.encode(each.pixels), hear)
        for _ in range(int(random.integers(3))):
            core.step()
        if cancels[number]:
            core.cancel(str(int(random.integers(max(number - 8, 0), number + 1))))
    while core.step():
        pass
    return _compared(model, asked, said, ended, advance)


def _compared(
    model: Trained,
    asked: list[Asked],
    said: list[list[int]],
    ended: dict[str, RequestDone],
    advance: Callable[[], None],
) -> Identity:
    """Compare whole answers to the letter, and cancelled ones as far as they came."""
    known: dict[Any, list[int]] = {}
    differing = 0
    for number, each in enumerate(asked):
        if each.key not in known:
            wrote = model.generate([each], 6, to_the_end=False)[0]
            known[each.key] = wrote[: wrote.index(END_ID) + 1] if END_ID in wrote else wrote
        expected, whole = known[each.key], ended[str(number)].finish_reason is not FinishReason.CANCELLED
        differing += said[number] != (expected if whole else expected[: len(said[number])])
        advance()
    usages = [done.usage for done in ended.values()]
    return Identity(
        len(asked),
        differing,
        sum(done.finish_reason is FinishReason.CANCELLED for done in ended.values()),
        sum(usage.cached for usage in usages),
        sum(usage.prompt for usage in usages),
        _cut_images(model, asked),
    )


def _cut_images(model: Trained, asked: list[Asked]) -> int:
    """Prompts that no step could take in whole, nor all of their images."""
    placeholders = models.placeholders(model.architecture)
    return sum(placeholders * len(each.pages) > STEP_TOKENS for each in asked)
