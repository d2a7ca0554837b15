"""The only user of private torch and Lightning names: each is wrapped once, with the reason it is needed."""

from lightning_ddp_hooks._compat.of_distributed import *  # noqa: F403
from lightning_ddp_hooks._compat.of_lightning import *  # noqa: F403
from lightning_ddp_hooks._compat.of_torch import *  # noqa: F403
