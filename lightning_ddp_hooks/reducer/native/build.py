"""Compiles the native engine once for each torch, keeps the result, and loads it from there in milliseconds.

    <cache>/lightning_ddp_hooks/native-<torch version>-<python>-<digest of the sources>/ldh_native.so

Run as a program with a directory it compiles into that directory; that is how `build` does it, since torch's builder
imports what it has built, under a name that it changes from one build to the next.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType

import torch

_NAME = "ldh_native"
_HERE = Path(__file__).resolve().parent
_FLAGS = ["-O3"]


def library_path() -> Path:
    """Return where the compiled engine for this torch and these sources lies, or would lie.

    The cache is ``$TORCH_EXTENSIONS_DIR``, or ``$XDG_CACHE_HOME``, or ``~/.cache``.
    """
    variables = (os.environ.get(name) for name in ("TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME"))
    root = next((Path(value) for value in variables if value), Path.home() / ".cache")
    return root / "lightning_ddp_hooks" / _build_name() / f"{_NAME}.so"


@cache
def _build_name() -> str:
    digest = hashlib.sha256(" ".join(_FLAGS).encode())
    for path in sorted([*_sources(), *_HERE.rglob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    # Two builds of one torch version may differ inside (a nightly, a build from source); their commits tell.
    digest.update(str(torch.version.git_version).encode())
    python = sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag
    return f"native-{torch.__version__}-{python}-{digest.hexdigest()[:16]}"


def _sources() -> list[Path]:
    here = _HERE.rglob("*.cpp")
    return sorted(path for path in here if path.parent.name != "shm" or sys.platform == "linux")


def is_built() -> bool:
    """Tell whether `load` would find a compiled engine."""
    return library_path().exists()


def load() -> ModuleType:
    """Import the compiled engine."""
    return _load(library_path())


@cache
def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(_NAME, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build() -> Path:
    """Compile the engine unless it is compiled already; of several processes on a node one does, the others wait."""
    target = library_path()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent / "lock"):
            if not target.exists():
                _compile_to(target)
    except OSError as error:
        raise RuntimeError(
            f"The native reducer cannot be built in {target.parent} ({error}); set TORCH_EXTENSIONS_DIR to a directory "
            "that can be written to."
        ) from error
    return target


def _compile_to(target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as directory:
        ran = subprocess.run([sys.executable, str(_HERE / "build.py"), directory], capture_output=True, text=True)
        if ran.returncode:
            raise RuntimeError(
                "The native reducer could not be built. It needs a C++ compiler (g++ or clang) and ninja "
                f"(pip install ninja); `reducer_backend='python'` needs neither. The builder said:\n"
                f"{(ran.stderr or ran.stdout).strip()}"
            )
        # Whoever finds the file finds all of it.
        (Path(directory) / target.name).replace(target)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock between processes, which a process that dies gives up."""
    try:
        import fcntl
    except ImportError:  # Windows: two builds at once waste time and do no harm
        yield
        return
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(directory: str) -> None:
    """Compile with torch's builder, in this process."""
    # Programs of a virtual environment that is not activated, such as a ninja from pip, are beside its Python.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    from torch.utils import cpp_extension

    cpp_extension.load(
        _NAME,
        [str(path) for path in _sources()],
        extra_cflags=_FLAGS,
        build_directory=directory,
        with_cuda=False,
    )


if __name__ == "__main__":
    try:
        _compile(sys.argv[1])
    except Exception as error:
        sys.exit(str(error))
