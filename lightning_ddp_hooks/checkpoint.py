"""State of the clock and of communication hooks, into and out of a Trainer checkpoint.

It lies under one key beside Lightning's own, and consists of tensors, str, int, float, bool, None, list and dict only:

    checkpoint["lightning_ddp_hooks"] = {"format": 1, "step": 120, "hook": {...}, "loss_scale": 1.0, "missing": []}

so that the checkpoint loads with ``weights_only=True``, and in a run with plain ``strategy="ddp"``, which ignores the
key.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lightning_ddp_hooks.hooks.contract import BoundHook

STATE_KEY = "lightning_ddp_hooks"
FORMAT = 1
_MAX_STEP = 1 << 53  # what a float can count to


def training_state(step: int, hook: BoundHook | None, *, loss_scale: float = 1.0, collective: bool) -> dict[str, Any]:
    """Return what a run needs to go on; collective if a hook has state.

    After an error, when other ranks may be anywhere, what needs them is left out, and named under ``"missing"``.
    """
    state: dict[str, Any] = {"format": FORMAT, "step": step, "hook": None, "loss_scale": loss_scale, "missing": []}
    if hook is not None and collective:
        state["hook"] = hook.state_dict()
    elif hook is not None:
        state["missing"].append(f"state of communication hook {hook.name}")
    return state


def require_trainer_checkpoint(checkpoint: object, path: str) -> None:
    """Make sure that what was read from a file was written by a Trainer."""
    if not isinstance(checkpoint, dict):
        raise ValueError(f"Expected a Trainer's checkpoint in {path!r}, found a {type(checkpoint).__name__}.")
    if not isinstance(checkpoint.get("pytorch-lightning_version"), str):  # nor would the Trainer take it
        keys = ", ".join(map(repr, list(checkpoint)[:4]))
        raise ValueError(
            f"Expected a Trainer's checkpoint in {path!r}, found a dict without 'pytorch-lightning_version' (its keys: "
            f"{keys or 'none'}{', ...' if len(checkpoint) > 4 else ''}). If these are weights alone, load them into "
            "the module: `module.load_state_dict(...)`."
        )


def progress_in(checkpoint: Mapping[str, Any]) -> str:
    """Say how far the run was that wrote a checkpoint."""
    state = checkpoint.get(STATE_KEY)
    step = state.get("step") if isinstance(state, Mapping) else None
    parts = {"epoch": checkpoint.get("epoch"), "global step": checkpoint.get("global_step"), "training step": step}
    return ", ".join(f"{name} {value}" for name, value in parts.items() if isinstance(value, int)) or "no progress"


def read_training_state(checkpoint: Mapping[str, Any], path: str | None = None) -> dict[str, Any] | None:
    """Return the state in a Trainer's checkpoint, checked for its form; None if it holds weights only.

    Of a run with another strategy it is the number of steps.
    """
    state = checkpoint.get(STATE_KEY)
    if problem := None if state is None else _problem_of(state):
        raise ValueError(f"{'' if path is None else f'{path}: '}The checkpoint's entry {STATE_KEY!r} {problem}.")
    return _of_another_strategy(checkpoint, path) if state is None else state


def _problem_of(state: Any) -> str | None:
    if not isinstance(state, dict) or not all(isinstance(state.get(name), int) for name in ("format", "step")):
        return "is damaged: expected a dict with `format` and `step`"
    form, step, scale = state["format"], state["step"], state.get("loss_scale", 1.0)
    if form < 1 or not 0 <= step <= _MAX_STEP:
        return f"is damaged: found format {form} and step {step}"
    if form > FORMAT:
        return f"has format {form}; this version of lightning_ddp_hooks reads formats up to {FORMAT}"
    if not isinstance(state.get("hook"), (dict, type(None))) or not isinstance(state.get("missing", []), list):
        return "is damaged: `hook` or `missing` has the wrong type"
    if not isinstance(scale, (int, float)) or not 0 < scale < math.inf:
        return f"is damaged: found `loss_scale` {scale!r}"
    found = state.get("overflows")
    if found is not None and not (isinstance(found, list) and [type(value) for value in found] == [float, float]):
        return f"is damaged: found `overflows` {found!r}"
    return None


def _of_another_strategy(checkpoint: Mapping[str, Any], path: str | None) -> dict[str, Any] | None:
    if "optimizer_states" not in checkpoint:
        return None
    try:
        step = int(checkpoint.get("global_step", 0))
        if len(checkpoint["optimizer_states"]) > 1:
            # Each optimizer's step counts there; what we count is batches.
            loop = checkpoint.get("loops", {}).get("fit_loop", {})
            step = int(loop.get("epoch_loop.batch_progress", {}).get("total", {}).get("completed", step))
    except (TypeError, AttributeError) as error:
        where = "" if path is None else f"{path}: "
        raise ValueError(f"{where}The checkpoint is damaged: its number of steps cannot be read ({error}).") from error
    return {"format": FORMAT, "step": step, "hook": None, "missing": []}
