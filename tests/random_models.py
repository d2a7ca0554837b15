"""Random models with random behavior of each rank, as `odd_models.Case`s: for the property test and the long soak."""

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from odd_models import Case, adamw, data
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

STEPS = 4
DTYPES = (torch.float64, torch.complex128)


@dataclass(frozen=True)
class Block:
    """One layer of a random model."""

    width: int
    dtype: int
    bias: bool
    frozen: bool
    checkpoint: str  # "", "reentrant" or "plain"
    repeats: int


@dataclass(frozen=True)
class Spec:
    """A random model, and who uses which of its blocks when."""

    blocks: tuple[Block, ...]
    micro_batches: int
    views: bool
    find_unused: bool
    zero_grad: str
    cap_bytes: int
    thaw_at: int  # the step from which on all blocks are trained
    seed: int

    def used(self, rank: int, step: int, micro: int) -> list[int]:
        """Return the blocks that the rank uses in the micro-batch; all of them unless unused ones are allowed."""
        everything = list(range(len(self.blocks)))
        if not self.find_unused:
            return everything
        generator = torch.Generator().manual_seed(hash((self.seed, rank, step, micro)) % (1 << 31))
        keep = torch.rand(len(everything), generator=generator) < 0.6
        return [index for index in everything if keep[index]]


class RandomModel(nn.Module):
    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        self.blocks = nn.ModuleList(
            nn.Linear(4, block.width, bias=block.bias, dtype=DTYPES[block.dtype]) for block in spec.blocks
        )
        for module, block in zip(self.blocks, spec.blocks, strict=True):
            module.requires_grad_(not block.frozen)
        self.anchor = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, x: Tensor, used: list[int]) -> Tensor:
        x = x * self.anchor
        total = x.sum()
        for index in used:
            block = self.spec.blocks[index]
            for _ in range(block.repeats):
                h = x.to(DTYPES[block.dtype])
                if block.checkpoint:
                    y = checkpoint(self.blocks[index], h, use_reentrant=block.checkpoint == "reentrant")
                else:
                    y = self.blocks[index](h)
                total = total + y.abs().square().mean()
        return total


def case(spec: Spec) -> Case:
    """Return the case that the spec describes."""

    def run(model: Any, module: nn.Module, rank: int, step: int, no_sync: Any) -> None:
        if step == spec.thaw_at:
            module.requires_grad_(True)
        for micro in range(spec.micro_batches):
            last = micro == spec.micro_batches - 1
            x = data(rank, 10 * step + micro, 3, 4)
            if last:
                model(x, spec.used(rank, step, micro)).backward()
            else:
                with no_sync():
                    model(x, spec.used(rank, step, micro)).backward()

    return Case(
        lambda: RandomModel(spec),
        run,
        {
            "bucket_cap_mb": spec.cap_bytes / (1 << 20),
            "first_bucket_mb": spec.cap_bytes / (2 << 20),
            "find_unused_parameters": spec.find_unused,
            "gradient_as_bucket_view": spec.views,
        },
        adamw,
        spec.zero_grad,
    )


blocks = st.builds(
    Block,
    width=st.integers(1, 6),
    dtype=st.integers(0, len(DTYPES) - 1),
    bias=st.booleans(),
    frozen=st.booleans(),
    checkpoint=st.sampled_from(["", "", "reentrant", "plain"]),
    repeats=st.sampled_from([1, 1, 2]),
)

specs = st.builds(
    Spec,
    blocks=st.lists(blocks, min_size=1, max_size=6).map(tuple),
    micro_batches=st.integers(1, 3),
    views=st.booleans(),
    find_unused=st.booleans(),
    zero_grad=st.sampled_from(["none", "zero", "never"]),
    cap_bytes=st.sampled_from([1, 64, 256, 1 << 20]),
    thaw_at=st.integers(1, STEPS),
    seed=st.integers(0, 1 << 20),
)
