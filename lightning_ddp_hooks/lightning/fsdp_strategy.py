"""The Trainer's strategy for models that are sharded by FSDP2, with hooks and averagers between replicas."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.averaging.averager import ModelAverager
from lightning_ddp_hooks.checkpoint import STATE_KEY
from lightning_ddp_hooks.hooks.registry import HookLike

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_ddp_hooks.fsdp import FSDPHooks

_ENTRY = "hooks"


class FSDPHooksStrategy(ModelParallelStrategy):
    """FSDP2 and tensor parallelism, as in Lightning's ``ModelParallelStrategy``, with replicas, hooks and averagers.

    The LightningModule shards itself in ``configure_model``, as there. On ``self.device_mesh["data_parallel"]`` each
    replica is sharded by itself, and what crosses to other replicas is the package's matter; on
    ``self.device_mesh["replicate", "data_parallel"]`` the parameters know of the replicas. Both train alike.

    Args:
        data_parallel_size: ranks that share the shards of one replica. ``"auto"``: with one replica the number of
            nodes, as in ``ModelParallelStrategy``, else all ranks that are left.
        tensor_parallel_size: ranks that share a tensor. ``"auto"``: with one replica the devices of a node, else 1.
        replicas: copies of the model, usually one for each host: ranks are the product of the three sizes.
        comm_hook: short name or `CommHook` for the gradients that are sent between replicas; with one replica for the
            reduce-scatter, which `Cast` and `BlockQuantize(error_feedback=False)` can do. None for the mean.
        averager: averages the model over the replicas every few steps, not gradients at each.
        average_before_eval: put the averaged model in place for validation.
        check_replicas_every_n_steps: compare the parameters of replicas so often; None for never.
        save_distributed_checkpoint: as there; the state of hooks and averagers needs it.
        process_group_backend: as there.
        timeout: as there.

    Raises:
        TypeError: A setting of the wrong type.
        ValueError: A setting out of range, settings that do not go together, or that do not fit the model at setup.

    Example:
        >>> Trainer(num_nodes=4, devices=8, strategy=FSDPHooksStrategy(replicas=4, averager=DiLoCo(period=100)))
    """

    def __init__(
        self,
        data_parallel_size: Literal["auto"] | int = "auto",
        tensor_parallel_size: Literal["auto"] | int = "auto",
        *,
        replicas: int = 1,
        comm_hook: HookLike | None = None,
        averager: ModelAverager | None = None,
        average_before_eval: bool = True,
        check_replicas_every_n_steps: int | None = None,
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = comm.DEFAULT_TIMEOUT,
    ) -> None:
        from lightning_ddp_hooks.fsdp.settings import FSDPSettings

        super().__init__(
            data_parallel_size,
            tensor_parallel_size,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        if isinstance(replicas, bool) or not isinstance(replicas, int):
            raise TypeError(f"Expected a whole number for `replicas`, got {replicas!r}.")
        if replicas < 1:
            raise ValueError(f"Expected `replicas` of at least 1, got {replicas}.")
        if not isinstance(average_before_eval, bool):
            raise TypeError(f"Expected True or False for `average_before_eval`, got {average_before_eval!r}.")
        self._settings = FSDPSettings(
            comm_hook=comm_hook, averager=averager, check_replicas_every_n_steps=check_replicas_every_n_steps
        )
        self._settings.check_model(has_replicas=replicas > 1, offloads=False)
        if averager is None and not average_before_eval:
            raise ValueError("`average_before_eval` has no effect without `averager`.")
        self._replicas = replicas
        self._average_before_eval = average_before_eval
        self._hooks: FSDPHooks | None = None
        self._evaluation = ExitStack()
        self._failed = False

    @property
    def hooks(self) -> FSDPHooks:
        """Hook and averager at work, while the Trainer fits."""
        if self._hooks is None:
            raise RuntimeError("No hook or averager is at work: there is one while a Trainer fits, if one was set.")
        return self._hooks

    @override
    def setup_environment(self) -> None:
        if self._replicas == 1:
            super().setup_environment()
            return
        from lightning_ddp_hooks._compat import of_fsdp

        ParallelStrategy.setup_environment(self)
        self._setup_distributed()
        parts, rest = divmod(self.world_size, self._replicas)
        tensor = 1 if self._tensor_parallel_size == "auto" else self._tensor_parallel_size
        data = parts // tensor if self._data_parallel_size == "auto" else self._data_parallel_size
        if rest or data * tensor != parts:
            raise ValueError(
                f"Expected `replicas` x `data_parallel_size` x `tensor_parallel_size` to be the {self.world_size} "
                f"ranks, got {self._replicas} x {data} x {tensor}."
            )
        self._data_parallel_size, self._tensor_parallel_size = data, tensor
        sizes = {"replicate": self._replicas, "data_parallel": data, "tensor_parallel": tensor}
        self._device_mesh = of_fsdp.device_mesh(self.root_device.type, sizes)
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._device_mesh

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        kwargs = super().distributed_sampler_kwargs
        if self._replicas > 1:
            kwargs["rank"] += kwargs["num_replicas"] * self.device_mesh.get_local_rank("replicate")
            kwargs["num_replicas"] *= self._replicas
        return kwargs

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        settings = self._settings
        fits = trainer.state.fn == TrainerFn.FITTING
        if not fits or (self._replicas == 1 and settings.hook is None):
            return
        from lightning_ddp_hooks.fsdp.hooks import apply, has_replicas

        assert self.model is not None
        self._hooks = apply(
            self.model,
            comm_hook=settings.comm_hook,
            averager=settings.averager,
            optimizers=self.optimizers,
            replicas=None if self._replicas == 1 or has_replicas(self.model) else self.device_mesh["replicate"],
            check_replicas_every_n_steps=settings.check_replicas_every_n_steps,
        )
        if self._hooks.keeps_state and not self._save_distributed_checkpoint:
            raise ValueError(
                "The state of the hook or averager lies on all ranks and is saved in a distributed checkpoint only: "
                "leave `save_distributed_checkpoint` at True."
            )

    @override
    def on_validation_start(self) -> None:
        if self._hooks is not None and self._average_before_eval:
            self._evaluation.enter_context(self._hooks.averaged())

    @override
    def on_validation_end(self) -> None:
        self._evaluation.close()

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._hooks is None or self._settings.averager is None:
            return super().lightning_module_state_dict()
        with self._hooks.averaged():
            return _copied(super().lightning_module_state_dict())  # type: ignore[no-any-return]

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if self._hooks is None or self._settings.averager is None:
            return super().optimizer_state(optimizer)
        with self._hooks.averaged(optimizers=True):
            return _copied(super().optimizer_state(optimizer))  # type: ignore[no-any-return]

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        whole = "optimizer_states" in checkpoint  # else only the weights are wanted
        if self._hooks is not None:
            self._hooks.check_replicas(f"before the checkpoint of step {self._hooks.step}")
        super().save_checkpoint(checkpoint, filepath, storage_options)
        own = Path(self.broadcast(filepath)) / STATE_KEY
        if self._hooks is not None and whole and self._save_distributed_checkpoint:
            from lightning_ddp_hooks._compat import of_fsdp

            of_fsdp.save_sharded({_ENTRY: self._hooks.state_dict()}, str(own))
        elif self.is_global_zero and own.is_dir():  # of a checkpoint that was overwritten
            shutil.rmtree(own)

    @override
    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        own = Path(self.broadcast(checkpoint_path)) / STATE_KEY
        if self._hooks is not None and own.is_dir():
            self._hooks.load_from(own, _ENTRY)
        elif self._hooks is not None:  # written by another strategy
            self._hooks.step = int(checkpoint.get("global_step", 0))
        return checkpoint

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        if self._hooks is not None:
            self._hooks.finish()

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self._failed = True

    @override
    def teardown(self) -> None:
        if self._hooks is not None and not self._failed:  # else other ranks may be anywhere
            self._hooks.close()
        self._hooks, self._failed = None, False
        super().teardown()

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register ``fsdp_hooks``."""
        for name in ("fsdp_hooks", cls.__name__.lower(), f"lightning_ddp_hooks.{cls.__name__.lower()}"):
            strategy_registry.register(name, cls, description="Sharded with communication hooks", override=True)


def _copied(value: Any) -> Any:
    """Copy the tensors of a nested state, which share memory with the model."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value
