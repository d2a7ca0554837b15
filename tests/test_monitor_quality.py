"""What hooks do to gradients, and how noisy those are: figures against known ones, and what is said of them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from monitor_fakes import sample_record, sample_steps
from ranks import run_ranks
from torch import Tensor, nn

import lightning_ddp_hooks as ldh
from lightning_ddp_hooks import comm, traffic
from lightning_ddp_hooks.hooks import Cast, PerParameter, PowerSGD, Rule, TopK
from lightning_ddp_hooks.monitor.clock import Clock
from lightning_ddp_hooks.monitor.quality import Norms, Quality, group_names
from lightning_ddp_hooks.monitor.quality_meter import QualityMeter
from lightning_ddp_hooks.monitor.record import RunRecord
from lightning_ddp_hooks.monitor.recorder import Recorder
from lightning_ddp_hooks.monitor.report import build_report
from lightning_ddp_hooks.monitor.report_text import quality_text
from lightning_ddp_hooks.monitor.timeline import StepTiming
from lightning_ddp_hooks.reducer.stream import start_read
from lightning_ddp_hooks.traffic import ByteCounter


def steps_of(*rows: tuple[Norms, ...], samples: int = 8) -> list[StepTiming]:
    """Return steps whose first bucket has these norms."""
    return [
        replace(step, samples=samples, buckets=(replace(step.buckets[0], norms=norms), *step.buckets[1:]))
        for step, norms in zip(sample_steps(len(rows)), rows, strict=True)
    ]


def row(**values: float) -> Norms:
    return Norms(**{"group": "a", "local": 2.0, "mean": 1.0, "error": 0.0, **values})  # type: ignore[arg-type]


@pytest.mark.parametrize("spread", [0.5, 3.0], ids=["little noise", "much noise"])
def test_the_noise_scale_of_gradients_with_a_known_one_is_found_within_a_tenth(spread: float) -> None:
    torch.manual_seed(0)
    ranks, batch, numel, count = 4, 8, 4096, 50
    signal = torch.randn(numel)
    deviation = spread * torch.rand(numel)  # of one sample's gradient, by coordinate: a diagonal covariance
    known = deviation.square().sum() / signal.square().sum()
    rows = []
    for _ in range(count):
        gradients = signal + deviation * torch.randn(ranks, batch, numel).mean(1)
        rows.append((row(local=float(gradients.square().sum(1).mean()), mean=float(gradients.mean(0).square().sum())),))
    quality = Quality.of(steps_of(*rows, samples=batch), ranks)
    assert quality is not None
    assert quality.noise_scale == pytest.approx(float(known), rel=0.1)
    noise = float(deviation.square().sum()) / (ranks * batch)
    share = noise / (noise + float(signal.square().sum()))
    assert quality.total.noise_share(ranks) ** 2 == pytest.approx(share, rel=0.1)


def test_noise_without_a_signal_is_infinite_and_one_rank_tells_nothing() -> None:
    assert row(local=4.0, mean=1.0).noise_batches(4) == float("inf")
    assert row(local=4.0, mean=1.0).noise_share(4) == 1.0
    assert row().noise_batches(1) is None
    assert row(local=1.0).noise_batches(2) == 0.0
    assert Quality.of(sample_steps(), 2) is None


@pytest.mark.parametrize(
    ("norms", "verdict"),
    [
        ({"own": 1.0, "due": 25.0, "memory": 24.0}, "too little"),  # 4% of what there is goes out at once
        ({"own": 1.0, "due": 2.0, "memory": 1.0}, "enough"),
        ({"own": 1.0, "due": 1.0, "memory": 0.01}, "more than needed"),
        ({"error": 0.9}, "too little"),  # of the mean half is noise
        ({"error": 0.1}, "enough"),
        ({"error": 1e-4}, "more than needed"),
        ({"error": 1e-4, "local": 1.0}, "enough"),  # there is no noise to hide it
        ({}, None),
    ],
)
def test_the_verdict_follows_from_what_is_late_or_lost(norms: dict[str, float], verdict: str | None) -> None:
    assert row(**norms).verdict(3) == verdict
    quality = Quality.of(steps_of(*[(row(**norms),)] * 4), 3)
    assert quality is not None
    assert quality.verdict() == verdict


def test_a_memory_that_grows_and_grows_says_that_too_little_is_sent() -> None:
    rows = [(row(own=1.0, due=1.0 + size, memory=0.5 * size),) for size in range(1, 20)]
    quality = Quality.of(steps_of(*rows), 2)
    assert quality is not None
    assert quality.total.verdict(2) == "enough"
    assert quality.verdict() == "too little"


def told(norms: Norms, **settings: Any) -> str:
    record = sample_record(steps_of(*[(norms,)] * 4))
    for name, value in {"has_hook": True, **settings}.items():
        setattr(record, name, value)
    text = quality_text(record)
    assert text is not None
    assert "By parameter group" in build_report(record)
    return text


def test_one_line_says_what_to_do() -> None:
    low = told(row(own=1.0, due=25.0, memory=24.0), sized_by="rank")
    assert low.replace("\N{MULTIPLICATION SIGN}", "x") == (
        "`rank` is too low: the hook sends 4.0% of the gradient and its error memory at once, and the memory is 4.90x "
        "the gradient; 100% of the mean gradient is noise."
    )
    assert told(row(own=1.0, due=2.0, memory=1.0), sized_by="ratio").startswith("`ratio` fits: the hook sends 50%")
    fine = told(row(error=1e-6, local=1.5))
    assert fine == (
        "The hook could send less: what comes out is 0.1% off the mean of the ranks' gradients; 50% of the mean "
        "gradient is noise (gradient noise scale about 16.0 samples, the batch of all ranks is 16)."
    )
    assert told(row(), has_hook=False).startswith("Measured: ")
    assert told(row(error=5.0), is_approximate=False).startswith("Ranks are to differ under this hook")
    assert quality_text(sample_record()) is None


def test_parameter_groups_are_the_optimizers_or_parts_of_the_model() -> None:
    names = ["head.weight", "body.0.weight", "body.0.bias", "body.1.weight"]
    assert list(group_names(names).values()) == ["head", "body.0", "body.0", "body.1"]
    assert list(group_names(names, at_most=2).values()) == ["head", "body", "body", "body"]
    assert set(group_names(names, at_most=1).values()) == {"all"}
    assert list(group_names(names, [names[:1], names[1:3]]).values()) == ["group 0", *["group 1"] * 2, "no optimizer"]
    assert group_names(["weight", "bias"]) == {"weight": "all", "bias": "all"}


# ---------------------------------------------------------------------- measured on ranks

WIDTH, STEPS, BATCH, DEVIATION = 48, 8, 16, 3.0
HOOKS: dict[str, Any] = {
    "none": None,
    "bf16": "bf16",
    "int8": "int8",
    "topk": TopK(ratio=0.004),
    "powersgd": PowerSGD(rank=2, start_iter=0, min_compression_rate=1),
    "cast": Cast(PowerSGD(rank=2, start_iter=0, min_compression_rate=1), "bfloat16"),
    "rules": PerParameter([Rule(TopK(ratio=0.5), pattern="1.*")], default="bf16"),
}


class Linears(nn.Sequential):
    """Two matrices whose gradients are means of given ones, one for each sample."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)))

    def forward(self, gradients: Tensor) -> Tensor:
        mean = gradients.mean(0)
        return (self[0].weight * mean[0] + self[1].weight * mean[1]).sum()


