"""An averaging run that is saved and resumed, evaluated in between, and ended."""

import copy

import averaging_case as case
import pytest
import torch
from hook_tools import require_plain
from ranks import run_ranks

from lightning_ddp_hooks import comm
from lightning_ddp_hooks.averaging import DiLoCo, HierarchicalModelAverager, PeriodicModelAverager, SlowMo
from lightning_ddp_hooks.averaging.driver import Averaging
from lightning_ddp_hooks.hooks.post_local_sgd import PostLocalSGD

pytestmark = pytest.mark.ranks

AVERAGERS = {
    "periodic": PeriodicModelAverager(period=3, warmup_steps=1),
    "slowmo": SlowMo(period=2, warmup_steps=1, optimizer_state="averaged"),
    "diloco": DiLoCo(period=3, warmup_steps=1, outer_device="cpu"),
    "streaming": DiLoCo(period=4, fragments=2, delay=2, blending=0.5),
    "streaming hook": DiLoCo(period=4, fragments=2, delay=2, blending=0.5, comm_hook=case.StagedMean()),
}


class Run:
    """One rank of a run: model, optimizer and averaging."""

    def __init__(self, averager, **kwargs):
        self.model = case.make_model()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.averaging = Averaging(averager, self.model, lambda: [self.optimizer], **kwargs)

    def train(self, first, last):
        for step in range(first, last):
            self.averaging.syncs_gradients()
            case.local_step(self.model, self.optimizer, comm.rank(), step)
            self.averaging.after_step()
        return self

    def save(self):
        checkpoint = {
            "state_dict": self.averaging.model_state(self.model.state_dict()),
            "optimizer": self.averaging.optimizer_state(self.optimizer),
            "averaging": self.averaging.state_dict(),
        }
        # As the Trainer does: rank 0 writes, all ranks read that file.
        checkpoint = comm.all_gather_object(checkpoint, comm.resolve_group(None))[0]
        require_plain(checkpoint["averaging"])
        return checkpoint

    def load(self, checkpoint):
        self.model.load_state_dict(checkpoint["state_dict"])
        self.optimizer.load_state_dict(copy.deepcopy(checkpoint["optimizer"]))  # torch does not copy
        self.averaging.load_state_dict(checkpoint["averaging"])
        return self

    def state(self):
        return case.snapshot(self.model)


def resume_after(averager, steps):
    whole = Run(averager).train(0, 11)
    broken = Run(averager).train(0, steps)
    checkpoint = broken.save()
    resumed = Run(averager).load(checkpoint)
    resumed.train(steps, 11)
    broken.train(steps, 11)  # saving changes nothing
    return whole.state(), resumed.state(), broken.state()


@pytest.mark.parametrize("name", AVERAGERS)
def test_resuming_equals_not_stopping(name):
    for whole, resumed, broken in run_ranks(resume_after, AVERAGERS[name], 7):
        case.assert_equal(whole, broken)
        case.assert_equal(whole, resumed)


def validate_often(averager):
    whole = Run(averager).train(0, 8)
    run = Run(averager)
    seen, saved = [], []
    for step in range(8):
        run.train(step, step + 1)
        own = run.state()
        run.averaging.before_eval()
        seen.append(run.state())
        saved.append(run.save()["state_dict"])
        run.averaging.after_eval()
        case.assert_equal(own, run.state())
    replicas = run.averaging.state_dict()["replicas"]
    return whole.state(), run.state(), list(zip(seen, saved, strict=True)), replicas


@pytest.mark.parametrize("name", AVERAGERS)
def test_validating_sees_equal_replicas_and_changes_nothing(name):
    results = run_ranks(validate_often, AVERAGERS[name])
    for whole, often, _, _ in results:
        case.assert_equal(whole, often)
    # The first steps are the warm-up: here gradients are not exchanged, though the averager is told that they are.
    warmup = AVERAGERS[name].warmup_steps
    for (first, saved), (second, _) in zip(results[0][2][warmup:], results[1][2][warmup:], strict=True):
        case.assert_equal(first, second)
        case.assert_equal(first, saved)
    assert results[1][3] is None
    for (_, own, _, _), replica in zip(results, results[0][3]["ranks"], strict=True):
        case.assert_equal({**replica["params"], **replica["buffers"]}, own)


