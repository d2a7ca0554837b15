"""The network lab of the benchmarks; needs root and iproute2, and is skipped elsewhere."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import netlab  # noqa: E402

needs_root = pytest.mark.skipif(netlab.why_impossible() is not None, reason=str(netlab.why_impossible()))

REDUCE = f"""
import socket, sys, time
sys.path.insert(0, {str(BENCHMARKS)!r})
import torch, torch.distributed as dist
from netlab import report
dist.init_process_group("gloo")
x = torch.ones(1 << 19)
dist.all_reduce(x)
dist.barrier()
start = time.perf_counter()
for _ in range(2):
    dist.all_reduce(x)
report({{"host": socket.gethostname(), "sum": float(x[0]), "seconds": time.perf_counter() - start}})
dist.destroy_process_group()
"""


def _left_behind(owner: int | None = None) -> list[str]:
    named = os.listdir("/sys/class/net") + [entry.name for entry in Path("/run/netns").glob("*")]
    mine = str(os.getpid() if owner is None else owner)
    return [name for name in named if name.startswith("ldh") and mine in name]


@pytest.fixture
def _nothing_left() -> Iterator[None]:
    yield
    assert not _left_behind()


@pytest.mark.parametrize(("text", "rate"), [("100mbit", 1e8), ("1gbit", 1e9), ("2.5gbit", 2.5e9), ("64kbit", 64e3)])
def test_rates_are_read_as_tc_reads_them(text: str, rate: float) -> None:
    assert netlab.parse_rate(text) == rate


@pytest.mark.parametrize("text", ["fast", "100", "100 mbit", "0mbit", "-1mbit", "1MB"])
def test_other_rates_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="such as '100mbit'"):
        netlab.Lab(2, text)


def test_impossible_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="1 to 200 hosts"):
        netlab.Lab(0)
    with pytest.raises(ValueError, match="at least one rank"):
        netlab.Lab(2, ranks_per_host=0)


def test_a_user_without_root_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(netlab.sys, "platform", "linux")
    monkeypatch.setattr(netlab.shutil, "which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr(netlab.os, "geteuid", lambda: 1000)
    with pytest.raises(netlab.LabError, match="takes root"), netlab.Lab(2):
        pass
    monkeypatch.setattr(netlab.shutil, "which", lambda tool: None)
    with pytest.raises(netlab.LabError, match="iproute2"), netlab.Lab(2):
        pass


@needs_root
@pytest.mark.ranks
@pytest.mark.usefixtures("_nothing_left")
def test_hosts_reduce_over_links_of_the_given_rate_and_the_kernel_counts_the_bytes(tmp_path: Path) -> None:
    script = tmp_path / "reduce.py"
    script.write_text(REDUCE)
    with netlab.Lab(hosts=2, rate="100mbit") as lab:
        before = lab.bytes()
        results = lab.run(script, timeout=90)
        sent = [after.sent - first.sent for first, after in zip(before, lab.bytes(), strict=True)]
    assert [result["host"] for result in results] == ["host0", "host1"]
    assert [result["sum"] for result in results] == [8.0, 8.0]
    # A ring of two sends the buffer once: 3 x 2 MiB, with headers and torchrun's own exchange within 5%.
    assert all(3 * (2 << 20) < count < 3.15 * (2 << 20) for count in sent), sent
    # 4 MiB at 12.5 MB/s take 0.336 s, of which the shaper lets 0.25 MB through at once.
    assert 0.29 < results[0]["seconds"] < 0.6


@needs_root
@pytest.mark.usefixtures("_nothing_left")
def test_a_failing_script_is_told_with_its_output_and_all_is_removed(tmp_path: Path) -> None:
    script = tmp_path / "fail.py"
    script.write_text("raise SystemExit('no such luck')")
    with pytest.raises(netlab.LabError, match="no such luck"), netlab.Lab(hosts=1, rate=None) as lab:
        lab.run(script, timeout=90)


@needs_root
def test_sigterm_removes_the_lab(tmp_path: Path) -> None:
    script = tmp_path / "sleep.py"
    script.write_text("import time; time.sleep(60)")
    command = [sys.executable, str(BENCHMARKS / "netlab.py"), "--hosts", "2", "--", str(script)]
    process = subprocess.Popen(command)
    deadline = time.monotonic() + 20
    while len(_left_behind(process.pid)) < 5 and time.monotonic() < deadline:  # 2 hosts, 2 ports, 1 bridge
        time.sleep(0.05)
    assert len(_left_behind(process.pid)) == 5
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 128 + signal.SIGTERM
    assert not _left_behind(process.pid)


@needs_root
def test_what_a_killed_lab_leaves_is_removed_by_the_next_one(tmp_path: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); import netlab, os, signal\n"
    code += "netlab.Lab(2, None).__enter__(); os.kill(os.getpid(), signal.SIGKILL)"
    process = subprocess.Popen([sys.executable, "-c", code])
    process.wait(30)
    assert _left_behind(process.pid)
    with netlab.Lab(1, None):
        assert not _left_behind(process.pid)
