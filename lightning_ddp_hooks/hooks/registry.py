"""From what a user may write for a hook (short name, declaration, pair) to the declaration, and what it is made of."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from lightning_ddp_hooks.hooks.contract import BindContext, BoundHook, CommHook, declaration_text
from lightning_ddp_hooks.hooks.function_hook import TorchHook
from lightning_ddp_hooks.reducer.module_sync import check_same_on_all_ranks
from lightning_ddp_hooks.reducer.reducer import Reducer
from lightning_ddp_hooks.short_names import known_names

# In this order, and with the function's type, a command line takes class paths for classes, and imports functions.
HookLike = CommHook | str | tuple[Any, Callable[..., Any]]

SHORT_NAMES: dict[str, Callable[..., CommHook]] = {}
"""Short name -> what makes the hook; each module of hooks enters its own."""


def short_name(hook: CommHook) -> str | None:
    """Return the short name that stands for just this declaration, or None."""
    made = ((name, make()) for name, make in SHORT_NAMES.items())
    return next((name for name, stands in made if type(stands) is type(hook) and stands == hook), None)


def resolve_hook(hook: HookLike | None) -> CommHook | None:
    """Return the declaration for what the user gave; None for plain all-reduce, which needs no hook."""
    if hook is None or isinstance(hook, CommHook):
        return None if hook is None or hook.is_plain_mean else hook
    if isinstance(hook, str):
        if hook not in SHORT_NAMES:
            raise ValueError(f"Unknown communication hook {hook!r}; known names: {known_names(SHORT_NAMES)}.")
        return resolve_hook(SHORT_NAMES[hook]())
    given: Any = hook
    if isinstance(given, (tuple, list)) and len(given) == 2:
        state, given = given
        if isinstance(given, (CommHook, str)):  # as `register_comm_hook` takes them
            if state is not None:
                raise TypeError(f"Expected None for the state of {given!r}, which makes its own, got {state!r}.")
            return resolve_hook(given)
        if not callable(given) and callable(state):
            raise TypeError("Expected a pair (state, hook); the callable comes second.")
        if hasattr(given, "as_comm_hook"):  # a function that stands for a declaration, such as a step in the hook
            declared: CommHook = given.as_comm_hook(state)
            return declared
        if not (isinstance(given, type) and issubclass(given, CommHook)):
            return TorchHook(hook=given, state=state)
    if isinstance(given, type):
        got = f"the class {given.__name__}; make one, as in {given.__name__}()"
    else:
        got = f"{type(given).__name__}{'; wrap a function as (None, function)' if callable(given) else ''}"
    raise TypeError(f"Expected a short name, a CommHook, a pair (state, hook) or None for `comm_hook`, got {got}.")


def parts_of(hook: CommHook | None) -> Iterator[CommHook]:
    """Walk a declaration and those that it is composed of; nothing for plain all-reduce."""
    if hook is None:
        return
    yield hook
    for inner in hook.inner_hooks():
        yield from parts_of(resolve_hook(inner))


def install_hook(reducer: Reducer, hook: CommHook, step: Callable[[], int]) -> BoundHook:
    """Bind a hook and have the reducer run it for each bucket; collective, since binding may make groups."""
    check_same_on_all_ranks([], {"comm_hook": declaration_text(hook)}, reducer.control_group)
    context = BindContext(
        control_group=reducer.control_group,
        names=reducer.names,
        params=reducer.params,
        step=step,
        subgroup=reducer.queue.subgroup,
    )
    bound = hook.bind(context)
    reducer.set_hook(bound)
    return bound


def first_difference(hooks: Iterable[HookLike | None]) -> int | None:
    """Return the first step from which replicas may differ under any of these hooks; None for never."""
    declared = (resolve_hook(hook) for hook in hooks)
    steps = (None if hook is None else hook.replicas_differ_from() for hook in declared)
    return min((step for step in steps if step is not None), default=None)


def late_starts(hook: CommHook | None) -> list[tuple[str, str, int]]:
    """Return the parts of a declaration that are plain all-reduce at first: name, setting, first step."""
    named = [(part, part.delayed_by) for part in parts_of(hook) if part.delayed_by is not None]
    late = [(type(part).__name__, setting, getattr(part, setting, None)) for part, setting in named]
    return [(name, setting, start) for name, setting, start in late if isinstance(start, int) and start > 0]
