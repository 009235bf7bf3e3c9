"""A model hub on this machine: the part of the Hugging Face Hub's API that the package huggingface_hub calls."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response

from specdec.inference.serving.processes import free_port

COMMIT = "1" * 40
TOKEN = "hf_test"


class FakeHub:
    """A model hub on this machine, whose repositories have one commit each, on the branch `main`.

    Attributes:
        models: directory of each model, by its id (OWNER/NAME).
        gated: ids of models that are served only to requests with the access token TOKEN.
        requests: method and path of every request so far.
    """

    def __init__(self, models: dict[str, Path], *, gated: frozenset[str] = frozenset()) -> None:
        self.models = models
        self.gated = gated
        self.requests: list[tuple[str, str]] = []
        self.url = ""

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.get("/api/models/{owner}/{name}/revision/{revision}")
        async def info(owner: str, name: str, revision: str, request: Request) -> Response:
            model_id = f"{owner}/{name}"
            if (refusal := self._refusal(model_id, revision, request)) is not None:
                return refusal
            siblings = [{"rfilename": path.name} for path in self._files(model_id)]
            return JSONResponse({"id": model_id, "modelId": model_id, "sha": COMMIT, "siblings": siblings})

        @app.get("/api/models/{owner}/{name}/tree/{revision}")
        async def tree(owner: str, name: str, revision: str, request: Request) -> Response:
            model_id = f"{owner}/{name}"
            if (refusal := self._refusal(model_id, revision, request)) is not None:
                return refusal
            return JSONResponse([_entry(path) for path in self._files(model_id)])

        @app.api_route("/{owner}/{name}/resolve/{revision}/{file}", methods=["GET", "HEAD"])
        async def resolve(owner: str, name: str, revision: str, file: str, request: Request) -> Response:
            model_id = f"{owner}/{name}"
            if (refusal := self._refusal(model_id, revision, request)) is not None:
                return refusal
            path = self.models[model_id] / file
            return FileResponse(path, headers={"ETag": f'"{_digest(path)}"', "X-Repo-Commit": COMMIT})

        return app

    def _files(self, model_id: str) -> list[Path]:
        return sorted(path for path in self.models[model_id].iterdir() if path.is_file())

    def _refusal(self, model_id: str, revision: str, request: Request) -> Response | None:
        self.requests.append((request.method, request.url.path))
        if model_id not in self.models:
            return _refused(401, "RepoNotFound")
        if model_id in self.gated and request.headers.get("authorization") != f"Bearer {TOKEN}":
            return _refused(403, "GatedRepo")
        return None if revision in ("main", COMMIT) else _refused(404, "RevisionNotFound")


def _refused(status: int, code: str) -> Response:
    return JSONResponse({"error": code}, status_code=status, headers={"X-Error-Code": code, "X-Error-Message": code})


def _digest(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


def _entry(path: Path) -> dict[str, Any]:
    return {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": _digest(path)}


@asynccontextmanager
async def running_hub(hub: FakeHub) -> AsyncGenerator[FakeHub, None]:
    """Run the hub, at `hub.url`, until the block ends."""
    port = free_port()
    config = uvicorn.Config(hub.app(), port=port, log_config=None, access_log=False, lifespan="off")
    server = uvicorn.Server(config)
    task = asyncio.create_task(server._serve())  # not `serve`, which would take over the tests' signals
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.01)
    hub.url = f"http://127.0.0.1:{port}"
    try:
        yield hub
    finally:
        server.should_exit = True
        await task
