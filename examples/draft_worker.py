"""Draft worker of a target, with grpcio and the .proto alone: `python examples/draft_worker.py 127.0.0.1:50051 PROMPT`.

In place of a draft model it looks tokens up: what followed the last two tokens the last time may follow them again.
docs/protocol.md tells the story of a session; docs/noise.md has what a worker with a model needs beside it.
"""

from __future__ import annotations

import queue
import sys
from pathlib import Path
from typing import Any

import grpc

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "protos"))
pb: Any
rpc: Any
pb, rpc = grpc.protos_and_services("specdec/v1/specdec.proto")


def proposal(tokens: list[int], gamma: int = 4) -> Any:
    """Return a message with up to `gamma` draft tokens; without any it asks for the target's own token."""
    for i in range(len(tokens) - 3, -1, -1):
        if tokens[i : i + 2] == tokens[-2:]:
            branch = pb.Branch(prefix_length=len(tokens), token_ids=tokens[i + 2 : i + 2 + gamma])
            return pb.VerifyRequest(propose=pb.Propose(branches=[branch]))
    return pb.VerifyRequest(propose=pb.Propose())


def main() -> None:
    address, prompt = sys.argv[1:]
    with grpc.insecure_channel(address) as channel:
        service = rpc.GenerationServiceStub(channel)
        model = service.GetModel(pb.GetModelRequest())
        tokens = list(service.Tokenize(pb.TokenizeRequest(text=prompt)).token_ids)
        num_prompt, num_accepted, requests = len(tokens), 0, queue.SimpleQueue[Any]()
        opening = pb.Open(
            protocol_version=1,
            tokenizer_fingerprint=model.tokenizer_fingerprint,
            vocab_size=model.vocab_size,
            prompt_token_ids=tokens,
            sampling=pb.SamplingParams(temperature=0.8, seed=7),  # the tokens are those of client.py
            max_new_tokens=32,
            stop_at_eos=True,
        )
        requests.put(pb.VerifyRequest(open=opening))
        requests.put(proposal(tokens))
        for response in rpc.VerificationServiceStub(channel).Verify(iter(requests.get, None), timeout=60):
            if not response.HasField("commit"):
                continue  # Opened, with the session's limits
            tokens += response.commit.token_ids
            num_accepted += response.commit.num_accepted_tokens
            requests.put(None if response.commit.finish_reason else proposal(tokens))
        print(service.Detokenize(pb.DetokenizeRequest(token_ids=tokens[num_prompt:])).text)
        print(f"{num_accepted} of {len(tokens) - num_prompt} tokens were accepted draft tokens", file=sys.stderr)


if __name__ == "__main__":
    main()
