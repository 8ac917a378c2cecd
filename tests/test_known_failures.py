"""Failures that users of comparable systems reported: for each, the test that covers it here, or why it cannot happen.

Sections A (asynchronous running and staleness), F (failures, timeouts, cleanup), G (configuration), M (masks), T
(tokenization and chat templates), P (parsing tool calls), X (sandboxes and rewards) and N (environments). An entry is
covered by tests, named as path::name and checked to exist, or impossible for the reason given, or both. What was
covered nowhere else is tested below.
"""

import ast
import dataclasses
import functools
import json
import re
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import chz
import pytest
import trio
import trio.lowlevel
from hypothesis import given
from hypothesis import strategies as st
from small_run import TASKS, make_late, small

from jaxrl.chat.families import renderer_for
from jaxrl.chat.tokenizer import byte_tokenizer
from jaxrl.config import AsyncConfig, Config, describe, parse
from jaxrl.env import EnvGroupBuilder, RLDataset
from jaxrl.plan import sampling_of, steps_of
from jaxrl.runtime.admission import Admission
from jaxrl.runtime.endpoint import open_endpoint
from jaxrl.runtime.episode import Limits
from jaxrl.runtime.message_env import MessageEnvDataset, TurnRules
from jaxrl.runtime.supply import Place, Stream, Supply
from jaxrl.train import TaskDatasets
from jaxrl.types import StopReason, Trajectory, TrajectoryGroup

ROOT = Path(__file__).parent.parent
HERE = "test_known_failures.py"
RENDERER = renderer_for(byte_tokenizer())

ENTRIES = [
    *("A01", "A03", "A05", "A07", "A09", "A11", "A13", "A15"),
    *("F01", "F03", "F05", "F07", "F09", "F11", "F13", "F15", "F17", "F19", "F21", "F23", "F25", "F27"),
    *("G01", "G03", "G05", "G07", "G09", "G11", "G13"),
    *("M01", "M03", "M05", "M07", "M09", "M11", "M13"),
    *("T01", "T03", "T05", "T07", "T09", "T11", "T13", "T15", "T17", "T19", "T21"),
    *("P01", "P03", "P05", "P07", "P09", "P11", "P13"),
    *("X01", "X03", "X05", "X07", "X09", "X11", "X13"),
    *("N01", "N03", "N05", "N07", "N09", "N11", "N13", "N15", "N17", "N19", "N21", "N23"),
]


@dataclasses.dataclass(frozen=True)
class Row:
    """What stands against an entry. tests: path::name under tests/. impossible: why it cannot happen here."""

    tests: tuple[str, ...] = ()
    impossible: str = ""


def row(*names: str, impossible: str = "") -> Row:
    return Row(names, impossible)


CHAOS, STRATEGY, SUPPLY = "runtime/test_chaos.py", "runtime/test_strategy.py", "runtime/test_supply.py"
AGE = f"{SUPPLY}::test_I8_no_trained_token_is_too_old_nothing_is_lost_and_nothing_trained_twice"

