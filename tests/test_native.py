"""The native engine beside its twin in Python and torch DDP (the same bits), and how it is built and chosen."""

import copy
import itertools
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from backends import backend_fixture, require, why_no_native  # noqa: F401
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lightning_ddp_hooks as ldh
from lightning_ddp_hooks.__main__ import main
from lightning_ddp_hooks.reducer import backend as backend_module
from lightning_ddp_hooks.reducer.native import build

# ------------------------------------------------------------------ the same bits


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 600), nn.ReLU(), nn.Linear(600, 32), nn.ReLU(), nn.Linear(32, 32))


def stress() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (4, 8)), *(nn.Linear(8, 8) for _ in range(50)), nn.Flatten())


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 64, 3, padding=1, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(64, 16, 1, bias=False),
                nn.BatchNorm2d(16),
                nn.ReLU(),
                nn.Conv2d(16, 64, 3, padding=1, bias=False),
                nn.BatchNorm2d(64),
            )
            for _ in range(2)
        )
        self.wide = nn.Conv2d(64, 64, 3, bias=False)  # large enough to be copied as it comes
        self.head = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x.view(-1, 2, 4, 4))
        for block in self.blocks:
            x = F.relu(x + block(x))
        out: Tensor = self.head(self.wide(x).mean((2, 3)))
        return out


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(4, 64))
        self.embed = nn.Linear(8, 64)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0) for _ in range(2))
        self.head = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.view(-1, 4, 8)) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(x).flatten(1)  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "stress": stress,
    "resnet": Residual,
    "transformer": Transformer,
}


