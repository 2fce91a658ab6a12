//! Every counted event can happen.

use core::cell::RefCell;
use std::collections::BTreeSet;

use super::*;

/// Statuses that only an owner or a server of another version uses.
const UNREACHED: [Status; 2] = [Status::NotOwner, Status::UnsupportedVersion];

type Totals = BTreeSet<&'static str>;

thread_local! {
    /// The events that the worlds of this thread counted at least once.
    static TOTALS: RefCell<Totals> = const { RefCell::new(BTreeSet::new()) };
}

impl Drop for World {
    fn drop(&mut self) {
        let counters = self.responder.counters();
        let events = counters.events().map(|(event, count)| (event.name(), count));
        let statuses = counters.statuses().map(|(status, count)| (status.text(), count));
        let counted = events.chain(statuses).filter(|&(_, count)| count > 0).map(|(name, _)| name);
        TOTALS.with_borrow_mut(|totals| totals.extend(counted));
    }
}

fn changed(world: &mut World, change: impl FnOnce(&mut Ipv6Addr, &mut Ipv6Addr, &mut Vec<u8>)) {
    let request = TestRequest::server(Command::Ping).carrying(b"data");
    let (mut from, mut to, mut bytes) = (request.from, request.to.to_ipv6(), request.bytes());
    change(&mut from, &mut to, &mut bytes);
    let error = Datagram::parse(from, to, &bytes).expect_err("it was changed");
    world.responder.count_malformed(error);
}

fn resealed(world: &mut World, change: impl FnOnce(&mut TestRequest)) {
    let mut request = TestRequest::server(Command::Ping);
    change(&mut request);
    let error =
        Datagram::parse(request.from, request.to.to_ipv6(), &request.bytes()).expect_err("changed");
    world.responder.count_malformed(error);
}

#[test]
fn every_malformed_datagram_has_its_counter() {
    let mut world = World::new();
    changed(&mut world, |from, _, _| *from = Ipv6Addr::LOCALHOST);
    changed(&mut world, |_, to, _| *to = Ipv6Addr::LOCALHOST);
    changed(&mut world, |_, _, bytes| bytes.truncate(20));
    changed(&mut world, |_, _, bytes| bytes[86] ^= 1);
    resealed(&mut world, |request| request.header.flags = Flags::default().with_trailer_units(3));
    resealed(&mut world, |request| request.header.target = Ipv6Addr::LOCALHOST);
    resealed(&mut world, |request| request.to.command = 0);
    resealed(&mut world, |request| request.from = pointer(0, 1).to_ipv6());
    let mut request = TestRequest::server(Command::Ping).bytes();
    let (from, to) = (endpoint(CLIENT), TestRequest::server(Command::Ping).to.to_ipv6());
    request[1] += 1;
    request.extend_from_slice(&[9, 200, 0, 0]);
    seal(from, to, &mut request, &[]);
    let error = Datagram::parse(from, to, &request).expect_err("the option is too long");
    world.responder.count_malformed(error);
    for event in [
        Event::DropForeignSource,
        Event::DropForeignDestination,
        Event::DropHeader,
        Event::DropCrc,
        Event::DropTrailer,
        Event::DropTarget,
        Event::DropDirection,
        Event::DropEndpoint,
        Event::DropOptions,
    ] {
        assert_eq!(world.event(event), 1, "{event:?}");
    }
}

#[test]
fn a_reply_is_dropped() {
    let mut world = World::new();
    let request = world.next(TestRequest::server(Command::Ping));
    world.offer(&request).unwrap();
    let transmit = world.responder.poll_transmit(&world.store).unwrap();
    let bytes = transmit.head.to_vec();
    let datagram = Datagram::parse(transmit.source, transmit.destination, &bytes).unwrap();
    world.responder.handle_datagram(world.now, 1, &datagram, &mut world.store).unwrap();
    assert_eq!(world.event(Event::DropReply), 1);
    assert_eq!(world.drain(), []);
}

#[test]
fn names_are_distinct_and_iteration_is_complete() {
    let counters = Counters::default();
    let names: BTreeSet<_> = counters.events().map(|(event, _)| event.name()).collect();
    assert_eq!(names.len(), Event::ALL.len());
    assert_eq!(counters.statuses().count(), Status::ALL.len());
}

