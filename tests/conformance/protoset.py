"""The Open Inference Protocol as compiled descriptors, for clients without reflection."""

from pathlib import Path

from google.protobuf import descriptor_pb2

from trimtab_protocol.grpc_messages import FILE

UNKNOWN_METHOD = "ServerFlies"


def write_protoset(folder: Path) -> str:
    """Write the descriptors by which Trimtab serves, with one method that no server has; return the file's path."""
    file = descriptor_pb2.FileDescriptorProto.FromString(FILE)
    method = file.service[0].method[0]
    file.service[0].method.add(name=UNKNOWN_METHOD, input_type=method.input_type, output_type=method.output_type)
    path = folder / "open_inference.protoset"
    path.write_bytes(descriptor_pb2.FileDescriptorSet(file=[file]).SerializeToString())
    return str(path)
