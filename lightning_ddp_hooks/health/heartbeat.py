"""What each rank tells the others about itself, and the thread that exchanges it through the store."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from types import FrameType

from torch import Tensor

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.health.stacks import line_of, stacks_text, write_stacks

# Of a traceback the end tells most; a store is no place for megabytes.
MAX_TEXT = 6000
# Of a collective that moves more than that much it is not said that it blocks: it may just take its time.
_SMALL_BYTES = 1 << 16
# Where waiting is done; elsewhere in ``torch.distributed`` there is also work, such as checkpoints that are written.
_COLLECTIVES = "torch.distributed.distributed_c10d"
CALLED_BY = " called by "
"""What stands before the user's line."""
_OURS = __name__.partition(".")[0]
_LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")
_LIBRARIES = {
    _OURS,
    *_LIGHTNING,
    "torch",
    "torchmetrics",
    "lightning_utilities",
    "contextlib",
    "functools",
    "threading",
}
_ENTRY_POINTS = ("fit", "validate", "test", "predict")  # of the Trainer: what calls them says nothing
_PICKLING = ("_object_to_tensor", "_tensor_to_object")
# How many heartbeats all ranks together may read from the store in a second.
_READS_PER_SECOND = 50_000


class State(str, Enum):
    """What has become of a rank."""

    RUNNING = "running"
    FAILED = "failed"  # by an error of its own
    GAVE_UP = "gave up"  # because of another rank
    FINISHED = "finished"


@dataclass(frozen=True)
class Progress:
    """How far a rank has come: its training step, and its place within the current backward."""

    step: int
    synced_backwards: int = 0
    launched: int = 0
    buckets: int = 0  # of the current backward; 0 outside a backward
    waits_for: str = ""  # what other ranks have to send, in words; empty if nothing is known to be under way
    collectives: int = 0  # begun so far, in all groups
    busy: bool = False  # with work of the user's own, in which it waits for nobody

    def text(self) -> str:
        """Describe the place in words."""
        sent = f"in a backward with {self.launched} of {self.buckets} buckets sent"
        place = f"step {self.step}, {sent if self.buckets else 'outside a backward'}"
        return f"{place}, waiting for {self.waits_for}" if self.waits_for else place


def blocking_collective(thread: int) -> str:
    """Return which collective a thread waits in, and whose line asked for it: "`barrier` called by f (train.py:31)".

    A thread that is blocked cannot say so itself, but Python's stack shows the collectives of Lightning, of metrics and
    of the user too. Where a step, a hook or a callback of the user's calls what communicates, that line is named; else
    Lightning's, after "in". The text is empty outside a collective of ``torch.distributed``, and for one that moves
    more than a few numbers, since it may be making progress. The thread is named by its ``threading.get_ident``.
    """
    frame, call = sys._current_frames().get(thread), None
    if frame is None or frame.f_globals.get("__name__") != _COLLECTIVES or frame.f_code.co_name in _PICKLING:
        return ""
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith("torch.distributed"):
        call, frame = frame, frame.f_back
        if any(_is_large(value) for value in list(call.f_locals.values())):
            return ""
    if call is None or frame is None:
        return ""
    # A decorator of torch's stands between the call and what is called.
    name = getattr(call.f_locals.get("func"), "__name__", call.f_code.co_name)
    users: FrameType | None = frame
    called = call
    while users is not None and _package(users) in _LIBRARIES:
        called, users = users, users.f_back
        if _package(frame) == _OURS:
            frame = users or frame
    if users is None or (_package(called) in _LIGHTNING and called.f_code.co_name in _ENTRY_POINTS):
        return f"`{name}` in {_place(frame)}"
    within = "" if called is call else f" in `{called.f_code.co_name}`"
    return f"`{name}`{within}{CALLED_BY}{_place(users)}"


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"


