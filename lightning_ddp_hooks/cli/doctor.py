"""``doctor``: does this environment train as it should? Versions, backends, ranks, link, clocks, native build."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shutil
import socket
import time
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.advisor.link_model import bandwidth_text
from lightning_ddp_hooks.cli import common
from lightning_ddp_hooks.cli.network import measure_link
from lightning_ddp_hooks.reducer.backend import BUILD_COMMAND
from lightning_ddp_hooks.reducer.native import build

DESCRIPTION = """\
Check an environment: versions, backends, whether ranks reach each other, their link, clocks, and the native build.

  python -m lightning_ddp_hooks doctor                  # this machine, with two processes on it
  torchrun --nnodes 4 ... -m lightning_ddp_hooks doctor # the hosts of a run, and the network between them

The exit status is 1 if something fails, and 0 if there are only warnings.
"""

_LITTLE_SPACE = 1e9  # bytes
_WITHDRAWN = ("2.6.2", "2.6.3")
_SHOWN_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_DEBUG", "OMP_NUM_THREADS")


class Finding(NamedTuple):
    """One line of the diagnosis."""

    verdict: Literal["ok", "warn", "FAIL"]
    subject: str
    text: str


def add_parser(commands: Any) -> None:
    """Add the command."""
    text = "check versions, backends, ranks, link, clocks and the native build"
    parser = common.add_command(commands, "doctor", run, text, DESCRIPTION)
    common.add_processes_argument(parser)
    parser.add_argument("--device", choices=["cpu", "cuda"],
                        help="whose ranks are checked (default: cuda if there is one)")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    device = common.device_of(args)
    if not common.launched():
        _show(local_findings())
        print("\nRanks, with processes of this machine:", flush=True)
        return common.start_processes(args.processes or 2)
    with common.world(device, args.processes) as group:
        findings = rank_findings(group, device)
        if comm.rank(group) == 0:
            if int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1:
                _show(local_findings())
            _show(findings)
    return int(any(finding.verdict == "FAIL" for finding in findings))


def _show(findings: list[Finding]) -> None:
    width = max(len(finding.subject) for finding in findings)
    for verdict, subject, text in findings:
        print(f"{verdict:4}  {subject:{width}}  {text}", flush=True)


def versions() -> dict[str, str]:
    """Return the versions of what matters."""
    found = {"python": platform.python_version()}
    for name in ("torch", "lightning", "torchmetrics", "lightning-ddp-hooks"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def local_findings() -> list[Finding]:
    """Check what one process can see."""
    known = versions()
    findings = [Finding("ok", "versions", ", ".join(f"{name} {version}" for name, version in known.items()))]
    if known["lightning"] in _WITHDRAWN:
        text = f"{known['lightning']} was withdrawn after it had been tampered with; install another"
        findings.append(Finding("FAIL", "lightning", text))
    backends = [name for name, there in comm.backends().items() if there]
    threads, cores = torch.get_num_threads(), os.cpu_count() or 1
    settings = [f"{name}={os.environ[name]}" for name in _SHOWN_VARIABLES if name in os.environ]
    return [
        *findings,
        Finding("ok" if "gloo" in backends else "FAIL", "backends", ", ".join(backends) or "none"),
        _gpu_finding(nccl="nccl" in backends),
        _native_finding(),
        Finding("ok", "processors", f"{cores}, and {threads} threads for torch in this process"),
        Finding("ok", "environment", ", ".join(settings) or "nothing set that concerns communication"),
    ]


def _gpu_finding(*, nccl: bool) -> Finding:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not gpus:
        return Finding("ok", "GPUs", "none; ranks run on the CPU, over gloo")
    text = f"{gpus} x {torch.cuda.get_device_name(0)}"
    return Finding("ok", "GPUs", text) if nccl else Finding("FAIL", "GPUs", f"{text}, but torch has no NCCL")


def _native_finding() -> Finding:
    if not build.is_built():
        return Finding(
            "warn", "native reducer", f"not built; the Python one takes longer. To build it: {BUILD_COMMAND}"
        )
    try:
        build.load()
    except ImportError as error:
        return Finding("FAIL", "native reducer", f"built, but cannot be loaded: {error}")
    return Finding("ok", "native reducer", str(build.library_path()))


def rank_findings(group: comm.ProcessGroup, device: torch.device) -> list[Finding]:
    """Check what takes all ranks; collective, and rank 0's list is the one to show."""
    control = comm.new_group(group, cpu=True)
    try:
        hosts = comm.all_gather_object(socket.gethostname(), control)
        names = dict.fromkeys(hosts)
        everyone = comm.all_gather_object({**versions(), "native": str(build.is_built())}, control)
        facts = dict(zip(hosts, comm.all_gather_object(_host_facts(), control), strict=True))
        findings = [
            Finding("ok", "ranks", f"{len(hosts)} on {len(names)} host(s): {', '.join(names)}"),
            _same_versions(everyone),
            _every_pair(group, device, control),
            _clocks(control),
            *(_host_finding(host, *found) for host, found in facts.items()),
        ]
    finally:
        comm.destroy_group(control)
    link = measure_link(group, device)
    slow = 8 * link.bandwidth < 2e9
    speed = f"{bandwidth_text(link.bandwidth)}, {1e6 * link.latency:.0f} µs a message ({comm.backend_name(group)})"
    hint = "; slow: ask `advise` which hook helps" if slow else ""
    return [*findings, Finding("warn" if slow else "ok", "link", f"{speed}{hint}")]


