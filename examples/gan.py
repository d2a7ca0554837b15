"""A GAN on handwritten digits: manual optimization, two optimizers, and no flag for unused parameters.

    python examples/gan.py
    python examples/gan.py --epochs 60      # digits that one can read, after about a minute

Each step of the discriminator leaves the generator without gradients and the other way round. The reducer notices, and
a bucket that no process used is not sent. The last line is what the discriminator thinks of real and of made images.
"""

import argparse

import torch
from digits import DigitsData
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce

import lightning_ddp_hooks  # noqa: F401  (registers the strategy "ddp_hooks")


class Gan(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 64), nn.Sigmoid())
        self.discriminator = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        real = batch[0].flatten(1)
        g_opt, d_opt = self.optimizers()
        made = self.generator(torch.randn(len(real), 16, device=self.device))

        for_real, for_made = self.discriminator(real), self.discriminator(made.detach())
        d_loss = bce(for_real, torch.full_like(for_real, 0.9)) + bce(for_made, torch.zeros_like(for_made))
        d_opt.zero_grad()
        self.manual_backward(d_loss)  # the generator has no gradients here
        d_opt.step()

        self.toggle_optimizer(g_opt)
        for_made = self.discriminator(made)
        g_opt.zero_grad()
        self.manual_backward(bce(for_made, torch.ones_like(for_made)))  # nor has the discriminator here
        g_opt.step()
        self.untoggle_optimizer(g_opt)

        shares = {"real": for_real.sigmoid().mean(), "made": for_made.sigmoid().mean()}
        self.log_dict(shares, prog_bar=True, on_step=False, on_epoch=True, sync_dist=True)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.Adam(net.parameters(), lr=2e-3, betas=(0.5, 0.999))
            for net in (self.generator, self.discriminator)
        ]


def draw(image: Tensor) -> str:
    return "\n".join("".join(" .:*#"[min(4, int(5 * value))] * 2 for value in row) for row in image.view(8, 8).tolist())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    args = parser.parse_args()
    seed_everything(0)
    quiet = {"logger": False, "enable_checkpointing": False}
    trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp_hooks", max_epochs=args.epochs, **quiet)
    model, data = Gan(), DigitsData()
    data.setup("fit")
    trainer.fit(model, data.train_dataloader())
    if trainer.is_global_zero:
        with torch.no_grad():
            print(draw(model.generator(torch.randn(1, 16))[0]))
        shares = (f"{name}={float(trainer.callback_metrics[name]):.4f}" for name in ("real", "made"))
        print(*shares, flush=True)
