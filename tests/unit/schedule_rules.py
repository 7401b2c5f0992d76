"""The invariants of the schedule."""

from rayloader.epoch.schedule import Schedule
from rayloader.task import DELIVERED, GONE, LOST, OUTSTANDING, QUEUED, READY


def check_rules(schedule: Schedule) -> None:
    """Asserts what must hold of a schedule between any two events."""
    tasks = schedule.tasks
    of_any = [task for task in tasks if not task.is_assigned]
    undelivered = [task for task in tasks if task.state is not DELIVERED]  # not by `head`, which changes `_head_id`
    checks = {
        "task ids ascend": list(schedule._tasks) == sorted(schedule._tasks),
        "what is GONE is not in the table": all(task.state is not GONE for task in tasks),
        "the queue holds what no worker has": list(schedule._queued) == of_any,
        "what no worker has is QUEUED": all(task.state is QUEUED for task in of_any),
        "only a dynamic schedule has a queue": schedule.dynamic or not of_any,
        "who may be given what queues has it": not schedule._queued or schedule._freest() is None,
        "what is DELIVERED is deliverable": sorted(task.task_id for task in schedule.deliverable)
        == [task.task_id for task in tasks if task.state is DELIVERED],
        "no undelivered task is below the head": all(task.task_id >= schedule._head_id for task in undelivered),
        "in order, what is READY waits for the head": not schedule.in_order
        or not undelivered
        or undelivered[0].state is not READY,
        "what is READY is counted": schedule.early == sum(task.state is READY for task in tasks),
        "draws are owed, or none": schedule.owed_draws >= 0,
        "what is closed holds nothing": not schedule.closed or not (tasks or schedule.owed_draws),
        "the table fits the window": len(tasks) + schedule.owed_draws <= schedule.window
        or schedule._sampler_exhausted
        # An exhausted worker's places are dropped, although its tasks may still wait for the head.
        or not all(worker.active for worker in schedule._workers),
        "active workers are counted": schedule._num_active == sum(worker.active for worker in schedule._workers),
    }
    for worker_id, worker in enumerate(schedule._workers):
        mine = [task for task in tasks if task.worker_id == worker_id]
        checks[f"worker {worker_id} holds its tasks"] = worker.held == len(mine)
        unanswered = {task.task_id for task in mine if task.state is OUTSTANDING}
        checks[f"worker {worker_id} owes what is OUTSTANDING"] = unanswered == {
            task.task_id for task in worker.unanswered
        }
        waiting = [task for task in mine if task.state in (QUEUED, LOST)]
        checks[f"worker {worker_id} waits for what is QUEUED or LOST"] = list(worker.waiting) == waiting
        checks[f"worker {worker_id} is given what it may be"] = not (worker.waiting and worker.ready)
        checks[f"worker {worker_id} without a process has nothing"] = worker.ready or not worker.unanswered
    for rule, holds in checks.items():
        assert holds, f"the schedule has broken a rule of its own: {rule}; {schedule._history()}"
