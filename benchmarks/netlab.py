"""A network of several hosts on one Linux machine, with links as slow as you like.

Each host is a network namespace with a link of its own to one switch; every link is shaped in both directions:

    host 0 [ eth0 ]--- tbf ---[ port 0 ]--+
    host 1 [ eth0 ]--- tbf ---[ port 1 ]--+-- bridge
    host 2 [ eth0 ]--- tbf ---[ port 2 ]--+

A script runs on all of them under torchrun, one or more ranks on each host, and sees what it would see on as many
machines: other addresses, other host names, an interface "eth0" of the given bandwidth. All hosts share this machine's
processors. Needs Linux, root, iproute2 and util-linux.

    python benchmarks/netlab.py --hosts 4 --rate 100mbit -- train.py --my-option 3
    python benchmarks/netlab.py --clean                        # what a killed run has left behind

In Python, where the script hands back a value of each rank by `report`:

    with Lab(hosts=4, rate="100mbit") as lab:
        results = lab.run("train.py", ["--my-option", "3"])
        sent_by_host = [count.sent for count in lab.bytes()]

What the kernel does here that a real network does not: there is no latency but that of the machine's scheduling
(netem is not in every kernel), no loss, and no contention of switches. TCP's congestion control is the machine's.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

PREFIX = "ldhlab"
_SUBNET = "10.213.77"
_PORT = 29571
_RESULTS = "NETLAB_RESULTS"
_RATE = re.compile(r"[1-9][0-9]*(\.[0-9]+)?(bit|kbit|mbit|gbit)")
_BITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


class LabError(RuntimeError):
    """The lab cannot be built here, or a script failed in it."""


class ByteCounter(NamedTuple):
    """What a link's interface counted, in bytes, with all headers that the kernel adds (TCP, IP, Ethernet)."""

    sent: int
    received: int


def report(value: Any) -> None:
    """Hand a JSON-able value of this rank to `Lab.run`; for the script. Outside a lab nothing happens."""
    if folder := os.environ.get(_RESULTS):
        target = Path(folder) / f"rank-{os.environ['RANK']}.json"
        partial = target.with_suffix(".partial")
        partial.write_text(json.dumps(value))
        partial.replace(target)


def why_impossible() -> str | None:
    """Why no lab can be built on this machine, or None if one can."""
    if sys.platform != "linux":
        return "network namespaces exist on Linux only"
    missing = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"missing: {', '.join(missing)} (on Debian: apt-get install iproute2 util-linux)"
    if os.geteuid() != 0:
        return "making network namespaces and links takes root: run it as root, or in a container of your own as root"
    return None


def parse_rate(rate: str) -> float:
    """The bits per second that ``"100mbit"`` or ``"1gbit"`` stand for."""
    if not _RATE.fullmatch(rate):
        raise ValueError(f"Expected a rate such as '100mbit' or '1gbit', got {rate!r}.")
    unit = rate.lstrip("0123456789.")
    return float(rate.removesuffix(unit)) * _BITS[unit]


# --- names: every one carries the prefix and the id of the process that owns it --------------------------------------


def _namespace(owner: int, host: int) -> str:
    return f"{PREFIX}-{owner}-{host}"


def _bridge(owner: int) -> str:
    return f"ldhb{owner}"  # the kernel takes 15 characters


def _port(owner: int, host: int) -> str:
    return f"ldhp{owner}.{host}"


def clean(*, also_of_the_living: bool = False) -> list[str]:
    """Remove what labs left behind whose process is gone; return the names."""
    removed = []
    for name in _namespaces():
        owner = name.split("-")[1]
        if also_of_the_living or not Path(f"/proc/{owner}").exists():
            _end_processes_in(name)
            _ip("netns", "delete", name)
            removed.append(name)
    for name in os.listdir("/sys/class/net"):
        match = re.fullmatch(r"ldh[bp]([0-9]+)(\.[0-9]+)?", name)
        if not match or (Path(f"/proc/{match[1]}").exists() and not also_of_the_living):
            continue
        # Deleting one end of a link deletes the other, and deleting a namespace does so too, but later.
        if subprocess.run(["ip", "link", "delete", name], capture_output=True).returncode == 0:
            removed.append(name)
    return removed


def _namespaces() -> list[str]:
    listed = _ip("netns", "list").split("\n")
    return [words[0] for line in listed if (words := line.split()) and words[0].startswith(PREFIX + "-")]


def _end_processes_in(namespace: str) -> None:
    for pid in _ip("netns", "pids", namespace).split():
        try:
            os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            continue


