"""Which of Lightning's two packages this one works with: `lightning`, or the older names of the same code.

`pytorch_lightning` and `lightning_fabric`, which many projects import, have classes of their own, which do not mix with
those of `lightning.pytorch` and `lightning.fabric`. So the modules of this package that import Lightning are compiled
with the names of the package that the program imports first; until then none of them is loaded, so that plain PyTorch
does without. The other one's Trainer says so when it is given the name of our strategy.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import re
import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

_ADAPTED = ("lightning_ddp_hooks.lightning.", "lightning_ddp_hooks._compat.of_lightning")
_PAIRS = [("pytorch_lightning", "lightning.pytorch"), ("lightning_fabric", "lightning.fabric")]
_IMPORTS = {
    "pytorch_lightning": "`import pytorch_lightning as pl`",
    "lightning.pytorch": "`import lightning.pytorch as pl`",
    "lightning_fabric": "`from lightning_fabric import Fabric`",
    "lightning.fabric": "`from lightning.fabric import Fabric`",
}


class _AdaptingLoader(SourceFileLoader):
    """Compiles a module with the older names, past the cache of compiled files."""

    def get_code(self, fullname: str) -> CodeType | None:
        source = self.get_source(fullname)
        assert source is not None
        for older, newer in _PAIRS:
            source = re.sub(rf"(?<![\w.]){re.escape(newer)}\b", older, source)
        code: CodeType = compile(source, self.path, "exec", dont_inherit=True)
        return code


class _AdaptingFinder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path) if fullname.startswith(_ADAPTED) else None
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _AdaptingLoader(fullname, spec.loader.path)
        return spec


@cache
def uses_older_names() -> bool:
    """Decide which package it is: the older names if they alone have been imported by now."""
    older = bool({"pytorch_lightning", "lightning_fabric"} & sys.modules.keys()) and "lightning" not in sys.modules
    if older:
        sys.meta_path.insert(0, _AdaptingFinder())
        # It was compiled before there was a choice.
        adapted = importlib.reload(sys.modules["lightning_ddp_hooks._compat.of_lightning"])
        compat = sys.modules["lightning_ddp_hooks._compat"]
        vars(compat).update({name: value for name, value in vars(adapted).items() if not name.startswith("_")})
    return older


def load() -> None:
    """Import the package; what waits for that, such as our strategies' names, is there afterward."""
    importlib.import_module("pytorch_lightning" if uses_older_names() else "lightning")


def refuse_in_other_package(name: str) -> None:
    """Have Trainer and Fabric of the package that is not used say which import to change; also if it comes later."""
    for older, newer in _PAIRS:
        other, used = (newer, older) if uses_older_names() else (older, newer)
        when_imported(other, _Refusal(name, other, used).register)


def when_imported(package: str, callback: Callable[[], object]) -> None:
    """Call back once a package has been imported: now, or when somebody does so."""
    if package in sys.modules:
        callback()
    else:
        sys.meta_path.insert(0, _ImportedFinder(package, callback))


class _Refusal:
    def __init__(self, name: str, other: str, used: str) -> None:
        self._name, self._other, self._used = name, other, used

    def __call__(self, **_: object) -> None:
        raise ValueError(
            f"strategy={self._name!r} works with `{self._used}` in this program: use {_IMPORTS[self._used]} instead of "
            f"{_IMPORTS[self._other]}, also for your LightningModule and callbacks; or import only `{self._other}`, "
            "and that before `lightning_ddp_hooks`."
        )

    def register(self) -> None:
        strategies = importlib.import_module(f"{self._other}.strategies")
        registry: Any = getattr(strategies, "StrategyRegistry", None) or strategies.STRATEGY_REGISTRY
        for suffix in ("", "_spawn", "_fork", "_notebook", "_find_unused_parameters_true"):
            registry.register(self._name + suffix, self, override=True)


class _ImportedFinder(importlib.abc.MetaPathFinder):
    """Calls back once a package has been imported."""

    def __init__(self, package: str, callback: Callable[[], object]) -> None:
        self.package = package
        self._callback = callback

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.package:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_call_back(module: ModuleType) -> None:
                execute(module)
                self._callback()

            spec.loader.exec_module = execute_and_call_back  # type: ignore[method-assign]
        return spec
