"""llama.cpp's server, built from the sources inside the source package of llama-cpp-python."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

PACKAGE = "llama-cpp-python==0.3.36"
SERVER = "llama-server"
OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",  # for this very processor, as ONNX Runtime chooses its kernels
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",  # it is a download, and its page is not used
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_OPENSSL=OFF",
)


def built_server(folder: Path) -> Path:
    """Return the program; download and build it in `folder` if it is not there (some ten minutes)."""
    server = folder / "out" / "bin" / SERVER
    if not server.exists():
        _build(_sources(folder), folder / "out")
    return server


def _sources(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if not any(folder.glob("llama_cpp_python-*.tar.gz")):
        download = ["pip", "download", "--no-deps", "--no-binary", "llama-cpp-python", PACKAGE]
        subprocess.run([sys.executable, "-m", *download, "--dest", str(folder)], check=True)
    [archive] = folder.glob("llama_cpp_python-*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz") / "vendor" / "llama.cpp"


def _build(sources: Path, out: Path) -> None:
    subprocess.run(["cmake", "-S", str(sources), "-B", str(out), *OPTIONS], check=True)
    subprocess.run(["cmake", "--build", str(out), "--parallel", "2", "--target", SERVER], check=True)
