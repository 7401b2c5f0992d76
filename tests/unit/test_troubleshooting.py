"""docs/troubleshooting.md quotes what the sources say, all of it, and what it quotes is what a user meets.

A message of the page is a heading, or the beginning of a list item, in back-ticks; `...` stands for what differs.
"""

import ast
import itertools
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from torch.utils.data import IterableDataset

import rayloader
from documents import ROOT
from rayloader import DataLoader, SharedList
from rayloader.options import check_forks
from rayloader.transport import local_line

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
MESSAGES = re.findall(r"^(?:### |- )`([^`]+)`", PAGE, re.MULTILINE)
SOURCES = sorted((ROOT / "rayloader").rglob("*.py"))

GAP = "..."
PLACEHOLDER = re.compile(r"%[-.\d]*[sdgfr]")  # of logging

# The constructors of what a user meets, and the functions that are given a text for the user.
PUBLIC = {name for name in rayloader.__all__ if name.endswith("Error")}
SAYS = PUBLIC | {"TypeError", "ValueError", "AssertionError", "IndexError", "FileNotFoundError", "ImportError"}
SAYS |= {"NotImplementedError", "UnpicklingError", "PicklingError"}
SAYS |= {"SourceError"}  # of the commands
SAYS |= {"warn", "warning", "info", "add_note", "refusal"}

# What these say that is not for users, or stands elsewhere.
NOT_ON_THE_PAGE = {
    "SingleProcessIterator requires timeout == 0": "torch's own text",
    "a class of the user's": "an assertion of the code",
    "it can't be put there": "caught where a generator is put back",
    "a state's ... must be ..., got ...": "goes on after `the state is not what state_dict() gave`",
    "decode needs the skeleton's ... buffers": "an assertion of the code",
    "a buffer must lie in the ... bytes of its slot": "an assertion of the code",
    "buffer ... must have ... bytes": "an assertion of the code",
    "...: its batches would not be the rest of the same stream": "goes on after `the state was saved with`",
    "...: if the order of the samples depends on it": "goes on after `the state was saved with`",
    "...: without workers the samples draw": "goes on after `the state is of a loader with num_workers=`",
    "...: its dataset is a stream, or has a state": "goes on after `the state is of a loader with num_workers=`",
    "... on node ... is another file": "goes on after `The dataset refers to`",
    "... does not reach node": "goes on after `The dataset refers to`",
    "... node ... does not have": "goes on after `The dataset refers to`",
    "... this worker on ... can't open": "goes on after `The dataset refers to`",
    "it is of another format, or of ... samples": "goes on after `the cache ... can't be used`",
    "it is of another format, or was cut off": "goes on after `the cache ... can't be used`",
    "its header is damaged": "goes on after `the cache ... can't be used`",
    "it is of another dataset": "goes on after `the cache ... can't be used`",
}


# --- what the sources say


def template(node: ast.AST) -> list[str]:
    """The texts that an expression may give, with gaps for what is not known here; none if it is no text."""
    if isinstance(node, ast.Constant):
        return [PLACEHOLDER.sub(GAP, node.value)] if isinstance(node.value, str) else []
    if isinstance(node, ast.JoinedStr):
        parts = [template(part) if isinstance(part, ast.Constant) else gaps(part) for part in node.values]
        return ["".join(choice) for choice in itertools.product(*parts)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [
            "".join(pair) for pair in itertools.product(template(node.left) or [GAP], template(node.right) or [GAP])
        ]
    if isinstance(node, ast.IfExp):
        return template(node.body) + template(node.orelse)
    return []


def gaps(node: ast.expr) -> list[str]:
    """A value within a text: a gap, or the text of a constant of rayloader's."""
    assert isinstance(node, ast.FormattedValue)
    name = ast.unparse(node.value)
    return [constants().get(name, GAP)]


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


@cache
def constants() -> dict[str, str]:
    """Names in capitals that stand for one text."""
    return {
        node.targets[0].id: node.value.value
        for path in SOURCES
        for node in nodes(path)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id.isupper()
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }


@cache
def all_texts() -> list[str]:
    """Whatever text the library may put together."""
    return [text for path in SOURCES for node in nodes(path) for text in template(node)]


def said() -> Iterator[tuple[str, str]]:
    """Where, and what: the texts of errors, warnings, notes and log lines."""
    for path in SOURCES:
        for node in nodes(path):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in SAYS:
                for argument in node.args:
                    texts = [text for text in template(argument) if " " in text]
                    yield from ((f"{path.relative_to(ROOT)}:{node.lineno}", text) for text in texts)
                    if texts:
                        break


def begins(text: str, message: str) -> bool:
    """Whether a text begins as a message does; a gap of the one may be anything in the other."""
    pattern = "(.|\n)*".join(map(re.escape, message.removesuffix(GAP).strip().split(GAP)))
    return re.match(pattern, text) is not None


# --- what provokes a message: a call, or the test that does


def looped(**attributes: object) -> None:
    """Sets attributes of a loader, as programs may, and begins an epoch."""
    loader = DataLoader(range(4), num_workers=1)
    vars(loader).update(attributes)
    iter(loader)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


def unforked() -> None:
    from rayloader.workers.zygote import Zygote

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fork", refused)
        Zygote(refused)  # type: ignore[arg-type]


def unpaired() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "socketpair", refused)
        local_line.pair()