def _ip(*words: str) -> str:
    return _command("ip", *words)


def _command(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise LabError(f"`{' '.join(words)}` failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


# --- the lab --------------------------------------------------------------------------------------------------------


class Lab:
    """Hosts, their links and their switch, for as long as the context lasts.

    All is removed at its end, also after an exception, Ctrl-C or SIGTERM. What a lab leaves that was killed outright is
    removed by the next one.

    Args:
        hosts: how many.
        rate: of each link in each direction, as ``tc`` writes it ("100mbit", "1gbit"); None for links as fast as the
            machine.
        ranks_per_host: how many processes torchrun starts on each host.

    Raises:
        LabError: it cannot be built here; the message says what is missing.
        ValueError: a number or rate that makes no sense.
    """

    def __init__(self, hosts: int = 4, rate: str | None = "100mbit", *, ranks_per_host: int = 1) -> None:
        if not 1 <= hosts <= 200:
            raise ValueError(f"Expected 1 to 200 hosts, got {hosts}.")
        if ranks_per_host < 1:
            raise ValueError(f"Expected at least one rank per host, got {ranks_per_host}.")
        if rate is not None:
            parse_rate(rate)
        self.hosts = hosts
        self.rate = rate
        self.ranks_per_host = ranks_per_host
        self._owner = os.getpid()
        self._running: list[subprocess.Popen[bytes]] = []
        self._handler_before: Any = None

    @property
    def world_size(self) -> int:
        """Ranks on all hosts together."""
        return self.hosts * self.ranks_per_host

    def __enter__(self) -> Lab:
        if reason := why_impossible():
            raise LabError(f"No network lab on this machine: {reason}.")
        clean()
        if _bridge(self._owner) in os.listdir("/sys/class/net"):
            raise LabError("This process has a lab already; leave it before you open the next one.")
        # SIGTERM would end Python without running any `finally`.
        self._handler_before = signal.signal(signal.SIGTERM, _exit_on_signal)
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def _build(self) -> None:
        bridge = _bridge(self._owner)
        _ip("link", "add", bridge, "type", "bridge")
        _ip("link", "set", bridge, "up")
        for host in range(self.hosts):
            namespace, port = _namespace(self._owner, host), _port(self._owner, host)
            _ip("netns", "add", namespace)
            _ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", namespace)
            _ip("link", "set", port, "master", bridge, "up")
            _ip("-n", namespace, "address", "add", f"{_SUBNET}.{host + 1}/24", "dev", "eth0")
            _ip("-n", namespace, "link", "set", "lo", "up")
            _ip("-n", namespace, "link", "set", "eth0", "up")
            if self.rate is not None:
                shape = ["root", "tbf", "rate", self.rate, "burst", "256kb", "latency", "100ms"]
                _command("tc", "-n", namespace, "qdisc", "add", "dev", "eth0", *shape)
                _command("tc", "qdisc", "add", "dev", port, *shape)

    def _remove(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one would break the removal off
        try:
            self._end_running()
            mine = f"{PREFIX}-{self._owner}-"
            for name in _namespaces():
                if name.startswith(mine):
                    _end_processes_in(name)
                    _ip("netns", "delete", name)
            for name in [_bridge(self._owner), *(_port(self._owner, host) for host in range(self.hosts))]:
                subprocess.run(["ip", "link", "delete", name], capture_output=True)  # gone already, as a rule
        finally:
            signal.signal(signal.SIGTERM, self._handler_before)

    def bytes(self) -> list[ByteCounter]:
        """Return what each host has sent and received since the lab was built, as its link counts it.

        The counters see packets as the kernel hands them over: those of one connection mostly in bundles with one
        header, so that headers weigh less here than on a wire (where they are 4 to 5% at an MTU of 1500).
        """
        counts = []
        for host in range(self.hosts):
            statistics = Path("/sys/class/net") / _port(self._owner, host) / "statistics"
            # The port's view is the other way round.
            sent, received = (int((statistics / name).read_text()) for name in ("rx_bytes", "tx_bytes"))
            counts.append(ByteCounter(sent, received))
        return counts

    def run(
        self, script: str | Path, args: Sequence[str] = (), *, timeout: float = 600.0, module: bool = False,
        env: dict[str, str] | None = None, echo: bool = False,
    ) -> list[Any]:  # fmt: skip
        """Run a script on all hosts under torchrun; return what each rank gave to `report`, in rank order.

        Args:
            script: path of the script; with ``module`` the name of a module, as for ``python -m``.
            args: its arguments.
            timeout: seconds after which it has failed.
            module: whether ``script`` names a module.
            env: further environment variables.
            echo: pass on what rank 0's host prints, while it does.

        Raises:
            LabError: a rank failed, or the time is up; with the end of what the first failing host printed.
        """
        with tempfile.TemporaryDirectory(prefix=f"{PREFIX}-") as tmp:
            folder = Path(tmp)
            logs = [folder / f"host-{host}.log" for host in range(self.hosts)]
            try:
                for host in range(self.hosts):
                    self._start(host, [*(["-m"] if module else []), str(script), *args], folder, logs[host], env or {},
                                echo and host == 0)  # fmt: skip
                self._wait(logs, timeout)
            finally:
                self._end_running()
            ranks = [folder / f"rank-{rank}.json" for rank in range(self.world_size)]
            return [json.loads(path.read_text()) if path.exists() else None for path in ranks]

    def _start(self, host: int, command: list[str], folder: Path, log: Path, env: dict[str, str], echo: bool) -> None:
        torchrun = [
            sys.executable, "-m", "torch.distributed.run", f"--nnodes={self.hosts}", f"--node-rank={host}",
            f"--nproc-per-node={self.ranks_per_host}", f"--master-addr={_SUBNET}.1", f"--master-port={_PORT}",
        ]  # fmt: skip
        # A host name of its own, since programs tell hosts apart by it.
        named = ["unshare", "--uts", "sh", "-c", f'echo host{host} > /proc/sys/kernel/hostname; exec "$@"', "sh"]
        environment = {
            **os.environ,
            "GLOO_SOCKET_IFNAME": "eth0",
            "NCCL_SOCKET_IFNAME": "eth0",
            "TP_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
            _RESULTS: str(folder),
            **env,
        }
        with log.open("wb") as output:
            self._running.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", _namespace(self._owner, host), *named, *torchrun, *command],
                    stdout=None if echo else output,
                    stderr=output,
                    stdin=subprocess.DEVNULL,
                    env=environment,
                    start_new_session=True,
                )
            )

    def _wait(self, logs: list[Path], timeout: float) -> None:
        deadline = time.monotonic() + timeout
        waiting = dict(enumerate(self._running))
        while waiting:
            for host, process in list(waiting.items()):
                status = process.poll()
                if status:
                    tail = logs[host].read_text(errors="replace")[-4000:]
                    raise LabError(f"Host {host} failed with status {status}. The end of its output:\n{tail}")
                if status == 0:
                    del waiting[host]
            if time.monotonic() > deadline:
                tail = logs[min(waiting)].read_text(errors="replace")[-4000:]
                raise LabError(f"Still running after {timeout:.0f} s on hosts {sorted(waiting)}. Output:\n{tail}")
            time.sleep(0.05)

    def _end_running(self) -> None:
        for process in self._running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + 5
        for process in self._running:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._running.clear()


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


# --- command line ---------------------------------------------------------------------------------------------------


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
        usage="%(prog)s [--hosts N] [--rate RATE] [--ranks-per-host N] [--timeout S] -- script.py [args ...]",
    )  # fmt: skip
    parser.add_argument("--hosts", type=int, default=4, help="(default: 4)")
    parser.add_argument("--rate", default="100mbit", help="of each link, or 'none' (default: 100mbit)")
    parser.add_argument("--ranks-per-host", type=int, default=1, help="(default: 1)")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds (default: 600)")
    parser.add_argument("--module", action="store_true", help="the script is a module, as for `python -m`")
    parser.add_argument("--clean", action="store_true", help="only remove what killed labs have left behind")
    parser.add_argument("command", nargs="*", metavar="script.py [args ...]")
    return parser


def main() -> int:
    parser = make_parser()
    args = parser.parse_args()
    if (reason := why_impossible()) is not None:
        parser.exit(2, f"No network lab on this machine: {reason}.\n")
    if args.clean:
        print("removed:", ", ".join(clean()) or "nothing")
        return 0
    if not args.command:
        parser.error("name a script to run, behind --")
    rate = None if args.rate == "none" else args.rate
    try:
        with Lab(args.hosts, rate, ranks_per_host=args.ranks_per_host) as lab:
            before = lab.bytes()
            start = time.perf_counter()
            lab.run(args.command[0], args.command[1:], timeout=args.timeout, module=args.module, echo=True)
            took = time.perf_counter() - start
            sent = [after.sent - first.sent for first, after in zip(before, lab.bytes(), strict=True)]
            print(f"{took:.1f} s in all; MB sent by each host:", *(f"{nbytes / 1e6:.2f}" for nbytes in sent))
    except (LabError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
