"""Compiles the native engine once for each torch, keeps the result, and loads it from there in milliseconds.

    <cache>/lightning_ddp_hooks/native-<torch version>-<python>-<digest of the sources>/ldh_native.so

Run as a program with a directory it compiles into that directory, and without one it does what `build` does, at the
lowest priority: so a run that has found no library leaves one to the next.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType

import torch

_NAME = "ldh_native"
_HERE = Path(__file__).resolve().parent
_FLAGS = ["-O3"]
_FAILED = "failed"
_BUILD_SECONDS = 1800  # longer than it takes
_begun: list[subprocess.Popen[bytes]] = []  # they outlive this process, and nobody waits for them


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


def start_build() -> bool:
    """Have another process build the engine for later runs; return whether one does, in this moment.

    It is begun once on a host, at the lowest priority and on one core. If it fails, it is not tried again; the reason
    lies in ``failed`` beside where the engine would be. ``DDP_HOOKS_BUILD=never`` in the environment prevents it.
    """
    folder = library_path().parent
    compiler = os.environ.get("CXX", "c++")
    if os.environ.get("DDP_HOOKS_BUILD") == "never" or (folder / _FAILED).exists() or not shutil.which(compiler):
        return False
    begun = folder / "begun"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if begun.exists() and time.time() - begun.stat().st_mtime > _BUILD_SECONDS:
            begun.unlink(missing_ok=True)  # it was killed
        with begun.open("x"):
            pass
        _begun.append(
            subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, "MAX_JOBS": "1"},
            )
        )
    except FileExistsError:
        return True
    except OSError:
        return False
    return True


def _build_later() -> None:
    folder = library_path().parent
    try:
        build()
    except RuntimeError as error:
        (folder / _FAILED).write_text(str(error))
    finally:
        (folder / "begun").unlink(missing_ok=True)


def _compile_to(target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as directory:
        ran = subprocess.run([sys.executable, str(_HERE / "build.py"), directory], capture_output=True, text=True)
        if ran.returncode:
            raise RuntimeError(
                "The native reducer could not be built. It needs a C++ compiler (g++ or clang); "
                f"`reducer_backend='python'` needs none. The builder said:\n{(ran.stderr or ran.stdout).strip()}"
            )
        # Whoever finds the file finds all of it.
        (Path(directory) / target.name).replace(target)
        (target.parent / _FAILED).unlink(missing_ok=True)


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
    """Compile with torch's builder, in this process: with ninja where it is there, else file after file."""
    # Programs of a virtual environment that is not activated, such as a ninja from pip, are beside its Python.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    from setuptools import Distribution  # type: ignore[import-untyped]
    from torch.utils.cpp_extension import BuildExtension, CppExtension, is_ninja_available

    extension = CppExtension(_NAME, [str(path) for path in _sources()], extra_compile_args=_FLAGS)
    command = BuildExtension(
        Distribution({"name": _NAME, "ext_modules": [extension]}),
        no_python_abi_suffix=True,
        use_ninja=is_ninja_available(),
    )
    command.build_lib = directory
    command.build_temp = str(Path(directory) / "objects")
    command.ensure_finalized()
    command.run()


if __name__ == "__main__":
    if len(sys.argv) == 1:
        if hasattr(os, "nice"):
            os.nice(19)
        _build_later()
    else:
        try:
            _compile(sys.argv[1])
        except Exception as error:
            sys.exit(str(error))
