"""Tasks join a transformer that serves: the pipeline's for good, a folder's as they come; no other gets in."""

import asyncio
import contextlib
import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from tests.model_servers.test_model_adapters import a_spec
from tests.model_servers.transformer.test_family import IMAGE, POINTS, SHAPE, TASK, answers, images, spec
from tests.model_servers.transformer.test_family import weights as weights  # noqa: PLC0414  (a fixture)
from trimtab_model_servers.batch_worker import BatchWorker
from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.families.vision_transformer import ServedTransformer
from trimtab_model_servers.server.hosted_model import load_model
from trimtab_model_servers.transformer.checkpoints import load
from trimtab_model_servers.transformer.task_registry import fingerprint, save_task
from trimtab_model_servers.transformer.tasks import Head
from trimtab_pipelines.accuracy_evidence import Accuracy
from trimtab_pipelines.tasks import METADATA_KEY, TaskRecord, UnusableTask, file_name, parse_task_record
from trimtab_protocol.extensions import parse_task_accuracies

WAYS = {"plain": None, "replace-2": 2, "replace-2+merge-4": 2}


def a_card(weights, **changes):
    mark = fingerprint(load(weights).transformer)
    return TaskRecord.model_validate({"classes": ["no", "yes"], "transformer": mark} | changes)


def a_task(path, weights, *, classes=2, width=SHAPE.width, ways=WAYS, likeliest=0, **card):
    """Write a task whose answer is always the same."""
    heads = {
        way: Head(
            torch.zeros(classes, width),
            torch.nn.functional.one_hot(torch.tensor(likeliest), classes) * 9.0,
            None if prompts is None else torch.zeros(SHAPE.depth, prompts, width),
        )
        for way, prompts in ways.items()
    }
    card = {"classes": [str(label) for label in range(classes)]} | card
    save_task(path, a_card(weights, **card), heads)
    return path


def labels(model, tasks, point="full"):
    return answers(model, point, images(len(tasks)), tasks)["label"].tolist()


def test_pipeline_tasks_follow_those_of_the_weights(weights, tmp_path):
    first = a_task(tmp_path / "first.safetensors", weights, likeliest=1)
    tasks = [{"name": "first", "storageUri": str(first)}]
    model, bare = load_model(spec(weights, tasks=tasks)), load_model(spec(weights))

    assert model.facts()["tasks"] == "letters,signs,first"
    assert "task_accuracies" not in model.facts(), "its card tells nothing"
    for point in (point["name"] for point in POINTS):
        assert labels(model, [2, 3], point) == [1, -1]
        assert labels(model, [0, 1, 1], point) == labels(bare, [0, 1, 1], point)


def test_deleted_pipeline_task_keeps_its_number(weights, tmp_path):
    second = a_task(tmp_path / "second.safetensors", weights, likeliest=1)
    tasks = [{"name": "first", "removed": True}, {"name": "second", "storageUri": str(second)}]
    model = load_model(spec(weights, tasks=[*tasks, {"name": "third", "removed": True}]))

    assert model.facts()["tasks"] == "letters,signs,,second,"
    assert labels(model, [2, 3, 4]) == [-1, 1, -1]


def test_a_folders_tasks_come_and_go_and_numbers_may_have_gaps(weights, tmp_path):
    model = load_model(spec(weights, tasksFolder=str(tmp_path)))
    network, before = model.network, labels(model, [0, 1])
    assert isinstance(network, ServedTransformer)
    file = a_task(tmp_path / file_name(5, "late"), weights, likeliest=1)
    network.reload_tasks()

    assert model.facts()["tasks"] == "letters,signs,,,,late"
    assert labels(model, [0, 1, 5, 4]) == [*before, 1, -1]

    again = load_model(spec(weights, tasksFolder=str(tmp_path)))  # as a replica that is started later

    assert labels(again, [5]) == [1]

    file.unlink()
    network.reload_tasks()

    assert labels(model, [5]) == [-1]


