"""Keys and values of every layer and slot, as memory that ONNX Runtime writes in place."""

from __future__ import annotations

import math

import numpy as np
import onnxruntime  # type: ignore[import-untyped]

from specdec.inference.backends.host import allow_huge_pages, lazy_zeros
from specdec.inference.backends.onnx.shape import DecoderShape
from specdec.inference.errors import RoomError

MAX_KEPT = 1024
"""Most ranges of neighbouring slots for which objects of ONNX Runtime are kept; making them takes 12 us per layer."""


class OnnxSlots:
    """Memory for keys and values of `num_slots` sequences of `max_length` positions, and one spare position each.

    Attributes:
        room: positions of a slot, the spare one among them.
        memory: keys and values, float32 [2 * num_layers, num_slots, num_kv_heads, room, head_room].
        slot_bytes: bytes of one slot.

    Raises:
        RoomError: there is not enough memory.
    """

    def __init__(self, shape: DecoderShape, *, num_slots: int, max_length: int) -> None:
        self.max_length = max_length
        self.room = max_length + 1
        # [layers and key or value, num_slots, num_kv_heads, room, head_room]: neighbouring slots are a batch of a layer
        rooms = (2 * shape.num_layers, num_slots, shape.num_kv_heads, self.room, shape.head_room)
        try:
            self._mapping = lazy_zeros(4 * math.prod(rooms))
        except MemoryError as error:
            message = f"{num_slots} slots of {max_length} positions do not fit into the memory of cpu"
            raise RoomError(message) from error
        self.memory = np.frombuffer(self._mapping, np.float32).reshape(rooms)
        self.slot_bytes = int(self.memory.nbytes // num_slots)
        self._values: dict[range, list[onnxruntime.OrtValue]] = {}
        self._well_filled: set[int] = set()

    def fork(self, source_slot: int, destination_slot: int, start: int, end: int) -> None:
        """Copy keys and values of the positions start .. end-1 from one slot to another."""
        self.memory[:, destination_slot, :, start:end] = self.memory[:, source_slot, :, start:end]

    def note_length(self, slot: int, length: int) -> None:
        """Allow huge pages for a slot whose `length` tokens fill half of it or more.

        With them a pass over 1,100 positions takes 12 % less time.
        """
        if 2 * length > self.max_length and slot not in self._well_filled:
            self._well_filled.add(slot)
            for room in self.memory:  # of a layer's keys or values
                start = room[slot].ctypes.data - self.memory.ctypes.data
                allow_huge_pages(self._mapping, start, room[slot].nbytes)

    def values(self, slots: range) -> list[onnxruntime.OrtValue]:
        """Return keys and values of neighbouring slots, not copied, layer by layer: key, value, key, value, ...

        Each is float32 [len(slots), num_kv_heads, room, head_room].
        """
        if slots not in self._values:
            if len(self._values) >= MAX_KEPT:
                self._values.clear()
            rooms = self.memory[:, slots.start : slots.stop]
            self._values[slots] = [onnxruntime.OrtValue.ortvalue_from_numpy(room) for room in rooms]
        return self._values[slots]
