"""Filter of the log: some lines of libraries are shown, and others are not."""

from __future__ import annotations

import logging

import pytest

from specdec.inference.caller import OneLine
from specdec.inference.cli.app import QuietLibraries

NXDI = "/opt/venv/neuronx_distributed_inference/models/config.py"


def record(level: int, message: str, *, path: str = NXDI, line: int = 1) -> logging.LogRecord:
    return logging.LogRecord("root", level, path, line, message, (), None)


@pytest.mark.parametrize(
    ("level", "message", "shown"),
    [
        (logging.INFO, "calling forward on network context_encoding_model", [False, False]),
        (logging.WARNING, "TP degree (2) and KV heads (8) are not divisible", [True, False]),
        (logging.WARNING, "NeuronConfig init: Unexpected keyword arguments: {'a': 1}", [False, False]),
        (logging.ERROR, "out of memory", [True, True]),
    ],
)
def test_nxdi_logs_each_warning_once(level: int, message: str, shown: list[bool]) -> None:
    """The log has each warning of NxDI once.

    It was once otherwise: NxDI writes to the root logger, and 8 of 250 lines were the draft's own.
    """
    quiet = QuietLibraries()
    assert [quiet.filter(record(level, message)) for _ in range(2)] == shown


def test_other_lines_are_logged_every_time() -> None:
    quiet = QuietLibraries()
    ours = record(logging.INFO, "ready", path="/srv/inference/serving/assembly.py")
    assert quiet.filter(ours)
    assert quiet.filter(ours)
    assert quiet.filter(record(logging.WARNING, "one", line=1))
    assert quiet.filter(record(logging.WARNING, "another", line=2))


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("ExecuteBatchError raised in core by servicer method [/specdec.v1.GenerationService/Generate]", False),
        ("Unexpected [ValueError] raised by servicer method [/specdec.v1.GenerationService/Generate]", True),
    ],
)
def test_a_client_gone_at_the_last_write(message: str, shown: bool) -> None:
    """A client that leaves at the last write causes no traceback in the log.

    It was once otherwise: 1 in some 1,000 callers left as its status was written, which put a traceback into a target's
    log.
    """
    told = logging.LogRecord("grpc._cython.cygrpc", logging.ERROR, "server.pyx", 1, message, (), None)
    assert QuietLibraries().filter(told) is shown


def test_no_text_of_a_peer_ends_a_line_of_the_log() -> None:
    """No text of a peer can begin a new line of the log.

    It was once otherwise: a certificate's name with a newline forged a line of the audit log.
    """
    record = logging.LogRecord(
        "specdec.audit", logging.INFO, "", 0, "refused: %s", ("a\nINFO caller=root \x1b[2J",), None
    )
    assert OneLine("%(name)s %(message)s").format(record) == "specdec.audit refused: a\\nINFO caller=root \\x1b[2J"
