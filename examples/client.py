"""Client of any server, made of only grpcio and the .proto: `python examples/client.py 127.0.0.1:50051 PROMPT`.

The messages are compiled from protos/ at start (package grpcio-tools), as a client in another language compiles them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import grpc

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "protos"))
pb: Any
rpc: Any
pb, rpc = grpc.protos_and_services("specdec/v1/specdec.proto")


def main() -> None:
    address, prompt = sys.argv[1:]
    with grpc.insecure_channel(address) as channel:
        service = rpc.GenerationServiceStub(channel)
        model = service.GetModel(pb.GetModelRequest())
        print(f"{model.name}, {model.topology}, at most {model.max_length} tokens", file=sys.stderr)
        sampling = pb.SamplingParams(temperature=0.8, seed=7)  # without a seed the server draws one, see Started
        request = pb.GenerateRequest(text=prompt, sampling=sampling, max_new_tokens=32)
        for response in service.Generate(request, timeout=60):
            if response.HasField("delta"):  # before the deltas comes one Started, after them one Finished
                print(response.delta.text, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
