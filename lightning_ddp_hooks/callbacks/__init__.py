"""Callbacks for the Trainer."""

from lightning_ddp_hooks.callbacks.model_averaging import ModelAveraging

__all__ = ["ModelAveraging"]