TABLE: dict[str, Row] = {
    "A01": row(
        AGE,
        impossible="age is bounded by admission, so a group that waits in the queue keeps its place and nothing needs "
        "to be dropped when it is trained; the age is read from the versions of the trained tokens",
    ),
    "A03": row(AGE, f"{SUPPLY}::test_in_turn_every_group_starts_with_the_weights_that_train_it"),
    "A05": row(
        f"{HERE}::test_A05_a_resumed_run_starts_as_many_groups_as_one_that_was_never_stopped",
        f"{SUPPLY}::test_I10_a_resumed_supply_has_what_was_finished_and_plays_what_was_not",
    ),
    "A07": row(f"{HERE}::test_A07_what_is_finished_and_not_needed_yet_stays"),
    "A09": row(
        "runtime/test_policies.py::test_I9_cancelled_sessions_of_any_policy_leave_nothing",
        "runtime/test_engine.py::test_I9_a_turn_given_up_leaves_a_session_that_can_go_on",
        "runtime/test_engine.py::test_I15_publishing_in_the_middle_of_a_turn_versions_each_token",
        impossible="there is no pause: weights are exchanged between two decode calls of one task, which is also the "
        "one that takes cancelled sessions out",
    ),
    "A11": row(
        f"{HERE}::test_A11_when_the_data_runs_out_it_starts_again_and_nobody_waits",
        f"{CHAOS}::test_A11_a_run_longer_than_its_data_ends_in_every_mode",
        "test_train.py::test_I12_a_wrong_configuration_is_refused_before_a_weight_is_read",
    ),
    "A13": row(f"{HERE}::test_A13_waiting_beside_finished_groups_costs_nothing"),
    "A15": row(f"{HERE}::test_A15_every_task_is_owned_by_a_nursery"),
    "F01": row(
        f"{CHAOS}::test_F01_an_error_anywhere_is_the_error_or_an_ending",
        f"{CHAOS}::test_F01_a_run_goes_on_in_every_mode_and_its_counts_add_up",
    ),
    "F03": row(
        f"{STRATEGY}::test_F03_a_group_goes_on_with_what_is_left_if_that_is_enough",
        f"{STRATEGY}::test_I13_who_failed_is_in_no_mean_and_moves_no_baseline",
        f"{STRATEGY}::test_retries_are_the_groups_and_not_the_members",
    ),
    "F05": row(
        f"{HERE}::test_F05_nobody_catches_a_cancellation_and_keeps_it",
        f"{STRATEGY}::test_F05_a_cancelled_group_is_cancelled_and_not_a_failure",
        "test_tools.py::test_cancellation_passes_through_a_tool",
        "test_layout.py::test_only_the_rollout_catches_everything",
    ),
    "F07": row(
        "runtime/test_executor.py::test_a_job_that_is_run_late_or_twice_is_refused",
        "runtime/test_executor.py::test_a_worker_that_crashes_is_seen_although_its_executor_would_try_again",
        "runtime/test_endpoint.py::test_a_request_cut_at_any_byte_draws_nothing_and_frees_the_session",
        "algo/test_data.py::test_I6_every_sampled_token_is_trained_exactly_once",
        impossible="an optimizer step is a call in this process, so no answer of it can be lost",
    ),
    "F09": row(
        "runtime/test_rollout.py::test_I9_a_release_that_hangs_is_given_up",
        f"{CHAOS}::test_F21_children_that_hold_pipes_end_with_the_episode",
    ),
    "F11": row(
        f"{CHAOS}::test_F11_when_the_parent_is_killed_the_envs_of_its_workers_are_closed",
        "runtime/test_executor.py::test_the_end_of_the_endpoint_ends_what_runs",
        "runtime/test_endpoint.py::test_a_client_that_dies_frees_its_session_at_once",
        "recipes/test_guess_number_recipe.py::test_I9_I10_ctrl_c_leaves_a_run_that_can_be_continued_and_no_process",
    ),
    "F13": row(f"{STRATEGY}::test_F13_every_attempt_has_an_env_of_its_own"),
    "F15": row(
        "envs/test_problems_symbolic.py::test_F15_what_sympy_cannot_do_in_time_is_not_equal",
        f"{CHAOS}::test_F15_a_grader_in_a_thread_has_a_deadline",
        f"{STRATEGY}::test_a_group_grader_that_is_late_is_a_graders_error",
        f"{HERE}::test_F15_no_time_limit_is_a_signal",
    ),
    "F17": row(
        f"{STRATEGY}::test_F13_every_attempt_has_an_env_of_its_own",
        impossible="nothing is pooled: an env is made for its episode and closed after it",
    ),
    "F19": row(
        "runtime/test_endpoint.py::test_an_answer_cut_at_any_byte_is_an_error_and_never_a_short_turn",
        "runtime/test_opponents.py::test_a_cut_body_is_tried_again_and_never_read_as_a_reply",
    ),
    "F21": row(f"{CHAOS}::test_F21_children_that_hold_pipes_end_with_the_episode"),
    "F23": row(
        f"{CHAOS}::test_F23_code_that_blocks_in_threads_delays_nobody",
        f"{CHAOS}::test_F23_code_that_blocks_delays_the_others_and_harms_nobody",
        "runtime/test_executor.py::test_groups_played_elsewhere_are_the_groups_played_here",
    ),
    "F25": row(f"{HERE}::test_F25_fifty_endpoints_at_once_have_fifty_ports"),
    "F27": row(
        f"{STRATEGY}::test_F27_a_late_agent_that_solved_it_counts_and_a_late_grader_is_no_zero",
        "envs/test_terminal_env.py::test_F27_an_agent_that_ran_out_of_time_is_graded_all_the_same",
        "envs/test_terminal_env.py::test_F27_a_grader_that_ran_out_of_time_is_an_error_whether_the_agent_did_or_not",
    ),
    "G01": row(
        f"{HERE}::test_G01_what_a_configuration_says_of_itself_makes_it_again",
        f"{HERE}::test_G01_none_is_none_and_no_word",
        "runtime/test_run_dir.py::test_resume_knows_none_from_absent_and_a_number_from_its_text",
    ),
    "G03": row(
        f"{HERE}::test_G03_every_field_of_a_configuration_is_read_somewhere",
        f"{HERE}::test_G03_every_limit_reaches_training_and_evaluation",
        "test_train.py::test_I12_a_wrong_argument_ends_in_a_short_message_and_code_2",
    ),
    "G05": row(f"{HERE}::test_G05_a_step_is_a_batch_of_groups"),
    "G07": row(f"{HERE}::test_G07_held_out_tasks_have_a_group_size_of_their_own"),
    "G09": row(
        "runtime/test_problem.py::test_G09_any_callable_is_a_check_and_metric_names_stay",
        f"{HERE}::test_G09_any_callable_makes_envs",
        "runtime/test_message_env.py::"
        "test_I14_members_have_one_task_and_one_first_observation_each_in_an_env_of_its_own",
    ),
    "G11": row(f"{HERE}::test_G11_one_task_opens_with_the_same_ids_in_training_and_evaluation"),
    "G13": row(
        "runtime/test_opponents.py::test_without_a_key_none_is_sent_and_the_server_chooses_what_is_not_given",
        "runtime/test_opponents.py::test_a_hosted_opponent_asks_and_answers",
    ),
    "M01": row(
        "runtime/test_message_env.py::test_I1_with_a_real_engine_the_datum_is_what_the_session_held",
    ),
    "M03": row(
        "algo/test_data.py::test_M03_assistant_turns_of_the_prompt_are_context",
    ),
    "M05": row(
        "chat/test_glm.py::test_M05_a_turn_stops_at_the_marker_of_whoever_speaks_next",
        "chat/test_harmony.py::test_M05_a_turn_stops_where_it_is_handed_over_and_not_between_its_messages",
        "chat/test_kimi.py::test_M05_both_ends_stop_and_a_cut_turn_is_closed",
        "chat/test_renderer.py::test_M05_both_stop_tokens_stop",
    ),
    "M07": row(
        "algo/test_data.py::test_nothing_after_the_last_sampled_token",
    ),
    "M09": row(
        "runtime/test_engine.py::test_I15_publishing_in_the_middle_of_a_turn_versions_each_token",
        impossible="no mask is kept beside the tokens: log-probs and versions come with a turn's ids, and the mask is "
        "made of the finished turns when they are trained",
    ),
    "M11": row(
        "algo/test_data.py::test_M11_a_cap_of_one_turn_is_no_cap_of_the_episode",
    ),
    "M13": row(
        "algo/test_step.py::test_I5_row_order_does_not_matter",
        "algo/test_step.py::test_I3_eval_logprobs_are_those_of_each_datum_alone",
    ),
    "T01": row(
        "chat/test_template.py::test_T01_a_turn_that_the_template_spells_otherwise_stays_as_it_was_sampled",
        "chat/test_template.py::test_T01_what_the_template_leaves_alone_keeps_its_ids_when_a_later_turn_is_rewritten",
        "chat/test_transcript.py::test_T01_non_canonical_splits_are_kept_verbatim",
    ),
    "T03": row(
        "chat/test_deepseek.py::test_T03_stripped_thoughts_leave_what_the_template_writes",
        "chat/test_glm.py::test_T03_T05_thoughts_go_when_the_user_speaks_and_stay_during_a_tool_loop",
        "chat/test_harmony.py::test_T03_T05_thoughts_go_when_the_user_speaks_and_stay_during_a_tool_loop",
        "chat/test_kimi.py::test_T03_thoughts_go_with_the_answer_that_ends_a_loop_of_calls",
        "chat/test_qwen3_5.py::test_T03_three_turns_of_thoughts",
        "chat/test_template.py::test_T03_thoughts_that_the_template_drops_are_dropped_and_counted",
        "chat/test_transcript.py::test_T03_three_turns_of_thoughts_stripped_at_the_next_query",
    ),
    "T05": row(
        "chat/test_every_family.py::test_T05_thoughts_of_earlier_turns_are_kept_or_dropped_as_the_flag_says",
        "chat/test_glm.py::test_T03_T05_thoughts_go_when_the_user_speaks_and_stay_during_a_tool_loop",
        "chat/test_harmony.py::test_T03_T05_thoughts_go_when_the_user_speaks_and_stay_during_a_tool_loop",
        "chat/test_qwen3_5.py::test_T05_kept_thoughts_stay_where_they_were_sampled",
        "chat/test_template.py::test_T05_only_what_is_added_or_changes_is_tokenized",
    ),
    "T07": row(
        "chat/test_glm.py::test_T07_a_role_that_was_sampled_is_not_written_again",
        "chat/test_harmony.py::test_T07_extend_starts_after_what_was_sampled",
        "chat/test_llama3.py::test_T07_a_turn_is_closed_once",
        "chat/test_renderer.py::test_T07_extend_starts_after_the_end_marker",
    ),
    "T09": row(
        "chat/test_glm.py::test_T09_what_opening_messages_say_is_trimmed_where_the_template_trims",
        "chat/test_harmony.py::test_T09_white_space_is_what_it_was",
        "chat/test_qwen3_5.py::test_T09_qwen3_5_trims_what_is_said_and_thought",
        "chat/test_template_parity.py::test_T09_white_space_is_written_as_the_published_template_does",
    ),
    "T11": row(
        "chat/test_every_family.py::test_T11_T13_a_prompt_begins_once_and_ends_where_the_model_speaks",
        "chat/test_glm.py::test_T11_a_conversation_begins_with_two_markers",
        "chat/test_llama3.py::test_T11_one_bos_in_the_opening_and_none_later",
        "chat/test_role_colon.py::test_T11_bos_only_where_the_row_names_it",
    ),
    "T13": row(
        "chat/test_every_family.py::test_T11_T13_a_prompt_begins_once_and_ends_where_the_model_speaks",
    ),
    "T15": row(
        "chat/test_mistral.py::test_T15_a_malformed_call_keeps_the_id_it_was_given",
        "chat/test_glm.py::test_T15_calls_that_could_and_could_not_be_read_keep_their_order",
        "chat/test_every_family.py::test_T15_a_malformed_call_before_a_good_one_is_answered_before_it",
        "chat/test_gemma.py::test_T15_results_in_a_row_share_a_turn_after_one_end_marker",
        "chat/test_glm.py::test_T15_results_in_a_row_share_an_observation",
        "chat/test_harmony.py::test_T15_results_in_a_row_are_messages_of_their_tools",
        "chat/test_llama3.py::test_T15_each_result_is_a_turn_and_a_json_string",
        "chat/test_mistral.py::test_T15_ids_of_calls_and_results_agree_given_or_made",
        "chat/test_renderer.py::test_T15_tool_results_in_a_row_share_a_turn",
        "test_tools.py::test_T15_calls_side_by_side_take_the_longest_and_are_answered_in_call_order",
    ),
    "T17": row(
        "chat/test_template_parity.py::test_open_writes_the_published_texts",
        "chat/test_template_parity.py::test_open_equals_the_published_tokens",
    ),
    "T19": row(
        "chat/test_chat_tokenizer.py::test_load_reads_a_directory_and_does_not_truncate",
        "runtime/test_episode.py::test_budgets",
    ),
    "T21": row(
        "chat/test_every_family.py::test_I1_kept_thoughts_leave_every_earlier_id_whatever_was_sampled",
        "chat/test_every_family.py::test_I6_each_sampled_token_is_trained_once_also_where_thoughts_are_dropped",
        "chat/test_every_family.py::test_a_cut_turn_is_closed_like_one_that_stopped",
    ),
    "P01": row(
        "chat/test_every_family.py::test_P01_markers_spelled_in_an_argument_are_text",
        "chat/test_gemma.py::test_P01_nothing_inside_an_argument_ends_the_call",
        "chat/test_glm.py::test_P01_markers_are_ids_not_text",
        "chat/test_harmony.py::test_P01_markers_are_ids_not_text",
        "chat/test_llama3.py::test_P01_nothing_inside_an_argument_ends_the_call",
        "chat/test_renderer.py::test_P01_a_closing_tag_inside_an_argument_is_harmless",
    ),
    "P03": row(
        "chat/test_every_family.py::test_P03_arguments_as_models_write_them_are_a_call_or_an_error_that_teaches",
        "chat/test_deepseek.py::test_P03_damage_inside_a_call_is_content_that_teaches",
        "chat/test_deepseek.py::test_P03_v3_1_reads_bare_arguments",
        "chat/test_gemma.py::test_P03_an_unreadable_call_tells_the_model_what_to_write",
        "chat/test_glm.py::test_P03_a_call_that_cannot_be_read_says_why_and_spoils_no_other",
        "chat/test_harmony.py::test_P03_a_call_that_cannot_be_read_says_why",
        "chat/test_kimi.py::test_P03_damage_inside_a_call_is_content_that_teaches",
        "chat/test_kimi.py::test_P03_text_among_calls_is_content_that_teaches",
        "chat/test_llama3.py::test_P03_an_unreadable_call_tells_the_model_what_to_write",
        "chat/test_mistral.py::test_P03_what_is_wrong_in_a_v3_block_is_said",
        "chat/test_mistral.py::test_P03_what_is_wrong_in_a_tagged_call_is_said",
        "chat/test_qwen3_5.py::test_P03_what_is_wrong_is_said_and_what_to_write",
        "chat/test_renderer.py::test_P03_content_problems_keep_the_turn_whole",
    ),
    "P05": row(
        "test_tools.py::test_P05_the_same_calls_have_the_same_replies_however_they_are_run",
    ),
    "P07": row(
        "test_tools.py::test_duplicate_names_are_refused",
        "chat/test_renderer.py::test_open_refuses_no_messages_and_two_tools_of_one_name",
        "runtime/test_mcp.py::test_P07_tools_named_alike_are_refused_and_a_prefix_tells_servers_apart",
    ),
    "P09": row(
        "chat/test_gemma.py::test_P09_broken_framing_is_malformed_and_no_stop_is_length",
        "chat/test_llama3.py::test_P09_broken_framing_is_malformed_and_no_stop_is_length",
        "chat/test_mistral.py::test_P09_invented_framing_is_malformed",
        "chat/test_renderer.py::test_P09_stop_length_and_malformed_are_three_outcomes",
        "chat/test_role_colon.py::test_P09_a_turn_without_the_stop_was_cut",
    ),
    "P11": row(
        "runtime/test_engine.py::test_turns_stop_at_token_ids_strings_budgets_and_the_context",
        "envs/test_search.py::test_P11_results_that_the_model_makes_up_beside_a_call_are_not_results",
    ),
    "P13": row(
        "runtime/test_turn_rules.py::test_P13_malformed_calls_go_only_with_the_call_too_many_before_them",
        "runtime/test_turn_rules.py::test_P13_the_allowed_calls_run_and_one_more_ends_the_episode",
        "envs/test_search.py::test_P13_one_search_too_many_is_refused_with_a_message",
        "envs/test_search.py::test_P13_the_limit_is_exact_within_a_turn_and_refused_calls_do_not_count",
    ),
    "X01": row(
        "envs/test_terminal_sandbox_attacks.py::test_X01_only_an_honest_answer_is_rewarded",
        "envs/test_terminal_grading.py::test_X01_a_reward_cannot_be_written_by_who_is_graded",
        "envs/test_terminal_grading.py::test_X01_an_honest_answer_is_rewarded_whatever_else_was_tried",
        "envs/test_terminal_own_tasks.py::test_X01_a_reward_that_is_there_already_is_replaced",
        "envs/test_terminal_grading.py::test_X01_what_replaces_a_program_does_not_reach_a_fresh_root",
        "envs/test_terminal_grading.py::test_X01_a_module_in_a_home_directory_is_not_imported_by_the_tests",
        "envs/test_terminal_own_tasks.py::test_X01_tasks_can_be_graded_from_outside_the_episode",
        "envs/test_terminal_sandbox_attacks.py::test_X01_attack_a_poisoned_grader",
        "envs/test_terminal_sandbox_attacks.py::test_X01_poison_does_not_reach_a_fresh_root",
    ),
    "X03": row(
        "envs/test_terminal_sandbox_attacks.py::test_X03_a_forged_end_of_a_command_is_output",
    ),
    "X05": row(
        "envs/test_terminal_grading.py::test_X05_a_megabyte_of_tests_arrives",
        "envs/test_terminal_sandbox.py::test_X05_a_command_too_long_for_an_argument_says_what_to_do_instead",
        "envs/test_terminal_sandbox_attacks.py::test_X05_a_shell_takes_a_command_longer_than_an_argument",
    ),
    "X07": row(
        "envs/test_terminal_sandbox.py::test_X07_a_tree_keeps_nested_files_dot_files_and_permission_bits",
        "envs/test_terminal_grading.py::test_X07_the_tests_of_a_step_lie_over_those_of_the_task_with_all_their_bits",
        "envs/test_terminal_dockerfile.py::test_X07_a_source_is_a_file_or_all_of_a_directory",
    ),
    "X09": row(
        "envs/test_terminal_env.py::test_X09_a_command_sees_no_variable_of_the_trainer",
        "envs/test_terminal_sandbox_attacks.py::test_X09_attack_reading_secrets_of_the_machine",
        "envs/test_terminal_task.py::test_X09_a_task_reads_no_variable_of_this_machine_that_it_was_not_given",
    ),
    "X11": row(
        "runtime/test_report.py::test_X11_text_of_the_model_is_never_markup",
        "runtime/test_report.py::test_X11_a_terminal_gets_no_control_codes_and_no_markup",
        "runtime/test_cli.py::test_X11_show_prints_hostile_text_as_it_is",
    ),
    "X13": row(
        "envs/test_terminal_dockerfile.py::test_X13_what_an_image_would_start_is_left_out",
        "envs/test_terminal_sandbox.py::test_X13_docker_runs_no_entry_point_of_the_image",
    ),
    "N01": row(
        "envs/test_text_arena.py::test_N01_N03_a_bad_move_says_why_the_same_every_time_and_is_no_turn",
        "envs/test_games.py::test_what_names_no_move_is_answered_with_those_there_are",
    ),
    "N03": row(
        "envs/test_text_arena.py::test_N01_N03_a_bad_move_says_why_the_same_every_time_and_is_no_turn",
        "envs/test_games_play.py::test_bad_moves_that_are_not_in_a_row_do_not_forfeit",
    ),
    "N05": row(
        "envs/test_games.py::test_tic_tac_toe_has_as_many_games_and_positions_as_everyone_counts",
        "envs/test_text_arena.py::test_N05_random_games_of_tic_tac_toe_end_as_ours_do",
    ),
    "N07": row(
        "envs/test_twenty_questions.py::test_what_is_read_as_a_guess",
        "envs/test_search_answers.py::test_N07_N19_parts_and_lists_are_not_equal",
    ),
    "N09": row(
        "envs/test_text_arena.py::test_N09_every_game_of_the_package_is_in_the_catalogue_and_every_offline_one_starts",
    ),
    "N11": row(
        "runtime/test_problem.py::test_N11_only_the_response_is_graded",
        "envs/test_search.py::test_N11_only_the_last_message_is_graded",
    ),
    "N13": row(
        "envs/test_search_retrievers.py::test_N13_a_copy_belongs_to_one_owner_and_a_damaged_one_is_made_again",
        "envs/test_search_chroma.py::test_N13_processes_that_start_at_once_own_a_copy_each_of_one_index",
        "envs/test_search_chroma.py::test_N13_what_one_client_wrote_to_a_server_another_finds",
        "envs/test_search_servers.py::test_N13_two_clients_may_fill_a_collection_at_once",
    ),
    "N15": row(
        "envs/test_search_retrievers.py::test_N15_another_embedder_or_corpus_is_another_index",
        "envs/test_search_servers.py::test_N15_a_collection_of_another_embedder_is_refused",
        "envs/test_search_chroma.py::test_N15_another_embedder_or_corpus_is_another_folder",
        "envs/test_search_servers.py::test_N15_another_embedder_or_corpus_is_another_collection",
    ),
    "N17": row(
        "envs/test_problems_grading.py::test_N17_a_box_inside_of_tags_is_read",
        "envs/test_search_answers.py::test_N17_the_answer_is_taken_out_of_its_wrapping",
    ),
    "N19": row(
        "runtime/test_problem.py::test_N19_shotgun_answers_score_nothing",
        "envs/test_problems.py::test_N19_numbers_outside_of_the_mark_are_not_looked_at",
        "envs/test_search_answers.py::test_N19_without_exactly_one_answer_line_at_the_end_there_is_no_answer",
        "envs/test_search_answers.py::test_N07_N19_parts_and_lists_are_not_equal",
    ),
    "N21": row("envs/test_games_play.py::test_running_out_of_turns_gives_the_match_away"),
    "N23": row(
        "runtime/test_interleave.py::test_N23_ragged_sources_of_5_and_3_in_batches_of_4_are_all_seen_once",
    ),
}


