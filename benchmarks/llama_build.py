"""llama.cpp's programs, built from the sources inside the source package of llama-cpp-python."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

PACKAGE = "llama-cpp-python==0.3.36"
PROGRAMS = ("llama-speculative-simple", "llama-completion")
SERVER = ("llama-server",)
OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",  # for this very processor, as ONNX Runtime chooses its kernels
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",  # a download; nobody looks at its page
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_OPENSSL=OFF",
)


def built_programs(folder: Path, names: Sequence[str] = PROGRAMS) -> dict[str, Path]:
    """Return the programs by name; download and build them in `folder` if they are not there (some ten minutes)."""
    programs = {name: folder / "out" / "bin" / name for name in names}
    if not all(program.exists() for program in programs.values()):
        _build(_sources(folder), folder / "out", names)
    return programs


def _sources(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if not any(folder.glob("llama_cpp_python-*.tar.gz")):
        download = ["pip", "download", "--no-deps", "--no-binary", "llama-cpp-python", PACKAGE]
        subprocess.run([sys.executable, "-m", *download, "--dest", str(folder)], check=True)
    [archive] = folder.glob("llama_cpp_python-*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz") / "vendor" / "llama.cpp"


def _build(sources: Path, out: Path, names: Sequence[str]) -> None:
    subprocess.run(["cmake", "-S", str(sources), "-B", str(out), *OPTIONS], check=True)
    subprocess.run(["cmake", "--build", str(out), "--parallel", "2", "--target", *names], check=True)
