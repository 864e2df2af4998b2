"""Accuracies and second looks into a pipeline's text: they take the place of what stood there; all else stays. Pure."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

import yaml

from trimtab_pipelines.accuracy_evidence import Accuracy
from trimtab_pipelines.escalation import Escalation

Measured = Mapping[tuple[str, str, str], Accuracy]
OnTasks = Mapping[tuple[str, str, str], Mapping[str, Accuracy]]
Looks = Mapping[tuple[str, str, str], Sequence[Escalation]]
_Edit = tuple[int, int, str]


def with_accuracies(text: str, measured: Measured, on_tasks: OnTasks = MappingProxyType({})) -> str:
    """Write accuracies, by (stage, variant, operating point), into a pipeline's YAML; comments and order stay.

    A variant that lists operating points has that of its best point as its own.

    Args:
        text: the YAML.
        measured: over all samples.
        on_tasks: on samples of single tasks; tasks that are not named keep what stood there.
    """
    return _edited(text, lambda stage, variant: _edits(text, stage, variant, measured, on_tasks))


def with_escalations(text: str, looks: Looks) -> str:
    """Write second looks, by (stage, variant, operating point), into a pipeline's YAML; comments and order stay.

    Points that are not named keep theirs; a point with none loses what it had.
    """
    return _edited(text, lambda stage, variant: _look_edits(text, stage, variant, looks))


def _edited(text: str, edits_of: Callable[[str, yaml.MappingNode], Iterator[_Edit]]) -> str:
    """The text with the edits of each stage's variants; what is an alias is written once, where it is defined."""
    root = yaml.compose(text, yaml.SafeLoader)
    edits: dict[int, _Edit] = {}
    for stage in _items(_at(root, "spec", "stages")):
        for variant in _items(_at(stage, "variants")):
            edits |= {edit[0]: edit for edit in edits_of(_name(stage), variant)}
    for start, end, new in sorted(edits.values(), reverse=True):
        text = text[:start] + new + text[end:]
    return text


def _edits(text: str, stage: str, variant: yaml.MappingNode, measured: Measured, on_tasks: OnTasks) -> Iterator[_Edit]:
    name, points = _name(variant), _at(variant, "operatingPoints")
    found = {point: accuracy for (s, v, point), accuracy in measured.items() if (s, v) == (stage, name)}
    if not found:
        return
    best = max(found.values(), key=lambda accuracy: accuracy.value)
    own = {} if _items(points) else on_tasks.get((stage, name, "default"), {})
    yield from _accuracy_edits(text, variant, best, own)
    for point in _items(points):
        which = _name(point, "default")
        if which in found:
            yield from _accuracy_edits(text, point, found[which], on_tasks.get((stage, name, which), {}))


def _look_edits(text: str, stage: str, variant: yaml.MappingNode, looks: Looks) -> Iterator[_Edit]:
    for point in _items(_at(variant, "operatingPoints")):
        found = looks.get((stage, _name(variant), _name(point, "default")))
        old = next((pair for pair in point.value if pair[0].value == "escalations"), None)
        if found is None or (not found and old is None):
            continue
        flows = point.flow_style or not found
        listed = _flow(found) if flows else _block(found, point.value[0][0].start_mark.column)
        if old is not None:
            yield old[0].end_mark.index + 1, node_content_end(old[1]), listed  # right behind the colon
        elif flows:
            end = int(point.end_mark.index) - 1
            yield end, end, f", escalations:{listed}"
        else:
            end = _line_end(text, node_content_end(point))
            yield end, end, "\n" + " " * point.value[0][0].start_mark.column + f"escalations:{listed}"


def _flow(looks: Sequence[Escalation]) -> str:
    return f" [{', '.join(map(_look, looks))}]"


def _block(looks: Sequence[Escalation], column: int) -> str:
    return "".join(f"\n{' ' * column}- {_look(look)}" for look in looks)


def _look(look: Escalation) -> str:
    """One second look in one line."""
    return _in_line(look.model_dump(mode="json", by_alias=True, exclude_none=True))


