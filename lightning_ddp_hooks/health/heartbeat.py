"""What a rank says of itself to the others: where it is, and how it ended."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import Enum

# Of a traceback the end tells most; a store is no place for megabytes.
MAX_TEXT = 6000


class State(str, Enum):
    """What has become of a rank.

    Attributes:
        RUNNING: it trains.
        FAILED: an error of its own ended it.
        GAVE_UP: it ended because of another rank.
        FINISHED: its fit is over.
    """

    RUNNING = "running"
    FAILED = "failed"
    GAVE_UP = "gave up"
    FINISHED = "finished"


@dataclass(frozen=True)
class Progress:
    """How far a rank has come.

    Attributes:
        step: the training step.
        passes: how many synchronised backwards it has ended.
        launched: how many buckets of the backward that is running were sent.
        buckets: how many there are; 0 outside a backward.
        waits_for: what it waits for from the other ranks, in words; empty if nothing is known to be on its way.
        collectives: how many collectives it has begun, in all groups.
    """

    step: int
    passes: int = 0
    launched: int = 0
    buckets: int = 0
    waits_for: str = ""
    collectives: int = 0

    def text(self) -> str:
        """Say it in words."""
        place = f"step {self.step}, outside a backward"
        if self.buckets:
            place = f"step {self.step}, in a backward with {self.launched} of {self.buckets} buckets sent"
        return f"{place}, waiting for {self.waits_for}" if self.waits_for else place


@dataclass(frozen=True)
class Heartbeat:
    """What a rank has written down for the others.

    Attributes:
        beat: grows with each note, so that readers see that the rank lives, without comparing clocks.
        where: how far it has come.
        state: what has become of it.
        text: its own error, with the traceback, if it failed; why it gave up, if it did.
    """

    beat: int
    where: Progress
    state: State = State.RUNNING
    text: str = ""

    def encode(self) -> str:
        """Return the note in JSON: what comes from another process is not unpickled."""
        return json.dumps({**asdict(self), "text": self.text[-MAX_TEXT:]})

    @classmethod
    def decode(cls, data: str | bytes) -> Heartbeat:
        """Undo `encode`."""
        fields = json.loads(data)
        return cls(int(fields["beat"]), Progress(**fields["where"]), State(fields["state"]), str(fields["text"]))
