"""`DistributedDataParallel` in the place of torch's: its arguments, and the names of it that other packages use."""

import inspect
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import lightning_ddp_hooks as ldh
from lightning_ddp_hooks import DistributedDataParallel

HARMLESS: dict[str, Any] = {
    "device_ids": None,
    "output_device": None,
    "dim": 0,
    "broadcast_buffers": True,
    "init_sync": True,
    "process_group": None,
    "bucket_cap_mb": None,
    "find_unused_parameters": True,
    "check_reduction": True,
    "gradient_as_bucket_view": False,
    "static_graph": False,
    "delay_all_reduce_named_params": None,
    "param_to_hook_all_reduce": None,
    "mixed_precision": None,
    "device_mesh": None,
    "skip_all_reduce_unused_params": True,
    "bucket_cap_mb_list": None,
    "batched_grad_copy": True,
    "forward_sync_buffers": True,
}


def test_it_has_the_arguments_of_torch() -> None:
    theirs, ours = (list(inspect.signature(cls).parameters) for cls in (TorchDDP, DistributedDataParallel))
    assert set(theirs) <= set(ours)
    assert set(theirs) <= {"module", *HARMLESS}
    assert theirs[:4] == ours[:4]  # by position, too
    assert ldh.DataParallel is DistributedDataParallel
    assert DistributedDataParallel.__name__ == TorchDDP.__name__


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"device_ids": [0]}, ValueError, "`device_ids` to name the one device of the module, got .0. .* on cpu"),
        ({"device_ids": 0}, TypeError, "a list with one device for `device_ids`"),
        ({"output_device": 0}, ValueError, "`output_device` to name the one device"),
        ({"device_ids": ["cpu"]}, ValueError, "on the CPU and on several devices leave the argument out"),
        ({"dim": 1}, ValueError, "`dim` to be 0"),
        ({"init_sync": None}, TypeError, "True or False for `init_sync`"),
        ({"forward_sync_buffers": 1}, TypeError, "True, False or None for `forward_sync_buffers`, got 1"),
        (
            {"mixed_precision": object()},
            TypeError,
            "Leave out `mixed_precision`: run the forward under `torch.autocast`",
        ),
        ({"bucket_cap_mb_list": [1, 2]}, TypeError, "set `bucket_cap_mb` and `first_bucket_mb`"),
        ({"delay_all_reduce_named_params": []}, TypeError, "Leave out `delay_all_reduce_named_params`: buckets"),
        ({"param_to_hook_all_reduce": 1}, TypeError, "Leave out `param_to_hook_all_reduce`: buckets"),
        ({"device_id": 0}, TypeError, "unexpected keyword argument 'device_id'"),
    ],
)
def test_what_cannot_be_taken_raises_and_says_what_to_do(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        DistributedDataParallel(nn.Linear(1, 1), **arguments)


def test_a_device_is_named_by_number_name_or_object() -> None:
    from lightning_ddp_hooks.torch_arguments import device_named

    module = nn.Linear(1, 1, device="meta")
    device = torch.device("meta")
    assert device_named(module, None, None) is None
    assert device_named(module, [], None) is None
    assert device_named(module, ["meta"], None) == device
    assert device_named(module, [device], device) == device
    with pytest.raises(ValueError, match="`output_device`"):
        device_named(module, ["meta"], 1)


# ---------------------------------------------------------------------- on ranks


class Buffered(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), 1.0 + rank))
        self.register_buffer("total", torch.full((1,), float(rank)))
        self.total: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum() + self.total.sum()


def train(model: Any) -> tuple[float, float, float]:
    module, rank = model.module, dist.get_rank()
    for step in range(3):
        module.total += rank
        model.zero_grad()
        model(torch.full((1,), 1.0 + rank + step)).backward()
    return module.weight.item(), module.weight.grad.item(), module.total.item()


SETTINGS: tuple[dict[str, Any], ...] = (
    HARMLESS,
    {},
    {"init_sync": False},
    {"forward_sync_buffers": False},
    {"broadcast_buffers": False},
    {"broadcast_buffers": False, "forward_sync_buffers": True},
)


@pytest.mark.filterwarnings("ignore")
def train_both() -> list[tuple[Any, Any]]:
    import warnings

    warnings.simplefilter("ignore")
    rank = dist.get_rank()
    known = inspect.signature(TorchDDP).parameters
    pairs = []
    for settings in SETTINGS:
        theirs = {name: value for name, value in settings.items() if name in known}
        if len(theirs) == len(settings):
            pairs.append(
                (train(DistributedDataParallel(Buffered(rank), **settings)), train(TorchDDP(Buffered(rank), **theirs)))
            )
    return pairs


@pytest.mark.ranks
def test_settings_give_what_they_give_in_torch() -> None:
    for pairs in run_ranks(train_both):
        assert len(pairs) > 2
        for ours, theirs in pairs:
            assert ours == theirs