def _is_large(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.nbytes > _SMALL_BYTES
    return isinstance(value, (list, tuple)) and any(map(_is_large, value))


@dataclass(frozen=True)
class Heartbeat:
    """One message from a rank to the others; ``text`` says why it failed, with the traceback, or why it gave up."""

    beat: int  # grows, so that readers see that the rank lives without comparing clocks
    progress: Progress
    state: State = State.RUNNING
    text: str = ""
    line: str = ""  # of the user's code, while the rank makes no progress

    def place(self) -> str:
        """Describe in words where the rank is."""
        known = not self.line or " called by " in self.progress.waits_for
        return self.progress.text() if known else f"{self.progress.text()}, in {self.line}"

    def encode(self) -> str:
        """Return the heartbeat in JSON: what comes from another process is not unpickled."""
        return json.dumps({**asdict(self), "text": self.text[-MAX_TEXT:]})

    @classmethod
    def decode(cls, data: str | bytes) -> Heartbeat:
        """Undo `encode`."""
        fields = json.loads(data)
        return cls(int(fields["beat"]), Progress(**fields["progress"]), State(fields["state"]), str(fields["text"]),
                   str(fields.get("line", "")))  # fmt: skip


@dataclass(frozen=True)
class PeerStatus:
    """What is known about another rank: its last heartbeat, and seconds since that was new and since it got on."""

    heartbeat: Heartbeat
    silent_s: float
    idle_s: float = 0.0


class HeartbeatThread(threading.Thread):
    """Writes this rank's heartbeat every ``period`` seconds, and reads the others' on request.

    A thread of its own, with a connection of its own, since a call to a store whose host was stopped may never return.
    """

    def __init__(
        self,
        store: comm.Store,
        rank: int,
        world_size: int,
        progress: Callable[[], Progress],
        period: float,
        thread: int | None = None,
    ) -> None:
        super().__init__(name="ldh-heartbeat", daemon=True)
        self._store = store
        self._rank = rank
        self._progress = progress
        self._period = period
        self._others = [other for other in range(world_size) if other != rank]
        self._read_every = max(period, world_size**2 / _READS_PER_SECOND)
        self._read_at = 0.0
        self._beat = 0
        self._last: tuple[State, str] | None = None
        self._last_is_sent = threading.Event()
        self._wake = threading.Event()
        self._ends = False
        self._thread = thread  # the one that trains
        self._told = Progress(-1)
        self._asks_for_stacks = self._wrote_stacks = False
        self.stacks_written = 0  # by ranks, known once this one has asked
        # The last heartbeat of each rank, when it was new, and when the rank had last made progress.
        self._peers: dict[int, tuple[Heartbeat, float, float]] = {}
        self.reads_peers = False  # whether the others' heartbeats are read
        self.alarms = 0  # ranks that have written that they failed or gave up
        self.informed = self.finished = 0  # ranks that have read that, or finished; known once this rank has ended
        self.answered_at = time.monotonic()  # the store's last answer
        self.broken: Exception | None = None  # what the store ended with

    def peers(self) -> dict[int, PeerStatus]:
        """Return what is known about the other ranks; of silence only what passed up to the last reading counts."""
        peers, read_at = self._peers, self._read_at
        return {
            other: PeerStatus(heartbeat, max(0.0, read_at - new_at), max(0.0, read_at - moved_at))
            for other, (heartbeat, new_at, moved_at) in peers.items()
        }

    def send_last(self, state: State, text: str, timeout: float) -> None:
        """Write how this rank ended; wait at most ``timeout`` seconds until it is written."""
        if self._last is None:
            self._last = (state, text)
        self._wake.set()
        self._last_is_sent.wait(timeout if self.is_alive() else 0)

    def ask_for_stacks(self) -> None:
        """Have all ranks that make no progress write their stacks into a file, this one too."""
        self._asks_for_stacks = True
        self._wake.set()

    def wait_until(self, condition: Callable[[], bool], timeout: float) -> None:
        """Exchange heartbeats in quick succession until a condition holds, for at most ``timeout`` seconds."""
        deadline, pause = time.monotonic() + timeout, self._period / 1000  # mostly the others are almost there
        while not condition() and self.is_alive() and time.monotonic() < deadline:
            self._wake.set()
            time.sleep(pause)
            pause = min(1.5 * pause, self._period / 20)

    def stop(self, timeout: float) -> None:
        """End the thread; it is left behind if the store does not answer within ``timeout`` seconds."""
        self._ends = True
        self._wake.set()
        if self.is_alive():
            self.join(timeout)

    def run(self) -> None:
        """Exchange heartbeats until `stop`."""
        try:
            while not self._ends:
                self._exchange()
                self._wake.wait(self._period)
                self._wake.clear()
            if self._last is not None and not self._last_is_sent.is_set():
                self._write()
        except Exception as error:  # of what kind depends on the store
            self.broken = error

    def _exchange(self) -> None:
        self._write()
        if self._wrote_stacks:
            self.stacks_written = self._store.add("stacks written", 0)
        alarms = self._store.add("alarms", 0)
        if alarms > self.alarms:
            self._read()
            if not self.alarms:
                self._store.add("informed", 1)
            self.alarms = alarms
        elif not (self.reads_peers or alarms):
            self._peers = {}  # what is not read grows old
        elif time.monotonic() - self._read_at >= self._read_every:
            self._read()
        if self._last is not None:
            self.informed = self._store.add("informed", 0)
            self.finished = self._store.add("finished", 0)
        self.answered_at = time.monotonic()

    def _write(self) -> None:
        last, progress = self._last, self._progress()
        self._beat += 1
        state, text = last or (State.RUNNING, "")
        stands, self._told = progress == self._told, progress
        # Of one that has failed the traceback tells more.
        line = line_of(self._thread) if stands and last is None and self._thread is not None else ""
        heartbeat = Heartbeat(self._beat, progress, state, text, line)
        if stands or last is not None:
            self._write_stacks(heartbeat.place())
        self._store.set(f"note/{self._rank}", heartbeat.encode())
        if last is not None and not self._last_is_sent.is_set():
            self._store.add("finished" if last[0] is State.FINISHED else "alarms", 1)
            self._last_is_sent.set()

    def _write_stacks(self, place: str) -> None:
        """Write this rank's stacks, once, if any rank asks for that."""
        if self._wrote_stacks or self._thread is None or not self._store.add("stacks", int(self._asks_for_stacks)):
            return
        self._wrote_stacks, self._asks_for_stacks = True, False
        write_stacks(self._rank, stacks_text(self._rank, self._thread, place))
        self._store.add("stacks written", 1)

    def _read(self) -> None:
        keys = [f"note/{other}" for other in self._others]
        if not self._store.check(keys):
            return  # one has not begun; reading its heartbeat would mean waiting for it
        heartbeats = [Heartbeat.decode(data) for data in self._store.multi_get(keys)]
        now, peers = time.monotonic(), dict(self._peers)
        for other, heartbeat in zip(self._others, heartbeats, strict=True):
            before, _, moved_at = peers.get(other, (None, now, now))
            if before is None or before.beat != heartbeat.beat:
                stands = before is not None and before.progress == heartbeat.progress
                peers[other] = (heartbeat, now, moved_at if stands else now)
        self._peers, self._read_at = peers, now
