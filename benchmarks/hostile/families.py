"""Every kind there is, by name."""

from benchmarks.hostile.bodies import BODIES
from benchmarks.hostile.connections import CONNECTIONS
from benchmarks.hostile.fields import FIELDS
from benchmarks.hostile.floods import FLOODS
from benchmarks.hostile.http1 import HTTP1
from benchmarks.hostile.kinds import Kind
from benchmarks.hostile.messages import MESSAGES

KINDS: tuple[Kind, ...] = tuple(
    kind for family in (HTTP1, BODIES, FIELDS, MESSAGES, FLOODS, CONNECTIONS) for kind in family.kinds
)