def use_names() -> dict[str, Any]:
    rank = dist.get_rank()
    module: Any = nn.Linear(2, 1, bias=False)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["bias"])
    model: Any = DistributedDataParallel(module, find_unused_parameters=True)
    model.register_comm_hook(None, ldh.hooks.allreduce_hook)
    model._set_static_graph()
    model._set_static_graph()
    facts = {"static": (model.static_graph, model.find_unused_parameters, model.reducer.config.static_graph)}
    gradients = []
    for micro in range(4):  # as loops do that set the attribute instead of entering `no_sync`
        model.require_backward_grad_sync = micro % 2 == 1
        model(torch.full((1, 2), 1.0 + rank)).sum().backward()
        gradients.append(module.weight.grad[0, 0].item())
        if micro == 1:
            model.zero_grad()
    with model.no_sync():
        inside = model.require_backward_grad_sync
    with torch.no_grad():
        module.weight.fill_(rank)
    model._sync_params_and_buffers(1)
    data = model._get_ddp_logging_data()
    return {
        **facts,
        "gradients": gradients,
        "no_sync": (inside, model.require_backward_grad_sync),
        "forward": model.require_forward_param_sync,
        "synced": module.weight.tolist(),
        "types": {type(value) for value in data.values()},
        "data": {name: data[name] for name in ("world_size", "rank", "module_name", "static_graph", "bucket_sizes")},
        "read": (model.device, model.device_ids, model.output_device, model.dim, model.gradient_as_bucket_view),
        "group": dist.get_world_size(model.process_group),
        "missing": hasattr(model, "no_such_name"),
    }


@pytest.mark.ranks
def test_names_that_other_packages_use_are_answered() -> None:
    for rank, found in enumerate(run_ranks(use_names)):
        assert found["static"] == (True, False, True)
        assert found["gradients"] == [1.0 + rank, 3.0, 1.0 + rank, 3.0]
        assert found["no_sync"] == (False, True)
        assert found["forward"] is True
        assert found["synced"] == [[1.0, 1.0]]
        assert found["types"] == {str, int}
        expected = {"world_size": 2, "rank": rank, "module_name": "Linear", "static_graph": 1, "bucket_sizes": "8"}
        assert found["data"] == expected
        assert found["read"] == (torch.device("cpu"), None, None, 0, True)
        assert found["group"] == 2
        assert found["missing"] is False


def set_too_late() -> str:
    model: Any = DistributedDataParallel(nn.Linear(1, 1))
    model(torch.ones(1, 1)).sum().backward()
    with pytest.raises(RuntimeError) as caught:
        model._set_static_graph()
    return str(caught.value)


def wrap_groups() -> list[int]:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    group = dist.new_group([0, 1])
    models: list[Any] = [
        DistributedDataParallel(nn.Linear(1, 1), group),  # type: ignore[arg-type]
        DistributedDataParallel(nn.Linear(1, 1), process_group=group),
        DistributedDataParallel(nn.Linear(1, 1), device_mesh=mesh["dp"]),
    ]
    with pytest.raises(ValueError, match="one dimension"):
        DistributedDataParallel(nn.Linear(1, 1), device_mesh=mesh)
    with pytest.raises(TypeError, match="a DeviceMesh of one dimension"):
        DistributedDataParallel(nn.Linear(1, 1), device_mesh=[0, 1])
    with pytest.raises(ValueError, match="not both"):
        DistributedDataParallel(nn.Linear(1, 1), process_group=group, device_mesh=mesh["dp"])
    return [dist.get_world_size(model.process_group) for model in models]


@pytest.mark.ranks
def test_ranks_are_named_by_group_or_mesh_and_static_graph_comes_in_time() -> None:
    assert run_ranks(wrap_groups) == [[2, 2, 2]] * 2
    assert "before the first backward" in run_ranks(set_too_late)[0]


ALONE = """
import sys
from lightning_ddp_hooks import DataParallel, DistributedDataParallel, hooks
unwanted = {"lightning", "pytorch_lightning", "lightning_fabric", "torchmetrics", "torch.distributed.fsdp"}
assert not unwanted & set(sys.modules), "loaded"
import lightning.pytorch
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry
import lightning_ddp_hooks as ldh
assert StrategyRegistry["ddp_hooks"]["strategy"] is ldh.DDPHooksStrategy
assert STRATEGY_REGISTRY["ddp_hooks"]["strategy"] is ldh.FabricDDPHooksStrategy
assert ldh.callbacks.UnevenInputs and ldh.fsdp.apply
"""


def test_plain_pytorch_loads_neither_lightning_nor_fsdp_and_names_are_registered_once_it_is() -> None:
    subprocess.run([sys.executable, "-c", ALONE], check=True, timeout=120)