def _host_facts() -> tuple[bool, int, int]:
    """Return what a host has: the native build, and free bytes of shared memory and of the working directory's disk."""
    shared = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
    return build.is_built(), shared, shutil.disk_usage(Path.cwd()).free


def _host_finding(host: str, native: bool, shared: int, disk: int) -> Finding:
    parts = [
        "native reducer" if native else "no native reducer",
        f"{shared / 1e9:.1f} GB of shared memory free",
        f"{disk / 1e9:.1f} GB of disk free in the working directory",
    ]
    # Workers of data loaders pass batches through shared memory; a checkpoint needs room twice while it is written.
    enough = shared >= _LITTLE_SPACE and disk >= _LITTLE_SPACE
    return Finding("ok" if enough else "warn", f"host {host}", ", ".join(parts))


def _same_versions(everyone: list[dict[str, str]]) -> Finding:
    differing = [name for name in everyone[0] if len({str(own.get(name)) for own in everyone}) > 1]
    if not differing:
        return Finding("ok", "same on all ranks", "versions and native build")
    shown = "; ".join(f"{name}: " + ", ".join(str(own[name]) for own in everyone) for name in differing)
    verdict: Literal["warn", "FAIL"] = "warn" if differing == ["native"] else "FAIL"
    return Finding(verdict, "same on all ranks", f"not the same, by rank: {shown}")


def _every_pair(group: comm.ProcessGroup, device: torch.device, control: comm.ProcessGroup) -> Finding:
    """Have every rank send its number to every other one."""
    n, own = comm.world_size(group), comm.rank(group)
    received = torch.full((n,), -1, device=device)
    comm.start_all_to_all(received, torch.full((n,), own, device=device), group).wait()
    missing = [rank for rank, number in enumerate(received.tolist()) if number != rank]
    wrong = [(rank, lacks) for rank, lacks in enumerate(comm.all_gather_object(missing, control)) if lacks]
    if wrong:
        text = "; ".join(f"rank {rank} got nothing right from {lacks}" for rank, lacks in wrong)
        return Finding("FAIL", "messages", text)
    return Finding("ok", "messages", f"each rank reaches each other one ({comm.backend_name(group)})")


def _clocks(control: comm.ProcessGroup, rounds: int = 8) -> Finding:
    """Compare clocks right after a barrier; the smallest spread of several rounds counts."""
    spreads = []
    for _ in range(rounds):
        comm.barrier(control)
        times = comm.all_gather_object(time.time(), control)
        spreads.append(max(times) - min(times))
    text = f"at most {1e3 * min(spreads):.1f} ms apart (the time of a barrier included)"
    if min(spreads) > 1:
        return Finding("warn", "clocks", f"{text}: logs and traces of different hosts will not line up; use NTP")
    return Finding("ok", "clocks", text)
