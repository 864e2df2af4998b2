"""The Open Inference Protocol as a compiled set of descriptors, for clients that are not told by reflection.

It is made from the descriptors that Trimtab itself serves by.
"""

from collections.abc import Sequence
from pathlib import Path

from google.protobuf import descriptor_pb2

from trimtab_protocol.grpc_messages import FILE


def protoset(invented: Sequence[str] = ()) -> bytes:
    """A serialized FileDescriptorSet: the protocol's messages, its service, and methods that no server has."""
    file = descriptor_pb2.FileDescriptorProto.FromString(FILE)
    for method in invented:
        known = file.service[0].method[0]
        file.service[0].method.add(name=method, input_type=known.input_type, output_type=known.output_type)
    return descriptor_pb2.FileDescriptorSet(file=[file]).SerializeToString()


def write_protoset(folder: Path, invented: Sequence[str] = ()) -> str:
    """Write it into a folder; return its path."""
    path = folder / "open_inference.protoset"
    path.write_bytes(protoset(invented))
    return str(path)