def test_recorded_accuracies_are_reported_while_active(weights, tmp_path):
    judged = Accuracy(value=0.75, source="Measured", samples=99, mean_confidence=0.9)
    card = {"accuracyByPoint": {"full": judged.model_dump(by_alias=True, exclude_none=True)}}
    first = a_task(tmp_path / "first.safetensors", weights, **card)
    tasks, folder = [{"name": "first", "storageUri": str(first)}], tmp_path / "folder"
    model = load_model(spec(weights, tasks=tasks, tasksFolder=str(folder)))
    network = model.network
    assert isinstance(network, ServedTransformer)
    late = a_task(folder / file_name(3, "late"), weights, **card)
    network.reload_tasks()

    assert parse_task_accuracies(model.facts()) == {"first": {"full": judged}, "late": {"full": judged}}

    late.unlink()
    network.reload_tasks()

    assert parse_task_accuracies(model.facts()) == {"first": {"full": judged}}


@contextlib.asynccontextmanager
async def followed(model):
    worker = BatchWorker()
    following = asyncio.create_task(model.watch_tasks(worker))
    yield
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    worker.close()


async def until(model, fact, words):
    """Wait until what a model tells of itself holds some words."""
    async with asyncio.timeout(20):
        while words not in str(model.facts().get(fact)):  # noqa: ASYNC110  (a thread puts it in force)
            await asyncio.sleep(0.01)


def test_mounted_config_map_is_followed_through_its_swaps(weights, tmp_path):
    """The kubelet exchanges the link `..data` to a new folder, then links new files and unlinks removed ones."""
    mount, model = tmp_path / "mount", load_model(spec(weights, tasksFolder=str(tmp_path / "mount")))

    def swap(version, **tasks):
        files = {file_name(number, name): number for name, number in tasks.items()}
        (mount / f"..{version}").mkdir(parents=True)
        for file in files:
            a_task(mount / f"..{version}" / file, weights, likeliest=1)
        (mount / "..data_tmp").symlink_to(f"..{version}")
        (mount / "..data_tmp").replace(mount / "..data")
        for file in files:
            if not (mount / file).is_symlink():
                (mount / file).symlink_to(f"..data/{file}")
        for link in mount.glob("*.safetensors"):
            if link.name not in files:
                link.unlink()

    async def until_swapped():
        swap(1)
        async with followed(model):
            swap(2, late=2)
            await until(model, "tasks", "letters,signs,late")
            swap(3, late=2, later=3)
            await until(model, "tasks", "letters,signs,late,later")
            swap(4, later=3)
            await until(model, "tasks", "letters,signs,,later")

    asyncio.run(until_swapped())
    assert labels(model, [2, 3]) == [-1, 1]


def test_a_task_without_a_way_runs_there_with_its_plain_head(weights, tmp_path):
    a_task(tmp_path / file_name(2, "bare"), weights, ways={"plain": None}, likeliest=1)
    a_task(tmp_path / file_name(3, "half"), weights, ways={"plain": None, "replace-2": 2})
    model, pictures = load_model(spec(weights, tasksFolder=str(tmp_path))), images(4)
    network = model.network
    assert isinstance(network, ServedTransformer)
    prompted = {
        point: [head.prompts is not None for head in network.active_tasks.banks[ready.prompt_variant].heads]
        for point, ready in network.points.items()
    }

    assert prompted["fine"] == prompted["both"] == [True, True, False, True]
    for point in ("full", "fast", "fine", "both"):
        mixed = answers(model, point, pictures, [0, 2, 3, 1])
        alone = [answers(model, point, pictures[row : row + 1], [task]) for row, task in enumerate([0, 2, 3, 1])]

        assert mixed["label"].tolist() == [int(one["label"]) for one in alone]
        assert torch.allclose(mixed["confidence"], torch.cat([one["confidence"] for one in alone]), atol=1e-5)