def _in_line(value: object) -> str:
    """Mappings, names and numbers in YAML's flow style."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_word(str(key))}: {_in_line(one)}" for key, one in value.items()) + "}"
    return f"{value:g}" if isinstance(value, int | float) else _word(str(value))


def _word(text: str) -> str:
    """A name, such that it is read as a text though it is `on` or `1`."""
    return text if yaml.safe_load(text) == text else f"'{text}'"


def _line_end(text: str, index: int) -> int:
    """Where the line of a place ends: behind its comment."""
    return len(text) if (end := text.find("\n", index)) == -1 else end


def _accuracy_edits(
    text: str, owner: yaml.MappingNode, accuracy: Accuracy, by_task: Mapping[str, Accuracy]
) -> Iterator[_Edit]:
    value, evidence, tasks = (_at(owner, name) for name in ("accuracy", "accuracyEvidence", "accuracyByTask"))
    if value is None:
        return
    yield value.start_mark.index, value.end_mark.index, f"{accuracy.value:g}"
    fields: dict[str, str | list[str]] = {}
    if evidence is not None:
        yield evidence.start_mark.index, node_content_end(evidence), f"{{{_evidence(accuracy)}}}"
    else:
        fields["accuracyEvidence"] = f"{{{_evidence(accuracy)}}}"
    told = {task: flow_accuracy(one) for task, one in by_task.items()}
    if isinstance(tasks, yaml.MappingNode):
        yield from _task_edits(text, tasks, told)
    elif told:
        fields["accuracyByTask"] = [f"{_word(task)}: {one}" for task, one in told.items()]
    if fields:
        yield _behind(text, owner, value if evidence is None else evidence, fields)


def _task_edits(text: str, tasks: yaml.MappingNode, told: Mapping[str, str]) -> Iterator[_Edit]:
    """Those that stand there get what is told of them; the others join them."""
    there = {str(key.value): node for key, node in tasks.value}
    for task in there.keys() & told.keys():
        yield there[task].start_mark.index, node_content_end(there[task]), told[task]
    fresh = [f"{_word(task)}: {one}" for task, one in told.items() if task not in there]
    if fresh and tasks.flow_style:
        end = int(tasks.end_mark.index) - 1
        yield end, end, ", ".join(([""] if there else []) + fresh)
    elif fresh:
        end, column = _line_end(text, node_content_end(tasks)), tasks.value[0][0].start_mark.column
        yield end, end, "".join(f"\n{' ' * column}{each}" for each in fresh)


def _behind(text: str, owner: yaml.MappingNode, place: yaml.Node, fields: Mapping[str, str | list[str]]) -> _Edit:
    """Put further fields of a mapping behind one of its values, in its style; lists are the fields of mappings."""
    if owner.flow_style:
        end = node_content_end(place)
        told = {name: one if isinstance(one, str) else f"{{{', '.join(one)}}}" for name, one in fields.items()}
        return end, end, "".join(f", {name}: {one}" for name, one in told.items())
    end = _line_end(text, node_content_end(place))
    line = "\n" + " " * next(key.start_mark.column for key, node in owner.value if node is place)
    told = {
        name: f" {one}" if isinstance(one, str) else "".join(f"{line}  {each}" for each in one)
        for name, one in fields.items()
    }
    return end, end, "".join(f"{line}{name}:{one}" for name, one in told.items())


def flow_accuracy(accuracy: Accuracy) -> str:
    """An accuracy with its evidence, as it stands under `accuracyByTask`, in one line."""
    return f"{{value: {accuracy.value:g}, {_evidence(accuracy)}}}"


def _evidence(accuracy: Accuracy) -> str:
    told = accuracy.model_dump(mode="json", by_alias=True, exclude_none=True, exclude={"value", "samples_digest"})
    digest = [] if accuracy.samples_digest is None else [f"samplesDigest: '{accuracy.samples_digest}'"]
    return ", ".join([*(f"{name}: {_in_line(one)}" for name, one in told.items()), *digest])


def node_content_end(node: yaml.Node) -> int:
    """Return where a node's own text ends; a block's mark lies behind the line ends and comments that follow it."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return node_content_end(last[1] if isinstance(last, tuple) else last)
    return int(node.end_mark.index)


def _at(node: yaml.Node | None, *path: str) -> yaml.Node | None:
    for name in path:
        pairs = node.value if isinstance(node, yaml.MappingNode) else ()
        node = next((value for key, value in pairs if key.value == name), None)
    return node


def _items(node: yaml.Node | None) -> list[yaml.MappingNode]:
    return [item for item in node.value if isinstance(item, yaml.MappingNode)] if node is not None else []


def _name(node: yaml.MappingNode, otherwise: str = "") -> str:
    named = _at(node, "name")
    return otherwise if named is None else str(named.value)
