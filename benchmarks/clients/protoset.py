"""The Open Inference Protocol as a compiled set of descriptors, for clients that are not told by reflection.

It is made from the descriptors Trimtab itself serves by, so that no copy of the protocol's source can fall behind.
"""

from collections.abc import Sequence
from pathlib import Path

from google.protobuf import descriptor_pb2

from trimtab_protocol.grpc_messages import METHODS, SERVICE, request_class, response_class


def protoset(invented: Sequence[str] = ()) -> bytes:
    """Return a serialized FileDescriptorSet: the protocol's messages, its service, and methods that no server has."""
    file = descriptor_pb2.FileDescriptorProto()
    request_class(METHODS[0]).DESCRIPTOR.file.CopyToProto(file)
    package, _, name = SERVICE.rpartition(".")
    del file.service[:]
    service = file.service.add(name=name)
    for method in (*METHODS, *invented):
        like = METHODS[0] if method in invented else method
        service.method.add(
            name=method,
            input_type=f".{package}.{request_class(like).DESCRIPTOR.name}",
            output_type=f".{package}.{response_class(like).DESCRIPTOR.name}",
        )
    return descriptor_pb2.FileDescriptorSet(file=[file]).SerializeToString()


def write_protoset(folder: Path, invented: Sequence[str] = ()) -> str:
    """Write it into a folder; return its path."""
    path = folder / "open_inference.protoset"
    path.write_bytes(protoset(invented))
    return str(path)
