"""Training loops: the transformer with its head on one task, then heads of other tasks on the frozen transformer."""

from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from trimtab_model_servers.transformer.config import preprocess
from trimtab_model_servers.transformer.tasks import Head
from trimtab_model_servers.transformer.transformer import PLAIN, ForwardPlan, VisionTransformer
from trimtab_training.prompt_tuning import LabelledImages, compute_features
from trimtab_training.trainer import Advance, Schedule, minimize

TRANSFORMER_WEIGHT_DECAY: Final = 0.05
HEAD_WEIGHT_DECAY: Final = 1e-4


def init_weights(transformer: VisionTransformer, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    for module in transformer.modules():
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02, generator=random)
            nn.init.zeros_(module.bias)
    nn.init.trunc_normal_(transformer.pos_embed, std=0.02, generator=random)
    nn.init.trunc_normal_(transformer.cls_token, std=0.02, generator=random)


def fit_transformer(
    transformer: VisionTransformer,
    images: LabelledImages,
    classes: int,
    schedule: Schedule,
    advance: Advance,
    initial: Head | None = None,
) -> Head:
    """Train a transformer with a head on one task, from an initial head or a new one; return the head."""
    random = torch.Generator().manual_seed(schedule.seed)
    head = nn.Linear(transformer.shape.width, classes)
    if initial is not None:
        head.load_state_dict({"weight": initial.weight, "bias": initial.bias})

    def loss() -> Tensor:
        indices = torch.randint(len(images), (schedule.batch,), generator=random)
        features = transformer(preprocess(images.pixels[indices], "Image"))
        return cross_entropy(head(features), images.labels[indices], label_smoothing=0.1)

    groups = _decay_groups([*transformer.parameters(), *head.parameters()], TRANSFORMER_WEIGHT_DECAY)
    minimize(groups, loss, schedule, advance=advance)
    return Head(head.weight.detach(), head.bias.detach())


def fit_head(
    transformer: VisionTransformer, images: LabelledImages, classes: int, schedule: Schedule, plan: ForwardPlan = PLAIN
) -> Head:
    """Train the head of one task on the features of a frozen transformer, which are computed once."""
    features = compute_features(transformer, images.pixels, "Image", plan)
    random = torch.Generator().manual_seed(schedule.seed)
    head = nn.Linear(transformer.shape.width, classes)
    nn.init.trunc_normal_(head.weight, std=0.02, generator=random)
    nn.init.zeros_(head.bias)

    def loss() -> Tensor:
        indices = torch.randint(len(images), (schedule.batch,), generator=random)
        return cross_entropy(head(features[indices]), images.labels[indices], label_smoothing=0.05)

    minimize(_decay_groups(list(head.parameters()), HEAD_WEIGHT_DECAY), loss, schedule)
    return Head(head.weight.detach(), head.bias.detach())


def _decay_groups(parameters: list[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups in which only matrices decay."""
    matrices = [parameter for parameter in parameters if parameter.dim() == 2]
    others = [parameter for parameter in parameters if parameter.dim() != 2]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
