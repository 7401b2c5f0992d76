"""What a replacement of torch's loader easily gets wrong: each fact, and the tests that show it.

The conformance suite compares whole streams with torch's; the tests named here look at one fact each.
"""

import ast
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1]

PARITY = {
    # The class
    "generic": ["class::test_generic"],
    "parameters spelled out": [
        "class::test_signature_is_torchs_spelled_out_with_ours_after_it",
        "class::test_every_parameter_is_an_attribute_from_which_a_framework_can_rebuild_the_loader",
    ],
    "dynamic subclasses, the _get_iterator seam": ["class::test_dynamic_subclass_with_own_get_iterator"],
    "the stock class is bound at import": [
        "class::test_isinstance_of_torchs_class_bound_at_import",
        "class::test_torchs_name_replaced_by_ours",
        "scripts::test_a_script_ends_by_itself_whatever_is_still_alive",
    ],
    "torch's errors for bad arguments": [
        "class::test_bad_arguments_raise_torchs_errors",
        "class::test_prefetch_factor_0_is_refused_by_iter_with_torchs_type",
    ],
    "every start method, by name and as an object": [
        "scripts::test_without_workers_ray_is_never_imported_whatever_the_context",
    ],
    "attributes that may and may not be set": [
        "class::test_attributes_that_must_not_be_set_raise_torchs_error",
        "class::test_collate_fn_may_be_set",
    ],
    "collected by reference count": [
        "class::test_collected_by_reference_count",
        "class::test_after_an_error_too_the_loader_is_collected_by_reference_count",
        "to_device::test_an_iterator_that_pins_is_collected_by_reference_count",
    ],
    "a script ends by itself after break and after an error": [
        "scripts::test_a_script_ends_by_itself_whatever_is_still_alive",
        "scripts::test_a_script_that_joins_a_running_ray_ends_and_takes_its_actors_along",
    ],
    # The stream
    "one base seed is drawn per iter(), from the generator alone": [
        "workers::test_one_base_seed_is_drawn_per_iter_from_the_generator_alone",
    ],
    "worker k is seeded base_seed + k; persistent workers once": [
        "workers::test_worker_k_is_seeded_base_seed_plus_k_anew_in_each_epoch",
        "workers::test_persistent_workers_are_not_seeded_again",
    ],
    "one copy of dataset, collate_fn and worker_init_fn": [
        "workers::test_dataset_collate_fn_and_worker_init_fn_are_one_copy",
    ],
    "one and the same thread": [
        "workers::test_all_user_code_runs_in_one_and_the_same_thread_the_main_one",
    ],
    "one torch thread": ["workers::test_torch_has_one_thread_in_a_worker"],
    "without Ray, workers are forks": [
        "default::test_what_comes_of_a_program_is_the_same_as_with_torchs_loader",
        "default::test_in_a_long_epoch_nothing_listens_and_nothing_of_ray_is_there",
    ],
    "sys.path travels": [
        "workers::test_sys_path_is_the_drivers",
        "workers::test_a_module_that_pytest_put_on_the_path_is_imported_not_copied",
        "scripts::test_a_script_ends_by_itself_whatever_is_still_alive",
    ],
    "classes of __main__ travel by value": ["scripts::test_a_script_ends_by_itself_whatever_is_still_alive"],
    "changes to the dataset are seen, but not by persistent workers": [
        "workers::test_workers_see_changes_made_to_the_dataset_since_the_last_epoch",
        "workers::test_persistent_workers_keep_their_first_copy",
    ],
    "iter(dl) is iter(dl) with persistent workers; else independent": [
        "class::test_persistent_workers_have_one_iterator_that_iter_resets",
        "class::test_without_persistent_workers_live_iterators_are_independent",
    ],
    "six workers at the same time": [
        "workers::test_six_workers_run_at_the_same_time",
        "workers::test_six_iterable_workers_meet_before_the_first_batch",
    ],
    # Errors
    "the user's type, torch's text, the original traceback; of a stream only that worker stops": [
        "errors::test_an_error_arrives_in_its_turn_and_a_note_names_where",
    ],
    "what is raised and is no Exception is a worker that exited": [
        "errors::test_a_worker_that_exits_is_torchs_error_with_its_pid_and_the_next_iter_works",
    ],
    "the timeout's text, and the process ends after it": [
        "scripts::test_a_script_ends_by_itself_whatever_is_still_alive",
    ],
    # Batches
    "writable": ["batches::test_batches_are_writable_and_private"],
}


@pytest.mark.parametrize("fact", PARITY)
def test_every_fact_has_its_tests(fact):
    for name in PARITY[fact]:
        file, test = name.split("::")
        tree = ast.parse((FOLDER / "integration" / f"test_{file}.py").read_text())
        assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, name
