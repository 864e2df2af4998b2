"""Every kind there is, by name."""

from benchmarks.hostile.addresses import ADDRESSES
from benchmarks.hostile.bodies import BODIES
from benchmarks.hostile.connections import CONNECTIONS
from benchmarks.hostile.fields import FIELDS
from benchmarks.hostile.http1 import HTTP1
from benchmarks.hostile.kinds import Kind
from benchmarks.hostile.messages import MESSAGES
from benchmarks.hostile.protobufs import PROTOBUFS
from benchmarks.hostile.values import VALUES

FAMILIES = (HTTP1, ADDRESSES, VALUES, BODIES, FIELDS, MESSAGES, PROTOBUFS, CONNECTIONS)
KINDS: tuple[Kind, ...] = tuple(kind for family in FAMILIES for kind in family.kinds)
