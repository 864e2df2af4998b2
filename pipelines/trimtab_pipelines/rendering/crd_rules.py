"""CEL validation rules of the CRDs, checked by the API server before an object is stored.

The models check the same and more when they read a document. What CEL cannot express within the API server's cost limit
(a tensor that its stage does not have, cycles of more than two stages, mismatching rows, a budget too small for one set
of replicas) is reported by the operator as a condition. Unique names need no rule, since lists of named items are keyed
by name.
"""

from dataclasses import dataclass

from pydantic import BaseModel

from trimtab_pipelines.engines import OPEN_INFERENCE_READY
from trimtab_pipelines.graph import REQUEST
from trimtab_pipelines.operating_point import InputSize, OperatingPoint
from trimtab_pipelines.resource import ADVISORY_SUFFIX
from trimtab_pipelines.spec import (
    Adaptation,
    Budget,
    InferencePipeline,
    InferencePipelineSpec,
    Objective,
    Rollout,
    ServiceLevel,
)
from trimtab_pipelines.stages import EMBEDDINGS_INPUT, GENERATION_OUTPUTS, IMAGES_INPUT, MESSAGES_INPUT, Stage
from trimtab_pipelines.tasks import Task
from trimtab_pipelines.variants import Container, Variant


@dataclass(frozen=True, slots=True)
class Rule:
    """A CEL rule and its message; messages do not include user values, which would exceed the cost limit."""

    rule: str
    message: str


_INPUTS, _OUTPUTS = (f"has(self.{name}) && self.{name}" for name in ("inputs", "outputs"))
"""Lists that a document may omit."""
_INTEGERS = '["INT32", "INT64", "UINT32", "UINT64"]'


def _positive_duration(field: str, example: str) -> Rule:
    """A duration that must not be zero."""
    return Rule(f"self.{field}.matches('[1-9]')", f"{field} must be above 0, for instance {example}")


_GENERATION_OUTPUTS = " && ".join(
    f"self.outputs.exists(o, o.name == '{name}' && o.datatype == '{datatype}' && "
    f"(has(o.shape) ? o.shape : []) == {list(shape)})"
    for name, datatype, shape in GENERATION_OUTPUTS
)
_GENERATES = "has(self.role) && self.role == 'Generate'"
_HAS_GENERATION = "self.stages.exists(s, has(s.role) && s.role == 'Generate')"
_COLOCATED = "has(v.encoder) && v.encoder == 'Colocated'"
_PINNED = "(!has(self.pin.variant) || v.name == self.pin.variant)"
_POINT = (
    "(has(v.operatingPoints) && v.operatingPoints.size() > 0 ? "
    "v.operatingPoints.exists(p, p.name == self.pin.operatingPoint) : self.pin.operatingPoint == 'default')"
)
"""Conditions on a variant v: it matches the pin, and it has the pinned operating point."""
_FAMILY, _IMPLEMENTATION = (f"(has(self.{name}) && self.{name} != '')" for name in ("family", "implementation"))
_INSIDE_INTERVAL = Rule(
    "!has(self.accuracyEvidence) || "
    "((!has(self.accuracyEvidence.low) || self.accuracyEvidence.low <= self.accuracy) && "
    "(!has(self.accuracyEvidence.high) || self.accuracy <= self.accuracyEvidence.high))",
    "accuracy must lie between accuracyEvidence.low and high",
)