# --- the table ------------------------------------------------------------------------------------


@functools.cache
def defined(path: str) -> frozenset[str]:
    """The tests of a file."""
    module = ast.parse((ROOT / "tests" / path).read_text())
    nodes = [n for n in ast.walk(module) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    return frozenset(n.name for n in nodes if n.name.startswith("test_"))


def test_every_entry_has_a_row_and_every_row_an_entry() -> None:
    assert list(TABLE) == ENTRIES
    assert [entry for entry, row in TABLE.items() if not (row.tests or row.impossible)] == []


@pytest.mark.parametrize("entry", ENTRIES)
def test_the_tests_of_a_row_exist(entry: str) -> None:
    for name in TABLE[entry].tests:
        path, _, test = name.partition("::")
        assert test in defined(path), f"{entry} names {name}, which there is not"


def test_a_test_named_after_an_entry_is_in_its_row() -> None:
    for path in (ROOT / "tests").rglob("test_*.py"):
        local = path.relative_to(ROOT / "tests").as_posix()
        for name in defined(local):
            for entry in re.findall(r"_([AFGMTP]\d\d)(?=_)", name):
                assert f"{local}::{name}" in TABLE[entry].tests, f"{local}::{name} is missing from {entry}"


# --- A: groups under way --------------------------------------------------------------------------


class Endless(RLDataset):
    """Batches of so many builders, which nobody looks at."""

    def __init__(self, *sizes: int) -> None:
        self._sizes = sizes

    def get_batch(self, index: int) -> Sequence[Any]:
        return [f"{index}.{i}" for i in range(self._sizes[index])]

    def __len__(self) -> int:
        return len(self._sizes)


def supply(
    nursery: trio.Nursery, dataset: RLDataset, seconds: Callable[[int], float], version: Callable[[], int]
) -> tuple[Supply, list[int]]:
    """A supply whose group n takes `seconds(n)`, and the numbers of the groups that started."""
    started: list[int] = []

    async def play(builder: EnvGroupBuilder, place: Place) -> TrajectoryGroup:
        started.append(place.number)
        await trio.sleep(seconds(place.number))
        return TrajectoryGroup((Trajectory((), StopReason.TERMINATED),) * 2, (0.0, 1.0), ({}, {}))

    return Supply(Stream(dataset), play, nursery, version=version, teaches=lambda group: True), started


async def test_A05_a_resumed_run_starts_as_many_groups_as_one_that_was_never_stopped(
    autojump_clock: trio.abc.Clock,
) -> None:
    admission, seconds = Admission(4, 2), lambda number: 1.0 + number % 3 * 40
    async with trio.open_nursery() as nursery:
        straight, began = supply(nursery, Endless(4), seconds, lambda: 100)
        straight.fill(admission, needed=12)
        for _ in range(4):
            await straight.take(100)
        straight.trained()
        state = json.loads(json.dumps(straight.state()))
        straight.fill(admission, needed=12)
        nursery.cancel_scope.cancel()
    async with trio.open_nursery() as nursery:
        resumed, started = supply(nursery, Endless(4), seconds, lambda: 100)
        resumed.restore(state)
        resumed.fill(admission, needed=12)
        await trio.lowlevel.checkpoint()
        assert resumed.untrained == straight.untrained == 12, "and not 12 more beside those that are finished"
        assert len(began) == 16
        assert set(started) <= set(range(16))
        nursery.cancel_scope.cancel()


async def test_A07_what_is_finished_and_not_needed_yet_stays(autojump_clock: trio.abc.Clock) -> None:
    version = 0
    async with trio.open_nursery() as nursery:
        held, started = supply(nursery, Endless(10), lambda number: float(number), lambda: version)
        held.fill(Admission(5, 1), needed=10)
        await trio.sleep(100)
        assert len(started) == 10
        held.fill(Admission(4, 2), needed=10)
        taken = [await held.take(0) for _ in range(4)]
        held.trained()
        assert held.untrained == 6 == len(held.state()["finished"])
        version = 1
        with trio.fail_after(1):
            more = [await held.take(1) for _ in range(4)]
        held.trained()
        rest = [await held.take(2) for _ in range(2)]
    numbers = [played.place.number for played in [*taken, *more, *rest]]
    assert numbers == list(range(10)), "each once, the oldest first"
    assert sorted(started) == list(range(10))


@pytest.mark.parametrize("ahead", [0, 1, 3])
async def test_A11_when_the_data_runs_out_it_starts_again_and_nobody_waits(
    ahead: int, autojump_clock: trio.abc.Clock
) -> None:
    version = 0
    async with trio.open_nursery() as nursery:
        held, started = supply(nursery, Endless(2), lambda number: 1.0, lambda: version)
        with trio.fail_after(100):
            for step in range(3):
                held.fill(Admission(2, ahead), needed=2 * min(ahead + 1, 3 - step))
                for _ in range(2):
                    await held.take(step)
                version = step + 1
                held.trained()
    assert sorted(started) == list(range(6))
    assert [Stream(Endless(2)).place(n).batch for n in range(6)] == [0, 0, 1, 1, 2, 2], "other random numbers"


class Steps(trio.abc.Instrument):
    """Counts how often any task is given the thread."""

    def __init__(self) -> None:
        self.taken = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.taken += 1


async def test_A13_waiting_beside_finished_groups_costs_nothing(autojump_clock: trio.abc.Clock) -> None:
    steps = Steps()
    async with trio.open_nursery() as nursery:
        held, _ = supply(nursery, Endless(4), lambda number: 10_000.0 if number == 0 else 1.0, lambda: 0)
        held.fill(Admission(4), needed=4)
        await trio.sleep(2)
        trio.lowlevel.add_instrument(steps)
        for _ in range(4):
            await held.take(0)
        trio.lowlevel.remove_instrument(steps)
    assert trio.current_time() == 10_000
    assert steps.taken < 20, "one wake-up, whatever the time"


# --- rules that a reader of the source can check --------------------------------------------------

SOURCES = sorted(p for folder in ("jaxrl", "envs", "recipes") for p in (ROOT / folder).rglob("*.py"))
BRIDGE = "asyncio_bridge.py"
"""Owns one asyncio loop, whose tasks it keeps and ends (tests/runtime/test_asyncio_bridge.py)."""


def called(path: Path) -> set[str]:
    """The names of everything a file calls, without what is before the last dot."""
    nodes = [n.func for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
    return {n.attr if isinstance(n, ast.Attribute) else n.id for n in nodes if isinstance(n, ast.Attribute | ast.Name)}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_A15_every_task_is_owned_by_a_nursery(path: Path) -> None:
    unowned = {"spawn_system_task", "start_thread_soon", "create_task", "ensure_future", "Thread", "start_new_thread"}
    assert path.name == BRIDGE or called(path) & unowned == set()


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_F15_no_time_limit_is_a_signal(path: Path) -> None:
    assert called(path) & {"alarm", "setitimer", "siginterrupt"} == set()


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_F05_nobody_catches_a_cancellation_and_keeps_it(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ExceptHandler):
            continue
        caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        named = {"BaseException" if c is None else ast.unparse(c).split(".")[-1] for c in caught}
        if not named & {"BaseException", "Cancelled"}:
            continue
        raises = any(isinstance(n, ast.Raise) for n in ast.walk(node))
        elsewhere = path.name == BRIDGE  # in the thread of the asyncio loop, where trio cancels nobody
        assert raises or elsewhere, f"{path.relative_to(ROOT)}:{node.lineno} keeps what it caught"


async def test_F25_fifty_endpoints_at_once_have_fifty_ports() -> None:
    ports: list[int] = []
    sampler: Any = None  # nobody asks for a session

    async def serve() -> None:
        async with open_endpoint(sampler) as endpoint:
            ports.append(endpoint.address.port)
            if len(ports) % 50 == 0:
                full.set()
            await full.wait()

    for round in (1, 2):  # and again, on whatever is free then
        full = trio.Event()
        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                for _ in range(50):
                    nursery.start_soon(serve)
        assert len(set(ports[-50:])) == 50
        assert len(ports) == 50 * round


# --- G: configuration -----------------------------------------------------------------------------


def settings(tmp: str = "run") -> dict[str, Any]:
    """What a command gives as its defaults."""
    config = small("tiny", Path(tmp))
    return {name: getattr(config, name) for name in chz.chz_fields(config) if name != "dataset_builder"}


SCALARS: dict[str, st.SearchStrategy[Any]] = {
    "max_steps": st.none() | st.integers(1, 10**9),
    "max_turns": st.none() | st.integers(1, 100),
    "episode_seconds": st.none() | st.floats(1e-3, 1e9),
    "eval_temperature": st.none() | st.floats(0, 10),
    "learning_rate": st.floats(1e-12, 1e3),
    "overlong_masking": st.booleans(),
    "seed": st.integers(0, 2**62),
    "thinking": st.sampled_from([None, "keep", "strip", "compact"]),
    "compact_turns": st.none() | st.integers(1, 100),
    "dtype": st.sampled_from([None, "float32", "bfloat16"]),
    "renderer_name": st.none() | st.from_regex(r"[a-z][a-z0-9_.-]{0,12}", fullmatch=True).filter(lambda t: t != "none"),
    "optimizer.schedule": st.sampled_from(["constant", "linear", "cosine"]),
    "lora.alpha": st.floats(1e-3, 1e3),
}


@given(st.fixed_dictionaries({}, optional=SCALARS))
def test_G01_what_a_configuration_says_of_itself_makes_it_again(values: dict[str, Any]) -> None:
    defaults = settings()
    config = parse([f"{name}={value}" for name, value in values.items()], **defaults)
    said = json.loads(json.dumps(describe(config)))
    for name, value in values.items():
        held: Any = said
        for part in name.split("."):
            held = held[part]
        assert (held, type(held)) == (value, type(value)), name
    flat = {name: said[name] if "." not in name else said[name.split(".")[0]][name.split(".")[1]] for name in values}
    assert describe(parse([f"{name}={value}" for name, value in flat.items()], **defaults)) == describe(config)


@pytest.mark.parametrize(
    "name", [n for n in chz.chz_fields(Config) if type(None) in typing.get_args(Config.__annotations__[n])]
)
def test_G01_none_is_none_and_no_word(name: str) -> None:
    given = {**settings(), "max_turns": 7, "episode_seconds": 3.0, "dataset_builder": TaskDatasets(TASKS, make_late)}
    assert getattr(parse([f"{name}=None"], **given), name) is None


CONFIGURED = (Config, Limits, TurnRules, TaskDatasets)


def nested(types: Sequence[Any]) -> list[type]:
    """The configuration types, and those their fields are made of."""
    found: list[type] = []
    waiting = list(types)
    while waiting:
        kind = waiting.pop(0)
        if (
            isinstance(kind, type)
            and (dataclasses.is_dataclass(kind) or chz.is_chz(kind))
            and kind not in found
            and kind.__module__ != "jaxrl.types"
        ):
            found.append(kind)
            waiting += typing.get_type_hints(kind).values()
        waiting += typing.get_args(kind)
    return found


def fields_of(kind: type) -> list[str]:
    return list(chz.chz_fields(kind)) if chz.is_chz(kind) else [f.name for f in dataclasses.fields(kind)]


@functools.cache
def loaded() -> frozenset[str]:
    """Every attribute that is read in jaxrl, but for reads of `self` in a `__post_init__`, which only check."""
    names: set[str] = set()
    for path in (ROOT / "jaxrl").rglob("*.py"):
        module = ast.parse(path.read_text())
        checks = [n for n in ast.walk(module) if isinstance(n, ast.FunctionDef) and n.name == "__post_init__"]
        skipped = {id(n) for check in checks for n in ast.walk(check)}
        names |= {
            n.attr
            for n in ast.walk(module)
            if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load) and id(n) not in skipped
        }
    return frozenset(names)


@pytest.mark.parametrize("kind", nested(CONFIGURED), ids=lambda kind: kind.__name__)
def test_G03_every_field_of_a_configuration_is_read_somewhere(kind: type) -> None:
    assert [name for name in fields_of(kind) if name not in loaded()] == []


def test_the_configuration_is_looked_at_as_a_whole() -> None:
    names = {kind.__name__ for kind in nested(CONFIGURED)}
    assert {"AsyncConfig", "StreamMinibatchConfig", "EngineConfig", "OptimizerConfig", "SoftOverlong"} <= names


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(Limits)])
def test_G03_every_limit_reaches_training_and_evaluation(name: str) -> None:
    changed = sampling_of(small("tiny", Path("run"), **{name: 5}))
    assert getattr(changed.limits, name) == getattr(changed.eval_limits, name) == 5
    shorter = sampling_of(small("tiny", Path("run"), val_max_turns=2))
    assert (shorter.limits.max_turns, shorter.eval_limits.max_turns) == (3, 2)


