"""Train with the package as it is installed, without any of its extras."""

import importlib.util
import pkgutil

import torch
from lightning.pytorch import LightningModule, Trainer

import lightning_ddp_hooks as ldh


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(8, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    absent = [name for name in ("jsonargparse", "rich", "sklearn", "tensorboard") if not importlib.util.find_spec(name)]
    for module in pkgutil.walk_packages(ldh.__path__, "lightning_ddp_hooks."):
        if module.name != "lightning_ddp_hooks.__main__":
            importlib.import_module(module.name)
    for hook in (None, "powersgd", "int8"):
        strategy = ldh.DDPHooksStrategy(comm_hook=hook, start_method="fork")
        trainer = Trainer(
            accelerator="cpu", devices=2, strategy=strategy, max_steps=4, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        module = Module()
        before = module.net.weight.detach().clone()
        trainer.fit(module, torch.utils.data.DataLoader(torch.randn(64, 8), 4))
        assert not torch.equal(before, module.net.weight)
    print(f"lightning_ddp_hooks {ldh.__version__} trains without {', '.join(absent)}")


if __name__ == "__main__":
    main()
