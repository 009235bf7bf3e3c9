"""The Locust side: what its process may import, and the way of a record through JSON."""

from __future__ import annotations

import ast
import dataclasses
import json

from inference.comparison.plan.config import Contender, Topology
from inference.comparison.run.load import LOCUST_FILE
from inference.comparison.run.record import record_from_json
from tests.support.samples import record


def test_locust_processes_import_neither_torch_nor_asyncio() -> None:
    tree = ast.parse(LOCUST_FILE.read_text())
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert not [name for name in names if name.startswith(("torch", "inference", "asyncio", "grpc.aio"))]
    assert "grpc.experimental.gevent" in names


def test_records_survive_json() -> None:
    sent = record(Contender(Topology.FUSED, "draft", 3))
    assert record_from_json(json.loads(json.dumps(dataclasses.asdict(sent)))) == sent
