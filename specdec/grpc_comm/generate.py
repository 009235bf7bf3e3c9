"""Generator of grpc_comm/specdec/v1 from protos/: `python -m specdec.grpc_comm.generate` (or `make proto`).

The committed stubs must import under protobuf 5, 6 and 7, and only old generators write such stubs, so the tools are
pinned to 1.66.2 and run in a virtual environment of their own under build/.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOOLS = "grpcio-tools==1.66.2"
PROTO = "protos/specdec/v1/specdec.proto"
# -Ialias=dir makes protoc believe that the file lies in specdec/grpc_comm/: the stubs import each other from there.
ARGUMENTS = ["-Ispecdec/grpc_comm=protos", "--python_out=.", "--pyi_out=.", "--grpc_python_out=.", PROTO]


def tools_python() -> Path:
    """Return the Python of the tools' environment, which is made on first use."""
    home = ROOT / "build" / "protoc"
    python = home / "bin" / "python"
    if not python.exists():
        venv.create(home, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", TOOLS, "setuptools<81"], check=True)
    return python


def main() -> int:
    command = [str(tools_python()), "-m", "grpc_tools.protoc", *ARGUMENTS]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