const TESTS: &[fn()] = &[
    every_malformed_datagram_has_its_counter,
    a_reply_is_dropped,
    adopted::a_line_is_served_when_it_is_adopted_and_moves_on,
    adopted::pointers_find_the_line_of_their_generation,
    adopted::lease_epochs_go_on_above_those_of_the_giver_and_of_earlier_processes,
    adopted::processes_differ_when_epochs_begin_again,
    adopted::fences_of_a_kept_line_end_old_sessions_and_leases,
    adopted::lines_that_are_scattered_here_move_on_together,
    adopted::lines_of_lost_contents_are_found_where_they_are_and_all_else_is_stale,
    adopted::what_an_earlier_process_gave_away_is_busy_until_it_is_known_where_it_is,
    free_lines::an_own_line_that_was_lost_elsewhere_is_used_again_when_it_is_free,
    free_lines::free_lines_are_found_and_forgotten_unless_they_move_or_are_used,
    freeing::the_home_frees_what_others_have,
    freeing::it_is_there_until_the_others_have_freed_their_parts,
    freeing::a_lease_on_a_page_is_waited_for,
    freeing::the_next_process_goes_on,
    freeing::a_part_is_freed_backwards_from_its_last_page,
    freeing::who_has_the_first_page_frees_what_the_home_has_lost,
    adopted::a_line_in_doubt_is_that_of_its_contents_only,
    adopted::an_own_line_in_doubt_is_busy_for_the_next_process_too,
    adopted::the_next_process_answers_keep_from_its_marks,
    adopted::a_taker_reads_all_fences_of_the_givers_next_process,
    adopted::a_takers_next_process_asks_for_its_lines,
    adopted::places_of_lines_that_moved_on_are_cleared_by_the_next_process,
    anywhere::repetitions_get_the_same_pages_and_time_runs_on,
    anywhere::unconfirmed_pages_are_freed_by_the_servers_clock,
    anywhere::confirm_keeps_the_pages,
    anywhere::a_refused_confirm_confirms_nothing,
    anywhere::any_request_of_the_same_endpoint_on_the_pointer_keeps_them,
    anywhere::another_endpoint_or_colour_does_not_keep_them,
    anywhere::deleting_provisional_pages_ends_them_once,
    anywhere::an_anywhere_alloc_write_states_its_piece_size,
    anywhere::an_unfinished_alloc_write_is_freed_with_its_time,
    anywhere::entries_and_pages_are_bounded,
    anywhere::refusals_leave_nothing_behind,
    anywhere::a_node_has_at_most_its_share,
    anywhere::another_endpoint_cannot_confirm,
    anywhere::a_store_that_keeps_its_pages_is_counted,
    checks::malformed_datagrams_are_dropped_and_counted,
    checks::destination_comes_first,
    checks::features_command_and_key_come_next,
    checks::spaces_are_checked_before_sessions,
    checks::sessions_are_checked_before_the_shape,
    checks::shapes_are_checked_before_the_range,
    checks::the_range_is_checked_in_order,
    checks::another_spaces_page_is_refused,
    checks::whole_refusals_of_reads_name_every_page,
    checks::requests_that_must_get_no_reply_are_dropped,
    checks::shards_reply_only_to_their_own_requests,
    checks::adopted_ranges_are_served_via_and_directly,
    checks::an_endpoint_address_must_be_the_servers_and_fit_the_pointer,
    checks::every_shard_serves_its_pointers_at_its_own_endpoint_address,
    checks::ranges_are_whole_lines_without_overlap_and_bounded,
    checks::invalid_configurations_are_refused,
    commands::bytes_come_back_at_any_alignment_and_piece_size,
    commands::replies_repeat_fields_of_the_request,
    commands::every_change_increments_the_version,
    commands::selective_reads_return_the_requested_pieces,
    commands::refused_pages_of_a_read_have_one_reply_each,
    commands::zeroing_keeps_the_allocation,
    commands::delete_returns_the_number_of_freed_pages,
    commands::atomics_are_big_endian_on_the_wire_and_little_endian_in_memory,
    commands::out_of_memory_and_quota_have_different_statuses,
    commands::stat_and_ping_have_replies,
    commands::alloc_write_takes_pieces_in_any_order,
    operator::an_operator_frees_unleased_allocations,
    operator::an_operator_frees_nothing_that_is_leased_or_unconfirmed,
    operator::an_operator_frees_only_what_is_served_here_with_authority,
    sessions::an_incarnation_fences_only_until_its_quarantine_ends,
    sessions::the_reply_to_open_describes_the_session,
    sessions::credit_is_limited_by_both_sides,
    sessions::session_ids_are_not_reused,
    sessions::idle_sessions_end_and_others_stay,
    sessions::a_higher_incarnation_ends_the_older_ones_sessions,
    sessions::a_full_table_evicts_from_the_node_with_most_sessions,
    sessions::a_node_at_its_limit_evicts_its_own_sessions,
    giver::a_line_is_taken_read_and_kept,
    giver::the_mark_answers_keep_in_any_session,
    giver::keep_needs_the_lease_of_every_page,
    giver::only_the_taker_takes_and_keeps_by_its_migrations_terms,
    giver::a_mark_is_not_the_answer_to_the_next_incarnation,
    giver::a_line_with_unfinished_or_unconfirmed_pages_is_busy,
    giver::no_page_of_an_allowed_range_is_allocated,
    giver::orders_are_executed_once_and_in_order,
    giver::a_full_table_refuses_and_changes_nothing,
    giver::a_take_waits_its_turn_and_is_next_after_the_longest_lease,
    giver::who_waits_for_a_line_learns_that_it_moved,
    giver::moved_raises_low_water_and_nothing_below_it_is_executed,
    giver::a_kept_line_brings_all_fences_in_parts,
    giver::moved_names_the_aligned_block,
    giver::adopted_lines_move_on,
    giver::a_line_that_is_free_as_a_whole_is_not_leased,
    giver::a_giver_without_authority_marks_nothing,
    giver::queued_replies_of_a_line_are_sent_before_it_is_kept,
    leases::a_grant_brings_contents_owner_epoch_and_time,
    leases::a_leased_page_is_busy_for_all_others_and_unchanged,
    leases::stale_reads_get_the_last_committed_contents,
    leases::a_commit_is_applied_as_a_whole_and_once,
    leases::late_requests_change_nothing,
    leases::only_the_owner_commits,
    leases::a_newer_incarnation_ends_the_leases_of_the_older,
    leases::abort_and_commit_release_what_they_cover,
    leases::a_renewal_sets_a_new_deadline,
    leases::a_repeated_update_gets_the_same_grant_while_it_lasts,
    leases::an_update_gets_all_its_pages_or_none,
    leases::the_table_is_bounded_and_replaces_the_oldest_ended_leases,
    leases::freed_and_moved_pages_lose_their_leases,
    leases::a_page_with_two_addresses_has_one_lease,
    leases::a_contended_lease_is_reported_rarely,
    leases::a_recorded_busy_reports_the_current_lease,
    leases::a_queued_read_is_sent_before_a_commit_changes_its_page,
    leases::commits_obey_the_rules_of_trains,
    leases::invalid_times_are_refused,
    leases::notices_are_sent_only_where_enabled,
    sessions::a_reused_slot_has_no_old_records,
    trains::any_order_with_duplicates_writes_once,
    trains::interleaved_trains_of_two_sessions_stay_apart,
    trains::a_page_is_written_only_when_all_its_pieces_are_there,
    trains::a_late_copy_of_a_piece_does_not_undo_a_newer_write,
    trains::incomplete_reports_the_arrived_pieces,
    trains::a_page_refused_in_the_middle_makes_it_partial,
    trains::a_status_common_to_all_pages_is_the_status_of_the_reply,
    trains::a_range_that_moves_during_a_train_is_partial_and_names_the_node,
    trains::contradicting_pieces_do_not_disturb_a_train,
    trains::an_abandoned_train_frees_its_buffers,
    trains::trains_lose_their_buffers_to_others_only_when_idle,
    trains::repeated_pieces_do_not_keep_buffers_that_others_need,
    trains::a_queued_read_is_sent_before_its_page_changes,
    trains::the_queue_of_replies_is_bounded,
    waiting::waiters_are_served_in_order,
    waiting::a_waiter_that_is_not_repeated_gets_no_lease,
    waiting::waiting_ends_when_the_lease_expires,
    waiting::a_new_request_does_not_overtake_waiters_of_an_expired_lease,
    waiting::a_read_gets_the_free_pages_at_once_and_the_others_later,
    waiting::an_update_of_several_pages_is_not_starved,
    waiting::abandoned_requests_stop_waiting,
    waiting::the_queue_is_bounded_in_all_and_per_node,
    waiting::waiters_are_refused_when_their_pages_change,
    waiting::more_waiters_than_reply_slots_are_served_in_steps,
    window::every_mutating_command_is_repeated_from_its_record,
    window::a_duplicate_has_no_second_effect_until_its_number_expires,
    window::reads_execute_again,
    window::the_window_is_512_numbers_from_the_highest_low_water,
    window::numbers_may_come_in_any_order,
    window::a_number_identifies_one_command,
    window::overload_and_shutdown_are_not_recorded,
];

/// Everything is as without direct readers if they answer nothing.
#[test]
fn idle_direct_readers_change_nothing() {
    WITH_READERS.set(true);
    for test in TESTS {
        test();
    }
    WITH_READERS.set(false);
}

/// Whatever a request for memory gets at the pointer, it gets at the server's endpoint address.
#[test]
fn the_endpoint_address_is_served_like_the_pointer() {
    AT_ENDPOINT.set(true);
    for test in TESTS {
        test();
    }
    AT_ENDPOINT.set(false);
}

/// Runs the other tests, in one thread, and checks what their worlds counted together.
#[test]
fn every_counted_event_happens_in_some_test() {
    TOTALS.with_borrow_mut(Totals::clear);
    for test in TESTS {
        test();
    }
    let missing = TOTALS.with_borrow(|totals| {
        let events = Event::ALL.iter().map(|event| event.name());
        let statuses =
            Status::ALL.iter().filter(|status| !UNREACHED.contains(status)).map(|s| s.text());
        events.chain(statuses).filter(|name| !totals.contains(name)).collect::<Vec<_>>()
    });
    assert_eq!(missing, [""; 0]);
}
