"""The settings are declared once: the constructors that take them have the same names, defaults and types."""

import dataclasses
import inspect
from typing import Any

import pytest

from lightning_ddp_hooks import DDPHooksStrategy, DistributedDataParallel, FabricDDPHooksStrategy
from lightning_ddp_hooks.config import Settings, settings_of

TAKERS = [DDPHooksStrategy, FabricDDPHooksStrategy, DistributedDataParallel]
TORCHS = {"process_group", "init_sync", "device_mesh", "forward_sync_buffers", "check_reduction", "batched_grad_copy"}
TORCHS |= {"skip_all_reduce_unused_params", "bucket_cap_mb_list", "delay_all_reduce_named_params"}
TORCHS |= {"param_to_hook_all_reduce", "mixed_precision"}
LIGHTNINGS = {"ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper", "model_averaging_period"}


def own_arguments(taker: type) -> dict[str, tuple[Any, Any]]:
    """Return default and annotation of each argument that is a setting."""
    parameters = inspect.signature(taker).parameters
    return {
        name: (parameter.default, parameter.annotation)
        for name, parameter in parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and name not in LIGHTNINGS | TORCHS
    }


@pytest.mark.parametrize("taker", TAKERS)
def test_a_constructor_has_the_names_defaults_and_types_of_the_settings(taker: type) -> None:
    declared = {entry.name: (entry.default, entry.type) for entry in dataclasses.fields(Settings)}
    declared["averager"] = (None, "AveragerLike | None")  # a name, too, until the settings are made

    assert own_arguments(taker) == {name: declared[name] for name in settings_of(taker.__name__)}


@pytest.mark.parametrize("taker", TAKERS)
def test_every_setting_of_a_constructor_is_documented(taker: type) -> None:
    text = inspect.getdoc(taker)
    assert text is not None
    for name in settings_of(taker.__name__):
        assert f"\n    {name}: " in text, name


def test_every_setting_is_taken_by_the_trainers_strategy() -> None:
    assert settings_of("DDPHooksStrategy") == [entry.name for entry in dataclasses.fields(Settings)]