def save_and_finish(averager, steps, **kwargs):
    run = Run(averager, **kwargs).train(0, steps)
    checkpoint = run.save()
    run.averaging.finish()
    return checkpoint, run.state()


def load_and_go_on(averager, checkpoint, steps):
    run = Run(averager).load(checkpoint)
    loaded = run.state()
    moments = run.optimizer.state_dict()["state"][0]["exp_avg"].clone()
    run.train(steps, steps + 4)
    run.averaging.finish()
    return loaded, moments, run.state()


@pytest.mark.parametrize("name", AVERAGERS)
def test_another_number_of_ranks_goes_on_from_the_averaged_model(name):
    first, second = run_ranks(save_and_finish, AVERAGERS[name], 6)
    checkpoint, final = first
    case.assert_equal(final, second[1])  # the end of training leaves equal replicas
    case.assert_close(checkpoint["state_dict"], final) if "streaming" not in name else None
    moments = [r["optimizers"][0][0]["exp_avg"] for r in checkpoint["averaging"]["replicas"]["ranks"]]
    results = run_ranks(load_and_go_on, AVERAGERS[name], checkpoint, 6, world_size=3)
    for loaded, found, after in results:
        case.assert_equal(loaded, checkpoint["state_dict"])
        torch.testing.assert_close(found, torch.stack(moments).mean(0))
        case.assert_equal(after, results[0][2])


def test_without_replicas_the_same_number_of_ranks_goes_on_from_the_averaged_model():
    checkpoint, _ = run_ranks(save_without_replicas)[0]
    assert checkpoint["averaging"]["replicas"] is None
    for loaded, _, _ in run_ranks(load_and_go_on, AVERAGERS["periodic"], checkpoint, 6):
        case.assert_equal(loaded, checkpoint["state_dict"])


def save_without_replicas():
    return save_and_finish(AVERAGERS["periodic"], 6, save_replicas=False)


def wrong_setups():
    messages = []
    for make in (
        lambda: Run(HierarchicalModelAverager(period_group_size_dict={2: 4})),
        lambda: Run(AVERAGERS["periodic"], hook=PostLocalSGD(start_local_sgd_iter=5, subgroup_size=1)),
        lambda: Run("periodic"),
        lambda: Run(AVERAGERS["periodic"]).averaging.load_state_dict({"averager": {"kind": "SlowMo", "step": 3}}),
    ):
        with pytest.raises((ValueError, TypeError)) as caught:
            make()
        messages.append(str(caught.value))
    run = Run(AVERAGERS["periodic"])
    gradients = []
    for step in range(3):
        gradients.append((run.averaging.syncs_gradients(), run.averaging.is_local))
        run.train(step, step + 1)
    return messages, gradients


def test_what_does_not_fit_is_refused_on_all_ranks():
    for messages, gradients in run_ranks(wrong_setups):
        assert "number of ranks, 2, got 4" in messages[0]
        assert "from step 1 on" in messages[1]
        assert "Expected a ModelAverager, got str" in messages[2]
        assert "Expected the state of a PeriodicModelAverager, found that of a SlowMo" in messages[3]
        assert gradients == [(True, False), (False, False), (False, True)]


def nothing_to_train(averager):
    frozen = case.make_model().requires_grad_(False)
    with pytest.raises(ValueError, match=r"has nothing to average: none of the model's 8 parameters is trainable"):
        case.bind(averager, frozen)


@pytest.mark.parametrize("name", AVERAGERS)
def test_a_model_with_nothing_to_train_is_refused_at_setup(name):
    run_ranks(nothing_to_train, AVERAGERS[name])
