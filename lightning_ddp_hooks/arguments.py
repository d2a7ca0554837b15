"""What the constructors of the Trainer's and of Fabric's strategy check alike: single values, with the same words."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta

import torch

START_METHODS = ("popen", "spawn", "fork", "forkserver")


def require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Make sure that a setting is one of several names.

    Raises:
        ValueError: it is not.
    """
    if value not in choices:
        raise ValueError(f"Expected `{name}` to be one of {choices}, got {value!r}.")


def require_flag(name: str, value: object) -> None:
    """Make sure that a setting is True or False.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(value, bool):
        raise TypeError(f"Expected True or False for `{name}`, got {value!r}.")


def require_timeout(value: object) -> None:
    """Make sure that the time-out of collectives is one.

    Raises:
        TypeError: it is neither a timedelta nor None.
        ValueError: it is negative.
    """
    if value is None:
        return
    if not isinstance(value, timedelta):
        raise TypeError(f"Expected a datetime.timedelta for `timeout`, got {value!r}.")
    if value < timedelta(0):
        raise ValueError(f"Expected a `timeout` that is not negative, got {value!r}.")


def require_backend_name(value: object, known: Sequence[str]) -> None:
    """Make sure that the backend of process groups is one, or one for each kind of device (``"cpu:gloo,cuda:nccl"``).

    Raises:
        TypeError: it is neither a name nor None.
        ValueError: there is no such backend.
    """
    if value is None:
        return
    if not isinstance(value, str):
        raise TypeError(f"Expected a name such as 'gloo' for `process_group_backend`, got {value!r}.")
    parts = [part.rpartition(":") for part in value.split(",")]
    if any(name.lower() not in known for *_, name in parts):
        raise ValueError(
            f"Expected a backend of torch.distributed for `process_group_backend`, got {value!r}; known are "
            f"{', '.join(known)}. One of your own has to be registered first."
        )
    devices = [device for device, colon, _ in parts if colon]
    if len(devices) < len(parts) > 1 or len(set(devices)) < len(devices) or not all(map(_is_device, devices)):
        raise ValueError(
            "Expected `process_group_backend` to name a backend, or one for each kind of device, as in "
            f"'cpu:gloo,cuda:nccl', got {value!r}."
        )


def _is_device(name: str) -> bool:
    try:
        return torch.device(name).index is None
    except RuntimeError:
        return False


def require_failure_timeout(value: object) -> None:
    """Make sure that the time after which a silent rank is given up is one.

    Raises:
        TypeError: it is neither a number nor None.
        ValueError: it is not positive, or longer than threads can wait.
    """
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"Expected a number of seconds or None for `failure_timeout`, got {value!r}.")
    if not 0 < value <= threading.TIMEOUT_MAX:
        raise ValueError(
            f"Expected a positive number of seconds for `failure_timeout`, or None for no reports, got {value!r}."
        )


def require_check_interval(value: object) -> None:
    """Make sure that the number of steps between two comparisons of the ranks is one.

    Raises:
        TypeError: it is neither a whole number nor None.
        ValueError: it is negative.
    """
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"Expected a number of steps or None for `check_replicas_every_n_steps`, got {value!r}.")
    if value < 0:
        raise ValueError(
            f"Expected 0 (never), a number of steps, or None for `check_replicas_every_n_steps`, got {value}."
        )
