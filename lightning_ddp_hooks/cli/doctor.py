"""``doctor``: does this environment train as it should? Versions, backends, and what each host can do."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.advisor.link_model import bandwidth_text
from lightning_ddp_hooks.cli import common
from lightning_ddp_hooks.cli.network import measure_link
from lightning_ddp_hooks.reducer import shm_backend
from lightning_ddp_hooks.reducer.backend import BUILD_COMMAND
from lightning_ddp_hooks.reducer.native import build

DESCRIPTION = """\
Check an environment: versions, backends, whether ranks reach each other, their link; and for each host the native
build, shared memory, ports, clock, and disk for checkpoints.

  python -m lightning_ddp_hooks doctor                  # this machine, with two processes on it
  torchrun --nnodes 4 ... -m lightning_ddp_hooks doctor # the hosts of a run, and the network between them

The exit status is 1 if something fails, and 0 if there are only warnings.
"""

_LITTLE_SPACE = 1e9  # bytes
_MEETING, _CONNECTS = timedelta(seconds=60), timedelta(seconds=5)
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
    parser.add_argument("--checkpoints", type=Path, default=Path(), metavar="DIR",
                        help="where checkpoints will be written (default: the working directory)")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    device = common.device_of(args)
    if not common.launched():
        _show(local_findings())
        print("\nRanks, with processes of this machine:", flush=True)
        return common.start_processes(args.processes or 2)
    if not comm.is_initialized() and args.processes is None and (unreachable := _unreachable()):
        if os.environ.get("RANK") == "0":
            _show(unreachable)
        return 1
    with common.world(device, args.processes) as group:
        findings = rank_findings(group, device, args.checkpoints)
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


def _unreachable() -> list[Finding]:
    """Find the hosts that others cannot connect to, before the ranks join, which would only fail; on all ranks."""
    store, rank, size = comm.meet(_MEETING)
    listening, port = comm.open_port()
    host = socket.gethostname()
    store.set(f"port/{rank}", json.dumps([host, port]))
    ports: list[tuple[str, int]] = [json.loads(data) for data in store.multi_get([f"port/{n}" for n in range(size)])]
    others = {name: number for name, number in ports if name != host}  # any rank stands for its host
    failed = [name for name, number in others.items() if not comm.reaches_port(name, number, _CONNECTS)]
    store.set(f"failed/{rank}", json.dumps(failed))
    # Nobody closes a port before all have tried.
    everyone = [json.loads(data) for data in store.multi_get([f"failed/{n}" for n in range(size)])]
    del listening
    pairs = dict.fromkeys((ports[n][0], name) for n, names in enumerate(everyone) for name in names)
    text = (
        "{0} cannot connect to {1}: let all ports through between hosts, since gloo and NCCL choose theirs, and see "
        "that names lead to addresses that others reach (or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME)"
    )
    return [Finding("FAIL", "ports", text.format(*pair)) for pair in pairs]


def rank_findings(group: comm.ProcessGroup, device: torch.device, checkpoints: Path = Path()) -> list[Finding]:
    """Check what takes all ranks; collective, and rank 0's list is the one to show."""
    control = comm.new_group(group, cpu=True)
    try:
        hosts = comm.all_gather_object(socket.gethostname(), control)
        names = dict.fromkeys(hosts)
        everyone = comm.all_gather_object({**versions(), "native": str(build.is_built())}, control)
        facts = dict(zip(hosts, comm.all_gather_object(_host_facts(checkpoints), control), strict=True))
        offsets = dict(reversed(list(zip(hosts, _clock_offsets(control), strict=True))))  # of each host's first rank
        findings = [
            Finding("ok", "ranks", f"{len(hosts)} on {len(names)} host(s): {', '.join(names)}"),
            _same_versions(everyone),
            _every_pair(group, device, control),
            *(_host_finding(host, offsets[host], found) for host, found in facts.items()),
        ]
    finally:
        comm.destroy_group(control)
    link = measure_link(group, device)
    slow = 8 * link.bandwidth < 2e9
    speed = f"{bandwidth_text(link.bandwidth)}, {1e6 * link.latency:.0f} µs a message ({comm.backend_name(group)})"
    hint = "; slow: ask `advise` which hook helps" if slow else ""
    return [*findings, Finding("warn" if slow else "ok", "link", f"{speed}{hint}")]


class _HostFacts(NamedTuple):
    """What a host has."""

    native: bool
    why_not_shm: str | None
    shared: int  # free bytes of shared memory
    disk: int  # free bytes where checkpoints go; -1 where nothing can be written


def _host_facts(checkpoints: Path) -> _HostFacts:
    shared = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
    folder = next(path for path in (checkpoints.absolute(), *checkpoints.absolute().parents) if path.is_dir())
    disk = shutil.disk_usage(folder).free if os.access(folder, os.W_OK) else -1
    return _HostFacts(build.is_built(), shm_backend.why_not(), shared, disk)


def _host_finding(host: str, offset: float, facts: _HostFacts) -> Finding:
    parts = [
        "native reducer" if facts.native else "no native reducer",
        "shm backend" if facts.why_not_shm is None else f"no shm backend ({facts.why_not_shm})",
        f"{facts.shared / 1e9:.1f} GB of shared memory free",
        "no checkpoints can be written" if facts.disk < 0 else f"{facts.disk / 1e9:.1f} GB of disk for checkpoints",
        f"clock {1e3 * offset:+.1f} ms from rank 0's" + ("; logs will not line up, use NTP" if abs(offset) > 1 else ""),
        "ports reached by the others",  # else the ranks would not have come so far
    ]
    # Workers of data loaders pass batches through shared memory; a checkpoint needs room twice while it is written.
    enough = min(facts.shared, facts.disk) >= _LITTLE_SPACE and abs(offset) <= 1
    verdict: Literal["ok", "warn", "FAIL"] = "FAIL" if facts.disk < 0 else "ok" if enough else "warn"
    return Finding(verdict, f"host {host}", ", ".join(parts))


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


def _clock_offsets(control: comm.ProcessGroup, rounds: int = 8) -> list[float]:
    """Return by how many seconds each rank's clock is ahead of the first one's; right to the time of a barrier."""
    found = []
    for _ in range(rounds):
        comm.barrier(control)
        times = comm.all_gather_object(time.time(), control)
        found.append([own - times[0] for own in times])
    return [min(offsets, key=abs) for offsets in zip(*found, strict=True)]
