"""Accuracies into a pipeline's text: what was measured takes the place of what stood there; all else stays."""

from collections.abc import Iterator, Mapping

import yaml

from trimtab_pipelines.evidence import Accuracy

Measured = Mapping[tuple[str, str, str], Accuracy]
_Edit = tuple[int, int, str]


def with_accuracies(text: str, measured: Measured) -> str:
    """Write accuracies, by (stage, variant, operating point), into a pipeline's YAML; comments and order stay.

    A variant that lists operating points has that of its best point as its own.
    """
    root = yaml.compose(text, yaml.SafeLoader)
    edits: dict[int, _Edit] = {}
    for stage in _items(_at(root, "spec", "stages")):
        for variant in _items(_at(stage, "variants")):
            for edit in _edits(text, _name(stage), variant, measured):
                edits[edit[0]] = edit  # what is an alias is written once, where it is defined
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


def _accuracy_edits(text: str, owner: yaml.MappingNode, accuracy: Accuracy) -> Iterator[_Edit]:
    value, evidence = _at(owner, "accuracy"), _at(owner, "accuracyEvidence")
    if value is None:
        return
    written, start, end = _evidence(accuracy), value.start_mark.index, value.end_mark.index
    if evidence is not None:
        yield start, end, f"{accuracy.value:g}"
        yield evidence.start_mark.index, _content_end(evidence), written
    elif owner.flow_style:
        yield start, end, f"{accuracy.value:g}, accuracyEvidence: {written}"
    else:
        yield start, end, f"{accuracy.value:g}"
        key = next(key for key, node in owner.value if node is value)
        below = len(text) if (line_end := text.find("\n", end)) == -1 else line_end  # behind the line's comment
        yield below, below, "\n" + " " * key.start_mark.column + f"accuracyEvidence: {written}"


def _evidence(accuracy: Accuracy) -> str:
    bounds = f"low: {accuracy.low:g}, high: {accuracy.high:g}" if accuracy.low is not None else ""
    return f"{{source: Measured, samples: {accuracy.samples}, {bounds}, samplesDigest: '{accuracy.samples_digest}'}}"


def _content_end(node: yaml.Node) -> int:
    """Return where a node's own text ends; a block's mark lies behind the line ends and comments that follow it."""
    if isinstance(node, yaml.MappingNode) and not node.flow_style and node.value:
        return _content_end(node.value[-1][1])
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
