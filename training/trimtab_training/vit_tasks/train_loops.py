"""Training: the transformer with its head on one task, then the heads of the others with the transformer frozen."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from trimtab_model_servers.transformer.image_preprocessing import preprocess
from trimtab_model_servers.transformer.tasks import Head
from trimtab_model_servers.transformer.transformer import PLAIN, ForwardPlan, VisionTransformer
from trimtab_training import optimizer
from trimtab_training.prompt_tuning import features_of
from trimtab_training.vit_tasks.datasets import Images

Advance = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class Training:
    """How long and how fast something learns."""

    steps: int
    batch: int
    peak_rate: float
    seed: int
    weight_decay: float = 0.05


def initialise(transformer: VisionTransformer, seed: int) -> None:
    """Give a transformer the random weights that training begins with."""
    random = torch.Generator().manual_seed(seed)
    for module in transformer.modules():
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02, generator=random)
            nn.init.zeros_(module.bias)
    nn.init.trunc_normal_(transformer.pos_embed, std=0.02, generator=random)
    nn.init.trunc_normal_(transformer.cls_token, std=0.02, generator=random)


def fit_transformer(
    transformer: VisionTransformer,
    images: Images,
    classes: int,
    training: Training,
    advance: Advance,
    begun: Head | None = None,
) -> Head:
    """Train the transformer with a head on one task, from the head it has or a new one; return the head."""
    random = torch.Generator().manual_seed(training.seed)
    head = nn.Linear(transformer.shape.width, classes)
    if begun is not None:
        head.load_state_dict({"weight": begun.weight, "bias": begun.bias})

    def loss() -> Tensor:
        chosen = torch.randint(len(images), (training.batch,), generator=random)
        features = transformer(preprocess(images.pixels[chosen], "Image"))
        return cross_entropy(head(features), images.labels[chosen], label_smoothing=0.1)

    _descend([*transformer.parameters(), *head.parameters()], loss, training, advance)
    return Head(head.weight.detach(), head.bias.detach())


def fit_head(
    transformer: VisionTransformer, images: Images, classes: int, training: Training, course: ForwardPlan = PLAIN
) -> Head:
    """Train the head of one task on a frozen transformer, whose features on a course are computed once."""
    features = features_of(transformer, images.pixels, "Image", course)
    random = torch.Generator().manual_seed(training.seed)
    head = nn.Linear(transformer.shape.width, classes)
    nn.init.trunc_normal_(head.weight, std=0.02, generator=random)
    nn.init.zeros_(head.bias)

    def loss() -> Tensor:
        chosen = torch.randint(len(images), (training.batch,), generator=random)
        return cross_entropy(head(features[chosen]), images.labels[chosen], label_smoothing=0.05)

    _descend(list(head.parameters()), loss, training)
    return Head(head.weight.detach(), head.bias.detach())


def _descend(
    parameters: list[nn.Parameter], loss: Callable[[], Tensor], training: Training, advance: Advance = lambda _: None
) -> None:
    """AdamW along one cycle of the learning rate; weights of more than one dimension decay."""
    decayed = [one for one in parameters if one.dim() == 2]
    kept = [one for one in parameters if one.dim() != 2]
    groups = [{"params": decayed, "weight_decay": training.weight_decay}, {"params": kept, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=training.peak_rate)
    optimizer.train_epochs(optimiser, loss, peak_rate=training.peak_rate, steps=training.steps, advance=advance)
