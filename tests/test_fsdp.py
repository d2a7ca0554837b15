"""Hooks on models that FSDP2 has sharded, on 2 x 2 ranks and on four shards: the mean, each hook, bytes, refusals."""

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_case import (
    bytes_sent,
    largest_difference,
    loss_of,
    make_model,
    mesh_1d,
    mesh_2d,
    optimizer_of,
    reference,
    shard,
    train,
    whole_gradients,
)
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import lightning_ddp_hooks as ldh
from lightning_ddp_hooks.averaging import DiLoCo, PeriodicModelAverager
from lightning_ddp_hooks.hooks import (
    BlockQuantize,
    Cast,
    OneBit,
    PerParameter,
    PostLocalSGD,
    PowerSGD,
    Rule,
    Schedule,
    Stage,
    TopK,
)
from lightning_ddp_hooks.traffic import sent_by_rank

pytestmark = pytest.mark.ranks

STEPS = range(2)
# Gradients are averaged over the replicas by the package at all steps.
MEAN = PeriodicModelAverager(period=1, warmup_steps=1000)

# ---------------------------------------------------------------------- the mean


def _no_sync(model: Any, last: bool) -> None:
    model.set_requires_gradient_sync(last)


def _no_all_reduce(model: Any, last: bool) -> None:
    model.set_requires_all_reduce(last)


def _mean_case(
    *, micro: Callable[[Any, bool], None] | None = None, clip: float | None = None, form: str = "2d", **options: Any
) -> float:
    mesh = mesh_2d()
    model = make_model(checkpointed=options.pop("checkpointed", False))
    compiled = options.pop("compiled", False)
    model = shard(model, mesh if form == "2d" else mesh["shard"])
    if compiled:
        model[1].compile(backend="aot_eager")
    optimizer = optimizer_of(model)
    hooks = ldh.fsdp.apply(
        model, averager=MEAN, optimizers=optimizer, replicas=None if form == "2d" else mesh["replicate"]
    )
    with warnings.catch_warnings():
        if compiled:  # dynamo looks at `.grad` of whatever it meets
            warnings.simplefilter("ignore")
        history = train(model, STEPS, optimizer, micro=micro, clip=clip)
    hooks.check_replicas()
    assert hooks.step == len(STEPS)
    hooks.close()
    return largest_difference(history, reference(STEPS, micro=micro is not None, clip=clip))


def _mixed_precision_case() -> float:
    """Compare with FSDP2's own mean under the same policy."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    histories = []
    for averager in (None, MEAN):
        model = shard(make_model(torch.float32), mesh_2d(), mp_policy=policy)
        optimizer = optimizer_of(model)
        ldh.fsdp.apply(model, averager=averager, optimizers=optimizer)
        histories.append(train(model, STEPS, optimizer, dtype=torch.float32))
    return largest_difference(*histories)


def _divide_factor_case() -> float:
    sums = []
    for averager in (None, MEAN):
        model = shard(make_model(), mesh_2d())
        ldh.fsdp.apply(model, averager=averager)
        for module in (model, *model):
            module.set_gradient_divide_factor(3.0)
        loss_of(model, [dist.get_rank()], 0).backward()
        sums.append(whole_gradients(model))
    return largest_difference(sums[:1], sums[1:])


def _given_back_case() -> float:
    """After `close` the model is FSDP2's again, which reduces over the replicas itself."""
    model = shard(make_model(), mesh_2d())
    optimizer = optimizer_of(model)
    for _ in range(2):
        ldh.fsdp.apply(model, comm_hook="int8", optimizers=optimizer).close()
    return largest_difference(train(model, STEPS, optimizer), reference(STEPS))


def _means() -> dict[str, float]:
    return {
        "plain": _mean_case(),
        "replicas apart": _mean_case(form="1d"),
        "no_sync": _mean_case(micro=_no_sync),
        "no all-reduce": _mean_case(micro=_no_all_reduce),
        "no all-reduce, replicas apart": _mean_case(micro=_no_all_reduce, form="1d"),
        "clipped": _mean_case(clip=0.1),
        "checkpointed": _mean_case(checkpointed=True),
        "compiled": _mean_case(compiled=True),
        "mixed precision": _mixed_precision_case(),
        "given back": _given_back_case(),
        "divide factor": _divide_factor_case(),
    }


# ---------------------------------------------------------------------- hooks