def refused() -> None:
    raise OSError("no more processes")


def elsewhere() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "platform", "darwin")
        check_forks("auto")


def with_references() -> None:
    from rayloader.workers.forks import ForkCalls

    ForkCalls._send(None, None, carries=True)  # type: ignore[arg-type]


def start_timeout() -> None:
    from rayloader.actors.placement import Placement

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAYLOADER_START_TIMEOUT", "soon")
        print(Placement().limit)


def lacking() -> None:
    loader = DataLoader(range(4))
    state = loader.state_dict()
    del state["position"]
    loader.load_state_dict(state)


def set_rank() -> None:
    DataLoader(range(4), num_replicas=2, rank=0).rank = 1


CALLS: dict[str, Callable[[], object]] = {
    "prefetch_bytes must be": lambda: DataLoader(range(4), prefetch_bytes=0),
    "prefetch_factor must be greater than 0": lambda: looped(prefetch_factor=0),
    "... must be a whole number >= ..., got ...; pass": lambda: looped(prefetch_factor="2"),
    "prefetch_factor must be a whole number where": lambda: looped(prefetch_factor=None),
    "num_workers must be": lambda: looped(num_workers=-1),
    "timeout must be": lambda: looped(timeout=-1),
    'on_timeout="restart"': lambda: DataLoader(range(4), on_timeout="restart"),
    'scheduling="dynamic" needs seeding="batch"': lambda: DataLoader(range(4), scheduling="dynamic"),
    'scheduling="dynamic" needs a map-style': lambda: DataLoader(Stream(), scheduling="dynamic", seeding="batch"),
    "... must be ... or ..., got ...": lambda: DataLoader(range(4), seeding="epoch"),
    "... must be True": lambda: DataLoader(range(4), arenas=1),
    "... must be a whole number >= 0": lambda: DataLoader(range(4), max_skipped=-1),
    "device must be a name": lambda: DataLoader(range(4), device=0),
    "device must name one": lambda: DataLoader(range(4), device="gpu"),
    "prefetch_to_device must be": lambda: DataLoader(range(4), prefetch_to_device=0),
    "prefetch_to_device needs": lambda: DataLoader(range(4), prefetch_to_device=2),
    "share() takes a loader without": lambda: rayloader.share(DataLoader(range(4), device="cpu"), consumers=1),
    "snapshot_every_n_steps": lambda: DataLoader(range(4), snapshot_every_n_steps=-1),
    "name must be": lambda: DataLoader(range(4), name=""),
    "ray_remote_args must be": lambda: DataLoader(range(4), ray_remote_args=[]),
    "ray_remote_args['resources']": lambda: DataLoader(range(4), ray_remote_args={"resources": 1}),
    "ray_remote_args must not": lambda: DataLoader(range(4), ray_remote_args={"name": "mine"}),
    "ray_remote_args: ...": lambda: DataLoader(range(4), ray_remote_args={"num_cpus": -1}),
    "RAYLOADER_START_TIMEOUT": start_timeout,
    'workers="fork" makes': lambda: looped(workers="fork", arenas=False),
    "this process could not be forked": unforked,
    "can't make a local socket": unpaired,
    "the sampler yields references": with_references,
    "workers can be forks only": elsewhere,
    "SharedList index": lambda: SharedList("ab")[2],
    "cached() needs": lambda: rayloader.cached(object()),
    "max_bytes must": lambda: rayloader.cached([1], "much"),
    "... is of a folder": lambda: rayloader.cached([1], fingerprint="1"),
    "a cached dataset is asked": lambda: rayloader.cached([1])["a"],
    "index ... is out of range": lambda: rayloader.cached([1])[1],
    "this is not a state of a rayloader.DataLoader": lambda: DataLoader(range(4)).load_state_dict({"epoch": 1}),
    "the state must have all": lacking,
    "... was given without": lambda: DataLoader(range(4), rank=0),
    "num_replicas must be": lambda: DataLoader(range(4), num_replicas=0, rank=0),
    "rank must be a whole number from 0 to ..., got ...": lambda: DataLoader(range(4), num_replicas=1, rank=1),
    "seed must be": lambda: DataLoader(range(4), seed=-1),
    "seed=...": lambda: DataLoader(range(4), seed=1),
    "... attribute should not": set_rank,
    "init() takes": lambda: rayloader.init(foo=3),
    "patch() takes arguments": lambda: rayloader.patch(num_workers=1),
    "share() takes a rayloader": lambda: rayloader.share([1], consumers=1),
    "share() needs": lambda: rayloader.share(DataLoader(range(4)), consumers=0),
    "consumer_timeout must": lambda: rayloader.share(DataLoader(range(4)), consumers=1, consumer_timeout=0),
}


