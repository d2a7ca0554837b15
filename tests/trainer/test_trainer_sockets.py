"""A fit opens no socket for strangers to connect to: what listens is torch's own."""

import os
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from torch import Tensor
from trainer_runs import Net, make_module, make_trainer

from lightning_ddp_hooks import DDPHooksStrategy

pytestmark = [pytest.mark.ranks, pytest.mark.trainer]

_LISTEN = "0A"


def listening() -> set[str]:
    """Return this process's sockets that others can connect to."""
    own = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(entry)
        except OSError:  # the one by which the folder was read
            continue
        if target.startswith("socket:["):
            own.add(target.removeprefix("socket:[").removesuffix("]"))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN and fields[9] in own:
                found.add(fields[9])
    return found


class Looking(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.listening = len(listening())
        return super().training_step(batch, batch_idx)


def count_sockets(strategies: list[Any]) -> list[int]:
    """Return how many sockets listen during a fit with each, beyond those that did before."""
    counts = []
    for strategy in strategies:
        before, module = len(listening()), make_module(Looking)
        make_trainer(strategy, max_epochs=1).fit(module)
        counts.append(module.listening - before)
    return counts


def groups_listen() -> int:
    """Return how many sockets one more group of torch's listens on."""
    from torch.distributed import destroy_process_group, new_group

    before = len(listening())
    group = new_group([0, 1])
    count = len(listening()) - before
    destroy_process_group(group)
    return count


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="looks into /proc")
def test_only_torchs_process_groups_listen(tmp_path: Path) -> None:
    of_a_group = run_ranks(groups_listen)[0]
    for plain, ours in run_ranks(count_sockets, ["ddp", DDPHooksStrategy()]):
        # The reducer's group and that of its control messages, and the group of logged values.
        assert ours <= plain + 3 * of_a_group
