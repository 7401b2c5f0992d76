"""`state_dict` and `load_state_dict`: what they leave alone, what is read again, and batches in any order.

That a loader goes on from every point of a run, with datasets and samplers of every kind, with other numbers of
workers, and after its workers have died, is told by the conformance tests, which disturb each of their cases so.
"""

import itertools

import pytest
from torch.utils.data import get_worker_info

import stateful
from checkpoint_data import CASES, batches, make, plain, read, resumed, save
from latches import Gate, Mail
from probes import Calls, Stream, oversubscribed
from rayloader.resume.state import State

pytestmark = [pytest.mark.usefixtures("ray_session"), oversubscribed]


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("case", ["augmented", "stateful stream"])
def test_loading_acts_on_the_next_iter_and_leaves_a_live_iterator_and_the_state_alone(case, persistent):
    def fresh(seed=1):
        return make(CASES[case], seed=seed, persistent_workers=persistent)

    loader = fresh()
    epochs = [list(batches(loader)) for _ in range(2)]
    loader = fresh()
    before_all = loader.state_dict()
    iterator = batches(loader)
    found = [next(iterator), next(iterator)]
    state = loader.state_dict()
    as_it_was = plain(state)
    assert found + list(iterator) == epochs[0]
    iterator = batches(loader)
    found = [next(iterator)]
    loader.load_state_dict(before_all)
    loader.load_state_dict(state)  # the last one counts
    assert plain(loader.state_dict()) == as_it_was
    assert found + list(iterator) == epochs[1]
    assert [list(batches(loader)), list(batches(loader))] == [epochs[0][2:], epochs[1]]
    loader.load_state_dict(state)
    assert list(batches(loader)) == epochs[0][2:]
    assert plain(state) == as_it_was


BROKEN_OFF = [(case, taken) for case in ("augmented", "shuffled stream", "late stream") for taken in (0, 1, 3)]


@pytest.mark.parametrize(("case", "taken"), [*BROKEN_OFF, ("stateful stream", 0)])  # which goes on, and has few
def test_a_state_of_the_epoch_after_one_that_was_broken_off(case, taken):
    def fresh(seed):
        return make(CASES[case], 1, seed=seed, workers="fork", persistent_workers=True, batch_size=1)

    loader = fresh(seed=1)
    for _ in loader:
        break
    iterator = batches(iter(loader))  # at once
    found = list(itertools.islice(iterator, taken))
    saved = save(loader)
    rest, following = list(iterator), list(batches(loader))
    assert resumed(fresh(seed=2), saved) == [rest, following]
    if case == "late stream":
        assert [batch[1] for batch in found + rest] == [[number] for number in range(1, 5)]


def test_without_workers_a_state_from_before_the_first_batch_after_a_break_is_warned_of():
    loader = make(CASES["late stream"], 0)
    next(iter(loader))
    iterator = iter(loader)
    with pytest.warns(UserWarning, match="broken off"):
        loader.state_dict()
    next(iterator)
    loader.state_dict()


def test_a_map_style_dataset_is_read_again_from_the_last_snapshot_on(tmp_path):
    """Calls carry one task here, so that each worker's first snapshot is behind its first batch."""
    mail = Mail(tmp_path / "mail")

    def get(index):
        mail.send(index)
        return index

    def arguments():
        return {"dataset": Calls(get, 40), "batch_size": None, "prefetch_factor": 2}

    loader = make(arguments)
    iterator = iter(loader)
    assert [next(iterator) for _ in range(25)] == list(range(25))
    saved = save(loader)
    rest = list(iterator)
    assert sorted(map(int, mail.receive(40))) == list(range(40))
    loader = make(arguments, 2)
    loader.load_state_dict(read(saved))
    assert list(loader) == rest == list(range(25, 40))
    again = [task_id for worker in State.load(read(saved)).position.workers for task_id, _ in worker.to_rebuild]
    assert sorted(map(int, mail.waiting())) == sorted(again + rest)
    assert {22, 23, 24} <= set(again) <= set(range(3, 25))  # of each worker the last one at least, to be compared
    mail.close()


# ---- other orders of delivery


@pytest.mark.parametrize("stream", [False, True])
def test_without_order_no_sample_is_lost_or_repeated(tmp_path, stream):
    """The first batch is held back until others have been taken; then all states are taken."""
    gate = Gate(tmp_path / "gate")

    def get(index):
        if index == 0:
            gate.wait()
        return [index, get_worker_info().seed]

    def arguments():
        dataset = Stream(lambda worker: map(get, range(worker, 20, 2))) if stream else Calls(get, 20)
        return {"dataset": dataset, "batch_size": 2, "prefetch_factor": 2, "in_order": False}

    def samples(found):
        return sorted(tuple(sample) for indices, seeds in found for sample in zip(indices, seeds, strict=True))

    loader = make(arguments, 2)
    iterator = iter(loader)
    found, saved = [], []
    for _ in range(2):
        found.append(next(iterator))
        saved.append(save(loader))
    gate.open()
    for batch in iterator:
        found.append(batch)
        saved.append(save(loader))
    assert [index for index, _ in samples(found)] == list(range(20))
    for taken, state in list(enumerate(saved, 1))[::3]:
        rest, following = resumed(make(arguments, 2, seed=2), state)
        assert [index for index, _ in samples(found[:taken] + rest)] == list(range(20))
        assert [index for index, _ in samples(following)] == list(range(20))
        if stream:
            assert samples(found[:taken] + rest) == samples(found)


class Known(stateful.Shuffled):
    """A stream that knows how long it is."""

    def __len__(self):
        return 4 + 9 + 14


def test_a_length_is_not_taken_for_too_small():
    """Of a length that is too small torch warns; here that would be an error."""

    def fresh():
        return make(lambda: {"dataset": Known(), "batch_size": None})

    loader = fresh()
    iterator = batches(loader)
    found = list(itertools.islice(iterator, 5))
    saved = save(loader)
    rest = list(iterator)
    loader = fresh()
    assert len(loader) == len(found + rest) == 27
    assert resumed(loader, saved)[0] == rest