TESTS = {
    "faults/test_recovery.py": {
        "test_all_workers_killed_at_once": ["rayloader: worker ... is lost"],
    },
    "faults/test_skip.py": {
        "test_the_log_names_the_index": ["rayloader: skipped sample"],
    },
    "frameworks/test_accelerate.py": {
        "test_a_rank_whose_part_would_be_dealt_out_to_all_is_an_error": ["with dispatch_batches"],
    },
    "integration/test_arenas.py": {
        "test_what_the_environment_says_is_checked": ["RAYLOADER_ARENAS"],
        "test_who_keeps_more_than_an_arena_has_room_for_gets_all_intact_and_one_warning": [
            "rayloader: so many batches"
        ],
        "test_where_no_arena_is_possible_batches_come_all_the_same": ["rayloader: batches travel"],
    },
    "integration/test_checkpoint.py": {
        "test_without_workers_a_state_from_before_the_first_batch_after_a_break_is_warned_of": [
            "this state was saved before the first batch"
        ],
    },
    "integration/test_checkpoint_fit.py": {
        "test_a_state_of_an_unknown_version_is_refused": ["the state has version"],
        "test_a_state_of_another_loader_is_refused": ["the state is of a loader with"],
        "test_a_state_that_is_ahead_of_what_was_dispatched_is_refused": ["the state says"],
        "test_what_a_dataset_tells_has_no_cycle_and_is_not_too_deep": ["what state_dict() gives must not"],
    },
    "integration/test_checkpoint_program.py": {
        "test_other_workers_end_the_epoch_and_then_the_loaders_own_begin": ["rayloader: this epoch resumes"],
        "test_a_state_that_is_refused_changes_nothing": ["the state is of a loader whose"],
        "test_of_a_text_or_a_fraction_that_differs_there_is_a_warning": ["the state was saved with"],
        "test_a_sampler_that_cannot_tell_its_state_is_an_error_only_for_who_asks": ["the sampler could not"],
    },
    "integration/test_class.py": {
        "test_an_iterator_refuses_to_be_pickled_with_torchs_type_of_error": ["... cannot be pickled: an iterator"],
    },
    "integration/test_closing.py": {
        "test_whoever_waits_in_next_is_told_that_the_epoch_was_ended": ["this epoch was ended"],
    },
    "integration/test_depth.py": {
        "test_where_no_line_is_possible_batches_come_by_ray_calls_and_that_is_said": ["rayloader: a worker is reached"],
        "test_a_sampler_that_is_changed_after_it_was_read_ahead_is_an_error": ["the sampler was changed"],
    },
    "integration/test_errors.py": {
        "test_a_worker_that_exits_is_torchs_error_with_its_pid_and_the_next_iter_works": ["DataLoader worker"],
        "test_a_timeout_names_batch_and_worker_and_iteration_may_go_on": ["DataLoader timed out"],
        "test_a_dataset_that_cannot_be_pickled_names_the_attribute_at_iter": ["It cannot be sent"],
        "test_the_part_of_a_batch_that_cannot_be_sent_is_named_with_the_remedy": ["What the dataset or collate_fn"],
    },
    "integration/test_fork_server.py": {
        "test_without_the_fork_server_workers_start_slowly_and_that_is_said_once": ["rayloader: there is no fork"],
    },
    "integration/test_interrupts.py": {
        "test_an_interrupted_next_loses_nothing_and_hangs_nowhere": [
            "this iterator was interrupted",
            "rayloader: an epoch was interrupted",
        ],
    },
    "integration/test_local.py": {
        "test_another_dataset_is_refused": ["the state does not fit the random"],
        "test_only_who_asks_for_a_state_pays_for_what_cannot_be_told": [
            "... could not save its state",
            "the position in the epoch",
        ],
        "test_a_stream_that_cannot_be_read_again_is_an_error": ["the iterable dataset was"],
    },
    "integration/test_ranks.py": {
        "test_that_all_ranks_read_the_same_is_told_in_the_log": ["rayloader: the loader has num_replicas"],
    },
    "integration/test_restoring.py": {
        "test_a_state_that_cannot_be_told_hurts_only_who_asks_for_it": ["a worker's dataset could not"],
        "test_what_cannot_be_followed_is_an_error_and_never_another_stream": ["batch ... and differs"],
        "test_a_stream_with_state_that_gives_nothing_after_a_kill_is_an_error": ["batch ... but did not come"],
        "test_a_stream_that_differs_is_that_error_for_every_batch": ["the iterable dataset of worker"],
        "test_a_worker_that_cannot_be_restored_after_a_kill_is_that_error_for_each_of_its_batches": [
            "the state of worker"
        ],
        "test_building_again_is_no_hang": ["rayloader: worker ... is rebuilding"],
    },
    "integration/test_scripts.py": {
        "test_ray_and_workers_are_started_ahead": ["Ray is running already"],
        "test_fork_with_a_live_iterator": ["Ray cannot be used", "an iterator works in the process"],
        "test_ray_and_rayloader_may_be_shut_down_under_live_iterators": [
            "Ray was shut down",
            "this iterator's workers",
        ],
    },
    "multinode/test_cluster_batches.py": {
        "test_who_keeps_all_batches_is_told_once_and_gets_the_rest": ["rayloader: the program keeps"],
    },
    "unit/test_draining.py": {
        "test_a_node_that_is_drained_is_said_once_and_left_when_it_is_late": ["rayloader: Ray drains the node"],
    },
    "multinode/test_cluster_join.py": {
        "test_ray_client_is_refused": ["rayloader needs a driver"],
    },
    "multinode/test_cluster_policy.py": {
        "test_bad_options_are_errors_at_the_latest_of_iter": ["Ray refuses the workers' options"],
        "test_workers_without_a_place_are_an_error_that_explains": ["... of ... DataLoader workers found no place"],
        "test_a_worker_without_a_place_is_hosted_by_the_others": ["rayloader: ... of ... worker"],
        "test_cpus_that_others_have_and_keep_are_done_without": ["rayloader: other Ray work"],
        "test_more_workers_than_cpus_share_them_with_a_warning": ["This DataLoader will create"],
    },
    "integration/test_share.py": {
        "test_who_is_dropped_is_told_so_and_the_others_go_on": ["rayloader: consumer ... reads", "consumer ... reads"],
        "test_a_rank_belongs_to_the_last_that_has_connected": ["consumer ... is another", "rank must be"],
        "test_an_epoch_that_is_broken_off_is_over_for_who_does_it_and_for_all_if_all_do": ["this iterator is of epoch"],
        "test_set_epoch_reaches_the_sampler_and_must_be_one_number": ["set_epoch("],
        "test_a_forked_child_cannot_read_on": ["a consumer of the share"],
        "test_where_there_can_be_no_line_an_error_says_so": ["the producer of the share ... cannot connect"],
        "test_references_to_rays_objects_are_an_error_in_place_of_their_batch": ["a batch of a shared loader must not"],
        "test_all_go_on_from_a_state_of_one": [
            "the state is of batch",
            "the state is of another share",
            "this is not a state of a rayloader.Consumer",
        ],
        "test_a_name_is_of_one_share_which_ends_when_it_is_closed": [
            "there is a share",
            "there is no share",
            "the producer of the share ... is gone",
        ],
        "test_what_cannot_travel_is_named": ["It cannot be sent to the producer", "Caught ... in the producer"],
    },
    "unit/test_trace.py": {
        "test_one_trace_at_a_time": ["this loader is being traced"],
        "test_a_folder_that_is_missing_is_told_before_anything_is_loaded": ["there is no folder"],
    },
    "integration/test_replicas.py": {
        "test_what_a_worker_cannot_open_is_told_below_the_error": ["The ... cannot be opened in the worker"],
        "test_a_function_that_travels_with_a_generator_of_its_module_is_warned_of": ["the workers have a copy"],
    },
    "unit/test_bulk.py": {"test_what_is_resized_meanwhile_is_an_error": ["a tensor or array was resized"]},
    "unit/test_codec.py": {
        "test_excessive_depth_is_a_pickling_error": ["objects are nested deeper"],
        "test_explains_what_cannot_be_pickled": ["torch.compile has made it"],
        "test_known_classes_need_not_be_picklable_here": ["a class of this batch"],
    },
    "unit/test_engine.py": {
        "test_where_something_was_lost_next_does_not_wait_for_ever": [
            "no worker has anything to do, and the epoch is not over"
        ],
    },
    "unit/test_frameworks.py": {
        "test_a_state_that_was_loaded_is_not_lost_in_silence": ["load_state_dict() was called"],
        "test_a_loader_whose_batches_come_from_another_one_has_no_position": ["a framework has rebuilt this loader"],
        "test_one_warning_tells_of_the_first_loader_that_is_made_anew": ["a rayloader.DataLoader was"],
        "test_one_warning_names_a_class_that_cannot_get_our_iterators": ["rayloader.patch() does not reach"],
    },
    "unit/test_generators.py": {
        "test_one_whose_place_is_missing_is_an_error": ["the random generator at"],
    },
    "unit/test_state.py": {
        "test_a_state_that_holds_something_else_is_refused": ["the state is not what"],
    },
    "unit/test_sources.py": {
        "test_what_is_no_file_is_refused": ["... can't be read", "... is a folder"],
        "test_other_files_are_refused": ["... is neither JSON", "... holds no state of"],
        "test_nothing_in_a_file_is_run": ["... holds objects"],
        "test_one_of_several_states_is_chosen_by_its_key": ["... holds ...; choose one by"],
        "test_a_log_needs_pyarrow": ["a provenance log is read"],
    },
    "unit/test_inspecting.py": {
        "test_loaders_of_one_log_are_told_apart": ["... is of no loader", "... is of several loaders"],
        "test_states_are_not_compared": ["... holds a state, and diff compares"],
        "test_logs_without_a_step_in_common_are_not_compared": ["the logs have no step"],
    },
    "unit/test_skips.py": {
        "test_what_is_no_step_is_refused": ["skip_steps must hold numbers of steps, or pairs"],
        "test_steps_and_epochs_count_from_0": ["skip_steps must hold numbers of steps and epochs"],
        "test_an_entry_that_comes_too_late_is_told_once_and_has_no_effect": ["skip_steps names ..., but the run"],
        "test_an_epoch_that_is_dealt_out_anew_forgets_its_steps": ["skip_steps names ...; but the rest"],
    },
    "integration/test_replay.py": {
        "test_a_place_that_does_not_exist": ["epoch and step must", "to build step", "step ... was never"],
        "test_what_the_command_cannot_do_is_said_in_one_line": [
            "the sources have no state of epoch",
            "there is no folder ... for ...; make it first",
            "say which epoch by",
            "... must be or return",
            "... must be a function that takes",
            "--rank and --world are for",
            "one log at most",
        ],
        "test_a_rank_that_the_sources_are_not_of": ["the sources are of ranks"],
        "test_a_step_that_raised_raises_in_one_line": ["step ... raised, and no batch came"],
        "test_any_step_of_a_run_is_built_again_from_each_state_of_its_epoch_that_suits": [
            "step ... can't be built from this state",
            "step ... depends on the batches",
        ],
        "test_without_workers_the_program_s_generators_need_a_state_from_right_before_the_step_or_a_log": [
            "the ... from the program's own random"
        ],
        "test_another_transform_is_an_error_where_a_log_tells": ["step ... can't be built again"],
        "test_a_process_that_dies_is_an_error": ["the process that was to build step"],
        "test_a_worker_builds_no_batch_again": ["batch_at() can't be called in a worker"],
    },
    "unit/test_unpicklable.py": {
        "test_a_stream_over_a_descriptor_is_an_error": ["cannot pickle ... object", "a descriptor of"],
    },
    "unit/test_metrics.py": {
        "test_where_ray_refuses_that_is_said_once_and_no_more_is_told": ["rayloader: Ray has refused"],
    },
    "unit/test_ray_use.py": {
        "test_a_start_method_of_the_program_gives_forks_and_one_warning": ["multiprocessing.set_start_method("],
    },
    "unit/test_fleet.py": {
        "test_a_dataset_that_ray_cannot_send_is_for_forks": ["rayloader: the workers are forks"],
    },
    "integration/test_to_device.py": {
        "test_a_device_that_is_not_there_is_an_error_that_says_so": [
            "device must be an accelerator that torch finds here, got ..., and torch finds"
        ],
        "test_an_index_without_a_device_is_an_error_that_says_so": ["device must have a number below ..., got"],
    },
    "unit/test_page_locks.py": {
        "test_what_cannot_be_locked_is_not_and_a_warning_says_so_once": ["rayloader: the memory of batches cannot"],
    },
    "unit/test_pickler.py": {
        "test_a_storage_on_an_accelerator_is_refused_in_a_batch": ["a batch and its indices must be in main memory"],
    },
    "unit/test_placement.py": {
        "test_what_is_waited_for_is_said": ["rayloader: waiting for ... of"],
        "test_the_users_limit_counts_for_both": ["... of ... DataLoader workers have"],
    },
    "unit/test_position.py": {
        "test_too_many_skipped_samples_end_it": ["... samples have raised"],
        "test_a_sampler_that_gives_others_is_refused": ["the sampler did not reproduce"],
        "test_nothing_can_be_told_before_the_workers_have_begun": ["the iterator was dropped"],
    },
    "unit/test_rank_states.py": {
        "test_what_does_not_belong_together_is_refused": [
            "a list of states",
            "a list must hold",
            "the states are of different",
        ],
        "test_what_cannot_be_dealt_anew_goes_on_with_as_many_ranks": ["the states are of ... ranks"],
        "test_ranks_that_skip_other_steps_are_refused": ["the ranks' states differ"],
    },
    "unit/test_readers.py": {
        "test_a_state_that_lightning_loads_after_its_first_batch_is_refused": ["the checkpoint has a state"],
    },
    "unit/test_replica.py": {
        "test_a_missing_file_is_named": ["The dataset refers to"],
        "test_an_open_text_file_in_a_batch_is_refused": ["a file of this process"],
        "test_too_little_memory_is_said_before_anything_is_written": ["... GB are needed"],
    },
    "unit/test_shortcuts.py": {
        "test_a_view_of_memory_is_refused": ["keep the object that"],
    },
    "unit/test_session.py": {
        "test_a_start_of_ray_that_never_ends_is_an_error": ["Ray has not started on"],
        "test_a_start_of_ray_that_takes_long_is_told_after_its_own_time": ["rayloader: waiting for the Ray at"],
        "test_a_home_that_cannot_keep_a_token_is_an_error_with_a_remedy": ["the token of a Ray"],
        "test_a_folder_that_cannot_be_written_to_is_an_error_before_the_raylet_waits_for_it": ["Ray keeps its objects"],
        "test_a_ray_that_does_not_come_up_is_an_error_that_says_what_to_do": [
            "Ray could not be started",
            "the Ray that",
        ],
    },
    "unit/test_arrow.py": {
        "test_what_needs_pyarrow_says_so": ["rayloader... needs pyarrow"],
        "test_a_cache_among_the_files_is_refused": ["cache must be another folder"],
        "test_what_is_wrong_is_an_error_that_says_so": [
            "... takes paths",
            "... needs at least one file",
            "an ArrowDataset maps files",
            "cache is a folder",
            "columns must be a list",
            "columns must name at least",
            "... must name columns",
            "a row has each column once",
            "a row has each field once",
            "decode must be a dict",
            "decode is called with",
            "fill_null must be a dict",
            "fill_null must have values",
            "column ... is of type",
        ],
        "test_a_folder_without_files_is_an_error": ["the folder ... has no file"],
        "test_files_that_differ_are_an_error_that_names_column_and_file": ["all files must have"],
        "test_what_is_no_such_file_is_named": ["a file of an ArrowDataset must be"],
        "test_a_truncated_file_is_named": ["... cannot be read, it is damaged"],
        "test_a_device_that_is_full_is_an_error_that_names_file_and_folder": ["this was raised while"],
        "test_a_mapped_file_that_is_gone_or_another_is_an_error": [
            "this process cannot open",
            "..., a file of an ArrowDataset, has",
        ],
        "test_indices": ["ArrowDataset index", "an index of an ArrowDataset"],
        "test_a_null_is_an_error_that_names_column_row_and_remedy": ["column ... is null"],
        "test_a_function_is_called_with_each_value": ["decode[...] raised"],
    },
    "unit/test_parquet.py": {
        "test_a_file_that_is_replaced_while_it_is_read_is_an_error": ["... was replaced while"],
        "test_what_is_wrong_is_an_error_that_says_so": [
            "there is no file or folder",
            "... of a ParquetStream must be a whole number",
            "equal_steps=... counts rows",
            "filters must be an expression",
            "filters do not fit",
        ],
        "test_files_without_rows": ["equal_steps=... needs a row"],
        "test_paths_elsewhere_are_looked_at_when_they_are_read": ["all paths must be"],
        "test_a_truncated_file_is_named": ["... has no footer of Parquet"],
        "test_a_filesystem_that_a_fork_would_lose_is_refused_there": ["this ParquetStream has a filesystem"],
        "test_a_row_group_that_cannot_be_read_is_named_and_the_rest_comes": ["row group ... of ... cannot be read"],
        "test_a_row_group_that_cannot_be_read_is_skipped_counted_and_told": ["rayloader: skipped a row group"],
        "test_a_state_of_something_else_is_refused": [
            "this is not a state of a ParquetStream's",
            "the state of a ParquetStream was",
        ],
        "test_a_state_whose_rows_the_filters_let_through_no_more_is_refused": ["the state of a ParquetStream has"],
        "test_a_loader_that_skips_is_refused_with_equal_steps": ['on_error="skip" leaves out rows'],
    },
    "unit/test_shard_info.py": {
        "test_a_loader_that_does_not_know_its_rank_is_an_error": ["get_shard_info() was called"],
        "test_a_worker_of_torchs_loader_is_an_error": ["get_shard_info() does not know"],
    },
    "unit/test_ranks.py": {
        "test_what_is_divided_already_is_refused": ["the data would be"],
        "test_an_endless_sampler_is_an_error_and_no_hang": [
            "with num_replicas a sampler",
            "the sampler ... gives more",
        ],
        "test_the_same_random_order_again_is_told_once": ["this epoch has the same"],
    },
    "unit/test_cache_folder.py": {
        "test_a_file_that_others_could_have_written_is_not_read": ["the cache file ..."],
        "test_a_group_s_folder_must_be_there": ["shared=True needs a folder"],
        "test_what_a_group_s_cache_can_t_hold_is_an_error": ["a cache with shared=True keeps"],
        "test_damaged_records_are_an_error": ["a record of the cache is damaged"],
        "test_older_caches_of_the_dataset_are_told_when_another_one_is_made": ["rayloader: beside the new cache"],
    },
    "unit/test_cached.py": {
        "test_batches_are_read_at_once_and_missing_samples_built_at_once": ["__getitems__ of the cached"],
        "test_a_dataset_that_can_t_be_described_needs_a_fingerprint": ["the dataset can't be described"],
        "test_a_sample_that_draws_is_refused": ["... of the cached ... draws"],
        "test_a_sample_that_differs_each_time_is_refused": ["sample ... of the cached ... differs"],
        "test_a_comparison_that_fails_says_that_it_was_one": ["a share of a cache's samples"],
        "test_a_full_disk_ends_the_cache_and_no_more": ["the cache ... can't be used"],
        "test_memory_files_may_be_refused": ["there is no room for a cache"],
        "test_indices_are_those_of_a_sequence": ["the cached dataset had"],
        "test_what_finds_no_room_is_built_each_time": ["rayloader: the cache ... is full"],
    },
    "unit/test_shared_list.py": {
        "test_an_item_that_cannot_be_pickled_is_named": ["A SharedList pickles its items"],
    },
    "unit/test_shares.py": {
        "test_a_stream_of_a_rank_that_nobody_knows_is_refused": ["share() was given a loader of an iterable"],
        "test_a_consumer_iterates_as_a_loader_does": ["cannot pickle a Consumer"],
        "test_a_producer_that_takes_long_to_start_is_told": ["rayloader: the producer of the share ... has not"],
        "test_who_waits_long_is_told_for_whom": ["rayloader: consumer ... has waited"],
        "test_after_the_shutdown_of_ray_it_is_not_called": ["Ray was shut down while the share"],
        "test_where_rays_connections_are_encrypted_nothing_is_shared": ["the batches of a share travel over"],
    },
    "unit/test_local_state.py": {
        "test_one_of_a_module_that_is_missing_is_warned_of": ["the state has the random generator"],
    },
    "unit/test_compat_ray.py": {
        "test_what_this_ray_lacks_is_said_once": ["rayloader: Ray ... lacks the private name"],
    },
    "unit/test_damaged.py": {
        "test_a_state_imports_no_module": ["the state is of workers that had"],
        "test_a_state_sets_no_attribute_of_a_sampler_to_what_it_cannot_be": ["the state has ... of the sampler"],
    },
    "unit/test_provenance.py": {
        "test_without_pyarrow_the_remedy_is_said": ["provenance= needs pyarrow"],
        "test_a_folder_that_is_missing_is_an_error_of_iter": ["there is no folder ... for the provenance log"],
        "test_another_process_is_kept_out_until_the_loader_has_ended": ["another process writes to"],
        "test_another_file_is_refused_and_left_as_it_is": ["... is no provenance log"],
        "test_a_damaged_log_is_refused_and_not_cut": ["the provenance log ... is damaged"],
        "test_a_full_disk_does_not_end_the_training_and_the_next_epoch_is_logged_again": [
            "rayloader: the provenance log ... cannot"
        ],
        "test_where_no_file_can_be_locked_it_is_written_all_the_same": ["rayloader: nothing keeps other processes"],
    },
    "unit/test_needs.py": {
        "test_a_name_that_is_missing_is_named_at_import": ["rayloader does not work with"],
    },
    "unit/test_inbox.py": {
        "test_a_line_that_ends_again_and_again_is_an_error": [
            "the connection to the producer of a share has ended again"
        ],
        "test_where_there_can_be_no_other_line_is_said": ["the producer of the share ... cannot connect"],
    },
    "unit/test_snapshot.py": {
        "test_a_dataset_with_other_generators_is_refused": ["the snapshot is of"],
    },
}

