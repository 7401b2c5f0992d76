"""What several files of integration tests use."""

import pytest


@pytest.fixture
def calls_of(monkeypatch):
    """Fixes the size of calls, as far as they may carry so many, and gives a list of the sizes that were made."""
    from rayloader.crew import Crew
    from rayloader.pace import Pace

    sizes = []
    run = Crew.run

    def counted(self, worker_id, tasks, *rest, **named):
        sizes.append(len(tasks))
        return run(self, worker_id, tasks, *rest, **named)

    def fix(tasks_per_call):
        def saw(pace, *_, **__):
            before, pace.tasks_per_call = pace.tasks_per_call, min(tasks_per_call, pace.max_tasks)
            pace.places = 3 * pace.tasks_per_call
            return pace.tasks_per_call != before

        monkeypatch.setattr(Pace, "saw", saw)
        return sizes

    monkeypatch.setattr(Crew, "run", counted)
    return fix


@pytest.fixture
def accelerator(monkeypatch):
    """Pins in Python: what `Tensor.pin_memory` does is put in."""
    import torch

    from accelerator import Accelerator

    fake = Accelerator()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: fake.index)
    monkeypatch.setattr(torch.accelerator, "set_device_index", fake.devices.add)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: fake.pin(tensor))
    return fake
