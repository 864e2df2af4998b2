"""Edit of a pipeline's YAML text: replaces the operating points of a variant and preserves all else."""

import json
from collections.abc import Sequence

import yaml

from trimtab.tuning.selection import Trial
from trimtab_pipelines.documents import DocumentError
from trimtab_pipelines.yaml_edit import node_content_end, with_accuracies

KNOBS = ("merging", "prompts", "precision", "compiled")


def with_points(text: str, stage: str, variant: str, selected: Sequence[Trial]) -> str:
    """Write the selected points and their evidence into a variant.

    Raises:
        DocumentError: the variant is written in flow style.
    """
    node = _variant(yaml.compose(text, yaml.SafeLoader), stage, variant)
    if node is None or node.flow_style:
        raise DocumentError(f"variant {variant}: points can only be added in block style, one field per line")
    column = node.value[0][0].start_mark.column
    listed = "".join(f"\n{' ' * column}- {_flow(trial)}" for trial in selected)
    block = f"operatingPoints:{listed}"
    old = next((pair for pair in node.value if pair[0].value == "operatingPoints"), None)
    if old is not None:
        start, end = old[0].start_mark.index, node_content_end(old[1])
        text = text[:start] + block + text[end:]
    else:
        end = node_content_end(node.value[-1][1])
        text = text[:end] + f"\n{' ' * column}{block}" + text[end:]
    measured = {(stage, variant, trial.point.name): trial.accuracy for trial in selected}
    return with_accuracies(text, measured, {(stage, variant, trial.point.name): trial.by_task for trial in selected})


def _flow(trial: Trial) -> str:
    """Render a point as one line of YAML."""
    written = trial.point.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)
    knobs = [f"{name}: {json.dumps(written[name])}" for name in KNOBS if name in written]
    return "{" + ", ".join([f"name: {trial.point.name}", *knobs, f"accuracy: {trial.accuracy.value:g}"]) + "}"


def _variant(root: yaml.Node | None, stage: str, variant: str) -> yaml.MappingNode | None:
    spec = _field(root, "spec")
    return _named(_field(_named(_field(spec, "stages"), stage), "variants"), variant)


def _field(node: yaml.Node | None, name: str) -> yaml.Node | None:
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    return next((value for key, value in pairs if key.value == name), None)


def _named(node: yaml.Node | None, name: str) -> yaml.MappingNode | None:
    for item in node.value if isinstance(node, yaml.SequenceNode) else []:
        field = _field(item, "name")
        if isinstance(item, yaml.MappingNode) and field is not None and field.value == name:
            return item
    return None
