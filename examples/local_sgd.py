"""Average models every few steps instead of gradients at every step, and see how much less is sent.

    python examples/local_sgd.py                       # local SGD: the mean of all replicas every 8 steps
    python examples/local_sgd.py --averager diloco     # an outer optimizer moves a global model instead
    python examples/local_sgd.py --averager none       # gradients at every step, to compare with

Two processes on the CPU train the network of digits.py. The last line is the accuracy on images that training has not
seen, and what each process sent per step.
"""

import argparse

from digits import DigitsData, DigitsModel
from lightning.pytorch import Trainer, seed_everything

from lightning_ddp_hooks import DDPHooksStrategy
from lightning_ddp_hooks.averaging import DiLoCo, ModelAverager, PeriodicModelAverager
from lightning_ddp_hooks.callbacks import CommMonitor


def averager(name: str, period: int, warmup: int) -> ModelAverager | None:
    if name == "diloco":
        return DiLoCo(period=period, warmup_steps=warmup, outer_lr=0.7, outer_momentum=0.5)
    return None if name == "none" else PeriodicModelAverager(period=period, warmup_steps=warmup)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--averager", choices=["periodic", "diloco", "none"], default="periodic")
    parser.add_argument("--period", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=20, help="steps that average gradients first")
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()
    seed_everything(0)
    monitor = CommMonitor(prog_bar=False)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        max_epochs=args.epochs,
        logger=False,
        enable_checkpointing=False,
        strategy=DDPHooksStrategy(averager=averager(args.averager, args.period, args.warmup)),
        callbacks=[monitor],
    )
    model, data = DigitsModel(), DigitsData()
    trainer.fit(model, datamodule=data)
    trainer.test(model, datamodule=data)
    if trainer.is_global_zero:
        sent_kb = sum(step.sent_bytes for step in monitor.record.steps) / len(monitor.record.steps) / 1e3
        accuracy = float(trainer.callback_metrics["test_acc"])
        print(f"test_acc={accuracy:.4f} kb_per_step={sent_kb:.1f}", flush=True)
