//! Scenarios: the requester against constructed replies.
//!
//! Each scenario is a test and returns the counters, so that one more test can check that every
//! event happens in some scenario.

mod anywhere;
mod atomic_and_small;
mod bench;
mod endpoint;
mod joining;
mod leases;
mod migration;
mod moved;
mod mutated;
mod reads;
mod refusals;
mod sessions;
mod trust;
mod writes;

use super::{Counters, Event};

/// Makes a test of each scenario, and a list of all of them.
macro_rules! scenarios {
    ($($module:ident: $($name:ident),+;)*) => {
        $(mod $module { $(#[test] fn $name() { crate::requester::tests::$module::$name(); })+ })*
        const ALL: &[fn() -> Counters] = &[$($(crate::requester::tests::$module::$name),+),*];
    };
}
pub(super) mod run {
    use super::Counters;

    scenarios! {
        anywhere: a_create_is_sent_anywhere_and_confirmed, a_create_is_repeated_if_its_pages_were_freed_early,
            a_full_node_leads_to_another, an_anywhere_train_is_repaired_and_varies_its_choice,
            a_smaller_piece_size_applies_from_the_next_train_on, a_train_states_its_own_piece_size;
        atomic_and_small: atomics_return_the_previous_value, small_requests_and_their_replies,
            a_close_waits_for_what_was_started_before;
        endpoint: retransmissions_go_to_the_endpoint, a_moved_range_is_requested_at_the_endpoint, moved_pages_are_requested_at_the_pointer_when_it_leads_there, who_has_the_first_page_frees_what_the_home_has_lost, a_part_is_freed_where_it_is, a_pointer_that_leads_elsewhere_is_avoided_for_a_time, a_server_without_the_range_is_asked_at_its_endpoint,
            a_refusal_of_another_node_is_returned_once, what_another_node_refuses_has_no_effect,
            the_target_of_a_redirect_still_serves, the_shard_is_the_pointers,
            a_server_without_the_flag_is_asked_at_the_pointer, each_session_has_its_own_flag;
        leases: an_update_is_joined_and_committed, a_lease_counts_from_the_attempt_of_its_reply,
            a_grant_to_another_endpoint_is_ignored, an_update_waits_at_the_home, a_long_wait_keeps_its_place_and_its_time,
            a_read_waits_for_the_page_that_is_leased, waiting_ends_at_the_deadline, an_update_is_repeated_if_its_grant_expired,
            a_lease_is_extended_and_ended, leases_outlive_the_session, last_committed_contents_are_read, fresh_contents_are_not_reported_as_stale,
            an_owner_lets_a_request_wait, waiting_does_not_use_the_window_up,
            the_longest_lease_time_of_all_pieces_counts, requests_without_page_data_cost_one_page_of_credit;
        migration: a_line_is_taken_read_and_kept_at_the_giver, a_giver_is_asked_again_until_it_answers,
            a_take_waits_for_leases, what_the_giver_refuses_is_final, a_doubt_is_reported_as_one,
            wrong_records_end_in_a_violation;
        moved: a_moved_range_is_followed_and_remembered, a_moved_block_is_remembered_as_a_whole, a_wrong_cached_move_leads_to_the_home, a_late_authority_is_waited_for, pages_that_moved_to_different_nodes_are_requested_one_by_one,
            a_range_that_keeps_moving_ends_in_a_failure, the_effect_on_a_changed_page_is_reported,
            a_page_is_requested_again_in_a_new_session;
        reads: a_page_is_read_in_one_round_trip, pieces_arrive_in_any_order_and_twice, missing_pieces_are_requested_again,
            many_lines_are_asked_for_as_trains, a_newer_version_restarts_its_page, pages_are_refused_one_by_one, credit_and_window_hold_operations_back,
            the_first_piece_measures_the_round_trip;
        refusals: busy_is_retried_at_the_home, a_lease_that_lasts_ends_in_busy, overload_is_waited_out, a_refusal_is_reported,
            a_redirect_is_referred_back_to_the_home, a_failure_at_the_deadline_reports_what_is_known, only_the_oldest_request_is_repeated_often,
            a_slow_network_is_measured_by_the_responses_to_first_attempts, a_cancelled_operation_leaves_nothing_behind,
            the_carrier_refuses, invalid_replies_end_in_a_violation, a_short_buffer_is_the_callers_fault;
        sessions: a_session_is_opened_first_and_once, open_is_repeated_and_backs_off, a_lost_session_is_opened_again,
            a_request_that_no_earlier_process_can_have_is_repeated,
            a_restarted_server_leaves_writes_unknown, a_home_that_lost_its_memory_is_asked_for_a_line, an_old_operation_is_not_repeated, an_open_that_is_refused_fails_all,
            a_servers_slot_is_reused, a_misrouted_open_is_reported, leaving_closes_every_session_once,
            a_smaller_piece_size_applies_to_an_open_in_progress, servers_may_issue_the_same_session,
            many_sessions_one_after_another_are_found;
        trust: foreign_datagrams_are_ignored;
        writes: a_train_is_sent_once_and_has_one_reply, an_incomplete_train_is_repaired, pages_end_differently, a_busy_page_is_written_later,
            written_pages_are_reported_when_the_rest_is_refused;
    }

    #[test]
    fn every_event_happens_in_some_scenario() {
        let counters: Vec<Counters> = ALL.iter().map(|scenario| scenario()).collect();
        for event in super::Event::ALL {
            let count: u64 = counters.iter().map(|counters| counters.of(*event)).sum();
            assert!(count > 0, "{} never happened", event.name());
        }
    }
}
