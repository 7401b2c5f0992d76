"""What a worker was given: where another process goes on, what it builds again, and what is not to come after all."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayloader.random.generators import RandomState
from rayloader.resume.digest import Drawn
from rayloader.resume.journal import Journal, Resumed
from rayloader.resume.snapshot import WorkerState
from rayloader.task import Task
from rayloader.transport import codec

PLAIN, OWN, STREAM = {}, {"dataset": b"state"}, {"dataset": b"state", "begin": RandomState()}  # snapshots hold this


def task_of(task_id):
    return Task(task_id, Drawn(codec.encode([task_id]), 0))


class Run:
    """A worker's run over epochs, and a model of it: which tasks it was given in each, and how far it and the user are.

    It answers in the order in which it was given its tasks, and its batches are taken in that order.
    """

    def __init__(self, parts):
        self.journal, self.parts = Journal(), parts
        self.given, self.answered, self.taken = [[]], 0, 0  # numbers of tasks by epochs; how many of the last one
        self.ever_answered = False

    @property
    def epoch(self):
        return len(self.given) - 1

    def give(self):
        self.given[-1].append(2 * len(self.given[-1]))
        self.journal.given(task_of(self.given[-1][-1]))

    def answer(self, told=False):
        if self.answered < len(self.given[-1]):
            self.begin()
            task_id = self.given[-1][self.answered]
            self.answered, self.ever_answered = self.answered + 1, True
            self.journal.answered(task_id, 100 + task_id)
            if told:
                self.journal.reached(WorkerState(self.epoch, self.answered, task_id, **self.parts))

    def answer_and_tell(self):
        self.answer(told=True)

    def take(self):
        if self.taken < self.answered:
            self.journal.taken(self.given[-1][self.taken])
            self.taken += 1

    def next_epoch(self):
        self.journal.begins(Resumed(self.epoch + 1, self.epoch + 51))
        self.given.append([])
        self.answered = self.taken = 0

    def begin(self):
        if not self.journal.begun:
            self.journal.reached_begin(WorkerState(self.epoch, **self.parts))

    def after(self, state, entries):
        """Epoch and last task of a worker that has gone through these again; nothing may be left out or come twice."""
        epoch, done = (0, 0) if state is None else (state.epoch, (state.last_task + 2) // 2)
        for entry in entries:
            if isinstance(entry, Resumed):
                assert (entry.epoch, done) == (epoch + 1, len(self.given[epoch]))
                epoch, done = entry.epoch, 0
            else:
                assert entry.task_id == self.given[epoch][done]
                assert entry.digest in (None, 100 + entry.task_id)
                done += 1
        return epoch, done

    def check(self):
        journal, entries = self.journal, self.journal.entries
        assert self.after(journal.state, entries) == (self.epoch, len(self.given[-1]))
        first = 0 if journal.state is None else journal.state.epoch
        assert journal.shared_seed == (50 + first if first else None)
        proofs = [entry for entry in entries if isinstance(entry, Task) and entry.digest is not None]
        # But for the begin of an epoch, and for the first one, a state of the dataset's own is used at once.
        is_own = self.parts and (not self.answered or journal.state is journal.base)
        assert proofs or is_own or not self.ever_answered
        if not journal.begun:
            return
        again, tasks, before = [*journal.to_rebuild.values()], journal.to_rebuild, journal.before
        base = (self.epoch, 0) if before else self.after(journal.base, ())
        assert (base[0], base[1] + len(again)) == (self.epoch, self.taken)
        assert [*tasks] == self.given[-1][base[1] : self.taken]
        assert again or not self.taken or (self.parts and journal.base.last_task == journal.last_taken)
        other = Journal()
        other.starts_at(journal.base, again)
        if before:
            other.starts_before(before)
            assert not other.begun
            assert self.after(before.state, before.entries) == (self.epoch, 0)
        assert self.after(other.state, other.entries) == (self.epoch, self.taken)


MOVES = [Run.give, Run.give, Run.answer, Run.answer_and_tell, Run.take, Run.next_epoch, Run.begin]


@given(st.sampled_from([PLAIN, OWN, STREAM]), st.lists(st.sampled_from(MOVES), max_size=40))
def test_another_process_goes_on_where_the_worker_and_the_user_are_and_proves_it(parts, moves):
    run = Run(parts)
    for move in moves:
        move(run)
        run.check()


# ---- what is used of several snapshots

ENDED = WorkerState(last_task=0, exhausted=True)


def journal_of(*task_ids, answered=(), snapshots=()):
    journal = Journal()
    for task_id in task_ids:
        journal.given(task_of(task_id))
    for task_id in answered:
        journal.answered(task_id, 100 + task_id)
    for state in snapshots:
        journal.reached(state)
    return journal


def at(journal):
    entries = [entry.task_id if isinstance(entry, Task) else entry for entry in journal.entries]
    return journal.state and journal.state.last_task, entries, [*journal.to_rebuild]


def test_the_newest_snapshots_are_used_that_leave_something_to_prove():
    states = [WorkerState(last_task=0, dataset=b"state"), WorkerState(last_task=2), WorkerState(last_task=4)]
    journal = journal_of(0, 2, 4, answered=(0, 2, 4), snapshots=states)
    journal.taken(0)
    journal.taken(2)
    assert (journal.base.last_task, journal.newest.last_task, at(journal)) == (0, 4, (2, [4], [2]))
    assert journal.state.dataset == journal.newest.dataset == b"state"  # a snapshot tells what has changed


@pytest.mark.parametrize("parts", [OWN, {"iterator": b"state"}, {"exhausted": True}])
def test_the_begin_of_an_epoch_needs_no_proof_where_the_dataset_has_a_state_or_has_ended(parts):
    journal = journal_of(0, 1, answered=(0, 1), snapshots=[WorkerState(last_task=0)])
    journal.begins(Resumed(1, None))
    journal.reached_begin(WorkerState(epoch=1, **parts))
    assert (at(journal), journal.before) == ((-1, [], []), None)


def test_of_a_stream_that_has_ended_nothing_is_built_any_more():
    journal = journal_of(0, 1, 2, 3, answered=(0, 1), snapshots=[WorkerState(last_task=1, exhausted=True)])
    journal.exhausted()
    assert at(journal) == (1, [], [])
    journal.begins(Resumed(1, None))
    assert at(journal) == (1, [Resumed(1, None)], [])


def test_the_end_of_a_stream_counts_where_the_last_batch_has_a_snapshot_of_its_own():
    """As with drop_last: what was drawn for the batch that was dropped comes after the last one."""
    journal = journal_of(0, 3, answered=(0,), snapshots=[WorkerState(last_task=0), ENDED])
    journal.exhausted()
    journal.taken(0)
    assert (journal.base, at(journal)) == (ENDED, (0, [], []))


def test_the_end_of_a_stream_counts_where_nothing_comes_after_the_state_that_was_loaded():
    journal = Journal()
    journal.starts_at(WorkerState(last_task=0, **STREAM), [])
    journal.reached(ENDED)
    assert journal.base.exhausted
    assert journal.state.exhausted
