"""Generated files are up to date; the .proto has comments everywhere and stays compatible."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

from specdec.grpc_comm.specdec.v1 import specdec_pb2

ROOT = Path(__file__).parent.parent
PROTO = ROOT / "protos" / "specdec" / "v1" / "specdec.proto"
STUBS = ROOT / "specdec" / "grpc_comm" / "specdec" / "v1"
BIN = Path(sys.executable).parent
WIRE = ROOT / "tests" / "support" / "wire_of_2026_11_24.binpb"

File = descriptor_pb2.FileDescriptorProto


def compiled(proto: Path, directory: Path) -> File:
    """Compile a .proto under the path of this project's own; return its file descriptor, with comments."""
    (directory / "specdec" / "v1").mkdir(parents=True)
    source = directory / "specdec" / "v1" / "specdec.proto"
    source.write_text(proto.read_text())
    output = directory / "set.bin"
    # The same mapping is in the Makefile's goal proto.
    arguments = [
        f"-Ispecdec/grpc_comm={directory}",
        "--include_source_info",
        f"--descriptor_set_out={output}",
        str(source),
    ]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *arguments], check=True, cwd=directory)
    (file,) = descriptor_pb2.FileDescriptorSet.FromString(output.read_bytes()).file
    return file


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> File:
    return compiled(PROTO, tmp_path_factory.mktemp("proto"))


def committed() -> File:
    file = File()
    specdec_pb2.DESCRIPTOR.CopyToProto(file)
    return file


def bare(file: File) -> File:
    """Remove comments and `json_name` from a descriptor, so that two can be compared."""
    file = File.FromString(file.SerializeToString())
    file.ClearField("source_code_info")
    for message in file.message_type:
        for field in message.field:
            field.ClearField("json_name")
    return file


def test_stubs_are_those_of_the_proto(fresh: File) -> None:
    assert bare(committed()) == bare(fresh), "stale: run `make proto`"


def test_a_changed_proto_makes_the_stubs_stale(tmp_path: Path) -> None:
    """A .proto with one more field, or a renamed one, no longer equals the stubs."""
    for number, (old, new) in enumerate(
        [
            ("uint64 seed = 2;", "uint64 seed = 2;\n  uint32 one_more = 99;"),
            ("repeated uint32 ids = 1;", "repeated uint32 identifiers = 1;"),
        ]
    ):
        source = tmp_path / f"{number}.proto"
        assert old in PROTO.read_text()
        source.write_text(PROTO.read_text().replace(old, new))
        assert bare(committed()) != bare(compiled(source, tmp_path / str(number)))


def test_grpc_stub_lists_every_method(fresh: File) -> None:
    source = (STUBS / "specdec_pb2_grpc.py").read_text()
    for service in fresh.service:
        assert f"class {service.name}Stub(" in source
        for method in service.method:
            assert f"'/{fresh.package}.{service.name}/{method.name}'" in source


def test_type_stub_names_every_field(fresh: File) -> None:
    tree = ast.parse((STUBS / "specdec_pb2.pyi").read_text())
    classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    for message in fresh.message_type:
        attributes = {
            node.target.id
            for node in classes[message.name].body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }
        assert {field.name for field in message.field} <= attributes


def undocumented(file: File) -> list[str]:
    """Return the names of services, methods, messages, fields, enums and values without a comment before them."""
    comments = {
        tuple(location.path): bool(location.leading_comments.strip()) for location in file.source_code_info.location
    }
    return [name for path, name in _elements(file) if not comments.get(path)]


def _elements(file: File) -> Iterator[tuple[tuple[int, ...], str]]:
    """Yield (path in the file descriptor, name) of each element that needs a comment."""
    for i, message in enumerate(file.message_type):
        yield (4, i), message.name
        for j, field in enumerate(message.field):
            yield (4, i, 2, j), f"{message.name}.{field.name}"
    for i, enum in enumerate(file.enum_type):
        yield (5, i), enum.name
        for j, value in enumerate(enum.value):
            yield (5, i, 2, j), f"{enum.name}.{value.name}"
    for i, service in enumerate(file.service):
        yield (6, i), service.name
        for j, method in enumerate(service.method):
            yield (6, i, 2, j), f"{service.name}.{method.name}"


def test_everything_on_the_wire_is_documented(fresh: File) -> None:
    assert undocumented(fresh) == []


def test_a_missing_comment_is_found(tmp_path: Path) -> None:
    source = tmp_path / "bare.proto"
    source.write_text(
        'syntax = "proto3";\npackage specdec.v1;\n// Yes.\nmessage A {\n  // Yes.\n  int32 b = 1;\n  int32 c = 2;\n}\n'
    )
    assert undocumented(compiled(source, tmp_path / "out")) == ["A.c"]


def run(*command: str | Path, directory: Path = ROOT) -> None:
    """Run a tool that must succeed; a failure shows its output."""
    result = subprocess.run(list(map(str, command)), cwd=directory, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_buf_lint() -> None:
    run(BIN / "buf", "lint", directory=ROOT / "protos")


def test_nothing_on_the_wire_is_broken() -> None:
    """`buf breaking` finds no incompatible change since an earlier version's descriptors."""
    run(BIN / "buf", "breaking", "--against", WIRE, directory=ROOT / "protos")