HOOKS: dict[str, Any] = {
    "bf16": "bf16",
    "fp16": "fp16",
    "float32 sum": Cast(dtype="bfloat16", accumulate="float32"),
    "int8": BlockQuantize(block_size=8),
    "int8 stochastic": BlockQuantize(block_size=8, error_feedback=False, stochastic_rounding=True),
    "fp8": "fp8",
    "onebit": OneBit(start_iter=1),
    "topk": TopK(ratio=0.1),
    "per tensor": "quantize_per_tensor",
    "per channel": "quantize_per_channel",
    "powersgd": PowerSGD(rank=1, start_iter=1),
    "batched powersgd": ldh.hooks.BatchedPowerSGD(start_iter=0),
    "powersgd in bf16": Cast(PowerSGD(rank=2, start_iter=0), "bfloat16"),
    "schedule": Schedule([Stage(0, "bf16"), Stage(2, "int8")]),
    "per parameter": PerParameter([Rule(PowerSGD(start_iter=0), ndim=2)], default="int8"),
}


# Whose result does not depend on the order of parameters in a bucket.
WITH_BIAS = ("bf16", "fp16", "topk", "powersgd", "powersgd in bf16", "per parameter")


class _Given(nn.Sequential):
    """A layer of the names and gradients that it is given; PowerSGD's first factors follow from the names."""

    def __init__(self, shapes: dict[str, torch.Size]) -> None:
        super().__init__(nn.Module())
        for name, shape in shapes.items():
            self[0].register_parameter(name.removeprefix("0."), nn.Parameter(torch.zeros(shape)))

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        return sum((own * gradients[name]).sum() for name, own in self.named_parameters())


def _wide(bias: bool = True) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(32, 24, bias=bias))


