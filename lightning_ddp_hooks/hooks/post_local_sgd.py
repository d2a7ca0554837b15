"""Global mean first, then the mean of a subgroup only: the gradient side of post-local SGD."""

# No postponed annotations: torch's DDP looks at those of the functions when it is given one.
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.hooks.allreduce import TensorFuture, divisor_of, done
from lightning_ddp_hooks.hooks.contract import BindContext, BoundHook, CommHook, Phases, Subgroup, require_types
from lightning_ddp_hooks.hooks.hierarchical import ranks_by_host
from lightning_ddp_hooks.hooks.registry import SHORT_NAMES
from lightning_ddp_hooks.reducer import requests
from lightning_ddp_hooks.reducer.bucket import GradBucket
from lightning_ddp_hooks.short_names import add_short_name


@dataclass(frozen=True, kw_only=True)
class PostLocalSGD(CommHook):
    """Averages gradients over all ranks until a step, and then over subgroups, or not at all.

    After that step the replicas drift apart; a model averager has to bring them together again now and then::

        DDPHooksStrategy(
            comm_hook=PostLocalSGD(start_local_sgd_iter=500, subgroup_size=8),
            averager=PeriodicModelAverager(period=4, warmup_steps=500),
        )

    Bytes per element of a float32 gradient: 8 times ``(n - 1) / n`` as in any ring, with n the number of ranks before
    that step and the size of the subgroup after it; 0 with ``post_local_gradient_allreduce=False``.

    Args:
        start_local_sgd_iter: First step with the subgroup's mean.
        subgroup_size: Number of ranks of a subgroup, neighbors in the order of ranks; None for those of one host.
        subgroups: Ranks of each subgroup, as ``[[0, 2], [1, 3]]``, in place of ``subgroup_size``.
        post_local_gradient_allreduce: False leaves gradients alone after that step: local SGD without subgroups.

    Raises:
        TypeError: A setting of the wrong type.
        ValueError: A setting out of range; at setup: a number of ranks that the subgroups do not divide.

    Lin et al., "Don't use large mini-batches, use local SGD", 2020, https://arxiv.org/abs/1808.07217.
    """

    delayed_by = "start_local_sgd_iter"

    start_local_sgd_iter: int = 100
    subgroup_size: int | None = None
    subgroups: Sequence[Sequence[int]] | None = None
    post_local_gradient_allreduce: bool = True

    def __post_init__(self) -> None:
        whole = ("start_local_sgd_iter", "subgroup_size")
        require_types(self, whole=whole, flags=("post_local_gradient_allreduce",))
        if self.start_local_sgd_iter < 0:
            raise ValueError(f"Expected start_local_sgd_iter of at least 0, got {self.start_local_sgd_iter}.")
        if self.subgroup_size is not None and self.subgroup_size < 1:
            raise ValueError(f"Expected subgroup_size of at least 1, got {self.subgroup_size}.")
        if self.subgroup_size is not None and self.subgroups is not None:
            raise ValueError("Expected subgroup_size or subgroups, got both.")
        parts = self.subgroups
        lists = isinstance(parts, (list, tuple)) and all(isinstance(part, (list, tuple)) for part in parts)
        if parts is not None and not lists:
            raise TypeError(f"Expected a list of lists of ranks for `subgroups`, got {parts!r}.")
        if not self.post_local_gradient_allreduce and (self.subgroup_size or self.subgroups):
            raise ValueError(
                "post_local_gradient_allreduce=False means that gradients are not averaged in subgroups; leave out "
                "subgroup_size and subgroups."
            )

    def bind(self, context: BindContext) -> BoundHook:
        """Make the subgroups, on all ranks."""
        subgroup = context.subgroup(self._parts(context)) if self.post_local_gradient_allreduce else None
        return _BoundPostLocalSGD(self.start_local_sgd_iter, context, subgroup)

    def _parts(self, context: BindContext) -> list[list[int]]:
        world_size, size = context.world_size, self.subgroup_size
        if self.subgroups is not None:
            parts = [list(part) for part in self.subgroups]
            if sorted(rank for part in parts for rank in part) != list(range(world_size)) or not all(parts):
                raise ValueError(
                    f"Expected subgroups that name each of the ranks 0 to {world_size - 1} once, got {parts}."
                )
            return parts
        if size is None:
            return ranks_by_host(context.control_group)
        if world_size % size:
            raise ValueError(
                f"Expected a subgroup_size that divides the number of ranks: {world_size} ranks cannot be split into "
                f"subgroups of {size}."
            )
        return [list(range(start, start + size)) for start in range(0, world_size, size)]

    def replicas_differ_from(self) -> int | None:
        """Return the first step with the subgroup's mean."""
        return self.start_local_sgd_iter