# What takes another machine, another kernel or another Python, or comes of a fault in Ray or in rayloader.
UNPROVOKED = [
    "the workers were shut down",
    "rayloader: waiting for Ray",
    "rayloader: no batch for",
    "rayloader: a worker process",
    "the producer of the share ... has failed",
    "can't map",
    "rayloader: the process that forks workers",
]


# --- tests


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_of_the_page_is_in_the_sources(message: str) -> None:
    assert any(begins(text, message) for text in all_texts())


def test_what_the_sources_say_is_on_the_page() -> None:
    known = [*MESSAGES, *NOT_ON_THE_PAGE]
    assert [(place, text) for place, text in said() if not any(begins(text, message) for message in known)] == []
    assert [text for text in NOT_ON_THE_PAGE if not any(begins(other, text) for _, other in said())] == []


@pytest.mark.parametrize("beginning", CALLS)
def test_a_call_provokes_the_message(beginning: str) -> None:
    (message,) = [beginning] if beginning in MESSAGES else [text for text in MESSAGES if begins(text, beginning)]
    with pytest.raises((Exception, UserWarning)) as caught:
        CALLS[beginning]()
    text = str(caught.value)
    assert begins(text, message) or begins(text.rpartition(": ")[2], message)  # the reason of a refusal comes last


