"""What a user has declared, and what it sends as far as a formula tells, in a line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_ddp_hooks.averaging import DiLoCo, HierarchicalModelAverager
from lightning_ddp_hooks.averaging.averager import ModelAverager
from lightning_ddp_hooks.hooks.block_quantize import BlockQuantize
from lightning_ddp_hooks.hooks.cast import Cast
from lightning_ddp_hooks.hooks.contract import CommHook, declaration_text, hook_name
from lightning_ddp_hooks.hooks.low_rank import matrix_shape, worth_compressing
from lightning_ddp_hooks.hooks.powersgd import PowerSGD
from lightning_ddp_hooks.hooks.registry import late_starts, resolve_hook, short_name
from lightning_ddp_hooks.optim.in_hook import OptimizerInHook
from lightning_ddp_hooks.traffic import sent_by_rank


def declared(hook: CommHook | None, averager: ModelAverager | None, optimizer: object | None) -> dict[str, str | None]:
    """Return the lines that tell what the user has declared, by their label."""
    name = None if hook is None else short_name(hook)
    parts = {"hook": hook, "averager": averager, "optimizer": optimizer}
    texts = {label: None if part is None else brief(part) for label, part in parts.items()}
    return texts if name is None else {**texts, "hook": f"{name}: {texts['hook']}"}


def brief(declaration: object) -> str:
    """Describe a declaration by its values that are not the defaults; long ones in part."""
    if isinstance(declaration, (list, tuple)):
        more = f", ... ({len(declaration)} in all)" if len(declaration) > _SHOWN else ""
        return "[" + ", ".join(map(brief, declaration[:_SHOWN])) + more + "]"
    if isinstance(declaration, partial):
        # A command line makes a class into a partial of a function of its own, with the class among the arguments.
        called = next((value for value in declaration.args if isinstance(value, type)), declaration.func)
        given = [f"{name}={brief(value)}" for name, value in declaration.keywords.items()]
        return f"{hook_name(called)}({', '.join(given)})"
    if isinstance(declaration, torch.dtype) or not is_dataclass(declaration) or isinstance(declaration, type):
        return declaration_text(declaration)
    values = [(entry, getattr(declaration, entry.name, MISSING)) for entry in fields(declaration) if entry.repr]
    changed = [(entry, value) for entry, value in values if value is not MISSING and _differs(value, entry)]
    return f"{type(declaration).__name__}({', '.join(f'{entry.name}={brief(value)}' for entry, value in changed)})"


_SHOWN = 8


def _differs(value: object, entry: Field[Any]) -> bool:
    """Tell whether a value is another than its field's default; it is the user's, and may do anything when compared."""
    try:
        default = entry.default if entry.default_factory is MISSING else entry.default_factory()
        return default is MISSING or bool(value != default)
    except Exception:
        return True


def traffic_texts(
    params: Sequence[Tensor],
    ranks: int,
    hook: CommHook | None,
    averager: ModelAverager | None,
    optimizer: OptimizerInHook | None,
) -> dict[str, list[str]]:
    """Say what hook and averager send beside plain all-reduce, and what a shard holds, by label of `declared`."""
    total = sum(param.nbytes for param in params)
    plain = sent_by_rank("all_reduce", total, ranks)

    def of_plain(share: float) -> str:
        return f"{share:.2g} of plain all-reduce, {mib(share * plain)} per rank and step"

    texts: dict[str, list[str]] = {"hook": [], "averager": [], "optimizer": []}
    share = sent_share(hook, params)
    if hook is not None and share is not None:
        start = max((start for *_, start in late_starts(hook)), default=0)
        texts["hook"].append(f"{f'from step {start} on ' if start else ''}about {of_plain(share)}")
    if isinstance(averager, HierarchicalModelAverager):
        levels = averager.period_group_size_dict.items()
        texts["averager"].append(", ".join(f"every {period} steps over {size} ranks" for period, size in levels))
    elif isinstance(period := getattr(averager, "period", None), int):
        share = sent_share(resolve_hook(averager.comm_hook), params) if isinstance(averager, DiLoCo) else 1.0
        texts["averager"].append(f"every {period} steps")
        texts["averager"] += [] if share is None else [f"about {of_plain(share / period)}"]
    if optimizer is not None and optimizer.shard and ranks > 1:
        texts["optimizer"].append(f"each rank keeps the state of {mib(total / ranks)} of the parameters")
    return texts


def sent_share(hook: CommHook | None, params: Sequence[Tensor]) -> float | None:
    """Return what a hook sends of the bytes that plain all-reduce sends; None where no formula tells."""
    total = sum(param.nbytes for param in params)
    if hook is None or not total:
        return 1.0
    if isinstance(hook, Cast):
        inner = resolve_hook(hook.inner)
        share = sent_share(inner, params)
        if share is None or not (inner is None or isinstance(inner, PowerSGD)):  # others have a format of their own
            return share
        return share * sum(param.numel() * min(2, param.itemsize) for param in params) / total
    if isinstance(hook, BlockQuantize):
        return sum(param.numel() for param in params) * (1 + 4 / hook.block_size) / total
    if type(hook) is PowerSGD:
        return sum(_factors_of(param, hook) * param.itemsize for param in params) / total
    return None


def _factors_of(param: Tensor, hook: PowerSGD) -> int:
    shape = None if param.is_complex() else matrix_shape(param)
    if shape is None or not worth_compressing(*shape, hook.rank, hook.min_compression_rate):
        return param.numel()
    return sum(shape) * min(hook.rank, *shape)


def mib(count: float) -> str:
    """Write a number of bytes in MiB, or in KiB where that would be a small fraction."""
    size, unit = (count / (1 << 10), "KiB") if 0 < count < (1 << 20) / 10 else (count / (1 << 20), "MiB")
    digits = 0 if size == int(size) else 1 if size >= 10 else 2
    return f"{size:.{digits}f} {unit}"
