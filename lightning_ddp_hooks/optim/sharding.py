"""Which rank steps which part of which parameter, and which hooks that goes with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from lightning_ddp_hooks.hooks.contract import CommHook, hook_name
from lightning_ddp_hooks.hooks.function_hook import TorchHook
from lightning_ddp_hooks.hooks.registry import resolve_hook
from lightning_ddp_hooks.optim.pieces import Piece, cut, partition
from lightning_ddp_hooks.reducer.reducer import Reducer


class ShardAssignment:
    """The ranks that own each parameter; once assigned, they stay, since the optimizer state lies there.

    With a ``world_size`` of 1 each rank steps all parameters.
    """

    def __init__(self, world_size: int = 1, rank: int = 0) -> None:
        self.world_size = world_size
        self.rank = rank
        self._loads = [0] * world_size
        self._pieces: dict[Tensor, tuple[Piece, ...]] = {}
        self._strides: dict[Tensor, tuple[int, ...]] = {}  # of those that are cut

    def has(self, param: Tensor) -> bool:
        """Tell whether the parameter has owners."""
        return self.world_size == 1 or param in self._pieces

    def pieces(self, param: Tensor) -> tuple[Piece, ...]:
        """Return the parameter's pieces, one for each rank that owns some of it, in the order of ranks."""
        return (Piece(self.rank, 0, param.numel()),) if self.world_size == 1 else self._pieces[param]

    def own(self, param: Tensor) -> Piece | None:
        """Return the piece that this rank owns, if the parameter has owners and this rank is one."""
        pieces = self.pieces(param) if self.has(param) else ()
        return next((piece for piece in pieces if piece.owner == self.rank), None)

    def require_order(self, params: Iterable[Tensor]) -> None:
        """Raise RuntimeError if the elements of a parameter that was cut lie in another order than then."""
        for param in params:
            if param.stride() != self._strides.get(param, param.stride()):
                raise RuntimeError(
                    f"A parameter of shape {tuple(param.shape)} lies in memory in another order than when it was "
                    f"shared among the ranks (strides {param.stride()}, not {self._strides[param]}): bring the model "
                    "into its memory format before training begins."
                )

    def join(self, params: Iterable[Tensor]) -> None:
        """Let those parameters have no owners that are cut and may not be, since another optimizer steps them."""
        for param in params:
            if len(self._pieces.get(param, ())) > 1:
                for owner, start, stop in self._pieces.pop(param):
                    self._loads[owner] -= stop - start
                del self._strides[param]

    def assign(
        self,
        params: Iterable[Tensor],
        runs: Iterable[Sequence[Tensor]] = (),
        cost: Callable[[Tensor], int] = Tensor.numel,
    ) -> list[Tensor]:
        """Give owners to parameters that have none, alike on all ranks; return those parameters.

        Args:
            params: Parameters that get one owner each, unless they are in ``runs``.
            runs: Parameters that are cut, where they lie one behind the other; `may_be_cut` holds for them.
            cost: Work of an update, where that of an element by itself is 1.
        """
        if self.world_size == 1:
            return []
        cuttable = [[p for p in dict.fromkeys(run) if p not in self._pieces] for run in runs]
        in_runs = dict.fromkeys(param for run in cuttable for param in run)
        whole = [p for p in dict.fromkeys(params) if p not in self._pieces and p not in in_runs]
        costs = [cost(param) for param in whole]
        for param, its_cost, rank in zip(whole, costs, partition(costs, self._loads), strict=True):
            self._loads[rank] += its_cost
            self._pieces[param] = (Piece(rank, 0, param.numel()),)
        for run in cuttable:
            for param, pieces in zip(run, cut([param.numel() for param in run], self._loads), strict=True):
                self._pieces[param] = pieces
                self._strides[param] = param.stride()
                for piece in pieces:
                    self._loads[piece.owner] += piece.stop - piece.start
        return [*whole, *in_runs]


def bucket_params(reducer: Reducer) -> Sequence[Sequence[Tensor]]:
    """Return the parameters of each bucket as it is laid out now."""
    layout = reducer.stats()["bucket_param_indices"]
    assert isinstance(layout, list)
    return [[reducer.params[index] for index in indices] for indices in layout]


def diverging_part(hook: CommHook | None) -> str | None:
    """Name a hook, or a part of it, that says that ranks may get different gradients from it; None without one."""
    return next((_name(part) for part in _diverging_parts(hook) if _says_so(part)), None)


def sharding_problem(hook: CommHook | None) -> str | None:
    """Say why a sharded optimizer does not go with a hook; None if it does."""
    parts = _diverging_parts(hook)
    if not parts:
        return None
    part, says_so = parts[0], _says_so(parts[0])
    text = (
        f"Communication hook {_name(part)} {'leaves' if says_so else 'may leave'} ranks with different gradients, but "
        "a sharded optimizer steps each parameter on one rank for all: use `OptimizerInHook(shard=False)`, or another "
        "hook."
    )
    if says_so:
        return text
    where = "a subclass of TorchHook for it" if isinstance(part, TorchHook) else "its class"
    return f"{text} If every rank gets the same result, override `replicas_differ_from` in {where} to return None."


def refuse_diverging(hook: CommHook | None) -> None:
    """Raise ValueError unless a hook, and each part of it, says that it gives all ranks the same gradients."""
    if (text := sharding_problem(hook)) is not None:
        raise ValueError(text)


def _diverging_parts(hook: CommHook | None) -> list[CommHook]:
    """Return the innermost parts from which ranks may get different results."""
    if hook is None or hook.replicas_differ_from() is None:
        return []
    return [part for inner in hook.inner_hooks() for part in _diverging_parts(resolve_hook(inner))] or [hook]


def _says_so(part: CommHook) -> bool:
    """Tell whether a hook is known to leave ranks with different gradients, and does not only not deny it."""
    if type(part) is TorchHook:
        return (getattr(part.hook, "__module__", None) or "").startswith(("lightning_ddp_hooks.", "torch."))
    ours = type(part).__module__.startswith("lightning_ddp_hooks.")
    return ours or type(part).replicas_differ_from is not CommHook.replicas_differ_from


def _name(part: CommHook) -> str:
    return hook_name(part.hook) if isinstance(part, TorchHook) else type(part).__name__