def test_every_message_is_provoked_by_a_call_or_a_test() -> None:
    tested = [message for names in TESTS.values() for messages in names.values() for message in messages]
    known = [*CALLS, *tested, *UNPROVOKED]
    assert [message for message in MESSAGES if not any(begins(message, beginning) for beginning in known)] == []
    assert [beginning for beginning in known if not any(begins(message, beginning) for message in MESSAGES)] == []


@pytest.mark.parametrize("file", TESTS)
def test_the_tests_that_provoke_messages_exist(file: str) -> None:
    tree = ast.parse((ROOT / "tests" / file).read_text())
    assert TESTS[file].keys() <= {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_the_tree_of_errors_is_that_of_the_classes() -> None:
    drawn = re.findall(r"^    ([│├└─ ]*)(\w+Error)$", rayloader.errors.__doc__ or "", re.MULTILINE)
    assert {name for _, name in drawn} == PUBLIC | {"RuntimeError"}
    above: list[str] = []
    for branch, name in drawn:
        above[len(branch) // 4 :] = [name]
        assert above[-2:-1] in ([], [getattr(rayloader, name, RuntimeError).__base__.__name__])


def test_the_reference_has_every_public_name() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    named = set(re.findall(r"^\.\. auto(?:class|function):: (\w+)", page, re.MULTILINE))
    assert set(rayloader.__all__) - PUBLIC <= named
    assert ".. automodule:: rayloader.errors" in page


@pytest.mark.parametrize(
    ("source", "texts"),
    [
        ("x", []),
        ("'a' 'b'", ["ab"]),
        ("f'a {b} c{d!r}'", ["a ... c..."]),
        ("'%d of %s, 100%%'", ["... of ..., 100%%"]),
        ("f'a {b}' + c", ["a ......"]),
        ("'a' if b else f'{c}'", ["a", "..."]),
    ],
)
def test_the_texts_of_an_expression(source: str, texts: list[str]) -> None:
    assert template(ast.parse(source, mode="eval").body) == texts


@pytest.mark.parametrize(
    ("text", "message", "does"),
    [
        ("no room for ... workers", "no room", True),
        ("no room for ... workers", "no room for ... work", True),
        ("no room for ... workers", "no room for ... actors", False),
        ("there is no room", "no room", False),
        ("got ...; leave it out", "got ...", True),
    ],
)
def test_how_a_text_begins(text: str, message: str, does: bool) -> None:
    assert begins(text, message) is does
