"""Checkpoint files: whole or not there, whatever happens while they are written; and what is read from damaged ones."""

import errno
import inspect
import os
import pickle
import random
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.plugins import AsyncCheckpointIO

from lightning_ddp_hooks import DDPHooksStrategy
from lightning_ddp_hooks.lightning.checkpoint_io import AtomicCheckpointIO

IO = AtomicCheckpointIO()


def _checkpoint(value: float = 1.0) -> dict[str, Any]:
    return {"state_dict": {"weight": torch.full((200, 200), value), "bias": torch.arange(5.0)}, "epoch": 3}


def _value(path: Path) -> float:
    return float(IO.load_checkpoint(path)["state_dict"]["weight"][7, 7])


@contextmanager
def _full_disk_after(size: int) -> Iterator[None]:
    """Have the system refuse to let a file grow beyond ``size`` bytes; Python ignores the signal that comes with it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_is_written_is_read_by_anybody_and_has_the_usual_permissions(tmp_path: Path) -> None:
    IO.save_checkpoint(_checkpoint(), tmp_path / "new" / "a.ckpt")
    TorchCheckpointIO().save_checkpoint(_checkpoint(), str(tmp_path / "b.ckpt"))
    assert os.listdir(tmp_path / "new") == ["a.ckpt"]
    assert (tmp_path / "new" / "a.ckpt").stat().st_mode == (tmp_path / "b.ckpt").stat().st_mode
    for io in (IO, TorchCheckpointIO()):
        for path in ("new/a.ckpt", "b.ckpt"):
            torch.testing.assert_close(io.load_checkpoint(str(tmp_path / path)), _checkpoint())


@pytest.mark.parametrize("size", [0, 1000, 100_000, 160_000])
def test_a_disk_that_is_full_leaves_the_checkpoint_before_as_it_was(tmp_path: Path, size: int) -> None:
    path = tmp_path / "last.ckpt"
    IO.save_checkpoint(_checkpoint(1.0), path)
    with _full_disk_after(size), pytest.raises(OSError, match="the one that was there before is untouched") as caught:
        IO.save_checkpoint(_checkpoint(2.0), path)
    assert caught.value.errno == errno.EFBIG
    assert caught.value.filename == str(path)
    assert os.listdir(tmp_path) == ["last.ckpt"]
    assert _value(path) == 1.0
    with _full_disk_after(size), pytest.raises(OSError, match="no part of it is left"):
        IO.save_checkpoint(_checkpoint(2.0), tmp_path / "new.ckpt")
    assert os.listdir(tmp_path) == ["last.ckpt"]


class _Unpicklable:
    def __reduce__(self) -> Any:
        raise TypeError("not me")


class _Interrupts:
    def __reduce__(self) -> Any:
        raise KeyboardInterrupt


@pytest.mark.parametrize(("value", "error"), [(_Unpicklable(), TypeError), (_Interrupts(), KeyboardInterrupt)])
def test_an_error_in_mid_file_leaves_no_file(tmp_path: Path, value: object, error: type[BaseException]) -> None:
    with pytest.raises(error):
        IO.save_checkpoint({**_checkpoint(), "value": value}, tmp_path / "a.ckpt")
    assert os.listdir(tmp_path) == []


def test_what_a_killed_process_left_is_replaced_and_not_taken_for_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "last.ckpt"
    with monkeypatch.context() as patch:  # all but the last step is done, and the end does not come to pass
        patch.setattr(os, "replace", lambda *_: os.listdir("/nowhere"))
        patch.setattr(Path, "unlink", lambda *_, **__: None)
        with pytest.raises(FileNotFoundError):
            IO.save_checkpoint(_checkpoint(1.0), path)
    (left,) = os.listdir(tmp_path)
    assert left.startswith(".")
    assert left.endswith(".tmp")
    assert "last" not in left
    IO.save_checkpoint(_checkpoint(2.0), path)
    assert os.listdir(tmp_path) == ["last.ckpt"]
    assert _value(path) == 2.0


def test_remote_paths_and_options_are_lightnings_affair() -> None:
    IO.save_checkpoint(_checkpoint(), "memory://folder/a.ckpt")
    torch.testing.assert_close(IO.load_checkpoint("memory://folder/a.ckpt"), _checkpoint())
    IO.remove_checkpoint("memory://folder/a.ckpt")
    with pytest.raises(FileNotFoundError):
        IO.load_checkpoint("memory://folder/a.ckpt")
    with pytest.raises(TypeError, match="storage_options"):
        IO.save_checkpoint(_checkpoint(), "a.ckpt", storage_options={})


def _flip(path: Path, position: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


def test_a_bit_that_has_changed_is_found(tmp_path: Path) -> None:
    path, draw = tmp_path / "a.ckpt", random.Random(0)
    IO.save_checkpoint(_checkpoint(), path)
    good, found = path.read_bytes(), 0
    for _ in range(40):
        path.write_bytes(good)
        _flip(path, draw.randrange(len(good)), draw.randrange(8))
        try:
            loaded = IO.load_checkpoint(path)
        except RuntimeError as error:
            found += f"Could not read the checkpoint {str(path)!r}" in str(error)
        else:  # a byte that nobody looks at
            torch.testing.assert_close(loaded, _checkpoint(), rtol=0, atol=0)
            found += 1
    assert found == 40


def test_torch_does_not_find_it(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    IO.save_checkpoint(_checkpoint(), path)
    _flip(path, path.stat().st_size // 2)  # if this fails, see whether checksums still need to be compared
    assert not torch.equal(torch.load(path)["state_dict"]["weight"], _checkpoint()["state_dict"]["weight"])


_DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda data: data[: len(data) // 2],
    "end missing": lambda data: data[:-3],
    "empty": lambda data: b"",
    "text": lambda data: b"what is this?\n" * 99,
    "zeros": lambda data: bytes(len(data)),
}


@pytest.mark.parametrize("damage", _DAMAGE)
def test_a_file_that_is_no_checkpoint_is_named(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "a.ckpt"
    IO.save_checkpoint(_checkpoint(), path)
    path.write_bytes(_DAMAGE[damage](path.read_bytes()))
    with pytest.raises((RuntimeError, pickle.UnpicklingError), match=f"Could not read the checkpoint '{path}'"):
        IO.load_checkpoint(path)


def test_a_folder_and_nothing_at_all_are_named(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match=f"found a folder.*'{tmp_path}'"):
        IO.load_checkpoint(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"nothing\.ckpt"):
        IO.load_checkpoint(tmp_path / "nothing.ckpt")


class _Runs:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


# Older Lightning trusts all files, and cannot be told not to.
_CAN_DISTRUST = "weights_only" in inspect.signature(TorchCheckpointIO.load_checkpoint).parameters


@pytest.mark.skipif(not _CAN_DISTRUST, reason="of a newer Lightning")
def test_code_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    torch.save({**_checkpoint(), "callbacks": _Runs(tmp_path / "ran")}, tmp_path / "a.ckpt")
    with pytest.raises(pickle.UnpicklingError, match=r"Could not read the checkpoint .*a\.ckpt"):
        IO.load_checkpoint(tmp_path / "a.ckpt")
    assert not (tmp_path / "ran").exists()
    IO.load_checkpoint(tmp_path / "a.ckpt", weights_only=False)  # who asks for it gets it
    assert (tmp_path / "ran").exists()


def test_files_without_checksums_are_read(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        IO.save_checkpoint(_checkpoint(), tmp_path / "a.ckpt")
    finally:
        torch.serialization.set_crc32_options(True)
    torch.testing.assert_close(IO.load_checkpoint(tmp_path / "a.ckpt"), _checkpoint())


def test_the_strategy_uses_it_unless_the_user_has_another_one() -> None:
    assert type(DDPHooksStrategy().checkpoint_io) is AtomicCheckpointIO
    for own in (TorchCheckpointIO(), AsyncCheckpointIO(TorchCheckpointIO())):
        strategy = DDPHooksStrategy(checkpoint_io=own)
        assert strategy.checkpoint_io is own
        assert type(getattr(own, "checkpoint_io", own)) is TorchCheckpointIO
    wrapper, strategy = AsyncCheckpointIO(), DDPHooksStrategy()
    strategy.checkpoint_io = wrapper
    assert strategy.checkpoint_io is wrapper
    assert type(wrapper.checkpoint_io) is AtomicCheckpointIO
