"""Find out from another thread in which collective a thread is blocked, since it cannot say so itself.

Not only our own collectives make ranks wait, but also Lightning's, those of metrics, and the user's. Python's stack
shows them all, and each group counts its collectives, which tells a further one at the same place from no progress.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

from torch import Tensor

# What is larger may just take its time.
_SMALL_BYTES = 1 << 16
# Where waiting is done; elsewhere in ``torch.distributed`` there is also work, such as checkpoints that are written.
_COLLECTIVES = "torch.distributed.distributed_c10d"
_PICKLING = ("_object_to_tensor", "_tensor_to_object")


def blocking_collective(thread: int) -> str:
    """Return which collective a thread waits in and where it was called, as in "`barrier` called by fit (train.py:31)".

    The text is empty outside a collective of ``torch.distributed``, and for one that moves more than a few numbers,
    since it may be making progress.

    Args:
        thread: Identifier of the thread, as from `threading.get_ident`.
    """
    frame = sys._current_frames().get(thread)
    call: FrameType | None = None
    if frame is None or frame.f_globals.get("__name__") != _COLLECTIVES or frame.f_code.co_name in _PICKLING:
        return ""
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith("torch.distributed"):
        call, frame = frame, frame.f_back
        if any(_is_large(value) for value in list(call.f_locals.values())):
            return ""
    if call is None or frame is None:
        return ""
    code = frame.f_code
    # A decorator of torch's stands between the call and what is called.
    name = getattr(call.f_locals.get("func"), "__name__", call.f_code.co_name)
    return f"`{name}` called by {code.co_name} ({Path(code.co_filename).name}:{frame.f_lineno})"


def _is_large(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.nbytes > _SMALL_BYTES
    return isinstance(value, (list, tuple)) and any(map(_is_large, value))
