"""Draws the random programs that `backward_programs.py` runs."""

from collections.abc import Sequence
from dataclasses import replace

from backward_programs import ALL, HEADS, WRAPPERS, Op, Program
from hypothesis import strategies as st

_INSIDE = st.sampled_from(["", "", "plain", "reentrant"])
_OUTSIDE = st.sampled_from(["", "", "plain", "reentrant", "nested"])
_SOME = st.lists(st.integers(0, HEADS - 1), min_size=1, max_size=HEADS, unique=True).map(tuple)
_KINDS = ["local", "no_sync", "evaluate", "zero", *["sync"] * 6, "abort", "drop", "wrap", "join", "join"]


@st.composite
def syncs(draw: st.DrawFn, find_unused: bool) -> Op:
    """Draw how a wrapper's forwards and backwards are arranged in a step."""
    inside, outside = draw(_INSIDE), draw(_OUTSIDE)
    apart = draw(st.sampled_from(["", "checkpoints"])) if outside else ""
    if apart and outside == "plain" and inside == "reentrant":
        inside = "plain"  # gradients would come twice in some of the backwards, which is an error
    heads = draw(st.tuples(_SOME, _SOME)) if find_unused else ALL
    return Op("sync", outside=outside, inside=inside, apart=apart, heads=heads)


@st.composite
def ops(draw: st.DrawFn, find_unused: bool, of_static: Sequence[Op]) -> Op:
    """Draw an operation; of wrappers with a static graph, whose steps are all alike."""
    kind = draw(st.sampled_from(_KINDS))
    wrappers = draw(st.sampled_from([(0,), (1,), (0, 1), (1, 0)]))
    if kind == "zero":
        return Op(kind, wrappers, to_none=draw(st.booleans()))
    if kind != "sync":
        wrappers = wrappers[:1]
    op = of_static[wrappers[0]] if of_static else draw(syncs(find_unused))
    op = replace(op, kind=kind, wrappers=wrappers)
    if kind == "join":
        of_two = draw(st.tuples(st.integers(0, 3), st.integers(0, 3)))
        by_world = draw(st.booleans())
        of_others = draw(st.tuples(st.integers(0, 3), st.integers(0, 3))) if by_world else of_two  # else thirds
        return replace(
            op,
            outside=op.outside if of_static else "",
            apart=op.apart if of_static else "",
            batches=of_two + of_others,
            accumulates=draw(st.booleans()),
            by_world=by_world,
            clears=draw(st.sampled_from(["begin", "end", "never"])),
        )
    if kind in ("local", "no_sync", "evaluate"):
        heads = op.heads if of_static or kind == "evaluate" else draw(st.tuples(_SOME, _SOME))
        return replace(op, apart="", heads=heads)
    if kind in ("abort", "drop", "wrap"):
        under = draw(st.sampled_from(["local", "no_sync", "sync"]))
        return replace(op, apart="", outside="", under=under)
    between = draw(st.sampled_from(["", "", "", "local", "no_sync", "evaluate", "forward", "zero"]))
    op = replace(op, between=between)
    if of_static:
        return replace(op, wrappers=wrappers[:1])
    if len(wrappers) == 2:
        return replace(op, chained=not op.outside and draw(st.booleans()), apart="")
    if not op.apart and op.inside != "reentrant" and op.outside in ("", "plain") and draw(st.booleans()):
        return replace(op, mixes=True)
    if op.outside:
        return op
    apart = draw(st.sampled_from(["", "", "outputs", "forwards"]))
    if apart:
        return replace(op, apart=apart, heads=(op.heads[0], op.heads[0]))  # as many backwards on all ranks
    return replace(op, again=draw(st.sampled_from([False, False, True])))


@st.composite
def programs(draw: st.DrawFn, length: int = 6) -> Program:
    """Draw a program."""
    find_unused, static_graph = draw(st.sampled_from([(False, False), (True, False), (False, True)]))
    heads = draw(st.sampled_from([ALL, draw(st.tuples(_SOME, _SOME))]))
    of_static = [replace(draw(syncs(False)), heads=heads) for _ in range(WRAPPERS if static_graph else 0)]
    drawn = draw(st.lists(ops(find_unused, of_static), min_size=1, max_size=length).map(tuple))
    trunk = draw(st.booleans())
    if find_unused and not draw(st.booleans()):  # then one that stock DDP can run
        trunk = False
    return Program(drawn, find_unused, static_graph, trunk, draw(st.booleans()), draw(st.integers(0, 1000)))
