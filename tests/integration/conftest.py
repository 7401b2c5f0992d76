"""What several files of integration tests use."""

import pytest


@pytest.fixture
def depth_of(monkeypatch):
    """Fixes an automatic depth, of each worker, and gives a list of the depths that were reached.

    These are tasks that the worker was told and the user has not taken: where a thread receives, few are unanswered.
    """
    from rayloader.epoch.depth import Pace
    from rayloader.epoch.engine import Engine
    from rayloader.task import TaskState

    depths, sees = [], Pace.saw
    handle = Engine._handle

    def counted(self, event):
        handle(self, event)
        given = [task for task in self.schedule.tasks if task.state not in (TaskState.QUEUED, TaskState.LOST)]
        depths.extend(sum(task.worker_id == worker.worker_id for task in given) for worker in self.fleet.workers)

    def fix(depth):
        def saw(pace, *measured):
            before = pace.depth
            sees(pace, *measured)  # the sizes, too
            pace.depth = pace.ahead = depth
            return before != depth

        monkeypatch.setattr(Pace, "saw", saw)
        return depths

    monkeypatch.setattr(Engine, "_handle", counted)
    return fix


@pytest.fixture
def accelerator(monkeypatch):
    """Pins in Python: what `Tensor.pin_memory` does is put in."""
    from accelerator import Accelerator

    fake = Accelerator()
    fake.install(monkeypatch)
    return fake
