"""A worker in its process, without the process."""

from collections import deque

import pytest

from rayloader._compat import DatasetKind
from rayloader.host.worker import BuildOrder, HostedWorker, Restoring
from rayloader.protocol import Answer, ResultKind, Setup
from rayloader.resume.journal import Resumed

SETUP = Setup(
    worker_id=0,
    num_workers=1,
    base_seed=0,
    seed_batches=False,
    shared_seed=None,
    dataset_kind=DatasetKind.Map,
    auto_collation=True,
    batch_size=1,
    drop_last=False,
    skip_errors=False,
    ranks=None,
    persistent=True,
    dataset_epoch=None,
)


def test_what_exits_while_earlier_batches_are_built_again_for_the_next_epoch_ends_the_process(monkeypatch):
    """Or the epoch would go on from a worker that has built only a part of them."""
    worker = HostedWorker(SETUP)
    worker._restoring = Restoring(left=deque([BuildOrder(7, (), again=True)]))
    monkeypatch.setattr(worker, "_do", lambda task, arena: Answer(task.task_id, ResultKind.EXITED, text="as planned"))
    with pytest.raises(SystemExit, match="as planned"):
        worker.resume(Resumed(1, None))
