"""A vision transformer as a replica serves it: points, tasks, and what is refused."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from torchvision.models import VisionTransformer as Torchvision

from tests.model_servers.test_model_adapters import a_spec
from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.families.vision_transformer import ServedTransformer
from trimtab_model_servers.server.hosted_model import load_model
from trimtab_model_servers.transformer.checkpoints import Checkpoint, load, save
from trimtab_model_servers.transformer.config import ViTConfig
from trimtab_model_servers.transformer.tasks import Head, TaskBank
from trimtab_model_servers.transformer.transformer import VisionTransformer

SHAPE = ViTConfig(side=16, patch=4, channels=1, width=16, depth=3, heads=2, inner=32)
TASKS = {"letters": ("a", "b", "c"), "signs": ("+", "-")}
IMAGE = {"name": "image", "datatype": "UINT8", "shape": [1, 16, 16]}
TASK = {"name": "task", "datatype": "INT64", "shape": [], "optional": True}
OUTPUTS = [{"name": "label", "datatype": "INT64"}, {"name": "confidence", "datatype": "FP32"}]
POINTS = [
    {"name": "full", "accuracy": 0.9},
    {"name": "fast", "accuracy": 0.8, "tokenDelta": -4},
    {"name": "fine", "accuracy": 0.95, "prompts": {"count": 2}},
    {"name": "both", "accuracy": 0.85, "prompts": {"count": 2}, "merging": {"schedule": [4]}},
]


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    torch.manual_seed(5)
    transformer = VisionTransformer(SHAPE).eval().requires_grad_(requires_grad=False)

    def heads(prompts):
        return {
            task: Head(torch.randn(len(labels), 16), torch.randn(len(labels)), prompts and torch.randn(3, 2, 16))
            for task, labels in TASKS.items()
        }

    path = tmp_path_factory.mktemp("weights") / "small.safetensors"
    ways = {"plain": heads(None), "replace-2": heads(1), "replace-2+merge-4": heads(1)}
    save(Checkpoint(transformer, ways, TASKS, "Image"), path, {"seed": "5"})
    return path


def spec(weights, **changes):
    given = {"family": "vision-transformer", "storageUri": str(weights), "inputs": [IMAGE, TASK], "outputs": OUTPUTS}
    return a_spec(**(given | {"operatingPoints": POINTS, "maxBatchSize": 4} | changes))


def answers(model, point, images, tasks):
    chosen = model.spec.point(point)
    with torch.inference_mode():
        return model.network.infer({"image": images, "task": torch.tensor(tasks)}, chosen)


def images(count):
    return torch.randint(256, (count, 1, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(6))


@pytest.mark.parametrize("point", ["full", "fast", "fine", "both"])
def test_tasks_mixed_in_one_batch_answer_as_each_alone(weights, point):
    model, pictures = load_model(spec(weights)), images(4)
    mixed = answers(model, point, pictures, [0, 1, 1, 0])
    for row, task in enumerate([0, 1, 1, 0]):
        alone = answers(model, point, pictures[row : row + 1], [task])

        assert mixed["label"][row] == alone["label"][0]
        assert torch.allclose(mixed["confidence"][row], alone["confidence"][0], atol=1e-5)


def test_a_point_uses_the_prompts_trained_for_just_what_it_does(weights):
    heads, network = load(weights).heads, load_model(spec(weights)).network
    assert isinstance(network, ServedTransformer)
    trained = {"full": "plain", "fast": "plain", "fine": "replace-2", "both": "replace-2+merge-4"}
    for name, variant in trained.items():
        served = network.active_tasks.banks[network.points[name].prompt_variant].heads[0].prompts
        expected = heads[variant]["letters"].prompts

        if expected is None:
            assert served is None
        else:
            assert served is not None
            assert torch.equal(served, expected)


def test_row_without_task_is_flagged_and_others_served(weights):
    model, pictures = load_model(spec(weights)), images(3)
    mixed, right = answers(model, "full", pictures, [0, 7, 1]), answers(model, "full", pictures, [0, 0, 1])

    assert (mixed["label"][1], mixed["confidence"][1]) == (-1, 0)
    assert torch.equal(mixed["label"][[0, 2]], right["label"][[0, 2]])


@pytest.mark.parametrize("precision", ["BF16", "FP16"])
@pytest.mark.parametrize("point", POINTS, ids=lambda point: point["name"])
def test_in_half_precision_it_answers_nearly_alike(weights, point, precision):
    halved = point | {"name": "halved", "precision": precision}
    model, pictures = load_model(spec(weights, operatingPoints=[point, halved])), images(4)
    exact, rough = (answers(model, name, pictures, [0, 1, 1, 0])["confidence"] for name in (point["name"], "halved"))

    assert torch.allclose(exact, rough, atol=0.05)
    assert not torch.equal(exact, rough)


@pytest.mark.parametrize(
    ("point", "words"),
    [
        ({"merging": {"schedule": [9]}}, "merges 9 tokens in a layer; of 16 patches"),
        ({"merging": {"schedule": [1, 2]}}, "a schedule of 2 numbers; this transformer has 3 layers"),
        ({"merging": {"schedule": [1], "rule": "best"}}, "unknown merging.rule 'best'; there are: bipartite, "),
        ({"prompts": {"count": 5}}, "'replace-5' is not trained .*; the weights have: plain"),
        ({"compiled": "inductor"}, "unknown compiled form 'inductor'"),
    ],
)
def test_invalid_point_is_rejected(weights, point, words):
    with pytest.raises(ModelError, match=words):
        load_model(spec(weights, operatingPoints=[{"accuracy": 0.9} | point]))


def test_images_of_another_size_are_rejected_at_load(weights):
    with pytest.raises(ModelError, match=r"reads an input image of shape \[1, 16, 16\]; the stage has \[1, 8, 8\]"):
        load_model(spec(weights, inputs=[IMAGE | {"shape": [1, 8, 8]}, TASK]))


def test_incomplete_file_is_rejected(weights, tmp_path):
    stored = load(weights)
    lame = {"plain": dict(stored.heads["plain"]), "replace-2": {"letters": stored.heads["replace-2"]["letters"]}}
    save(Checkpoint(stored.transformer, lame, TASKS, "Image"), tmp_path / "lame.safetensors", {})
    (tmp_path / "torn.safetensors").write_bytes(weights.read_bytes()[:100])

    with pytest.raises(ModelError, match="task 'signs' has no head for 'replace-2'"):
        load(tmp_path / "lame.safetensors")
    with pytest.raises(ModelError, match="not a complete safetensors file"):
        load(tmp_path / "torn.safetensors")


def test_torchvisions_weights_are_served_as_they_are(tmp_path):
    torch.manual_seed(7)
    stock = Torchvision(32, 8, 2, 2, 16, 32, num_classes=5).eval()
    torch.nn.init.normal_(stock.heads.head.weight)
    save_file(stock.state_dict(), tmp_path / "stock.safetensors")
    model = load_model(
        spec(
            tmp_path / "stock.safetensors",
            inputs=[{"name": "image", "datatype": "FP32", "shape": [3, 32, 32]}],
            outputs=[{"name": "logits", "datatype": "FP32", "shape": [5]}],
            operatingPoints=[{"accuracy": 0.9}, {"name": "fast", "accuracy": 0.8, "tokenDelta": -2}],
            parameters={"heads": 2},
        )
    )
    pictures = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        got = model.network.infer({"image": pictures}, model.spec.operating_points[0])["logits"]

        assert torch.allclose(got, stock(pictures), atol=1e-5)


def test_confidence_uses_the_temperature_of_point_and_task(weights, tmp_path):
    stored, pictures, tasks = load(weights), images(4), [0, 1, 1, 0]
    given = {"merge-4": {"signs": 2.0}, "replace-2": {"letters": 0.5, "signs": 3.0}}
    save(replace(stored, temperatures=given), tmp_path / "cooled.safetensors", {})
    before, after = load_model(spec(weights)), load_model(spec(tmp_path / "cooled.safetensors"))
    for point, by_task in {"full": {}, "fast": given["merge-4"], "fine": given["replace-2"], "both": {}}.items():
        raw, cooled = (answers(model, point, pictures, tasks) for model in (before, after))
        divisor = torch.tensor([by_task.get(("letters", "signs")[task], 1.0) for task in tasks])

        assert torch.equal(raw["label"], cooled["label"])
        assert torch.equal(raw["logits"], cooled["logits"])
        expected = (raw["logits"] / divisor[:, None]).softmax(dim=1).amax(dim=1)
        assert torch.allclose(cooled["confidence"], expected, atol=1e-5)


def test_invalid_temperature_is_rejected(weights, tmp_path):
    save(replace(load(weights), temperatures={"plain": {"signs": 0.0}}), tmp_path / "cold.safetensors", {})
    with pytest.raises(ModelError, match="invalid metadata"):
        load(tmp_path / "cold.safetensors")


def test_int8_point_does_not_change_other_points(weights):
    points = [{"name": "full", "accuracy": 0.9}, {"name": "rounded", "accuracy": 0.9, "precision": "INT8"}]
    both, alone = load_model(spec(weights, operatingPoints=points)), load_model(spec(weights))
    full, rounded = (answers(both, name, images(4), [0, 1, 0, 1])["logits"] for name in ("full", "rounded"))
    known = torch.isfinite(full)

    assert torch.equal(full, answers(alone, "full", images(4), [0, 1, 0, 1])["logits"])
    assert not torch.equal(rounded, full)
    assert torch.allclose(rounded[known], full[known], atol=0.1 * float(full[known].abs().max()))
    assert isinstance(both.network, ServedTransformer)
    with pytest.raises(ModelError, match="INT8 is computed on the CPU"):
        both.network.move_to(torch.device("meta"))


def task_heads(*classes, prompts=0):
    random = torch.Generator().manual_seed(4)
    return [
        Head(
            torch.randn(count, 8, generator=random),
            torch.randn(count, generator=random),
            torch.randn(3, prompts, 8, generator=random) if prompts else None,
        )
        for count in classes
    ]


def test_bank_shares_the_memory_of_its_heads():
    given = task_heads(5, 2, 9000)
    held = {one.data_ptr(): one.numel() for one in reached(TaskBank(given)) if one.dtype == torch.float32}

    assert sum(held.values()) == (5 + 2 + 9000) * (8 + 1)


def reached(holder):
    """All tensors that something holds."""
    if isinstance(holder, torch.Tensor):
        return [holder]
    if isinstance(holder, Head):
        return reached((holder.weight, holder.bias, holder.prompts))
    if isinstance(holder, tuple | list):
        return [tensor for one in holder for tensor in reached(one)]
    return reached(list(vars(holder).values())) if hasattr(holder, "__dict__") else []


def test_logits_are_as_wide_as_the_tasks_of_the_batch_need():
    bank, features = TaskBank(task_heads(5, 2, 9000)), torch.randn(3, 8)

    assert bank.logits(features, torch.tensor([1, 0, 1])).shape == (3, 5)
    assert bank.logits(features, torch.tensor([1, 1, 1])).shape == (3, 2)
    assert torch.isneginf(bank.logits(features, torch.tensor([1, 0, 1]))[[0, 2], 2:]).all()


def test_prompts_of_one_way_must_be_alike_in_all_tasks():
    with pytest.raises(ValueError, match="must have the same shape in all tasks"):
        TaskBank([*task_heads(5, prompts=2), *task_heads(5, prompts=3)])
    with pytest.raises(ValueError, match="needs at least one task"):
        TaskBank([])