class _BoundPostLocalSGD(BoundHook):
    """Post-local SGD at work; ``is_plain_mean`` where all ranks are in one subgroup."""

    name = "PostLocalSGD"

    def __init__(self, start: int, context: BindContext, subgroup: Subgroup | None) -> None:
        self._start = start
        self._step = context.step
        self._world_size = context.world_size
        self._subgroup = subgroup
        self.is_plain_mean = subgroup is not None and len(subgroup.ranks) == context.world_size > 1

    def reduce(self, bucket: GradBucket) -> Phases:
        buffer = bucket.buffer()
        local = self._step() >= self._start
        subgroup = self._subgroup if local else None
        if local and subgroup is None:
            return None
        # A divisor other than the number of ranks means that some of them have no data; their share is taken to be the
        # same in each subgroup.
        size = self._world_size if subgroup is None else len(subgroup.ranks)
        if buffer.numel():
            buffer.mul_(self._world_size / (bucket.divisor * size))
            if size > 1:
                yield requests.AllReduce(buffer, subgroup)
        return None


class PostLocalSGDState:
    """What `post_local_sgd_hook` knows: the groups, and the step.

    It may be made before there is a process group; groups that are not given are found at the first bucket then. On
    our reducer ``iter`` is the training step, as of all that is counted there; on torch's DDP the number of backwards.

    Args:
        process_group: Ranks to average over at first; None for all.
        subgroup: Ranks to average over after the switch; None for those of one host, which is collective.
        start_local_sgd_iter: First step with the subgroup's mean.
        post_local_gradient_allreduce: False leaves gradients alone after the switch.
    """

    def __init__(
        self,
        process_group: comm.ProcessGroup | None,
        subgroup: comm.ProcessGroup | None,
        start_local_sgd_iter: int,
        post_local_gradient_allreduce: bool = True,
    ) -> None:
        self.process_group = process_group
        self.subgroup = subgroup
        self.start_local_sgd_iter = start_local_sgd_iter
        self.post_local_gradient_allreduce = post_local_gradient_allreduce
        self.iter = 0
        if comm.is_initialized():
            self.find_groups()

    def find_groups(self) -> comm.ProcessGroup:
        """Find those groups that were not given, and return the one of all ranks; the first call is collective."""
        everyone = self.process_group = comm.resolve_group(self.process_group)
        if self.subgroup is None and self.post_local_gradient_allreduce:
            self.subgroup = comm.split_group(everyone, ranks_by_host(everyone))
        return everyone


def post_local_sgd_hook(state: PostLocalSGDState, bucket: comm.TorchGradBucket) -> TensorFuture:
    """Average over all ranks until ``state.start_local_sgd_iter``, then over the subgroup; by torch's contract.

    Example:
        >>> state = PostLocalSGDState(None, None, start_local_sgd_iter=100)
        >>> ddp_model.register_comm_hook(state, post_local_sgd_hook)
    """
    process_group = state.find_groups()
    local = state.iter >= state.start_local_sgd_iter
    state.iter += bucket.is_last()
    buffer = bucket.buffer()
    if local and not state.post_local_gradient_allreduce:
        return done(buffer)
    group = state.subgroup if local else process_group
    assert group is not None
    everyone = comm.world_size(process_group)
    buffer.mul_(everyone / (divisor_of(bucket, process_group) * comm.world_size(group)))
    return comm.all_reduce(buffer, group).get_future().then(lambda future: future.value()[0])


add_short_name(SHORT_NAMES, "post_local_sgd", PostLocalSGD)
