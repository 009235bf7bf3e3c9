"""Tests of images at a vLLM server with this project's configuration: answers stay, draft workers see no image."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from PIL import Image

from specdec.grpc_comm.specdec.v1 import specdec_pb2 as pb
from specdec.inference.config import ROOT
from tests.support.models import NUM_TOKENIZER_IDS, disturbed, tiny_model, tiny_tokenizer
from tests.support.raw_worker import RawWorker
from tests.vllm.conftest import Pair
from tests.vllm.serve_site import Site, sites

pytestmark = [pytest.mark.release, pytest.mark.timeout(1800)]

PLACE, PLACE_ID = "<image>", NUM_TOKENIZER_IDS
"""Text and id of the token that stands for a part of an image in a prompt."""
SIDE, PATCH, WIDTH = 28, 14, 64
NUM_PLACES = (SIDE // PATCH) ** 2
SALT = "a secret"
WAYS: Sequence[dict[str, Any]] = ({"temperature": 0.0}, {"temperature": 0.8, "seed": 7, "cache_salt": SALT})


def save_seeing(target: Path, draft: Path) -> None:
    """Save a tiny model that reads images, and a draft: a changed copy of its language model."""
    from safetensors.torch import load_file, save_file
    from transformers import PaliGemmaConfig, PaliGemmaForConditionalGeneration, PaliGemmaProcessor
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    tokenizer = tiny_tokenizer(chat_template="{% for message in messages %}{{ message['content'] }}{% endfor %}")
    tokenizer.add_special_tokens({"additional_special_tokens": [PLACE]})
    tokenizer.add_tokens("\n")  # ends a prompt with an image
    assert tokenizer.convert_tokens_to_ids(PLACE) == PLACE_ID
    square = SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE}, image_seq_length=NUM_PLACES)
    PaliGemmaProcessor(square, tokenizer).save_pretrained(target)  # adds tokens for places in an image
    text = tiny_model("gemma", seed=1, vocab_size=len(tokenizer), hidden_size=WIDTH, head_dim=32)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = PaliGemmaForConditionalGeneration(
        PaliGemmaConfig(
            text_config=text.config.to_dict(),
            vision_config={"image_size": SIDE, "patch_size": PATCH, "vision_use_head": False, **sizes},
            image_token_index=PLACE_ID,
            hidden_size=WIDTH,
            projection_dim=WIDTH,
            is_mm_prefix_lm=False,  # vLLM's attention on a CPU sees no tokens to the right
        )
    )
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.save_pretrained(target)
    weights, tower = load_file(target / "model.safetensors"), "vision_tower."
    named = {name.replace(tower, f"{tower}vision_model."): each for name, each in weights.items()}  # as vLLM has them
    save_file(named, target / "model.safetensors", metadata={"format": "pt"})
    disturbed(text).save_pretrained(draft)
    tokenizer.save_pretrained(draft)


def picture(colour: str) -> bytes:
    """Return a square of one colour as a PNG file."""
    file = io.BytesIO()
    Image.new("RGB", (SIDE, SIDE), colour).save(file, "PNG")
    return file.getvalue()


PICTURES = [picture(colour) for colour in ("red", "blue")]


async def answers(site: Site, ways: Sequence[dict[str, Any]] = WAYS) -> list[list[int]]:
    """Return the token ids of answers about each picture, and about none, with each set of request fields in `ways`."""
    wanted = [(picture, way) for picture in (*PICTURES, None) for way in ways]
    return await asyncio.gather(*(seen(site, *each) for each in wanted))


async def seen(site: Site, picture: bytes | None, way: dict[str, Any]) -> list[int]:
    """Return the token ids of the answer about a picture, or without one if it is None; `way` has request fields."""
    content: list[Any] = [{"type": "text", "text": "a plain question of a few words"}]
    if picture is not None:
        url = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
        content.insert(0, {"type": "image_url", "image_url": {"url": url}})
    messages: list[Any] = [{"role": "user", "content": content}]
    extra = {"return_token_ids": True, "ignore_eos": True, **way}
    asked: dict[str, Any] = {"model": "target", "max_tokens": 40, "extra_body": extra}
    answer: Any = await site.client().chat.completions.create(messages=messages, **asked)
    assert answer.prompt_token_ids.count(PLACE_ID) == (0 if picture is None else NUM_PLACES)
    token_ids: list[int] = answer.choices[0].token_ids
    return token_ids


async def record(worker: RawWorker, messages: list[pb.AssistResponse]) -> None:
    """Append each message that the target sends to a draft worker to `messages`, until the stream ends."""
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        while (message := await worker.call.read()) != grpc.aio.EOF:
            messages.append(message)


async def test_answers_about_images_are_those_of_vllm_without_our_file(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy answers about images are those of stock vLLM, and draft workers change no answer.

    A worker gets the positions of an image in the prompt as token ids, but neither the image nor a cache salt.
    """
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "support" / "no_torchvision"))
    seeing = replace(pair, target=tmp_path / "target", draft=tmp_path / "draft")
    save_seeing(seeing.target, seeing.draft)
    stock, ours = Site(tmp_path, seeing, config=None), Site(tmp_path, seeing)
    async with sites(stock, ours):
        await asyncio.gather(stock.start_vllm(), ours.start_vllm())
        right = await answers(ours)
        assert len(set(map(tuple, right))) == len(right)
        assert right[:: len(WAYS)] == await answers(stock, WAYS[:1])  # a seed ends stock vLLM's core on a CPU
        await ours.start_pool()
        messages: list[pb.AssistResponse] = []
        async with ours.raw_worker() as worker:
            recording = asyncio.create_task(record(worker, messages))
            assert await answers(ours) == right
            recording.cancel()
        prompts = [list(each.open.open.prompt_token_ids) for each in messages if each.HasField("open")]
        assert {prompt.count(PLACE_ID) for prompt in prompts} == {0, NUM_PLACES}
        sent = b"".join(message.SerializeToString() for message in messages)
        for secret in (SALT.encode(), *PICTURES, *(base64.b64encode(each)[:40] for each in PICTURES)):
            assert secret not in sent
        await ours.start_draft()
        async with asyncio.timeout(300):
            while not await ours.num_accepted():
                assert await answers(ours) == right