def batch(rank: int, step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(4, 32, generator=torch.Generator().manual_seed(100 * step + rank)).to(dtype)


def steps(model: Any, net: nn.Module, *, dtype: torch.dtype = torch.float32, micro: int = 1) -> list[Tensor]:
    """Train a little; returns parameters, buffers and last gradients."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    for step in range(4):
        optimizer.zero_grad()
        for n in range(micro):
            x = batch(dist.get_rank(), 10 * step + n, dtype)
            if n < micro - 1:
                with model.no_sync():
                    model(x).square().mean().backward()
            else:
                model(x).square().mean().backward()
        optimizer.step()
    return [t.detach().clone() for t in (*net.state_dict().values(), *(p.grad for p in net.parameters()))]  # type: ignore[union-attr]


def same_bits(a: list[Tensor], b: list[Tensor]) -> bool:
    def raw(t: Tensor) -> Tensor:
        return (torch.view_as_real(t) if t.is_complex() else t).contiguous().reshape(-1).view(torch.uint8)

    return len(a) == len(b) and all(torch.equal(raw(x), raw(y)) for x, y in zip(a, b, strict=True))


def _beside_torch(name: str, micro: int, channels_last: bool) -> list[dict[str, bool]]:
    return [_engines_beside_torch(name, views, micro, channels_last) for views in (True, False)]


def _engines_beside_torch(name: str, views: bool, micro: int, channels_last: bool) -> dict[str, bool]:
    net = MODELS[name]()
    if channels_last:
        net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    twin = copy.deepcopy(net)
    limits = {"bucket_cap_mb": 0.005, "gradient_as_bucket_view": views}
    wanted = steps(nn.parallel.DistributedDataParallel(twin, **limits), twin, micro=micro)  # type: ignore[arg-type]
    outcome = {}
    for backend in ("python", "native"):
        module = copy.deepcopy(net)
        model = ldh.DataParallel(module, reducer_backend=backend, first_bucket_mb=0.005, **limits)  # type: ignore[arg-type]
        outcome[backend] = same_bits(steps(model, module, micro=micro), wanted)
        facts = model.stats()
        assert facts["backend"] == backend
        assert facts["has_rebuilt_buckets"]
        assert len(facts["bucket_sizes"]) > 1  # type: ignore[arg-type]
    return outcome


# Of more than two ranks the sum depends on where a bucket is cut, and torch cuts the first backward's differently.
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "micro", "channels_last"),
    [("mlp", 1, False), ("stress", 1, False), ("resnet", 2, True), ("transformer", 2, False)],
)
def test_both_engines_give_the_bits_of_torch_ddp(name: str, micro: int, channels_last: bool) -> None:
    require("native")
    for of_views, of_copies in run_ranks(_beside_torch, name, micro, channels_last):
        assert of_views == {"python": True, "native": True}
        assert of_copies == {"python": True, "native": True}


class Odd(nn.Module):
    """Complex and empty parameters, parameters of several dtypes and strides, a block that is recomputed."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(32, 600, dtype=dtype)
        self.second = nn.Linear(600, 32, dtype=dtype)
        self.phase = nn.Parameter(torch.randn(32, dtype=torch.complex64))
        self.empty = nn.Parameter(torch.empty(0, 3, dtype=dtype))
        self.turned = nn.Parameter(torch.randn(200, 32, dtype=torch.float64).t())
        self.scale = nn.Parameter(torch.ones(1, 32, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.first, x.requires_grad_(), use_reentrant=True)
        y = self.second(torch.tanh(hidden)) * self.scale
        spectrum = (y.to(torch.complex64) * self.phase).abs().double() @ self.turned
        return spectrum + self.empty.sum().double()


def _twins(dtype: torch.dtype, views: bool, hook: bool) -> bool:
    net = Odd(dtype)
    outcomes = []
    for backend in ("python", "native"):
        module = copy.deepcopy(net)
        model = ldh.DataParallel(
            module, reducer_backend=backend, gradient_as_bucket_view=views, bucket_cap_mb=0.05, first_bucket_mb=0.001
        )
        if hook:
            model.register_comm_hook(None, _mean_in_double)
        outcomes.append(steps(model, module, dtype=dtype, micro=2))
    return same_bits(*outcomes)


def _mean_in_double(state: None, bucket: ldh.GradBucket) -> Tensor:
    total = bucket.buffer().double()
    dist.all_reduce(total)
    return total / bucket.divisor


def _all_twins(dtype: torch.dtype) -> dict[str, bool]:
    return {
        f"{views=}, {hook=}": _twins(dtype, views, hook) for views, hook in itertools.product((True, False), repeat=2)
    }


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_the_engines_give_each_others_bits(dtype: torch.dtype) -> None:
    require("native")
    for same in run_ranks(_all_twins, dtype, world_size=3):
        assert len(same) == 4
        assert all(same.values()), same


def _mixed_ranks(views: bool) -> bool:
    net = Transformer()
    outcomes = []
    for native_ranks in ({0, 1, 2}, {1}):
        # What "auto" comes to where only some hosts have a built engine.
        built = dist.get_rank() in native_ranks
        backend_module.build.is_built = lambda built=built: built  # type: ignore[misc]
        module = copy.deepcopy(net)
        model = ldh.DataParallel(module, gradient_as_bucket_view=views, bucket_cap_mb=0.05)
        assert model.stats()["backend"] == ("native" if built else "python")
        outcomes.append(steps(model, module))
    return same_bits(*outcomes)


@pytest.mark.ranks
@pytest.mark.parametrize("views", [True, False], ids=["views", "copy"])
def test_ranks_with_different_engines_understand_each_other(views: bool) -> None:
    require("native")
    assert run_ranks(_mixed_ranks, views, world_size=3) == [True] * 3


# ------------------------------------------------------------------ errors and ends, in a whole reducer


def _failing_hook(backend: str) -> list[str]:
    net = mlp()
    model = ldh.DataParallel(net, reducer_backend=backend, bucket_cap_mb=0.05)  # type: ignore[arg-type]
    calls = 0

    def hook(state: None, bucket: ldh.GradBucket) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise LookupError("out of luck")
        return bucket.buffer()

    model.register_comm_hook(None, hook)
    said = []
    for step in range(4):
        net.zero_grad()
        try:
            model(batch(0, step)).sum().backward()
            said.append("fine")
        except LookupError as error:
            said.append(str(error))
    return said


@pytest.mark.ranks
def test_an_exception_in_a_hook_reaches_the_caller_and_the_next_step_works(backend: str) -> None:
    assert sorted(run_ranks(_failing_hook, backend, world_size=1)[0]) == ["fine", "fine", "fine", "out of luck"]


def _after_the_end(backend: str) -> bool:
    net = mlp()
    plain = copy.deepcopy(net)
    model = ldh.DataParallel(net, reducer_backend=backend)  # type: ignore[arg-type]
    for step in range(2):
        model(batch(0, step)).sum().backward()
    late = model(batch(0, 2)).sum()
    net.zero_grad()
    model.detach()
    late.backward()  # a graph that was made before the end
    plain(batch(0, 2)).sum().backward()
    first = same_bits([p.grad for p in net.parameters()], [p.grad for p in plain.parameters()])  # type: ignore[misc]
    del model
    for module in (net, plain):
        module.zero_grad()
        module(batch(0, 3)).sum().backward()
    return first and same_bits([p.grad for p in net.parameters()], [p.grad for p in plain.parameters()])  # type: ignore[misc]


@pytest.mark.ranks
def test_after_detach_the_module_is_a_plain_one(backend: str) -> None:
    assert run_ranks(_after_the_end, backend, world_size=1) == [True]


@pytest.mark.timeout(900)
def test_a_process_that_ends_in_mid_training_ends_quietly() -> None:
    backends = ["python", *(["native"] if why_no_native() is None else [])]
    program = f"""
import torch, torch.distributed as dist, tempfile, lightning_ddp_hooks as ldh
dist.init_process_group("gloo", init_method="file://" + tempfile.mktemp(), rank=0, world_size=1)
models, graphs = [], []
for backend in {backends}:
    models.append(ldh.DataParallel(torch.nn.Linear(300, 300), reducer_backend=backend))
    for _ in range(3):
        models[-1](torch.randn(2, 300)).sum().backward()
    graphs.append(models[-1](torch.randn(2, 300)).sum())
    print(models[-1].stats()["backend"])
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout.split()) == (0, backends), ran.stderr


# ------------------------------------------------------------------ building and choosing


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    backend_module._say_once.cache_clear()
    return tmp_path


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert build.library_path().is_relative_to(tmp_path / "home" / ".cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert build.library_path().is_relative_to(tmp_path / "xdg")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "torch"))
    assert build.library_path().is_relative_to(tmp_path / "torch")
    assert torch.__version__ in str(build.library_path())


def test_auto_without_a_build_takes_python_and_says_once_how_to_build(
    empty_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            assert backend_module.engine_factory("auto") is backend_module.engine_factory("python")
    assert len(caplog.records) == 1
    assert backend_module.BUILD_COMMAND in caplog.text


def test_auto_without_a_build_has_one_made_in_the_background_once(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("DDP_HOOKS_BUILD")
    monkeypatch.setenv("CXX", "false")  # a compiler that fails
    failed = build.library_path().parent / "failed"

    assert backend_module.engine_factory("auto") is backend_module.engine_factory("python")
    assert "in the background" in caplog.text
    assert build.start_build()  # the one that is under way
    while not failed.exists():
        time.sleep(0.05)
    assert "could not be built" in failed.read_text()
    while (failed.parent / "begun").exists():
        time.sleep(0.05)
    assert not build.start_build()  # it would fail again
    build._begun.pop().wait()

    monkeypatch.setattr(build, "_compile_to", lambda target: target.touch())
    failed.unlink()
    build._build_later()
    assert build.is_built()


def test_no_build_is_begun_without_a_compiler(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DDP_HOOKS_BUILD")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert not build.start_build()
    assert not any(empty_cache.rglob("begun"))


def test_auto_with_a_library_that_cannot_be_loaded_takes_python_and_says_so(
    empty_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build.library_path().parent.mkdir(parents=True)
    build.library_path().write_text("not a library")
    assert backend_module.engine_factory("auto") is backend_module.engine_factory("python")
    assert "cannot be loaded" in caplog.text
    with pytest.raises(RuntimeError, match="cannot be loaded"):
        backend_module.engine_factory("native")


def test_native_without_a_compiler_raises_with_its_message(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(RuntimeError, match="no-such-compiler"):
        backend_module.engine_factory("native")
    assert not build.is_built()
    assert main(["build-native"]) == 1


def test_native_in_a_cache_that_cannot_be_written_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file"))
    with pytest.raises(RuntimeError, match="TORCH_EXTENSIONS_DIR"):
        build.build()


def test_one_of_several_compiles_and_the_others_wait(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    def compile_slowly(target: Path) -> None:
        compiled.append(target)
        time.sleep(0.2)
        target.touch()

    monkeypatch.setattr(build, "_compile_to", compile_slowly)
    # A lock of the file system keeps threads apart as well, since each opens the file anew.
    threads = [threading.Thread(target=build.build) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compiled == [build.library_path()]


@pytest.mark.timeout(900)
def test_a_build_is_found_again_and_loads_without_the_builder(capsys: pytest.CaptureFixture[str]) -> None:
    require("native")
    assert main(["build-native"]) == 0
    assert str(build.library_path()) in capsys.readouterr().out
    program = """
import sys, torch
from lightning_ddp_hooks.reducer.native import build
build.load()
print("torch.utils.cpp_extension" in sys.modules)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=dict(os.environ))
    assert ran.stdout.split() == ["False"]  # what takes long


def _one_rank_cannot_build() -> str:
    if dist.get_rank() == 1:
        os.environ["TORCH_EXTENSIONS_DIR"] = os.devnull
    try:
        ldh.DataParallel(mlp(), reducer_backend="native")
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.ranks
def test_a_rank_that_cannot_build_makes_all_ranks_raise() -> None:
    require("native")
    first, second = run_ranks(_one_rank_cannot_build)
    assert "cannot be built" in second
    assert first.startswith("Rank 1 failed")
