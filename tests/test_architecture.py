"""Which module may import what: the map in the design, kept by a test."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import lightning_ddp_hooks

PACKAGE = Path(lightning_ddp_hooks.__file__).parent

# From the top down; a module imports only from its own layer or from layers below it.
LAYERS = [
    ["__init__", "__main__"],
    ["cli"],
    ["lightning", "callbacks"],
    ["data_parallel", "torch_arguments", "fsdp", "model_monitor"],
    ["run"],
    ["run_hook", "optimizer_clock"],
    ["checkpoint"],
    ["conflicts", "describe"],
    ["config"],
    ["optim"],
    ["join"],
    ["averaging"],
    ["hooks"],
    ["reducer", "health"],
    ["advisor", "monitor"],
    ["comm"],
    ["traffic", "weak", "short_names"],
    ["_compat"],
    ["_lightning_package"],
]
MAY_IMPORT_LIGHTNING = {"cli", "lightning", "callbacks", "_compat"}
MAY_IMPORT_DISTRIBUTED = {"comm", "_compat"}
MAKE_FLOATS = {f"torch.{name}" for name in ("empty", "zeros", "ones", "full", "rand", "randn", "linspace", "eye")}


def _files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def _part(path: Path) -> str:
    """Return the top-level part of the package that a file belongs to."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _layer(part: str) -> int:
    return next(number for number, parts in enumerate(LAYERS) if part in parts)


@pytest.mark.parametrize("path", _files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_downward_and_what_it_may(path: Path) -> None:
    part = _part(path)
    for name in _imports(path):
        top, _, rest = name.partition(".")
        if top == "lightning_ddp_hooks" and rest:
            inner = rest.split(".")[0]
            if any(inner in parts for parts in LAYERS):
                assert _layer(inner) >= _layer(part), f"{part} must not import upward: {name}"
        if top in ("lightning", "pytorch_lightning", "lightning_utilities"):
            assert part in MAY_IMPORT_LIGHTNING, f"{part} must not import Lightning: {name}"
        if name.startswith("torch.distributed"):
            assert part in MAY_IMPORT_DISTRIBUTED, f"{part} must go through comm.py: {name}"


@pytest.mark.parametrize("path", _files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_callbacks_know_the_strategy_and_not_the_other_way_round(path: Path) -> None:
    if _part(path) not in ("strategy", "fabric", "lightning") or path.parent.name == "callbacks":
        return
    for name in _imports(path):
        assert not name.startswith(("lightning_ddp_hooks.callbacks", "lightning_ddp_hooks.lightning.callbacks")), name


@pytest.mark.parametrize("path", _files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_private_names_of_torch_and_lightning_are_used_in_one_package(path: Path) -> None:
    if _part(path) == "_compat":
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            root = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            private_of_torch = isinstance(root, ast.Name) and root.id in ("torch", "dist", "lightning", "pl")
            assert not private_of_torch, f"{path.name}:{node.lineno} uses {ast.unparse(node)}; wrap it in _compat"
    for name in _imports(path):
        if name.startswith(("torch.", "lightning.")):
            private = [p for p in name.split(".") if p.startswith("_") and not p.startswith("__")]
            assert not private, f"{path.name} imports {name}; wrap it in _compat"


def test_every_public_name_is_exported_and_documented() -> None:
    for name in lightning_ddp_hooks.__all__:
        value = getattr(lightning_ddp_hooks, name)
        assert name == "__version__" or value.__doc__, name


# Calls that run what they read, or let strangers connect.
_TRUSTING = {
    "pickle.load", "pickle.loads", "pickle.Unpickler", "eval", "exec", "socket.socket", "socket.create_server",
    "socketserver.TCPServer", "multiprocessing.Manager",
}  # fmt: skip


@pytest.mark.parametrize("path", _files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_unpickles_or_listens(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            assert name not in _TRUSTING, f"{path.name}:{node.lineno} calls {name}"
            if name == "torch.load":
                assert any(keyword.arg == "weights_only" for keyword in node.keywords), f"{path.name}:{node.lineno}"


@pytest.mark.parametrize("path", _files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_tensors_are_made_in_a_dtype_that_is_named(path: Path) -> None:
    """Else in manual optimization with `precision="bf16-true"` or `"64-true"` they are made in that one."""
    if _part(path) not in ("hooks", "averaging", "reducer", "optim", "join", "health"):
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in MAKE_FLOATS:
            named = any(keyword.arg == "dtype" for keyword in node.keywords)
            strides_only = "device='meta'" in ast.unparse(node)
            assert named or strides_only, f"{path.name}:{node.lineno}: say the dtype in {ast.unparse(node)}"
