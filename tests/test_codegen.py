"""Tests that files generated from the .proto are up to date, and that the .proto is commented and stays compatible."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

from specdec.grpc_comm.specdec.v1 import specdec_pb2

ROOT = Path(__file__).parent.parent
PROTOS = ROOT / "protos"
BIN = Path(sys.executable).parent
WIRE = ROOT / "tests" / "support" / "wire_of_2026_11_24.binpb"


def run(*command: str | Path, directory: Path = PROTOS) -> None:
    """Run a tool that must succeed; a failure shows its output."""
    result = subprocess.run(list(map(str, command)), cwd=directory, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def bare(file: FileDescriptorProto) -> FileDescriptorProto:
    """Remove `json_name` from a .proto file's descriptor, in place; return it.

    Of the two descriptors that are compared, only one has this field.
    """
    for message in file.message_type:
        for field in message.field:
            field.ClearField("json_name")
    return file


def test_stubs_are_those_of_the_proto(tmp_path: Path) -> None:
    output = tmp_path / "set.bin"
    # The same mapping is in the goal proto of the Makefile.
    mapping = f"-Ispecdec/grpc_comm={PROTOS}"
    source = PROTOS / "specdec" / "v1" / "specdec.proto"
    run(sys.executable, "-m", "grpc_tools.protoc", mapping, f"--descriptor_set_out={output}", source)
    (fresh,) = FileDescriptorSet.FromString(output.read_bytes()).file
    committed = FileDescriptorProto()
    specdec_pb2.DESCRIPTOR.CopyToProto(committed)
    assert bare(committed) == bare(fresh), "stale: run `make proto`"


def test_every_part_of_the_proto_has_a_comment_and_a_right_name() -> None:
    run(BIN / "buf", "lint")


def test_nothing_on_the_wire_is_broken() -> None:
    """`buf breaking` finds no incompatible change of the .proto since the descriptors of an earlier version."""
    run(BIN / "buf", "breaking", "--against", WIRE)
