"""The messages as they were on 2026-11-21, for peers that were not updated: a draft, a client and a target of then.

Made of a descriptor set in a pool of its own, since two versions of one file cannot live in the default pool.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

WIRE = Path(__file__).with_name("wire_of_2026_11_21.binpb")
PACKAGE = "specdec.v1"


class OldMessages:
    """Message classes by name, such as `old.GenerateRequest`."""

    def __init__(self) -> None:
        self._pool = descriptor_pool.DescriptorPool()
        for file in descriptor_pb2.FileDescriptorSet.FromString(WIRE.read_bytes()).file:
            self._pool.AddSerializedFile(file.SerializeToString())

    def __getattr__(self, name: str) -> Any:
        return message_factory.GetMessageClass(self._pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))

    @property
    def names(self) -> list[str]:
        file = self._pool.FindFileByName("specdec/v1/specdec.proto")
        return sorted(file.message_types_by_name)


old = OldMessages()