def _measure() -> dict[str, tuple[Quality, list[tuple[float, float]]]]:
    found = {}
    for name, hook in HOOKS.items():
        torch.manual_seed(0)
        signal = torch.randn(2, WIDTH, WIDTH)
        model = ldh.DataParallel(Linears(), comm_hook=hook, bucket_cap_mb=0.005, first_bucket_mb=0.005)
        torch.manual_seed(100 + comm.rank())
        counter = ByteCounter()
        traffic.count_bytes(counter)
        group = comm.new_group(comm.resolve_group(None))
        meter = QualityMeter.of_run(model._run, group, 2, start_read)
        recorder = model.reducer.observer = Recorder(Clock(), counter, meter)
        steps: list[StepTiming] = []
        expected: list[tuple[float, float]] = []
        for number in range(STEPS):
            recorder.begin_step(number)
            recorder.note_batch(lambda: BATCH)
            gradients = signal + DEVIATION * torch.randn(BATCH, 2, WIDTH, WIDTH)
            model.zero_grad()
            model(gradients).backward()
            own = gradients.mean(0)
            everyone = torch.stack(comm.all_gather(own, comm.resolve_group(None)))
            result = torch.stack([param.grad for param in model.parameters()])  # type: ignore[misc]
            if number % 2 == 0:
                off = (result - everyone.mean(0)).norm() / everyone.mean(0).norm()
                expected.append((float(everyone.square().sum((1, 2, 3)).mean()), float(off)))
            steps += recorder.end_step()
        traffic.count_bytes(None)
        quality = Quality.of(steps, comm.world_size())
        assert quality is not None
        assert quality.steps == STEPS // 2
        measured = [(sum(r.local for b in step.buckets for r in b.norms), step) for step in steps[::2]]
        for (local, off), (figure, step) in zip(expected, measured, strict=True):
            one = Quality.of([step], comm.world_size())
            assert one is not None
            assert figure == pytest.approx(local, rel=1e-4), name
            assert one.total.relative_error == pytest.approx(off, rel=1e-3, abs=1e-6), name
        memory = meter.error_memory()
        if hook is not None and name not in ("bf16", "rules"):
            assert memory.keys() == {"0.weight", "1.weight"}, name
        found[name] = quality, expected
        model.detach()
    return found


@pytest.mark.ranks
def test_figures_of_hooks_are_those_of_the_gradients_themselves() -> None:
    known = 2 * WIDTH**2 * DEVIATION**2 / float(torch.manual_seed(0) and torch.randn(2, WIDTH, WIDTH).square().sum())
    for found in run_ranks(_measure, world_size=3, timeout=120):
        for name, (quality, _) in found.items():
            assert quality.noise_scale == pytest.approx(known, rel=0.1), name
            assert quality.total.has_memory == (name not in ("none", "bf16")), name
        assert found["none"][0].verdict() is None
        assert found["bf16"][0].verdict() == "more than needed"
        assert found["int8"][0].verdict() == "more than needed"
        assert found["topk"][0].verdict() == "too little"
        assert 0.9 < found["powersgd"][0].total.unsent < 1.0
        assert found["cast"][0].total.unsent == pytest.approx(found["powersgd"][0].total.unsent, rel=0.02)
        assert [row.group for row in found["rules"][0].groups] == ["TopK: 1", "AllReduce: 0"]
        assert [row.has_memory for row in found["rules"][0].groups] == [True, False]


def test_a_record_without_steps_has_no_quality() -> None:
    assert RunRecord(world_size=2, rank=0, keep_steps=1).quality is None