def _hook_against_data_parallel(hook: Any, bias: bool) -> float:
    """Compare with the same hook in `DataParallel` over the replicas, given the gradients of this rank's shard."""
    mesh = mesh_2d()
    rank, place = dist.get_rank(), mesh.get_local_rank("shard")
    model, plain = fully_shard(_wide(bias), mesh=mesh), _wide(bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    hooks = ldh.fsdp.apply(model, comm_hook=hook, optimizers=optimizer, check_replicas_every_n_steps=1)
    expected = _Given({name: param.chunk(2)[0].shape for name, param in plain.named_parameters()})
    other = ldh.DataParallel(expected, process_group=mesh["replicate"].get_group(), comm_hook=hook)
    worst = 0.0
    for step in range(4):
        torch.manual_seed(10 * step + rank)
        batch = torch.randn(8, 32)
        for module in (model, plain):
            module.zero_grad()
            module(batch).square().mean().backward()
        given = {}
        for name, param in plain.named_parameters():
            dist.all_reduce(param.grad, op=dist.ReduceOp.SUM, group=mesh["shard"].get_group())
            given[name] = param.grad.div_(2).chunk(2)[place]
        expected.zero_grad()
        other(given).backward()
        for name, own in expected.named_parameters():
            found = dict(model.named_parameters())[name].grad.to_local()
            worst = max(worst, float((found - own.grad).abs().max() / own.grad.abs().max()))
        optimizer.step()
    hooks.close()
    other.detach()
    return worst


def _hooks() -> dict[str, float]:
    return {name: _hook_against_data_parallel(hook, name in WITH_BIAS) for name, hook in HOOKS.items()}


def _bytes() -> dict[str, int]:
    """Return what a rank sends for a backward by hook, and what it would in full."""
    sent = {}
    numel = 32 * 24 + 24
    for name, hook in {"bf16": "bf16", "int8": "int8"}.items():
        model = fully_shard(_wide(), mesh=mesh_2d())
        ldh.fsdp.apply(model, comm_hook=hook)
        sent[f"replicas {name}"] = bytes_sent(lambda model=model: model(torch.ones(1, 32)).sum().backward())
    sent["replicas"] = sent_by_rank("all_reduce", 4 * numel // 2, 2)
    for name, hook in {"bf16": "bf16", "int8": BlockQuantize(error_feedback=False)}.items():
        model = fully_shard(_wide(), mesh=mesh_1d())
        ldh.fsdp.apply(model, comm_hook=hook)
        sent[f"shards {name}"] = bytes_sent(lambda model=model: model(torch.ones(1, 32)).sum().backward())
    sent["shards"] = sent_by_rank("reduce_scatter", 4 * numel, 4)
    return sent


def _scatter_errors() -> dict[str, float]:
    """Return for plain FSDP the largest error of a gradient, relative to the largest gradient, by hook."""
    errors = {}
    stochastic = BlockQuantize(error_feedback=False, stochastic_rounding=True, block_size=64)
    hooks = {
        "none": None,
        "bf16": "bf16",
        "fp16": "fp16",
        "float32 sum": Cast(dtype="bfloat16", accumulate="float32"),
        "int8": BlockQuantize(error_feedback=False, block_size=64),
        "int8 stochastic": stochastic,
        "fp8": BlockQuantize(error_feedback=False, dtype="fp8"),
    }
    exact = make_model()
    loss_of(exact, list(range(4)), 0).backward()
    for name, hook in hooks.items():
        model = shard(make_model(torch.float32), mesh_1d())
        hooks_at_work = ldh.fsdp.apply(model, comm_hook=hook)
        for last in (False, True):  # each half of the gradient
            model.set_requires_gradient_sync(last)
            (loss_of(model, [dist.get_rank()], 0, torch.float32) / 2).backward()
        found = whole_gradients(model)
        whole = torch.cat([param.grad.flatten() for param in exact.parameters()])
        own = torch.cat([found[key].flatten() for key, _ in exact.named_parameters()])
        errors[name] = float((own - whole).abs().max() / whole.abs().max())
        hooks_at_work.step_ended()
    return errors


# ---------------------------------------------------------------------- what cannot work


def _message(call: Callable[[], object]) -> str:
    try:
        call()
    except (TypeError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _refusals() -> dict[str, str]:
    mesh, plain = mesh_2d(), mesh_1d()

    def on(model_mesh: Any, **settings: Any) -> Callable[[], object]:
        return lambda: ldh.fsdp.apply(shard(make_model(torch.float32), model_mesh), **settings)

    def partly_used() -> None:
        model = fully_shard(make_model(torch.float32), mesh=mesh)
        ldh.fsdp.apply(model, comm_hook="int8")
        model.forward = lambda x: model[2](x)
        model(torch.ones(1, 7, requires_grad=True)).sum().backward()

    def twice() -> None:
        model = shard(make_model(torch.float32), mesh)
        ldh.fsdp.apply(model, comm_hook="int8")
        ldh.fsdp.apply(model, comm_hook="int8")

    def factor() -> None:
        model = fully_shard(make_model(torch.float32), mesh=plain)
        ldh.fsdp.apply(model, comm_hook="bf16")
        model.set_gradient_divide_factor(3.0)
        model(torch.ones(1, 7)).sum().backward()

    def drifted() -> None:
        model = shard(make_model(torch.float32), mesh)
        hooks = ldh.fsdp.apply(model, check_replicas_every_n_steps=1)
        with torch.no_grad():
            model[0].up.weight.to_local().add_(mesh.get_local_rank("replicate"))
        hooks.step_ended()

    def meta() -> None:
        with torch.device("meta"):
            model = make_model(torch.float32)
        ldh.fsdp.apply(shard(model, mesh), comm_hook="int8")

    def outside() -> None:
        model = make_model(torch.float32)
        fully_shard(model[0], mesh=mesh)
        ldh.fsdp.apply(model, comm_hook="int8")

    cases = {
        "outside": outside,
        "not sharded": lambda: ldh.fsdp.apply(make_model(), comm_hook="int8"),
        "no module": lambda: ldh.fsdp.apply("model"),  # type: ignore[arg-type]
        "meta": meta,
        "function": on(mesh, comm_hook=(None, ldh.hooks.fp16_compress_hook)),
        "differing": on(mesh, comm_hook=PostLocalSGD(start_local_sgd_iter=1)),
        "noop": on(mesh, comm_hook="noop"),
        "name": on(mesh, comm_hook="int9"),
        "no effect": on(mesh, comm_hook="int8", averager=DiLoCo(period=2)),
        "averager type": on(mesh, averager="diloco"),
        "one replica": on(plain, averager=DiLoCo(period=2)),
        "nothing to check": on(plain, check_replicas_every_n_steps=2),
        "checks": on(mesh, averager=DiLoCo(period=2), check_replicas_every_n_steps=2),
        "interval": on(mesh, check_replicas_every_n_steps=-1),
        "feedback": on(plain, comm_hook="int8"),
        "all-reduce": on(plain, comm_hook="powersgd"),
        "inner": on(plain, comm_hook=Cast("int8")),
        "both": on(mesh, comm_hook="int8", replicas=mesh["replicate"]),
        "own shards": on(mesh["shard"], comm_hook="int8", replicas=mesh["shard"]),
        "twice": twice,
        "partly used": partly_used,
        "factor": factor,
        "drifted": drifted,
        "other settings": on(mesh, comm_hook="int8" if dist.get_rank() < 2 else "fp8"),
    }
    return {name: _message(case) for name, case in cases.items()}


EXPECTED = {
    "outside": "ValueError: Nobody reduces the gradient of '1.up.weight' (5 parameters of no sharded module)",
    "not sharded": "ValueError: No part of the model is sharded: call `torch.distributed.fsdp.fully_shard`",
    "no module": "TypeError: Expected a torch.nn.Module, got str",
    "meta": "ValueError: Some parameters are on the meta device",
    "function": "ValueError: The function fp16_compress_hook issues collectives itself",
    "differing": "ValueError: PostLocalSGD leaves replicas with different gradients",
    "noop": "ValueError: Noop leaves replicas with different gradients",
    "name": "ValueError: Unknown communication hook 'int9'; known names",
    "no effect": "ValueError: The hook BlockQuantize has no effect: DiLoCo begins at step 0",
    "averager type": "TypeError: Expected a ModelAverager for `averager`, got str",
    "one replica": "ValueError: DiLoCo averages over replicas, and the model has only one",
    "nothing to check": "ValueError: `check_replicas_every_n_steps` has no effect: the model has only one replica",
    "checks": "ValueError: `check_replicas_every_n_steps` compares replicas that are meant to be the same",
    "interval": "ValueError: Expected 0 (never), a number of steps, or None",
    "feedback": "ValueError: BlockQuantize(error_feedback=True) cannot work on the reduce-scatter of plain FSDP",
    "all-reduce": "ValueError: PowerSGD makes an all-reduce, which plain FSDP has none of",
    "inner": "ValueError: Cast makes an all-reduce, which plain FSDP has none of",
    "both": "ValueError: The model's mesh has replicas of its own: leave out `replicas`",
    "own shards": "ValueError: Expected `replicas` to hold ranks of other shard groups",
    "twice": "RuntimeError: A hook or a collective is at work on this model already",
    "partly used": "RuntimeError: Expected gradients of all trainable parameters of 'the model'",
    "factor": "RuntimeError: A communication hook on the reduce-scatter cannot multiply by a number of yours",
    "drifted": "RuntimeError: The ranks' parameters have drifted apart by the end of step 0: '0.up.weight' differs",
    "other settings": "RuntimeError: ",
}


def _all() -> dict[str, Any]:
    return {
        "means": _means(),
        "hooks": _hooks(),
        "bytes": _bytes(),
        "scatter": _scatter_errors(),
        "refusals": _refusals(),
    }


@cache
def _results() -> list[dict[str, Any]]:
    return run_ranks(_all, world_size=4, timeout=110)


def test_the_mean_is_that_of_one_process() -> None:
    for result in _results():
        for name, difference in result["means"].items():
            assert difference < (1e-12 if name not in ("mixed precision",) else 1e-6), name


def test_each_hook_does_what_it_does_in_data_parallel() -> None:
    for result in _results():
        for name, difference in result["hooks"].items():
            assert difference < 1e-6, name


def test_hooks_send_what_they_should() -> None:
    for result in _results():
        sent = result["bytes"]
        for where in ("replicas", "shards"):
            assert sent[f"{where} bf16"] == sent[where] // 2
            assert sent[where] * 0.25 <= sent[f"{where} int8"] < sent[where] * 0.28


def test_the_reduce_scatter_of_plain_fsdp_is_close_to_the_mean() -> None:
    limits = {"none": 1e-6, "bf16": 2**-7, "fp16": 2**-10, "float32 sum": 2**-8, "int8": 0.5 / 127, "fp8": 0.07}
    for result in _results():
        errors = result["scatter"]
        for name, limit in (limits | {"int8 stochastic": 1 / 127}).items():
            assert errors[name] <= limit * 1.01, name
        assert errors["int8"] > 1e-4
        assert errors["int8 stochastic"] != errors["int8"]


def test_what_cannot_work_raises_on_all_ranks_with_the_reason() -> None:
    for result in _results():
        for name, text in EXPECTED.items():
            assert result["refusals"][name].startswith(text), (name, result["refusals"][name])
