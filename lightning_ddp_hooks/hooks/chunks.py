"""Where the blocks of a bucket lie: one chunk for each rank, and one message for each chunk.

bucket    | block | block | block | block | block | block | bl. + padding |
|------ chunk 0 --------|------ chunk 1 --------|--- chunk 2 ----
message   | scale of each block (float32) | codes of each block | up to 7 bytes of padding |
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_ddp_hooks.hooks.kernels import SCALE_BYTES, BlockCodec


@dataclass(frozen=True)
class Chunks:
    """How a bucket is cut into one chunk for each rank; the last ones are filled up with zeros.

    Attributes:
        numel: Number of elements of the bucket.
        world_size: Number of chunks.
        block: Number of elements of a block; fewer than asked for where the bucket is too small for one per chunk.
        blocks: Number of blocks of a chunk.
    """

    numel: int
    world_size: int
    block: int
    blocks: int

    @classmethod
    def build(cls, numel: int, world_size: int, block_size: int) -> Chunks:
        """Cut ``numel`` elements into blocks of at most ``block_size`` (a multiple of 8)."""
        share = -(-numel // world_size)
        block = min(block_size, -(-share // 8) * 8)
        return cls(numel, world_size, block, -(-share // block) if share else 0)

    @property
    def chunk(self) -> int:
        """Elements of a chunk, with padding."""
        return self.blocks * self.block

    def start(self, rank: int) -> int:
        """Return where the chunk of ``rank`` begins in the bucket; its end, if the chunk is all padding."""
        return min(rank * self.chunk, self.numel)

    def count(self, rank: int) -> int:
        """Return how many elements of the chunk of ``rank`` are not padding."""
        return self.start(rank + 1) - self.start(rank)

    def message_bytes(self, codec: BlockCodec) -> int:
        """Return the bytes of one chunk's message, a multiple of 8."""
        return -(-self.blocks * (SCALE_BYTES + codec.code_bytes(self.block)) // 8) * 8


class Message:
    """One or more messages, one behind the other, and the views of their parts."""

    def __init__(self, chunks: Chunks, codec: BlockCodec, count: int, device: torch.device) -> None:
        self.bytes = torch.zeros(count, chunks.message_bytes(codec), dtype=torch.uint8, device=device)
        split = chunks.blocks * SCALE_BYTES
        code_bytes = codec.code_bytes(chunks.block)
        self.scales = self.bytes[:, :split].view(torch.float32)
        codes = self.bytes[:, split : split + chunks.blocks * code_bytes]
        self.codes = codes.view(count, chunks.blocks, code_bytes)
