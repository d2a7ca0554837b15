"""Train the byte-level transformer of language_model.py sharded by FSDP2, as two replicas of two shards on the CPU.

    python examples/language_model_fsdp.py
    python examples/language_model_fsdp.py --averager none

By default the replicas, which stand for two hosts, train for themselves and meet every 20 steps (DiLoCo); with ``none``
their gradients are averaged at each step, in 8 bits. The last line is the validation loss, ``val_loss=2.xxx``.
"""

import argparse

import lightning as L
from language_model import LanguageModel, StandardLibrary
from torch import Tensor
from torch.distributed.fsdp import fully_shard

import lightning_ddp_hooks as ldh


class ShardedLanguageModel(LanguageModel):
    """The same model; each block is gathered for itself while it computes."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]  # the shards of one replica
        for block in self.blocks.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(self, mesh=mesh)

    def forward(self, text: Tensor) -> Tensor:
        return super().forward(text).clone()  # FSDP2 warns of outputs that are views


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--averager", choices=("diloco", "none"), default="diloco")
    parser.add_argument("--batches", type=int, default=200)
    options = parser.parse_args()
    L.seed_everything(0)
    if options.averager == "diloco":
        strategy = ldh.FSDPHooksStrategy(replicas=2, averager=ldh.averaging.DiLoCo(period=20))
    else:
        strategy = ldh.FSDPHooksStrategy(replicas=2, comm_hook="int8")
    trainer = L.Trainer(
        accelerator="cpu",
        devices=4,
        strategy=strategy,
        max_epochs=1,
        limit_train_batches=options.batches,
        limit_val_batches=min(20, options.batches),
        enable_checkpointing=False,
        logger=False,
    )
    trainer.fit(ShardedLanguageModel(), datamodule=StandardLibrary())
    if trainer.is_global_zero:
        print(f"val_loss={trainer.callback_metrics['val_loss']:.4f}", flush=True)


if __name__ == "__main__":
    main()
