"""Life cycle of a pool of draft workers beside `vllm serve`, whose engine cores dial a unix socket of the pool."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from specdec.inference.config import ObserveConfig, ServerConfig
from specdec.inference.serving.assembly import RunningTarget
from specdec.inference.serving.fronts import Ports
from specdec.inference.serving.observers import observed
from specdec.inference.serving.target import serve
from specdec.inference.text.tokenizer import Tokenizer
from specdec.inference.vllm.lending import LendingEngine
from specdec.inference.vllm.mailbox import Mailbox
from specdec.inference.workers.completing.remote import TARGET

logger = logging.getLogger(__name__)


async def serve_pool(folder: Path, server: ServerConfig, observe: ObserveConfig) -> None:
    """Let vLLM's engine cores, which dial a unix socket in `folder`, use draft workers, until a signal.

    The ports for draft workers open when the first core has dialled.

    Raises:
        ConfigError: a port is taken, or the folder cannot be used.
        IncompatibleDraftError: the tokenizer of a core cannot be read.
        InternalError: vLLM now serves a model with another vocabulary.
    """
    ports = Ports(server, observe)
    mailbox = Mailbox(folder)
    engine = LendingEngine(mailbox, server.drafting)
    with observed(observe) as observers:
        try:
            await mailbox.open()
            logger.info("waiting for vLLM's engine cores at %s", mailbox.path)
            served = await engine.served()
            tokenizer = await asyncio.to_thread(Tokenizer.unpacked, served.tokenizer, frozenset(served.ends))
            running = RunningTarget(engine, tokenizer, lend=engine.lend, noise=served.noise)
            await serve(running, served.name, "", TARGET, ports, observers)
        finally:
            await mailbox.close()
