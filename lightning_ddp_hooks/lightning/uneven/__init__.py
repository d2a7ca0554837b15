"""Uneven inputs under a Trainer: the run that a strategy asks what a step means on this rank."""
