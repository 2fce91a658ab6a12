//! Scenarios: the requester against replies made by hand.
//!
//! Each scenario is a test and returns what was counted, so that one more test can see that every
//! event happens in some scenario.

mod anywhere;
mod atomic_and_small;
mod bench;
mod joining;
mod leases;
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
        anywhere: a_create_is_asked_anywhere_and_confirmed, pages_that_were_freed_too_early_are_asked_for_anew,
            a_full_node_leads_to_another, an_anywhere_train_is_repaired_and_varies_its_choice,
            a_smaller_link_is_heeded_from_the_next_train_on, a_train_names_the_piece_size_that_it_was_cut_with;
        atomic_and_small: atomics_answer_what_was_there, small_requests_and_their_answers,
            a_close_waits_for_what_was_started_before;
        leases: an_update_is_joined_and_committed, a_lease_counts_from_the_try_that_was_answered,
            a_grant_to_somebody_else_is_not_taken, an_update_waits_at_the_home, a_long_wait_keeps_its_place_and_its_time,
            a_read_waits_for_the_page_that_is_leased, waiting_ends_at_the_deadline, a_grant_that_ran_out_is_asked_for_anew,
            a_lease_is_extended_and_ended, leases_outlive_the_session, last_committed_contents_are_read, what_is_fresh_is_not_called_stale,
            an_owner_lets_a_request_wait, waiting_does_not_use_the_window_up,
            the_longest_time_that_a_piece_tells_counts, what_only_names_a_lease_costs_the_credit_of_one_page;
        moved: a_moved_range_is_followed_and_remembered, a_wrong_memory_leads_home, a_grant_that_is_late_is_waited_for, pages_that_moved_apart_are_asked_one_by_one,
            a_range_that_moves_for_ever_is_given_up, a_page_that_was_changed_is_not_forgotten,
            a_page_is_asked_for_anew_in_a_new_session;
        reads: a_page_is_read_in_one_round_trip, pieces_come_in_any_order_and_twice, missing_pieces_are_asked_for_again,
            a_newer_version_restarts_its_page, pages_are_refused_one_by_one, credit_and_window_hold_operations_back,
            the_first_piece_measures_the_round_trip;
        refusals: busy_is_tried_again_at_home, a_lease_that_lasts_ends_in_busy, overload_is_waited_out, a_refusal_is_told,
            a_redirect_leads_back_home, a_deadline_tells_what_is_known, a_cancelled_operation_is_forgotten,
            the_carrier_refuses, broken_replies_end_in_a_violation, a_short_buffer_is_the_callers_fault;
        sessions: a_session_is_opened_first_and_once, open_is_repeated_and_backs_off, a_lost_session_is_opened_anew,
            a_restarted_server_leaves_writes_unknown, an_old_operation_is_not_repeated, an_open_that_is_refused_fails_all,
            a_servers_place_is_given_on, a_misrouted_open_is_told, who_leaves_closes_every_session_once,
            a_smaller_link_is_heeded_by_an_open_under_way, servers_may_issue_the_same_session,
            many_sessions_one_after_another_are_found;
        trust: nothing_foreign_is_taken;
        writes: a_train_is_sent_and_answered_once, a_broken_train_is_repaired, pages_end_differently, a_busy_page_is_written_later,
            what_was_written_is_told_when_the_rest_is_refused;
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
