"""What ties a run to Lightning: the strategies of Trainer and Fabric, callbacks, checkpoint files and messages."""

from lightning_ddp_hooks import _lightning_package

_lightning_package.load()  # decided before the modules of this folder are compiled
