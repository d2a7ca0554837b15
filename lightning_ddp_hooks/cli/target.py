"""The module that the command line asks about: from a class path or a CLI configuration to objects."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, seed_everything

# What of a configuration's `trainer` section changes the time of a step; the rest is ours to choose.
_TAKEN_OVER = ("precision", "accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm")


@dataclass(frozen=True)
class Target:
    """How to make the module and its data, afresh each time."""

    make: Callable[[], tuple[LightningModule, Any]]  # data: a LightningDataModule, a DataLoader, or None for its own
    trainer: dict[str, Any] = field(default_factory=dict)  # arguments for the Trainer, from the configuration
    name: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that name a module."""
    group = parser.add_argument_group("what is trained")
    group.add_argument("--model", metavar="PKG.MODULE",
                       help="class path of the LightningModule, or of a function that makes one")  # fmt: skip
    group.add_argument("--data", metavar="PKG.DATA", help="class path of the LightningDataModule; without it the "
                       "module's own train_dataloader is used")  # fmt: skip
    group.add_argument("--config", type=Path, action="append", default=[], metavar="YAML",
                       help="configuration of a LightningCLI: its `model` and `data`, and of `trainer`: "
                       f"{', '.join(_TAKEN_OVER)}; of several, later ones change earlier ones")  # fmt: skip
    group.add_argument("--batch", metavar="PKG.FUNCTION", help="function that makes one batch, which each step is then "
                       "given, instead of loading data")  # fmt: skip


def load_target(args: argparse.Namespace) -> Target:
    """Find what the options name; a ValueError says what to do where something cannot be found or made."""
    config: dict[str, Any] = {}
    for path in args.config:
        config = _merged(config, _read(path))
    model_class, data_class, batch = (
        None if getattr(args, option) is None else _find(getattr(args, option), f"--{option}")
        for option in ("model", "data", "batch")
    )
    if model_class is None and "class_path" not in (config.get("model") or {}):
        raise ValueError(
            "Name the LightningModule: --model pkg.Module, or a --config whose `model` has a class_path. The "
            "configuration of a LightningCLI with fixed classes needs --model and --data beside it."
        )
    if data_class is not None and batch is not None:
        raise ValueError("Set --data or --batch, not both.")

    def make() -> tuple[LightningModule, Any]:
        seed_everything(0, verbose=False)
        module = make_object(model_class, config.get("model"), "model", LightningModule)
        if not isinstance(module, LightningModule):
            raise ValueError(f"Expected a LightningModule from --model, got a {type(module).__name__}.")
        data: Any = None
        if batch is not None:
            data = torch.utils.data.DataLoader(_Repeated(batch()), batch_size=None)
        elif data_class is not None or config.get("data"):
            data = make_object(data_class, config.get("data"), "data", LightningDataModule)
        return module, data

    taken = {key: value for key in _TAKEN_OVER if (value := (config.get("trainer") or {}).get(key)) is not None}
    name = args.model or config["model"]["class_path"]
    return Target(make, taken, name)


class _Repeated(torch.utils.data.IterableDataset[Any]):
    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self._batch


def _find(path: str, option: str) -> Any:
    """Import what a dotted path names."""
    module_name, _, name = path.replace(":", ".").rpartition(".")
    if not module_name:
        raise ValueError(f"Expected {option} as pkg.module.Name, got {path!r}.")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"{option} {path}: cannot import {module_name!r} ({error}). The search begins in the working directory."
        ) from error
    if not hasattr(module, name):
        raise ValueError(f"{option} {path}: {module_name!r} has no {name!r}.")
    return getattr(module, name)


def _read(path: Path) -> dict[str, Any]:
    import yaml  # type: ignore[import-untyped]

    try:
        config = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"--config {path}: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"--config {path}: expected a mapping with `model`, got {type(config).__name__}.")
    return config.get("fit", config)  # type: ignore[no-any-return]


def _merged(config: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    """Lay one configuration over another; arguments of another class are not kept."""
    if "class_path" in later and later["class_path"] != config.get("class_path"):
        return later
    both = {key: _merged(config[key], value) for key, value in later.items()
            if isinstance(value, dict) and isinstance(config.get(key), dict)}  # fmt: skip
    return {**config, **later, **both}


def make_object(maker: Any, section: Any, key: str, base: type) -> Any:
    """Make an object from a class (or function) and the section of a configuration that is about it.

    The section ``key`` holds arguments, or names a subclass of ``base`` by ``class_path`` and ``init_args``, as it must
    where ``maker`` is None. A ValueError says what to do where the object cannot be made.
    """
    section = dict(section or {})
    if maker is not None and not section:
        try:
            return maker()
        except TypeError as error:
            raise ValueError(
                f"{maker.__name__} cannot be made without arguments ({error}): give them in the `{key}` section of a "
                "--config, or name a function without arguments that makes it."
            ) from error
    try:
        from jsonargparse import ArgumentParser
    except ImportError as error:
        raise ValueError("--config needs jsonargparse: pip install 'jsonargparse[signatures]'.") from error
    parser = ArgumentParser(exit_on_error=False)
    if maker is None or "class_path" in section:
        parser.add_subclass_arguments(base, key, fail_untyped=False)
    else:
        parser.add_class_arguments(maker, key, fail_untyped=False)
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes  # the older name
    try:
        return instantiate(parser.parse_object({key: section}))[key]
    except Exception as error:  # jsonargparse raises several kinds
        raise ValueError(f"The `{key}` section of the configuration cannot be used: {error}") from error