def test_untrained_prompts_are_rejected_without_a_folder(weights, tmp_path, caplog):
    points = [*POINTS, {"name": "odd", "accuracy": 0.5, "prompts": {"count": 5}}]
    listed = [{"name": "new", "storageUri": str(tmp_path / "new.safetensors")}]
    a_task(tmp_path / "new.safetensors", weights, ways=WAYS | {"replace-5": 5}, likeliest=1)
    with pytest.raises(ModelError, match="operating point 'odd': 'replace-5' is not trained"):
        load_model(spec(weights, operatingPoints=points))
    model = load_model(spec(weights, operatingPoints=points, tasks=listed))
    awaiting = load_model(spec(weights, operatingPoints=points, tasksFolder=str(tmp_path / "none")))

    assert labels(model, [2, 0], "odd") == [1, labels(model, [0, 0])[1]]
    assert labels(awaiting, [0, 1], "odd") == labels(awaiting, [0, 1], "full")
    assert "'odd': 'replace-5' is not trained" in caplog.text


ODD = [
    ({"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}, b"\0"),
    ({"dtype": "F32", "shape": [0, 2**63], "data_offsets": [0, 0]}, b""),
]
"""Tensors that a safetensors file may hold, and torch cannot."""


def an_odd_task(path, weights, name, entry, content):
    """Write a task whose card is right, and one tensor."""
    header = {"__metadata__": {METADATA_KEY: a_card(weights).model_dump_json(exclude_none=True)}, name: entry}
    written = json.dumps(header).encode()
    path.write_bytes(len(written).to_bytes(8, "little") + written + content)


@pytest.mark.parametrize("name", ["x", "plain.weight"])
@pytest.mark.parametrize(("entry", "content"), ODD, ids=["type", "size"])
def test_unreadable_tensor_does_not_stop_a_replica(weights, tmp_path, name, entry, content):
    an_odd_task(tmp_path / file_name(2, "odd"), weights, name, entry, content)
    a_task(tmp_path / file_name(7, "fine"), weights, likeliest=1)
    model = load_model(spec(weights, tasksFolder=str(tmp_path)))

    assert list(json.loads(str(model.facts()["rejected_task_files"]))) == ["2-odd"]
    assert labels(model, [7]) == [1]


@pytest.mark.parametrize(("entry", "content"), ODD, ids=["type", "size"])
def test_changes_are_noticed_after_an_unreadable_tensor(weights, tmp_path, entry, content):
    model = load_model(spec(weights, tasksFolder=str(tmp_path)))

    async def until_both():
        async with followed(model):
            an_odd_task(tmp_path / file_name(2, "odd"), weights, "plain.weight", entry, content)
            await until(model, "rejected_task_files", "2-odd")
            a_task(tmp_path / file_name(7, "fine"), weights, likeliest=1)
            await until(model, "tasks", "fine")

    asyncio.run(until_both())
    assert labels(model, [7]) == [1]


def test_unreadable_folder_is_logged_once_and_retried(weights, tmp_path, caplog):
    model = load_model(spec(weights, tasksFolder=str(tmp_path)))

    async def until_read_again():
        loop, read = asyncio.get_running_loop(), asyncio.Event()
        network = _Failing(failures=2, read=lambda: loop.call_soon_threadsafe(read.set))
        async with followed(replace(model, network=network)), asyncio.timeout(20):
            await read.wait()

    asyncio.run(until_read_again())
    assert [record.exc_info[1].args for record in caplog.records if record.exc_info] == [(5, "Input/output error")]


class _Failing:
    """A network whose folder lies on a disk that fails for some looks."""

    def __init__(self, failures, read):
        self.failures, self.read = failures, read

    def infer(self, inputs, point):
        raise NotImplementedError

    def reload_tasks(self):
        if self.failures:
            self.failures -= 1
            raise OSError(5, "Input/output error")
        self.read()

    def facts(self):
        return {}


@pytest.mark.parametrize(
    ("number", "name", "changes", "words"),
    [
        (2, "signs", {}, "task 'signs' exists already"),
        (1, "late", {}, "number 1 belongs to task 'signs'"),
        (2, "late", {"width": 8}, r".weight must have shape \[2, 16\], but is \[2, 8\]"),
        (2, "late", {"ways": {"replace-2": 2}}, r"plain.weight must have shape \[2, 16\], but is missing"),
        (2, "late", {"ways": {"plain": None, "replace-2": None}}, "replace-2.prompts must have .*, but is missing"),
        (2, "late", {"ways": WAYS | {"replace-2": 3}}, r"prompts must have shape \[3, 2, 16\], but is \[3, 3, 16\]"),
        (2, "late", {"likeliest": 0, "transformer": "sha256:" + 64 * "0"}, "trained on another transformer"),
    ],
    ids=["name taken", "number taken", "width", "no plain head", "no prompts", "prompts", "another transformer"],
)
def test_invalid_task_file_is_rejected_and_reported(weights, tmp_path, number, name, changes, words):
    a_task(tmp_path / file_name(number, name), weights, **changes)
    a_task(tmp_path / file_name(7, "fine"), weights, likeliest=1)
    model = load_model(spec(weights, tasksFolder=str(tmp_path)))
    refused = json.loads(str(model.facts()["rejected_task_files"]))

    assert list(refused) == [f"{number}-{name}"]
    with pytest.raises(ModelError, match=words):
        raise ModelError(refused[f"{number}-{name}"])
    assert labels(model, [7]) == [1]
    assert labels(model, [0, 1]) == labels(load_model(spec(weights)), [0, 1])


def test_task_with_too_many_classes_is_rejected(weights, tmp_path):
    logits = {"name": "logits", "datatype": "FP32", "shape": [3]}
    a_task(tmp_path / file_name(2, "broad"), weights, classes=4)
    model = load_model(spec(weights, outputs=[logits], tasksFolder=str(tmp_path)))

    assert "it has 4 classes; the stage declares at most 3" in str(model.facts()["rejected_task_files"])


def test_invalid_task_of_the_pipeline_fails_the_load(weights, tmp_path):
    a_task(tmp_path / "narrow.safetensors", weights, width=8)
    (tmp_path / "text.safetensors").write_text("hello")
    shutil.copy(weights, tmp_path / "weights.safetensors")
    for file, words in [
        ("narrow", "must have shape"),
        ("text", "not a safetensors file"),
        ("weights", "no 'trimtab-task'"),
        ("missing", "no such weights"),
    ]:
        tasks = [{"name": "new", "storageUri": str(tmp_path / f"{file}.safetensors")}]
        with pytest.raises(ModelError, match=words):
            load_model(spec(weights, tasks=tasks))


def test_stage_without_task_input_takes_no_more_tasks(weights, tmp_path):
    tasks = [{"name": "new", "storageUri": str(a_task(tmp_path / "new.safetensors", weights))}]
    with pytest.raises(ModelError, match="its stage has no input 'task'"):
        load_model(spec(weights, tasks=tasks, inputs=[IMAGE]))


def test_a_family_without_tasks_refuses_them():
    with pytest.raises(ModelError, match="family 'echo' takes no tasks, but the variant has 'new'"):
        load_model(a_spec(inputs=[IMAGE, TASK], tasks=[{"name": "new", "storageUri": "x"}]))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not a safetensors file"),
        (b"\xff" * 64, "not a safetensors file"),
        ((2**20 + 1).to_bytes(8, "little") + bytes(2**20 + 1), "its header has 1048577 bytes; at most 1048576"),
        ((4).to_bytes(8, "little") + b"{}}}", "no 'trimtab-task'"),
        ((2).to_bytes(8, "little") + b"[]", "no 'trimtab-task'"),
    ],
)
def test_file_without_record_is_rejected(content, words):
    with pytest.raises(UnusableTask, match=words):
        parse_task_record(content)


def test_record_with_invalid_field_is_rejected(tmp_path):
    save_file({"x": torch.zeros(1)}, tmp_path / "x.safetensors", metadata={METADATA_KEY: '{"classes": ["a"]}'})
    with pytest.raises(UnusableTask, match="task record: classes: "):
        parse_task_record((tmp_path / "x.safetensors").read_bytes())
