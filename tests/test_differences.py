"""What torch's DDP takes and ours refuses raises, as `docs/migrate.md` says, row by row."""

import copy
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.distributed.device_mesh import init_device_mesh

from lightning_ddp_hooks import DistributedDataParallel as DDP
from lightning_ddp_hooks.averaging import HierarchicalModelAverager
from lightning_ddp_hooks.hooks import PowerSGDState, batched_powersgd_hook, powersgd_hook

DOCS = Path(__file__).resolve().parent.parent / "docs" / "migrate.md"


def refuses(error: type[Exception], message: str, act: Callable[[], object]) -> None:
    with pytest.raises(error, match=message):
        act()


def step(model: nn.Module, **settings: Any) -> None:
    model(torch.ones(1, 2)).sum().backward(**settings)


def create_graph() -> None:
    model = DDP(nn.Linear(2, 2))
    refuses(RuntimeError, r"torch.autograd.grad.*no_sync", lambda: step(model, create_graph=True))


def copies() -> None:
    model = DDP(nn.Linear(2, 2))
    for act in (pickle.dumps, copy.copy, copy.deepcopy):
        refuses(TypeError, "save its `.module`", lambda act=act: act(model))


def wrapped_twice() -> None:
    module = nn.Linear(2, 2)
    model = DDP(module)
    for again in (module, nn.Sequential(module, nn.Linear(2, 2))):
        refuses(ValueError, "reduced already", lambda again=again: DDP(again))
    model.detach()
    DDP(module)


def mixed_precision() -> None:
    refuses(TypeError, "torch.autocast", lambda: DDP(nn.Linear(2, 2), mixed_precision=object()))


def layouts_by_hand() -> None:
    for name in ("delay_all_reduce_named_params", "param_to_hook_all_reduce"):
        refuses(TypeError, "order in which gradients come", lambda name=name: DDP(nn.Linear(2, 2), **{name: []}))
    refuses(TypeError, "bucket_cap_mb", lambda: DDP(nn.Linear(2, 2), bucket_cap_mb_list=[1]))


def unused_and_static() -> None:
    settings = {"find_unused_parameters": True, "static_graph": True}
    refuses(ValueError, "static_graph", lambda: DDP(nn.Linear(2, 2), **settings))
    model = DDP(nn.Linear(2, 2), find_unused_parameters=True)
    model._set_static_graph()
    assert model.static_graph
    assert not model.find_unused_parameters


def mesh() -> None:
    group = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))["dp"]
    assert DDP(nn.Linear(2, 2), device_mesh=group).process_group is group.get_group()


def one_state_for_two_hooks() -> None:
    hooks = (powersgd_hook, batched_powersgd_hook)
    for first, second in (hooks, hooks[::-1]):
        state = PowerSGDState(None, start_powerSGD_iter=0)
        models = DDP(nn.Linear(2, 2)), DDP(nn.Linear(2, 2))
        models[0].register_comm_hook(state, first)
        models[1].register_comm_hook(state, second)
        step(models[0])
        refuses(RuntimeError, "make one for each hook", lambda models=models: step(models[1]))
        step(models[0])


def equal_sizes() -> None:
    refuses(ValueError, "must increase", lambda: HierarchicalModelAverager(period_group_size_dict={2: 2, 4: 2}))


def unknown_group() -> None:
    group = dist.ProcessGroup(dist.HashStore(), 0, 1)
    refuses(ValueError, "torch.distributed.new_group", lambda: DDP(nn.Linear(2, 2), process_group=group))


def torchs_join() -> None:
    model = DDP(nn.Linear(2, 2))
    refuses(TypeError, r"`model.join\(\)`", lambda: TorchJoin([model]))


ROWS = {
    "`backward(create_graph=True)` through the wrapper": create_graph,
    "a pickle or a deep copy of the wrapper": copies,
    "a module wrapped twice at a time, or two wrappers that share parameters": wrapped_twice,
    "`mixed_precision`": mixed_precision,
    "`delay_all_reduce_named_params`, `param_to_hook_all_reduce`, `bucket_cap_mb_list`": layouts_by_hand,
    "`find_unused_parameters=True` with `static_graph=True`": unused_and_static,
    "`device_mesh` of one dimension beside others of tensor parallelism": mesh,
    "one `PowerSGDState` for `powersgd_hook` and `batched_powersgd_hook`": one_state_for_two_hooks,
    "two periods for groups of one size in `HierarchicalModelAverager`": equal_sizes,
    "a process group that `torch.distributed` has no record of": unknown_group,
    "`torch.distributed.algorithms.join.Join([wrapper])`": torchs_join,
}


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.trunk(x)
        return self.a(h), self.b(h)


def two_backwards(**settings: Any) -> None:
    model = DDP(TwoOutputs(), **settings)
    for number, output in enumerate(model(torch.ones(1, 2))):
        output.sum().backward(retain_graph=not number)


def walk() -> None:
    for row in ROWS.values():
        row()
    two_backwards()
    refuses(RuntimeError, "static_graph", lambda: two_backwards(static_graph=True))
    model = DDP(nn.Identity())
    assert model(torch.ones(1)).item() == 1
    assert not isinstance(model, nn.parallel.DistributedDataParallel)


@pytest.mark.ranks
def test_what_is_refused_raises() -> None:
    run_ranks(walk, world_size=1)


def test_each_row_of_the_page_is_looked_at() -> None:
    section = DOCS.read_text().split("## What torch takes and we refuse")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \|", section, flags=re.MULTILINE)
    assert rows[1:] == list(ROWS)
