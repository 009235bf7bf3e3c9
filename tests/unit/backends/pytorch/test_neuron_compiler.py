"""The stand-in for TorchNeuron's compiler refuses what the real compiler refuses, so that other tests can use it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed

from tests.support.neuron_compiler import NeuronCompiler

Function = Callable[[Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def _whole_graphs() -> Iterator[None]:
    """Set Dynamo to pass on graphs that it would refuse itself, so that the compiler under test must refuse them."""
    torch.compiler.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        yield
    torch.compiler.reset()


def compiled(function: Function, compiler: NeuronCompiler) -> Function:
    return torch.compile(function, backend=compiler, fullgraph=True, dynamic=False)


def slots() -> tuple[Tensor, Tensor]:
    return torch.arange(24.0).reshape(4, 6), torch.tensor([0, 2])


def write_rows(room: Tensor, rows: Tensor) -> Tensor:
    flat = room.view(2, 2, 6).flatten(0, 1)
    flat.scatter_(0, rows[:, None].expand(2, 6), torch.ones(2, 6))
    room[:, :2] = 3.0
    room.narrow(1, 4, 2).copy_(torch.zeros(4, 2))
    return (room[:, :4].index_select(0, rows) @ room[:, :4].T).softmax(1)


def write_by_out(room: Tensor, rows: Tensor) -> Tensor:
    torch.mul(room, 2.0, out=room)
    return room.sum() + rows


def write_an_unseen_view(room: Tensor, rows: Tensor) -> Tensor:
    room.diagonal().fill_(1.0)
    return room.sum() + rows


def write_by_mask(room: Tensor, rows: Tensor) -> Tensor:
    room[room > 5] = 0.0
    return room.sum() + rows


REFUSED: dict[str, tuple[Function, str]] = {
    "writing by out=": (write_by_out, "1 inputs are changed, but the alias analysis finds 0"),
    "writing an unseen view": (write_an_unseen_view, "1 inputs are changed, but the alias analysis finds 0"),
    "writing by a mask": (write_by_mask, "has a boolean index"),
    "selecting by a mask": (lambda room, rows: room[room > 5] * 2, "dynamic shape .* of index"),
    "looking for ones": (lambda room, rows: (room > 5).nonzero(), "dynamic shape .* of nonzero"),
    "looking at a value": (lambda room, rows: room * rows[0].item(), "a number that depends on data"),
    "counting to a value": (lambda room, rows: torch.arange(int(rows[1].item())), "a number that depends on data"),
    "repeating by data": (
        lambda room, rows: room[:2].repeat_interleave(rows, dim=0),
        "dynamic shape .* of repeat_interleave",
    ),
    "64 bits": (lambda room, rows: (room.double() / 3).float(), "torch.float64 of"),
    "complex numbers": (
        lambda room, rows: torch.view_as_real(torch.view_as_complex(room.view(4, 3, 2)) * 1j),
        "torch.complex64 of",
    ),
}


def test_a_pass_over_slots_is_compiled_once() -> None:
    compiler = NeuronCompiler()
    function = compiled(write_rows, compiler)
    for _ in range(3):
        (room, rows), (expected_room, _) = slots(), slots()
        assert torch.equal(function(room, rows), write_rows(expected_room, rows))
        assert torch.equal(room, expected_room)
    [graph] = compiler.graphs
    assert graph.num_changed == 1
    assert graph.operators["scatter"] == 1


@pytest.mark.parametrize(("function", "words"), REFUSED.values(), ids=REFUSED)
def test_operators_that_the_device_lacks_are_refused(function: Function, words: str) -> None:
    compiler = NeuronCompiler()
    with pytest.raises(BackendCompilerFailed, match=words):
        compiled(function, compiler)(*slots())
    assert not compiler.graphs
