"""Uneven inputs: ranks may run out of data at different times."""

from lightning_ddp_hooks.join.context import Join, Joinable, JoinHook

__all__ = ["Join", "JoinHook", "Joinable"]
