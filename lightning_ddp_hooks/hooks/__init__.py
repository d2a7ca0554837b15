"""Communication hooks: what is done with a full bucket of gradients."""

from lightning_ddp_hooks.hooks.allreduce import AllReduce, Noop, allreduce_hook, noop_hook
from lightning_ddp_hooks.hooks.block_quantize import BlockQuantize, OneBit
from lightning_ddp_hooks.hooks.cast import (
    Cast,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from lightning_ddp_hooks.hooks.compose import PerParameter, Rule, Schedule, Stage
from lightning_ddp_hooks.hooks.contract import BindContext, BoundHook, CommHook, Phases
from lightning_ddp_hooks.hooks.error_feedback import ErrorFeedback
from lightning_ddp_hooks.hooks.function_hook import TorchHook
from lightning_ddp_hooks.hooks.hierarchical import HierarchicalAllReduce
from lightning_ddp_hooks.hooks.on_torch import TorchDDPState, run_on_torch_ddp
from lightning_ddp_hooks.hooks.post_local_sgd import PostLocalSGD, PostLocalSGDState, post_local_sgd_hook
from lightning_ddp_hooks.hooks.powersgd import (
    BatchedPowerSGD,
    PowerSGD,
    PowerSGDState,
    batched_powersgd_hook,
    powersgd_hook,
)
from lightning_ddp_hooks.hooks.quantize import (
    QuantizePerChannel,
    QuantizePerTensor,
    quantization_perchannel_hook,
    quantization_pertensor_hook,
)
from lightning_ddp_hooks.hooks.topk import TopK
from lightning_ddp_hooks.reducer import requests

__all__ = [
    "AllReduce",
    "BatchedPowerSGD",
    "BindContext",
    "BlockQuantize",
    "BoundHook",
    "Cast",
    "CommHook",
    "ErrorFeedback",
    "HierarchicalAllReduce",
    "Noop",
    "OneBit",
    "PerParameter",
    "Phases",
    "PostLocalSGD",
    "PostLocalSGDState",
    "PowerSGD",
    "PowerSGDState",
    "QuantizePerChannel",
    "QuantizePerTensor",
    "Rule",
    "Schedule",
    "Stage",
    "TopK",
    "TorchDDPState",
    "TorchHook",
    "allreduce_hook",
    "batched_powersgd_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
    "noop_hook",
    "post_local_sgd_hook",
    "powersgd_hook",
    "quantization_perchannel_hook",
    "quantization_pertensor_hook",
    "requests",
    "run_on_torch_ddp",
]
