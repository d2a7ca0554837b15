"""Private names of FSDP2 (``torch.distributed.fsdp.fully_shard``); imported only where it is used, since it is large.

What is public is set for a whole module, and says neither which parameters a reduction holds nor how to leave out the
all-reduce of a mesh with replicas; both are known to FSDP2's parameter groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo, HSDPMeshInfo
from torch.distributed.tensor import DTensor

ProcessGroup = dist.ProcessGroup


def is_fsdp1(model: nn.Module) -> bool:
    """Tell whether a part of the model is wrapped in the older FSDP."""
    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


class ShardedParam:
    """One parameter of a group.

    Attributes:
        name: Name in the model.
        param: The sharded parameter, a DTensor.
        padded_shape: Shape of the largest shard, in which a reduction holds the shard of each rank.
        dim: Dimension that is sharded.
    """

    def __init__(self, raw: Any, name: str) -> None:
        self.name = name
        self.param: DTensor = raw.sharded_param
        self.padded_shape = torch.Size(raw.padded_sharded_param_size)
        self.dim = int(raw.fsdp_placement.dim)

    def local(self) -> Tensor:
        """Return this rank's shard, whose memory is the parameter's."""
        return self.param._local_tensor.detach()

    def places(self) -> list[tuple[int, int]]:
        """Return this rank's place and the number of places in each dimension of the mesh that shards the parameter.

        With tensor parallelism that is not FSDP2's alone.
        """
        mesh = self.param.device_mesh
        dims = [dim for dim, placement in enumerate(self.param.placements) if not placement.is_replicate()]
        return [(mesh.get_local_rank(dim), mesh.size(dim)) for dim in dims]

    def with_local(self, local: Tensor) -> DTensor:
        """Return a tensor that is sharded like the parameter, of which ``local`` is this rank's shard."""
        param = self.param
        return DTensor.from_local(
            local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
        )


class ParamGroup:
    """The parameters that FSDP2 gathers and reduces together.

    Attributes:
        name: Name of its module.
        params: Its parameters, in the order in which a reduction holds them.
        shard_group: Ranks that hold the shards.
        replicate_group: Ranks that hold the same shard; None on a mesh of one dimension.
    """

    def __init__(self, raw: Any, name: str, names: dict[int, str]) -> None:
        self._raw = raw
        self._before: dict[str, Any] = {}
        self.name = name
        self.params = [ShardedParam(param, names.get(id(param.sharded_param), "")) for param in raw.fsdp_params]
        info = raw.mesh_info
        self.shard_group: ProcessGroup | None = info.shard_process_group if isinstance(info, FSDPMeshInfo) else None
        self.replicate_group: ProcessGroup | None = (
            info.replicate_process_group if isinstance(info, DDPMeshInfo) else None
        )

    @property
    def offloads(self) -> bool:
        """Whether shards lie on the CPU and are computed with elsewhere."""
        return isinstance(self._raw.offload_policy, CPUOffloadPolicy) and self._raw.device.type != "cpu"

    @property
    def has_own_reduction(self) -> bool:
        """Whether somebody has set a hook or a collective for its gradients."""
        scatter = getattr(self._raw, "_reduce_scatter_comm", None)
        own_scatter = scatter is not None and not type(scatter).__module__.startswith("torch.")
        return getattr(self._raw, "_all_reduce_hook", None) is not None or own_scatter

    @property
    def reduces_over_replicas(self) -> bool:
        """Whether the present backward is to be reduced over the replicas: see ``set_requires_all_reduce``."""
        return bool(self._raw.all_reduce_grads)

    @property
    def divides(self) -> bool:
        """Whether the user has FSDP2 divide by a number of their own, and not by that of the ranks."""
        return getattr(self._raw, "gradient_divide_factor", None) is not None

    def take_all_reduce(self, hook: Callable[[Tensor], None]) -> None:
        """Have ``hook`` reduce the result of the reduce-scatter in place, instead of FSDP2's all-reduce."""
        _require(self._raw, "_all_reduce_hook", "2.7")
        info = self._raw.mesh_info
        if isinstance(info, HSDPMeshInfo):  # the group is told that it has no replicas; its parameters know better
            alone = FSDPMeshInfo(mesh=info.mesh, shard_mesh_dim=info.shard_mesh_dim)
            if self._raw.post_forward_mesh_info is info:
                self._set("post_forward_mesh_info", alone)
            self._set("mesh_info", alone)
        self._set("_all_reduce_hook", hook)

    def take_reduce_scatter(self, collective: Any) -> None:
        """Have ``collective`` take the place of the reduce-scatter; see ``set_custom_reduce_scatter``."""
        _require(self._raw, "_reduce_scatter_comm", "2.9")
        self._set("_reduce_scatter_comm", collective)

    def _set(self, name: str, value: Any) -> None:
        self._before.setdefault(name, getattr(self._raw, name))
        setattr(self._raw, name, value)

    def give_back(self) -> None:
        """Leave its gradients to FSDP2 again."""
        for name, value in self._before.items():
            setattr(self._raw, name, value)
        self._before.clear()


def _require(raw: Any, name: str, version: str) -> None:
    if not hasattr(raw, name):
        raise RuntimeError(f"Communication hooks on FSDP2 need torch {version} or later; this is {torch.__version__}.")


def param_groups(model: nn.Module) -> list[ParamGroup]:
    """Return the parameter groups of a model in the order of its modules; its parameters get resharded."""
    modules = [(name, module) for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    for _, module in modules:
        module.reshard()
    names = {id(param): name for name, param in model.named_parameters()}
    return [ParamGroup(raw, name, names) for name, module in modules for raw in _raw_groups(module)]


def _raw_groups(module: Any) -> Iterator[Any]:
    state = module._get_fsdp_state()
    groups: Iterable[Any] = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return (group for group in groups if group is not None)


def shared_beside_shards(params: Iterable[ShardedParam]) -> str | None:
    """Return the name of a parameter that tensor-parallel ranks share, while they shard others; None if there is none.

    Only trainable ones count.
    """
    dims = {p.name: sum(size > 1 for _, size in p.places()) for p in params if p.param.requires_grad}
    return min(dims, key=dims.__getitem__) if len(set(dims.values())) > 1 else None


def scale_of(op: Any, world_size: int) -> float | None:
    """Return what a reduction multiplies each rank's part with before the sum; None if that is not known."""
    if op == dist.ReduceOp.AVG:
        return 1.0 / world_size
    return 1.0 if op == dist.ReduceOp.SUM else None


def local_tensor(value: object) -> object:
    """Return this rank's shard of a DTensor, whose memory is the same; anything else as it is."""
    return value._local_tensor if isinstance(value, DTensor) else value


# ---------------------------------------------------------------------- distributed checkpoints


def save_sharded(state: dict[str, Any], path: str) -> None:
    """Write a distributed checkpoint; collective."""
    from torch.distributed.checkpoint.state_dict_saver import save

    save(state, checkpoint_id=path)


def saved_tensors(path: str) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return shape and dtype of the tensors in a distributed checkpoint."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    entries = FileSystemReader(path).read_metadata().state_dict_metadata
    return {
        name: (entry.size, entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def load_sharded(state: dict[str, Any], path: str) -> None:
    """Read tensors of a distributed checkpoint into those of ``state``; collective."""
    from torch.distributed.checkpoint.state_dict_loader import load

    load(state, checkpoint_id=path)


def device_mesh(device_type: str, sizes: dict[str, int]) -> Any:
    """Return a mesh over all ranks, with a size for each dimension by name; collective."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