@pytest.mark.parametrize(
    ("tasks", "batch", "asked", "ahead", "steps"),
    [(32, 8, None, None, 4), (20, 8, None, None, 3), (32, 8, 2, None, 2), (32, 8, None, 4, 8), (30, 8, None, 4, 7)],
)
def test_G05_a_step_is_a_batch_of_groups(
    tasks: int, batch: int, asked: int | None, ahead: int | None, steps: int
) -> None:
    data = MessageEnvDataset(TASKS[:1] * tasks, make_late, RENDERER, batch, 8)
    off_policy = AsyncConfig(1, ahead) if ahead else None
    assert steps_of(small("tiny", Path("run"), max_steps=asked, off_policy=off_policy), data) == steps
    groups = ahead or batch
    assert groups * (steps - 1) < sum(len(data.get_batch(i)) for i in range(len(data)))


@pytest.mark.parametrize("size", [2, 8])
async def test_G07_held_out_tasks_have_a_group_size_of_their_own(size: int) -> None:
    train, test = await TaskDatasets(TASKS, make_late, TASKS[:3], batch_size=4, group_size=size)(RENDERER)
    assert test is not None
    assert len(await train.get_batch(0)[0].make_envs()) == size
    assert [len(await builder.make_envs()) for builder in test.get_batch(0)] == [1, 1, 1]


