"""Edits of a pipeline's YAML: accuracies, escalations and storage URIs. Comments, order and style are preserved."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

import yaml

from trimtab_pipelines.accuracy_evidence import DIGESTS, Accuracy
from trimtab_pipelines.escalation import Escalation

Measured = Mapping[tuple[str, str, str], Accuracy]
ByTask = Mapping[tuple[str, str, str], Mapping[str, Accuracy]]
Escalations = Mapping[tuple[str, str, str], Sequence[Escalation]]
_Edit = tuple[int, int, str]


def with_accuracies(text: str, measured: Measured, by_task: ByTask = MappingProxyType({})) -> str:
    """Set accuracies, by (stage, variant, operating point), in a pipeline's YAML; those of other tasks are unchanged.

    A variant that lists operating points gets the accuracy of its best point.
    """
    return _edited(text, lambda stage, variant: _edits(text, stage, variant, measured, by_task))


def with_escalations(text: str, by_point: Escalations) -> str:
    """Set escalations, by (stage, variant, operating point), in a pipeline's YAML.

    Other points are unchanged; an empty list removes a point's escalations.
    """
    return _edited(text, lambda stage, variant: _escalation_edits(text, stage, variant, by_point))


def with_storage_uris(text: str, locations: Mapping[str, tuple[str, str | None]]) -> str:
    """Replace storage URIs of variants and their tasks by others with digests."""
    return _edited(text, lambda _, variant: _location_edits(text, variant, locations))


def _location_edits(
    text: str, variant: yaml.MappingNode, locations: Mapping[str, tuple[str, str | None]]
) -> Iterator[_Edit]:
    for owner in (variant, *_items(_at(variant, "tasks"))):
        uri, digest = _at(owner, "storageUri"), _at(owner, "digest")
        if uri is None or uri.value not in locations:
            continue
        location, new_digest = locations[uri.value]
        yield uri.start_mark.index, uri.end_mark.index, f"'{location}'"
        if new_digest is not None and digest is None:
            yield _behind(text, owner, uri, {"digest": f"'{new_digest}'"})


def variant_node(text: str, stage: str, variant: str) -> yaml.MappingNode | None:
    stages = _items(_at(yaml.compose(text, yaml.SafeLoader), "spec", "stages"))
    variants = [found for each in stages if _name(each) == stage for found in _items(_at(each, "variants"))]
    return next((found for found in variants if _name(found) == variant), None)


def _edited(text: str, edits_of: Callable[[str, yaml.MappingNode], Iterator[_Edit]]) -> str:
    """Apply the edits of each stage's variants; an alias is edited once, at its anchor."""
    root = yaml.compose(text, yaml.SafeLoader)
    edits: dict[int, _Edit] = {}
    for stage in _items(_at(root, "spec", "stages")):
        for variant in _items(_at(stage, "variants")):
            edits |= {edit[0]: edit for edit in edits_of(_name(stage), variant)}
    for start, end, new in sorted(edits.values(), reverse=True):
        text = text[:start] + new + text[end:]
    return text


def _edits(text: str, stage: str, variant: yaml.MappingNode, measured: Measured, by_task: ByTask) -> Iterator[_Edit]:
    name, points = _name(variant), _at(variant, "operatingPoints")
    by_point = {point: accuracy for (s, v, point), accuracy in measured.items() if (s, v) == (stage, name)}
    if not by_point:
        return
    best = max(by_point.values(), key=lambda accuracy: accuracy.value)
    own = {} if _items(points) else by_task.get((stage, name, "default"), {})
    yield from _accuracy_edits(text, variant, best, own)
    for point in _items(points):
        point_name = _name(point, "default")
        if point_name in by_point:
            yield from _accuracy_edits(text, point, by_point[point_name], by_task.get((stage, name, point_name), {}))


def _escalation_edits(text: str, stage: str, variant: yaml.MappingNode, by_point: Escalations) -> Iterator[_Edit]:
    for point in _items(_at(variant, "operatingPoints")) or (variant,):
        name = "default" if point is variant else _name(point, "default")
        escalations = by_point.get((stage, _name(variant), name))
        old = next((pair for pair in point.value if pair[0].value == "escalations"), None)
        if escalations is None or (not escalations and old is None):
            continue
        flows = point.flow_style or not escalations
        listed = _flow(escalations) if flows else _block(escalations, point.value[0][0].start_mark.column)
        if old is not None:
            yield old[0].end_mark.index + 1, node_content_end(old[1]), listed  # right behind the colon
        elif flows:
            end = int(point.end_mark.index) - 1
            yield end, end, f", escalations:{listed}"
        else:
            end = _line_end(text, node_content_end(point))
            yield end, end, "\n" + " " * point.value[0][0].start_mark.column + f"escalations:{listed}"


