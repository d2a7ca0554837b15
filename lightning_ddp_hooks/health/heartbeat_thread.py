"""A rank's exchange of notes with the others, over a connection to the store that is its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.health.heartbeat import Heartbeat, Progress, State
from lightning_ddp_hooks.health.report import PeerStatus

# How many notes all ranks together may read from the store in a second.
_READS_PER_SECOND = 50_000


@dataclass(frozen=True)
class _Seen:
    """The last note of another rank; when it was new, and when the rank had come to where it is."""

    note: Heartbeat
    new_at: float
    moved_at: float


class HeartbeatThread(threading.Thread):
    """Writes this rank's note every ``period`` seconds, and reads the others' when asked to.

    A thread of its own, since a call to a store whose host was stopped may never return.

    Args:
        store: a connection that nobody else uses.
        rank: this rank.
        world_size: the number of ranks.
        where: tells how far this rank has come; called from any thread.
        period: seconds between two notes.

    Attributes:
        wants_notes: whether the others' notes are read.
        alarms: how many ranks have written that they failed or gave up.
        informed: how many ranks have read that; known once this one has ended.
        finished: how many ranks have written that their fit is over; likewise.
        answered_at: when the store answered last, by `time.monotonic`.
        broken: the error that the store ended with, or None.
    """

    def __init__(
        self, store: comm.Store, rank: int, world_size: int, where: Callable[[], Progress], period: float
    ) -> None:
        super().__init__(name="ldh-health-post", daemon=True)
        self._store = store
        self._rank = rank
        self._where = where
        self._period = period
        self._others = [other for other in range(world_size) if other != rank]
        self._read_every = max(period, world_size**2 / _READS_PER_SECOND)
        self._read_at = 0.0
        self._beat = 0
        self._last: tuple[State, str] | None = None
        self._last_is_sent = threading.Event()
        self._wake = threading.Event()
        self._ends = False
        self._seen: dict[int, _Seen] = {}
        self.wants_notes = False
        self.alarms = self.informed = self.finished = 0
        self.answered_at = time.monotonic()
        self.broken: Exception | None = None

    def seen(self) -> dict[int, PeerStatus]:
        """Return what is known of the other ranks; of silence only what passed up to the last reading counts."""
        seen, read_at = self._seen, self._read_at
        return {
            other: PeerStatus(last.note, max(0.0, read_at - last.new_at), max(0.0, read_at - last.moved_at))
            for other, last in seen.items()
        }

    def send_last(self, state: State, text: str, timeout: float) -> None:
        """Write how this rank ended; wait until it is written, or until ``timeout`` seconds are over."""
        if self._last is None:
            self._last = (state, text)
        self._wake.set()
        self._last_is_sent.wait(timeout if self.is_alive() else 0)

    def wait_until(self, condition: Callable[[], bool], timeout: float) -> None:
        """Exchange notes in quick succession until a condition holds, or until ``timeout`` seconds are over."""
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
        """Be the thread."""
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
        alarms = self._store.add("alarms", 0)
        if alarms > self.alarms:
            self._read()
            if not self.alarms:
                self._store.add("informed", 1)
            self.alarms = alarms
        elif not (self.wants_notes or alarms):
            self._seen = {}  # what is not looked at grows old
        elif time.monotonic() - self._read_at >= self._read_every:
            self._read()
        if self._last is not None:
            self.informed = self._store.add("informed", 0)
            self.finished = self._store.add("finished", 0)
        self.answered_at = time.monotonic()

    def _write(self) -> None:
        last = self._last
        self._beat += 1
        note = Heartbeat(self._beat, self._where(), *(last or (State.RUNNING, "")))
        self._store.set(f"note/{self._rank}", note.encode())
        if last is not None and not self._last_is_sent.is_set():
            self._store.add("finished" if last[0] is State.FINISHED else "alarms", 1)
            self._last_is_sent.set()

    def _read(self) -> None:
        keys = [f"note/{other}" for other in self._others]
        if not self._store.check(keys):
            return  # one has not begun; to read its note would mean to wait for it
        notes = [Heartbeat.decode(data) for data in self._store.multi_get(keys)]
        now, seen = time.monotonic(), dict(self._seen)
        for other, note in zip(self._others, notes, strict=True):
            last = seen.get(other)
            if last is None or last.note.beat != note.beat:
                stands = last is not None and last.note.where == note.where
                seen[other] = _Seen(note, now, last.moved_at if last is not None and stands else now)
        self._seen, self._read_at = seen, now
