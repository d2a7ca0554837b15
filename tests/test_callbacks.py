"""Callbacks are known by their public path, wherever they are defined: configuration files and pickles name it."""

import pickle

import pytest
from jsonargparse import ArgumentParser
from lightning.pytorch import Callback

from lightning_ddp_hooks import callbacks
from lightning_ddp_hooks.averaging import SlowMo

ARGUMENTS = {"UnevenInputs": (), "CommMonitor": (), "ModelAveraging": (SlowMo(period=4),)}


@pytest.mark.parametrize("name", callbacks.__all__)
def test_a_callback_is_written_down_by_its_public_path(name: str) -> None:
    path = f"lightning_ddp_hooks.callbacks.{name}"
    flags = ["--callback.averager=lightning_ddp_hooks.averaging.SlowMo", "--callback.averager.period=4"]
    parser = ArgumentParser()
    parser.add_argument("--callback", type=Callback)
    written = parser.dump(parser.parse_args([f"--callback={path}", *(flags if ARGUMENTS[name] else ())]))
    assert f"class_path: {path}\n" in written

    pickled = pickle.dumps(getattr(callbacks, name)(*ARGUMENTS[name]))
    assert b"lightning_ddp_hooks.callbacks" in pickled
    assert b"lightning_ddp_hooks.lightning" not in pickled
    assert type(pickle.loads(pickled)) is getattr(callbacks, name)