class Factory:
    """An object that is called."""

    def __call__(self, task: Any, extra: int = 0) -> Any:
        return make_late(task)

    async def slowly(self, task: Any) -> Any:
        return make_late(task)


@pytest.mark.parametrize(
    "factory",
    [lambda task: make_late(task), functools.partial(Factory(), extra=1), Factory(), Factory().slowly, make_late],
    ids=["lambda", "partial", "object", "async method", "function"],
)
async def test_G09_any_callable_makes_envs(factory: Any) -> None:
    train, _ = await TaskDatasets(TASKS, factory, batch_size=4, group_size=2)(RENDERER)
    envs = await train.get_batch(0)[0].make_envs()
    assert [env.describe() for env in envs] == ["Late", "Late"]


async def test_G11_one_task_opens_with_the_same_ids_in_training_and_evaluation() -> None:
    rules = TurnRules(parse_retries=2, mask_malformed=True)
    train, test = await TaskDatasets(TASKS, make_late, TASKS, batch_size=len(TASKS), group_size=2, rules=rules)(
        RENDERER
    )
    assert test is not None
    for left, right in zip(train.get_batch(0), test.get_batch(0), strict=True):
        (first, *_), (held_out,) = await left.make_envs(), await right.make_envs()
        assert await first.initial_observation() == await held_out.initial_observation()
        assert vars(left)["rules"] == vars(right)["rules"] == rules
