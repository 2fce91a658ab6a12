"""Compares the project's own declarations of P4Runtime with those that finsy carries.

Usage: descriptors.py DESCRIPTORS, an encoded FileDescriptorSet. Every message, field and enum
value that the project declares must be there with the same number, type and oneof; what the
project leaves out is listed here.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from finsy.proto.google.rpc import status_pb2
from finsy.proto.p4.config.v1 import p4info_pb2, p4types_pb2
from finsy.proto.p4.v1 import p4data_pb2, p4runtime_pb2
from google.protobuf import descriptor_pb2 as pb

PACKAGES = ("p4.v1", "p4.config.v1", "google.rpc")

# Type specifications: no message of this pipeline carries them.
LEFT_OUT = (
    "p4.config.v1.P4BitTypeSpec",
    "p4.config.v1.P4BitstringLikeTypeSpec",
    "p4.config.v1.P4BoolType",
    "p4.config.v1.P4DataTypeSpec",
    "p4.config.v1.P4EnumTypeSpec",
    "p4.config.v1.P4ErrorType",
    "p4.config.v1.P4ErrorTypeSpec",
    "p4.config.v1.P4HeaderStackTypeSpec",
    "p4.config.v1.P4HeaderTypeSpec",
    "p4.config.v1.P4HeaderUnion",
    "p4.config.v1.P4IntTypeSpec",
    "p4.config.v1.P4NewType",
    "p4.config.v1.P4SerializableEnumTypeSpec",
    "p4.config.v1.P4StructTypeSpec",
    "p4.config.v1.P4TupleTypeSpec",
    "p4.config.v1.P4TypeInfo",
    "p4.config.v1.P4VarbitTypeSpec",
    "p4.config.v1.P4Info.type_info",
    "p4.config.v1.Register.type_spec",
    "p4.config.v1.Digest.type_spec",
)


def in_messages(prefix: str, message: pb.DescriptorProto) -> Iterator[tuple[str, str]]:
    name = f"{prefix}.{message.name}"
    yield name, "message"
    for field in message.field:
        oneof = ""
        if field.HasField("oneof_index"):
            oneof = message.oneof_decl[field.oneof_index].name
        told = (field.number, field.type, field.label, field.type_name, oneof)
        yield f"{name}.{field.name}", repr(told)
    for nested in message.nested_type:
        yield from in_messages(name, nested)
    for enum in message.enum_type:
        yield from in_enum(name, enum)


def in_enum(prefix: str, enum: pb.EnumDescriptorProto) -> Iterator[tuple[str, str]]:
    for value in enum.value:
        yield f"{prefix}.{enum.name}.{value.name}", repr(value.number)


def declared(files: list[pb.FileDescriptorProto]) -> dict[str, str]:
    found: dict[str, str] = {}
    for file in files:
        if file.package not in PACKAGES:
            continue
        for message in file.message_type:
            found.update(in_messages(file.package, message))
        for enum in file.enum_type:
            found.update(in_enum(file.package, enum))
        for service in file.service:
            for method in service.method:
                told = (
                    method.input_type,
                    method.output_type,
                    method.client_streaming,
                    method.server_streaming,
                )
                name = f"{file.package}.{service.name}.{method.name}"
                found[name] = repr(told)
    return found


def main(descriptors: Path) -> None:
    ours = declared(
        list(pb.FileDescriptorSet.FromString(descriptors.read_bytes()).file)
    )
    theirs_files = []
    for module in (status_pb2, p4info_pb2, p4types_pb2, p4data_pb2, p4runtime_pb2):
        file = pb.FileDescriptorProto()
        module.DESCRIPTOR.CopyToProto(file)
        theirs_files.append(file)
    theirs = declared(theirs_files)
    wrong = [
        f"{name}: {ours.get(name)} instead of {theirs.get(name)}"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
        and not (name not in ours and name.startswith(LEFT_OUT))
    ]
    assert not wrong, "\n".join(wrong)
    assert len(ours) > 300, "nothing was compared"
    print("done")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
