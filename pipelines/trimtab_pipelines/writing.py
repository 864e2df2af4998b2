"""Accuracies and second looks into a pipeline's text: they take the place of what stood there; all else stays. Pure."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import yaml

from trimtab_pipelines.evidence import Accuracy
from trimtab_pipelines.second_look import SecondLook

Measured = Mapping[tuple[str, str, str], Accuracy]
Looks = Mapping[tuple[str, str, str], Sequence[SecondLook]]
_Edit = tuple[int, int, str]


def with_accuracies(text: str, measured: Measured) -> str:
    """Write accuracies, by (stage, variant, operating point), into a pipeline's YAML; comments and order stay.

    A variant that lists operating points has that of its best point as its own.
    """
    return _edited(text, lambda stage, variant: _edits(text, stage, variant, measured))


def with_second_looks(text: str, looks: Looks) -> str:
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


def _edits(text: str, stage: str, variant: yaml.MappingNode, measured: Measured) -> Iterator[_Edit]:
    name, points = _name(variant), _at(variant, "operatingPoints")
    found = {point: accuracy for (s, v, point), accuracy in measured.items() if (s, v) == (stage, name)}
    if not found:
        return
    yield from _accuracy_edits(text, variant, max(found.values(), key=lambda accuracy: accuracy.value))
    for point in _items(points):
        accuracy = found.get(_name(point, "default"))
        if accuracy is not None:
            yield from _accuracy_edits(text, point, accuracy)


def _look_edits(text: str, stage: str, variant: yaml.MappingNode, looks: Looks) -> Iterator[_Edit]:
    for point in _items(_at(variant, "operatingPoints")):
        found = looks.get((stage, _name(variant), _name(point, "default")))
        old = next((pair for pair in point.value if pair[0].value == "secondLooks"), None)
        if found is None or (not found and old is None):
            continue
        flows = point.flow_style or not found
        listed = _flow(found) if flows else _block(found, point.value[0][0].start_mark.column)
        if old is not None:
            yield old[0].end_mark.index + 1, content_end(old[1]), listed  # right behind the colon
        elif flows:
            end = int(point.end_mark.index) - 1
            yield end, end, f", secondLooks:{listed}"
        else:
            end = _line_end(text, content_end(point))
            yield end, end, "\n" + " " * point.value[0][0].start_mark.column + f"secondLooks:{listed}"


def _flow(looks: Sequence[SecondLook]) -> str:
    return f" [{', '.join(map(_look, looks))}]"


def _block(looks: Sequence[SecondLook], column: int) -> str:
    return "".join(f"\n{' ' * column}- {_look(look)}" for look in looks)


def _look(look: SecondLook) -> str:
    """One second look in one line."""
    return _in_line(look.model_dump(mode="json", by_alias=True, exclude_none=True))


def _in_line(value: object) -> str:
    """Mappings, names and numbers in YAML's flow style."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_in_line(one)}" for key, one in value.items()) + "}"
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def _line_end(text: str, index: int) -> int:
    """Where the line of a place ends: behind its comment."""
    return len(text) if (end := text.find("\n", index)) == -1 else end


def _accuracy_edits(text: str, owner: yaml.MappingNode, accuracy: Accuracy) -> Iterator[_Edit]:
    value, evidence = _at(owner, "accuracy"), _at(owner, "accuracyEvidence")
    if value is None:
        return
    written, start, end = _evidence(accuracy), value.start_mark.index, value.end_mark.index
    if evidence is not None:
        yield start, end, f"{accuracy.value:g}"
        yield evidence.start_mark.index, content_end(evidence), written
    elif owner.flow_style:
        yield start, end, f"{accuracy.value:g}, accuracyEvidence: {written}"
    else:
        yield start, end, f"{accuracy.value:g}"
        key = next(key for key, node in owner.value if node is value)
        below = _line_end(text, end)
        yield below, below, "\n" + " " * key.start_mark.column + f"accuracyEvidence: {written}"


def _evidence(accuracy: Accuracy) -> str:
    bounds = f"low: {accuracy.low:g}, high: {accuracy.high:g}" if accuracy.low is not None else ""
    certain = f", meanCertainty: {accuracy.mean_certainty:g}" if accuracy.mean_certainty is not None else ""
    digest = f"samplesDigest: '{accuracy.samples_digest}'"
    return f"{{source: {accuracy.source}, samples: {accuracy.samples}, {bounds}{certain}, {digest}}}"


def content_end(node: yaml.Node) -> int:
    """Return where a node's own text ends; a block's mark lies behind the line ends and comments that follow it."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return content_end(last[1] if isinstance(last, tuple) else last)
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
