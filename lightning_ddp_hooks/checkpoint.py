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


def training_state(step: int, hook: BoundHook | None, *, loss_scale: float = 1.0, collective: bool) -> dict[str, Any]:
    """Return what a run needs to go on; collective if a hook has state.

    Args:
        step: the training step that comes next.
        hook: the hook at work.
        loss_scale: the scale of the gradients that the hook has seen last.
        collective: False after an error, when other ranks may be anywhere: what needs them is left out then, and named
            under ``"missing"``.
    """
    state: dict[str, Any] = {"format": FORMAT, "step": step, "hook": None, "loss_scale": loss_scale, "missing": []}
    if hook is not None and collective:
        state["hook"] = hook.state_dict()
    elif hook is not None:
        state["missing"].append(f"state of communication hook {hook.name}")
    return state


def read_training_state(checkpoint: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the state in a checkpoint, checked for its form; None if it holds weights only.

    Of a run with another strategy it is the number of steps.

    Raises:
        ValueError: it is not what this version writes.
    """
    state = checkpoint.get(STATE_KEY)
    if state is None:
        return _of_another_strategy(checkpoint)
    if (
        not isinstance(state, dict)
        or not isinstance(state.get("format"), int)
        or not isinstance(state.get("step"), int)
    ):
        raise ValueError(f"The checkpoint's entry {STATE_KEY!r} is damaged: expected a dict with `format` and `step`.")
    if state["format"] < 1 or state["step"] < 0:
        raise ValueError(
            f"The checkpoint's entry {STATE_KEY!r} is damaged: found format {state['format']} and step {state['step']}."
        )
    if state["format"] > FORMAT:
        raise ValueError(
            f"The checkpoint's entry {STATE_KEY!r} has format {state['format']}; this version of lightning_ddp_hooks "
            f"reads formats up to {FORMAT}."
        )
    if not isinstance(state.get("hook"), (dict, type(None))) or not isinstance(state.get("missing", []), list):
        raise ValueError(f"The checkpoint's entry {STATE_KEY!r} is damaged: `hook` or `missing` has the wrong type.")
    scale = state.get("loss_scale", 1.0)
    if not isinstance(scale, (int, float)) or not 0 < scale < math.inf:
        raise ValueError(f"The checkpoint's entry {STATE_KEY!r} is damaged: found `loss_scale` {scale!r}.")
    return state


def _of_another_strategy(checkpoint: Mapping[str, Any]) -> dict[str, Any] | None:
    if "optimizer_states" not in checkpoint:
        return None
    step = int(checkpoint.get("global_step", 0))
    if len(checkpoint["optimizer_states"]) > 1:
        # Each optimizer's step counts there; what we count is batches.
        loop = checkpoint.get("loops", {}).get("fit_loop", {})
        step = int(loop.get("epoch_loop.batch_progress", {}).get("total", {}).get("completed", step))
    return {"format": FORMAT, "step": step, "hook": None, "missing": []}


def restore_hook(state: Mapping[str, Any], hook: BoundHook | None) -> str | None:
    """Hand a hook its state.

    Returns:
        A warning for the user if some state is not there or not used, else None.

    Raises:
        ValueError: the state does not fit the hook.
    """
    if state.get("missing"):
        return f"The checkpoint was written after an error and lacks: {', '.join(map(str, state['missing']))}."
    saved = state.get("hook")
    if hook is None:
        return "The checkpoint holds the state of a communication hook, but this run has none." if saved else None
    if saved is None:
        return None
    try:
        hook.load_state_dict(saved)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(
            f"The checkpoint's state of communication hook {hook.name} is damaged: {type(error).__name__}: {error}."
        ) from error
    return None
