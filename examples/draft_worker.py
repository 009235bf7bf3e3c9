"""Draft worker and a request that it helps, made of only grpcio and the .proto.

    python examples/draft_worker.py 127.0.0.1:50051 PROMPT

Instead of a draft model it uses lookup: it proposes the tokens that followed an earlier occurrence of the last two.
docs/protocol.md describes a session; docs/noise.md has what a worker with a model needs in addition.
"""

from __future__ import annotations

import os
import queue
import sys
from pathlib import Path
from typing import Any

import grpc

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "protos"))
pb: Any
rpc: Any
pb, rpc = grpc.protos_and_services("specdec/v1/specdec.proto")


def proposal(name: str, tokens: list[int], gamma: int = 4) -> Any:
    """Return a message with up to `gamma` draft tokens; a message without any asks for the target's own token."""
    branches = []
    for i in range(len(tokens) - 3, -1, -1):
        if tokens[i : i + 2] == tokens[-2:]:
            branches = [pb.Branch(prefix_length=len(tokens), token_ids=tokens[i + 2 : i + 2 + gamma])]
            break
    return pb.AssistRequest(propose=pb.AssistPropose(session_id=name, propose=pb.Propose(branches=branches)))


def main() -> None:
    address, prompt = sys.argv[1:]
    with grpc.insecure_channel(address) as channel:  # one connection: the name below counts on no other
        service = rpc.GenerationServiceStub(channel)
        model = service.GetModel(pb.GetModelRequest())
        attach = pb.Attach(
            protocol_version=2,
            tokenizer_fingerprint=model.tokenizer_fingerprint,
            vocab_size=model.vocab_size,
            num_slots=1,
            is_private=True,
        )
        outbox = queue.SimpleQueue[Any]()
        outbox.put(pb.AssistRequest(attach=attach))
        assist = rpc.VerificationServiceStub(channel).Assist(iter(outbox.get, None), timeout=60)
        next(assist)  # Attached, or an error with the reason

        tokens = list(service.Tokenize(pb.TokenizeRequest(text=prompt)).token_ids)
        num_prompt, num_accepted, session = len(tokens), 0, os.urandom(16)
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=tokens),
            sampling=pb.SamplingParams(temperature=0.8, seed=7),  # the tokens are those of client.py
            max_new_tokens=32,
            schedule=pb.SCHEDULE_SYNC,  # the target waits for each proposal
            draft_session=session,
        )
        outbox.put(proposal(session.hex(), tokens))  # may arrive before the request
        for response in service.Generate(request, timeout=60):
            delta = response.delta
            tokens += delta.token_ids
            num_accepted += delta.num_accepted_tokens - delta.num_lookup_accepted
            print(delta.text, end="", flush=True)
            if delta.token_ids and not delta.finish_reason:
                outbox.put(proposal(session.hex(), tokens))
        assist.cancel()
        outbox.put(None)  # ends the thread that reads the outbox
        print()
        print(f"{num_accepted} of {len(tokens) - num_prompt} tokens were accepted draft tokens", file=sys.stderr)


if __name__ == "__main__":
    main()
