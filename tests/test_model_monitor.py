"""`ModelMonitor`: what it writes for loops in plain PyTorch and Fabric; and two runs compared."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from ranks import run_ranks
from torch import nn

import lightning_ddp_hooks as ldh
from ddp_hooks_command import main
from lightning_ddp_hooks.averaging import PeriodicModelAverager
from lightning_ddp_hooks.monitor.compare import read_summary

pytestmark = pytest.mark.ranks


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 8))


def _train(model: Any, optimizer: Any, steps: int, backward: Any = torch.Tensor.backward) -> None:
    for _ in range(steps):
        backward(model(torch.randn(4, 64)).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def _monitored(directory: Path) -> list[str]:
    said: list[str] = []
    for name, hook in (("plain", None), ("int8", "int8")):
        model = ldh.DataParallel(_net(), comm_hook=hook, bucket_cap_mb=0.01)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with ldh.ModelMonitor(model, directory / name) as monitor:
            with pytest.raises(RuntimeError, match="monitored already"):
                ldh.ModelMonitor(model)
            with torch.no_grad():
                model(torch.randn(4, 64))  # an evaluation is no step
            with model.no_sync():
                model(torch.randn(4, 64)).sum().backward()
            _train(model, optimizer, 24)
        said.append(f"{monitor.record.count} {model.reducer.observer}")
        model.detach()
    model = ldh.DataParallel(_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with contextlib.suppress(ZeroDivisionError), ldh.ModelMonitor(model, directory / "failed"):
        _train(model, optimizer, 2)
        raise ZeroDivisionError
    model.detach()
    with pytest.raises(ValueError, match="detached"):
        ldh.ModelMonitor(model)
    with pytest.raises(TypeError, match="got Sequential"):
        ldh.ModelMonitor(_net())
    averager = PeriodicModelAverager(period=2)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=ldh.FabricDDPHooksStrategy(averager=averager))
    fabric.launch()
    net = _net()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    with ldh.ModelMonitor(model, directory / "fabric", keep_steps=4):
        _train(model, optimizer, 6, fabric.backward)
    return said


def test_loops_without_a_trainer_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_ranks(_monitored, tmp_path) == [["24 None", "24 None"]] * 2
    for name, steps in (("plain", 24), ("int8", 24), ("failed", 2), ("fabric", 4)):
        summary = read_summary(tmp_path / name)
        assert summary["step"]["steps"] == steps
        ranks = {event["pid"] for event in json.loads((tmp_path / name / "trace.json").read_text())["traceEvents"]}
        assert ranks == ({1} if name == "failed" else {1, 2})  # by process: rank + 1
        assert "<h1>Communication report" in (tmp_path / name / "report.html").read_text()
    plain, int8 = (read_summary(tmp_path / name) for name in ("plain", "int8"))
    assert plain["step"]["compression"] == pytest.approx(1, rel=0.1)
    assert int8["step"]["compression"] > 3
    assert sum(bucket["grad_bytes"] for bucket in plain["buckets"]) == 4 * (64 * 256 + 256 + 256 * 8 + 8)
    assert plain["phases"]["transfer"] >= 0
    assert "recorded by then" in (tmp_path / "failed" / "report.html").read_text()
    assert json.loads((tmp_path / "fabric" / "summary.json").read_text())["facts"]["averager"]

    page, runs = tmp_path / "page.html", [str(tmp_path / "plain"), str(tmp_path / "int8")]
    assert main(["compare", *runs, "--names", "before", "after", f"--output={page}"]) == 0
    text = page.read_text()
    assert "int8: BlockQuantize()" in text
    assert "in after and" in text
    assert "0.25" in text or "0.26" in text or "0.27" in text or "0.28" in text  # of the bytes
    capsys.readouterr()
    assert main(["compare", str(tmp_path), runs[0]]) == 2
    assert "expected the summary.json of a CommMonitor" in capsys.readouterr().err
