"""Where a rank hangs: the user's line for the others to tell, and its stacks and collectives in a file."""

from __future__ import annotations

import sys
import sysconfig
import tempfile
import threading
import traceback
from pathlib import Path
from types import FrameType

from lightning_ddp_hooks import comm

FOLDER = "ddp_hooks_stacks"
_FRAMEWORKS = {"torch", "lightning", "lightning_fabric", "pytorch_lightning", "lightning_ddp_hooks"}
_STANDARD = sysconfig.get_path("stdlib")


def line_of(thread: int) -> str:
    """Return the innermost line of a thread that is not in a library, as in "`forward` (net.py:31)"; from any thread.

    Where a library runs, its innermost function follows.
    """
    innermost = frame = sys._current_frames().get(thread)
    while frame is not None and _is_library(frame):
        frame = frame.f_back
    if innermost is None or frame is None:
        return "" if innermost is None else _place(innermost)
    return _place(frame) if frame is innermost else f"{_place(frame)} in {_place(innermost)}"


def _is_library(frame: FrameType) -> bool:
    if str(frame.f_globals.get("__name__", "")).partition(".")[0] in _FRAMEWORKS:
        return True
    name = frame.f_code.co_filename
    return name.startswith("<") or (name.startswith(_STANDARD) and "site-packages" not in name)


def _place(frame: FrameType) -> str:
    return f"`{frame.f_code.co_name}` ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"


def stacks_text(rank: int, thread: int, place: str) -> str:
    """Describe a rank: its place, the stacks of its threads, the one that trains first, and its last collectives."""
    names = {known.ident: known.name for known in threading.enumerate()}
    frames = sys._current_frames()
    lines = [f"Rank {rank} was at {place}."]
    for ident in sorted(frames, key=lambda ident: ident != thread):
        what = "The thread that trains" if ident == thread else f"Thread {names.get(ident, ident)}"
        lines += ["", f"{what}, innermost call last:", "".join(traceback.format_stack(frames[ident])).rstrip()]
    return "\n".join([*lines, "", *comm.last_collectives()]) + "\n"


def write_stacks(rank: int, text: str) -> None:
    """Write a rank's text into its file, in the working directory or else the one for temporary files."""
    for folder in (Path.cwd(), Path(tempfile.gettempdir())):
        try:
            (folder / FOLDER).mkdir(exist_ok=True)
            (folder / FOLDER / f"rank-{rank}.txt").write_text(text, encoding="utf-8")
            return
        except OSError:
            continue


def files_text() -> str:
    """Say where the ranks' files are."""
    return f"The stacks of each rank are in {Path.cwd() / FOLDER}/rank-<n>.txt on its host."
