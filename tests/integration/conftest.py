"""What several files of integration tests use."""

import pytest


@pytest.fixture
def depth_of(monkeypatch):
    """Fixes an automatic depth, of each worker, and gives a list of the depths that were reached.

    These are tasks that the worker was told and the user has not taken: where a thread receives, few are unanswered.
    """
    from rayloader.epoch.tables import Tables
    from rayloader.workers.pace import Pace

    depths = []
    run = Tables.run

    def counted(self, slot, told):
        run(self, slot, told)
        untaken = [task for task in self.schedule.tasks if task.worker_id == slot.worker_id]
        depths.append(len(untaken) - len(slot.waiting))

    def fix(depth):
        def saw(pace, *_):
            before, pace.depth, pace.ahead = pace.depth, depth, depth
            return before != depth

        monkeypatch.setattr(Pace, "saw", saw)
        return depths

    monkeypatch.setattr(Tables, "run", counted)
    return fix


@pytest.fixture
def accelerator(monkeypatch):
    """Pins in Python: what `Tensor.pin_memory` does is put in."""
    from accelerator import Accelerator

    fake = Accelerator()
    fake.install(monkeypatch)
    return fake
