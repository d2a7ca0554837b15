"""Uneven inputs under a Trainer: what a step means on this rank, and who takes part in its collectives."""