def _flow(escalations: Sequence[Escalation]) -> str:
    return f" [{', '.join(map(_flow_escalation, escalations))}]"


def _block(escalations: Sequence[Escalation], column: int) -> str:
    return "".join(f"\n{' ' * column}- {_flow_escalation(escalation)}" for escalation in escalations)


def _flow_escalation(escalation: Escalation) -> str:
    return _flow_value(escalation.model_dump(mode="json", by_alias=True, exclude_none=True))


def _flow_value(value: object) -> str:
    """Mappings, names and numbers in YAML's flow style."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_scalar(str(key))}: {_flow_value(item)}" for key, item in value.items()) + "}"
    return f"{value:g}" if isinstance(value, int | float) else _scalar(str(value))


def _scalar(text: str) -> str:
    """A string, quoted if YAML would read it as another type, such as `on` or `1`."""
    return text if yaml.safe_load(text) == text else f"'{text}'"


def _line_end(text: str, index: int) -> int:
    """Index of the line end after an index, behind its comment."""
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
    accuracies = {task: flow_accuracy(accuracy) for task, accuracy in by_task.items()}
    if isinstance(tasks, yaml.MappingNode):
        yield from _task_edits(text, tasks, accuracies)
    elif accuracies:
        fields["accuracyByTask"] = [f"{_scalar(task)}: {accuracy}" for task, accuracy in accuracies.items()]
    if fields:
        yield _behind(text, owner, value if evidence is None else evidence, fields)


def _task_edits(text: str, tasks: yaml.MappingNode, accuracies: Mapping[str, str]) -> Iterator[_Edit]:
    present = {str(key.value): node for key, node in tasks.value}
    for task in present.keys() & accuracies.keys():
        yield present[task].start_mark.index, node_content_end(present[task]), accuracies[task]
    added = [f"{_scalar(task)}: {accuracy}" for task, accuracy in accuracies.items() if task not in present]
    if added and tasks.flow_style:
        end = int(tasks.end_mark.index) - 1
        yield end, end, ", ".join(([""] if present else []) + added)
    elif added:
        end, column = _line_end(text, node_content_end(tasks)), tasks.value[0][0].start_mark.column
        yield end, end, "".join(f"\n{' ' * column}{entry}" for entry in added)


def _behind(text: str, owner: yaml.MappingNode, after: yaml.Node, fields: Mapping[str, str | list[str]]) -> _Edit:
    """Insert fields of a mapping behind one of its values, in its style; lists hold the fields of mappings."""
    if owner.flow_style:
        end = node_content_end(after)
        values = {name: v if isinstance(v, str) else f"{{{', '.join(v)}}}" for name, v in fields.items()}
        return end, end, "".join(f", {name}: {value}" for name, value in values.items())
    end = _line_end(text, node_content_end(after))
    line = "\n" + " " * next(key.start_mark.column for key, node in owner.value if node is after)
    values = {
        name: f" {value}" if isinstance(value, str) else "".join(f"{line}  {entry}" for entry in value)
        for name, value in fields.items()
    }
    return end, end, "".join(f"{line}{name}:{value}" for name, value in values.items())


def flow_accuracy(accuracy: Accuracy) -> str:
    """An accuracy with its evidence in flow style, as under `accuracyByTask`."""
    return f"{{value: {accuracy.value:g}, {_evidence(accuracy)}}}"


def _evidence(accuracy: Accuracy) -> str:
    fields = accuracy.model_dump(mode="json", by_alias=True, exclude_none=True, exclude={"value", *DIGESTS})
    digests = accuracy.model_dump(by_alias=True, exclude_none=True, include=DIGESTS).items()
    digest = [f"{name}: '{value}'" for name, value in digests]
    return ", ".join([*(f"{name}: {_flow_value(value)}" for name, value in fields.items()), *digest])


def node_content_end(node: yaml.Node) -> int:
    """Index where a node's text ends; a block's end mark lies behind the following line ends and comments."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        if isinstance(last, tuple) and last[1].start_mark.index < last[0].start_mark.index:
            return int(last[0].end_mark.index)  # an alias, whose node is at its anchor
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
