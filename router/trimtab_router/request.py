"""`Call` and `RequestOptions`: a request, and the deadline, accuracy, task, utility and priority that it asks for.

Options are parameters of the protocol. Numbers may be sent as text, because some clients cannot send all number types.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from trimtab_pipelines.accuracy_floor import required_mean
from trimtab_protocol import InferRequest, Parameters
from trimtab_protocol.chat.engine_routes import ForwardedRequest
from trimtab_protocol.chat.internal_wire import Chunk, LastChunk
from trimtab_protocol.extensions import (
    ACCURACY_FLOOR,
    ACCURACY_PROBABILITY,
    EXTENSION_PREFIX,
    PRIORITY,
    REQUEST_EXTENSIONS,
    TASK,
    TIMEOUT,
    UTILITY,
)
from trimtab_protocol.tensors import Array
from trimtab_router.refusal import invalid

Listener = Callable[[int, Chunk | LastChunk], None]  # called with the row and its next chunk
_MAX_MICROSECONDS = 10**15
_MAX_TASK_CHARACTERS = 128
_MAX_UTILITY = 1e9
DEFAULT_PRIORITY, LOWEST_PRIORITY = 3, 5


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Options of one request. The defaults ask for nothing."""

    timeout_seconds: float | None = None
    """From arrival to response, None for the pipeline's SLO."""
    accuracy_floor: float = 0.0
    """Minimum accuracy of the rows, 0 to 1."""
    accuracy_probability: float | None = None
    """That the share of correct rows reaches it; None: on average."""
    utility: float = 1.0
    """Value of a response in time, relative to other requests."""
    task: str = ""
    """Task of the rows, empty for none."""
    priority: int = DEFAULT_PRIORITY
    """1 (highest) to 5."""

    @property
    def only_latency(self) -> bool:
        return not self.accuracy_floor and not self.task and self.utility == 1.0 and self.priority == DEFAULT_PRIORITY

    def min_accuracy(self, rows: int) -> float:
        """Minimum expected accuracy that grants the floor to this many rows."""
        return required_mean(self.accuracy_floor, rows, self.accuracy_probability)


NO_OPTIONS = RequestOptions()


@dataclass
class Call:
    """A valid request. Parsing sets its contents, and ingress what its transport knows. Its class has the defaults."""

    request: InferRequest
    """Description of the request as received, without tensors."""
    inputs: Mapping[str, Array]
    requested_outputs: tuple[str, ...]
    options: RequestOptions = NO_OPTIONS
    images: int = 0
    """Number of images per chat."""
    arrived_at: float = 0.0
    """Seconds of the executor's clock."""
    deadline_seconds: float | None = None
    """Left at arrival according to the transport; None for no deadline."""
    request_id: str = field(default="", init=False)
    """Forwarded as `x-request-id`: bounded in length and safe for a header."""
    trace_parent: str = field(default="", init=False)
    """Forwarded as `traceparent`, empty unless it is valid."""
    listener: Listener | None = field(default=None, init=False)
    """Called with each chunk of a streamed response."""
    last_chunks: dict[int, LastChunk] | None = field(default=None, init=False)
    """Set to a dictionary, which receives the last chunk of each row, for a response that is not streamed."""
    variant: str = field(default="", init=False)
    """Variant that generates a chat's response, once it has begun."""
    hold_bytes: Callable[[int], None] | None = field(default=None, init=False)
    """Called with the size of outputs stored until the end."""
    forwarded: ForwardedRequest | None = field(default=None, init=False)
    """Set if its messages are a request that only a third-party engine reads."""
    client: str = field(default="", init=False)
    """Name of the client, the tenant of its chats; empty if unknown."""


def parse_request_options(parameters: Parameters) -> RequestOptions:
    """Options among a request's parameters. Raises Refusal for one that is unknown, out of range or contradictory."""
    if not parameters:
        return NO_OPTIONS
    for name in parameters:
        if name.startswith(EXTENSION_PREFIX) and name not in REQUEST_EXTENSIONS:
            raise invalid(f"unknown parameter {name!r}; known parameters: {', '.join(REQUEST_EXTENSIONS)}")
    options = RequestOptions(
        timeout_seconds=_timeout_seconds(parameters),
        accuracy_floor=_number(parameters, ACCURACY_FLOOR, 0.0, maximum=1.0),
        accuracy_probability=_probability(parameters),
        utility=_number(parameters, UTILITY, 1.0, maximum=_MAX_UTILITY),
        task=_task(parameters),
        priority=_priority(parameters),
    )
    return NO_OPTIONS if options == NO_OPTIONS else options


def _timeout_seconds(parameters: Parameters) -> float | None:
    timeout = parameters.get(TIMEOUT, 0)
    if not isinstance(timeout, int) or isinstance(timeout, bool):
        raise invalid(f"parameter 'timeout' is {timeout!r}; it must be an integer number of microseconds")
    if timeout < 0:
        raise invalid(f"parameter 'timeout' is {timeout}; it must be at least 0 microseconds (0 means the SLO)")
    return min(timeout, _MAX_MICROSECONDS) / 1e6 if timeout else None


def _probability(parameters: Parameters) -> float | None:
    if ACCURACY_PROBABILITY not in parameters:
        return None
    probability = _number(parameters, ACCURACY_PROBABILITY, 0.0, maximum=1.0)
    if not 0.0 < probability < 1.0:
        raise invalid(f"parameter {ACCURACY_PROBABILITY!r} is {probability:g}; it must be above 0 and below 1")
    if ACCURACY_FLOOR not in parameters:
        raise invalid(f"parameter {ACCURACY_PROBABILITY!r} requires {ACCURACY_FLOOR!r}")
    return probability


def _priority(parameters: Parameters) -> int:
    """Priority of a request. 0 means the default, as in Triton."""
    level = _number(parameters, PRIORITY, 0.0, maximum=float(LOWEST_PRIORITY))
    if level != int(level):
        raise invalid(f"parameter {PRIORITY!r} is {level:g}; it must be an integer, 1 (highest) to {LOWEST_PRIORITY}")
    return int(level) or DEFAULT_PRIORITY


def _task(parameters: Parameters) -> str:
    task = parameters.get(TASK, "")
    if not isinstance(task, str):
        raise invalid(f"parameter {TASK!r} is {task!r}; it must be the name of a task")
    if len(task) > _MAX_TASK_CHARACTERS:
        raise invalid(
            f"parameter {TASK!r} has {len(task)} characters; a task's name has at most {_MAX_TASK_CHARACTERS}"
        )
    return task


def _number(parameters: Parameters, name: str, default: float, *, maximum: float) -> float:
    """A number from 0 to `maximum`, given as such or as text."""
    value = parameters.get(name, default)
    try:
        number = float("nan") if isinstance(value, bool) else float(value)
    except (ValueError, OverflowError):
        number = float("nan")
    if not 0.0 <= number <= maximum:
        raise invalid(f"parameter {name!r} is {value!r}; it must be a number from 0 to {maximum:g}")
    return number
