"""The target's end-of-sequence tokens count, not the draft's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from specdec.inference.backends.onnx.packed import packed_decoder
from specdec.inference.request import SamplingParams, Schedule
from specdec.inference.serving.processes import ServerProcess
from specdec.inference.workers.completion import CompletionRequest
from tests.conftest import ModelDirectories
from tests.support.servers import complete_all, draft_server

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]


@pytest.mark.long
async def test_other_eos_ids_of_a_draft_change_nothing(
    models: ModelDirectories, target: ServerProcess, tmp_path: Path
) -> None:
    """Text ends at the target's end-of-sequence ids, even if the draft has other ids.

    It was once otherwise: the draft worker sent its own end-of-sequence ids, so text ended too early or went on.
    """
    draft = shutil.copytree(models.related, tmp_path / "draft")
    eos = list(range(20, 80))  # every few tokens one of them
    (draft / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    packed_decoder(draft, "float32", None)
    requests = [
        CompletionRequest(
            f"the {i} wind", SamplingParams(temperature=1.0), seed=i, max_new_tokens=60, schedule=schedule
        )
        for i in range(8)
        for schedule in Schedule
    ]
    alone = await complete_all(target, requests)
    assert any(set(completion.token_ids) & set(eos) for completion in alone)
    async with draft_server(draft, target) as worker:
        helped = await complete_all(worker, requests)
    assert [h.token_ids for h in helped] == [a.token_ids for a in alone]
    assert [h.reason for h in helped] == [a.reason for a in alone]