RULES: dict[type[BaseModel], tuple[Rule, ...]] = {
    InferencePipeline: (
        Rule(
            f"!self.metadata.name.endsWith('{ADVISORY_SUFFIX}')",
            f"metadata.name must not end in {ADVISORY_SUFFIX}, which is reserved for advisory PipelinePlans",
        ),
    ),
    Variant: (
        Rule(
            f"has(self.container) || (({_FAMILY} || {_IMPLEMENTATION}) && has(self.storageUri) && "
            "self.storageUri != '')",
            "give storageUri and family or implementation, or a container",
        ),
        Rule(
            f"({_FAMILY} ? 1 : 0) + ({_IMPLEMENTATION} ? 1 : 0) + (has(self.container) ? 1 : 0) <= 1",
            "give one of family, implementation and container",
        ),
        _INSIDE_INTERVAL,
    ),
    Container: (
        Rule(
            "has(self.image) && self.image != '' && !has(self.endpoints)",
            "a container needs an image in a cluster; endpoints are for trimtab up",
        ),
        Rule(
            f"!has(self.protocol) || self.protocol != 'OpenAI' || self.readyPath != '{OPEN_INFERENCE_READY}'",
            "protocol OpenAI requires a readyPath, for instance /health",
        ),
    ),
    Task: (
        Rule(
            "(has(self.removed) && self.removed) != (has(self.storageUri) && self.storageUri != '')",
            "set either storageUri or removed: true",
        ),
    ),
    Stage: (
        Rule(f"self.name != '{REQUEST}'", f"the name {REQUEST} is reserved for the request; rename the stage"),
        Rule("self.minReplicas <= self.maxReplicas", "minReplicas must not be above maxReplicas"),
        Rule(
            "!has(self.pin) || !has(self.pin.variant) || self.variants.exists(v, v.name == self.pin.variant)",
            "pin.variant must be the name of one of the stage's variants",
        ),
        Rule(
            f"!has(self.pin) || !has(self.pin.operatingPoint) || self.variants.exists(v, {_PINNED} && {_POINT})",
            "pin.operatingPoint must be an operating point of pin.variant, or of any of the stage's variants if "
            "pin.variant is absent",
        ),
        Rule(
            "!has(self.pin) || !has(self.pin.batchSize) || self.variants.exists(v, "
            f"self.pin.batchSize <= v.maxBatchSize && {_PINNED} && (!has(self.pin.operatingPoint) || {_POINT}))",
            "pin.batchSize must not exceed the maxBatchSize of every variant that the pin allows",
        ),
        Rule(
            "!has(self.pin) || !has(self.pin.replicas) || "
            "(self.minReplicas <= self.pin.replicas && self.pin.replicas <= self.maxReplicas)",
            "pin.replicas must lie between minReplicas and maxReplicas",
        ),
        Rule(
            f"!({_INPUTS}.exists(i, i.from.startsWith(self.name + '.')))",
            "a stage must not read its own outputs; take the input from the request or from another stage",
        ),
        Rule(
            "!has(self.outputs) || self.outputs.all(o, !has(o.countedBy) || self.outputs.exists(c, "
            f"c.name == o.countedBy && c.datatype in {_INTEGERS} && !has(c.countedBy)))",
            "countedBy must name an INT32 or INT64 output of the same stage that has no countedBy itself",
        ),
        Rule(
            "!has(self.role) || self.role != 'Generate' || "
            f"(has(self.outputs) && self.outputs.size() == {len(GENERATION_OUTPUTS)} && {_GENERATION_OUTPUTS})",
            "role Generate requires the outputs text BYTES [], finish_reason BYTES [] and usage INT64 [5]",
        ),
        Rule(
            "!has(self.role) || self.role != 'Encode' || (has(self.outputs) && self.outputs.size() == 1 && "
            f"self.outputs[0].name == '{EMBEDDINGS_INPUT}' && "
            "self.outputs[0].datatype == 'BYTES' && (has(self.outputs[0].shape) ? self.outputs[0].shape : []) == [] && "
            f"{_INPUTS}.exists(i, i.name == '{IMAGES_INPUT}' && i.from.startsWith('request.')))",
            f"role Encode requires the only output {EMBEDDINGS_INPUT} BYTES [] and an input {IMAGES_INPUT} "
            "from the request",
        ),
        Rule(
            f"!self.variants.exists(v, {_COLOCATED}) || ({_GENERATES} && "
            f"['{IMAGES_INPUT}', '{EMBEDDINGS_INPUT}'].all(n, "
            f"{_INPUTS}.exists(i, i.name == n && has(i.optional) && i.optional)))",
            f"encoder Colocated requires role Generate and the optional inputs {IMAGES_INPUT} and {EMBEDDINGS_INPUT}",
        ),
        Rule(
            "self.variants.all(v, !has(v.container) || !has(v.container.protocol) || "
            "v.container.protocol != 'OpenAI' || "
            f"({_GENERATES} && {_INPUTS}.exists(i, i.name == '{MESSAGES_INPUT}') && "
            f"(({_COLOCATED}) || !({_INPUTS}.exists(i, i.name == '{EMBEDDINGS_INPUT}')))))",
            f"a container of protocol OpenAI requires role Generate, an input {MESSAGES_INPUT}, and a variant with its "
            "own encoder",
        ),
    ),
    OperatingPoint: (
        Rule(
            "!has(self.tokenDelta) || self.tokenDelta == 0 || !(has(self.merging) || has(self.prompts))",
            "tokenDelta is a shorthand for merging or prompts: set only one of them",
        ),
        _INSIDE_INTERVAL,
    ),
    InputSize: (Rule("has(self.resolution) || has(self.patch)", "give resolution, patch, or both"),),
    Objective: (
        Rule("self.goal != 'MinCost' || has(self.accuracyFloor)", "goal MinCost needs accuracyFloor, for instance 0.9"),
    ),
    Budget: (Rule("string(self.cores).matches('[1-9]')", "cores must be above 0, for instance 2 or 500m"),),
    ServiceLevel: (
        _positive_duration("latency", "250ms"),
        Rule(
            "!has(self.timeToFirstToken) || duration(self.timeToFirstToken) <= duration(self.latency)",
            "timeToFirstToken must not be longer than latency, which bounds the whole response",
        ),
    ),
    Adaptation: (
        Rule("duration(self.interval) >= duration('1s')", "interval must be 1s or more, for instance 10s"),
        _positive_duration("horizon", "20s"),
    ),
    Rollout: (_positive_duration("readyTimeout", "5m"),),
    InferencePipelineSpec: (
        Rule(
            "self.stages.all(s, !has(s.inputs) || s.inputs.all(i, i.from.startsWith('request.') ? !has(self.inputs) || "
            "self.inputs.exists(t, i.from == 'request.inputs.' + t.name) : "
            "self.stages.exists(o, i.from.startsWith(o.name + '.outputs.'))))",
            "each input's from must be request.inputs.TENSOR or STAGE.outputs.TENSOR of an existing tensor or stage",
        ),
        Rule(
            "!has(self.outputs) || self.outputs.all(o, self.stages.exists(s, "
            "o.from.startsWith(s.name + '.outputs.') && "
            "(!has(s.outputs) || s.outputs.exists(t, o.from.endsWith('.outputs.' + t.name)))) || "
            f"({_INPUTS}.exists(t, o.from == 'request.inputs.' + t.name)))",
            "each output's from must be STAGE.outputs.TENSOR or request.inputs.TENSOR of an existing tensor",
        ),
        Rule(
            "self.stages.exists(s, !has(s.inputs) || s.inputs.all(i, i.from.startsWith('request.')))",
            "stages form a cycle: at least one stage must read from the request only; a pipeline must be acyclic",
        ),
        Rule(
            "!self.stages.exists(a, self.stages.exists(b, a.name < b.name && has(a.inputs) && has(b.inputs) && "
            "a.inputs.exists(i, i.from.startsWith(b.name + '.outputs.')) && "
            "b.inputs.exists(i, i.from.startsWith(a.name + '.outputs.'))))",
            "two stages read from each other; a pipeline must be acyclic",
        ),
        Rule(
            f"!(has(self.slo.timeToFirstToken) || has(self.slo.timePerOutputToken)) || {_HAS_GENERATION}",
            "slo.timeToFirstToken and slo.timePerOutputToken require a stage of role Generate",
        ),
        Rule(
            f"!has(self.chat) || ({_INPUTS}.exists(i, i.name == 'messages' && i.datatype == 'BYTES') && "
            f"{[name for name, *_ in GENERATION_OUTPUTS]}.all(n, {_OUTPUTS}.exists(o, o.name == n)) && "
            f"{_HAS_GENERATION})",
            "chat requires an input messages BYTES [] and outputs text, finish_reason and usage of a stage of role "
            "Generate",
        ),
    ),
}
