//! Everything that is counted can happen.

use core::cell::RefCell;
use std::collections::BTreeSet;

use super::*;

/// What only an owner answers, and what a server of another version would.
const UNREACHED: [Status; 2] = [Status::NotOwner, Status::UnsupportedVersion];

type Totals = BTreeSet<&'static str>;

thread_local! {
    /// What the worlds of this thread counted at least once.
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

fn bent(world: &mut World, bend: impl FnOnce(&mut Ipv6Addr, &mut Ipv6Addr, &mut Vec<u8>)) {
    let ask = Ask::server(Command::Ping).carrying(b"data");
    let (mut from, mut to, mut bytes) = (ask.from, ask.to.to_ipv6(), ask.bytes());
    bend(&mut from, &mut to, &mut bytes);
    let error = Datagram::parse(from, to, &bytes).expect_err("it was bent");
    world.responder.count_malformed(error);
}

fn resealed(world: &mut World, bend: impl FnOnce(&mut Ask)) {
    let mut ask = Ask::server(Command::Ping);
    bend(&mut ask);
    let error = Datagram::parse(ask.from, ask.to.to_ipv6(), &ask.bytes()).expect_err("bent");
    world.responder.count_malformed(error);
}

#[test]
fn every_way_to_be_malformed_has_its_counter() {
    let mut world = World::new();
    bent(&mut world, |from, _, _| *from = Ipv6Addr::LOCALHOST);
    bent(&mut world, |_, to, _| *to = Ipv6Addr::LOCALHOST);
    bent(&mut world, |_, _, bytes| bytes.truncate(20));
    bent(&mut world, |_, _, bytes| bytes[86] ^= 1);
    resealed(&mut world, |ask| ask.header.flags = Flags::default().with_trailer_units(3));
    resealed(&mut world, |ask| ask.header.target = Ipv6Addr::LOCALHOST);
    resealed(&mut world, |ask| ask.to.command = 0);
    resealed(&mut world, |ask| ask.from = pointer(0, 1).to_ipv6());
    let mut ask = Ask::server(Command::Ping).bytes();
    let (from, to) = (endpoint(CLIENT), Ask::server(Command::Ping).to.to_ipv6());
    ask[1] += 1;
    ask.extend_from_slice(&[9, 200, 0, 0]);
    seal(from, to, &mut ask, &[]);
    let error = Datagram::parse(from, to, &ask).expect_err("the option is too long");
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
    let ask = world.next(Ask::server(Command::Ping));
    world.offer(&ask).unwrap();
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

/// Runs the other tests, in one thread, and looks at what their worlds counted together.
#[test]
fn everything_that_is_counted_happens_in_some_test() {
    let tests: &[fn()] = &[
        every_way_to_be_malformed_has_its_counter,
        a_reply_is_dropped,
        anywhere::repetitions_get_the_same_pages_and_time_runs_on,
        anywhere::unconfirmed_pages_are_freed_by_the_servers_clock,
        anywhere::confirm_keeps_the_pages,
        anywhere::a_refused_confirm_keeps_nothing,
        anywhere::any_request_of_the_same_endpoint_on_the_pointer_keeps_them,
        anywhere::another_endpoint_or_colour_does_not_keep_them,
        anywhere::deleting_provisional_pages_ends_them_once,
        anywhere::alloc_write_anywhere_brings_its_piece_size,
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
        checks::what_nobody_may_answer_is_dropped,
        checks::shards_answer_only_for_themselves,
        checks::adopted_ranges_are_served_via_and_directly,
        checks::ranges_are_whole_lines_without_overlap_and_bounded,
        checks::wrong_configurations_are_refused,
        commands::bytes_come_back_at_any_alignment_and_piece_size,
        commands::replies_repeat_what_was_asked,
        commands::a_new_version_shows_with_every_change,
        commands::selective_reads_answer_the_wanted_pieces,
        commands::refused_pages_of_a_read_are_answered_one_by_one,
        commands::zeroing_keeps_the_allocation,
        commands::delete_says_how_many_pages_it_freed,
        commands::atomics_are_big_endian_outside_and_little_endian_inside,
        commands::out_of_memory_and_quota_are_told_apart,
        commands::stat_and_ping_answer,
        commands::alloc_write_takes_pieces_in_any_order,
        operator::an_operator_frees_what_nobody_holds,
        operator::an_operator_frees_nothing_that_is_leased_or_unconfirmed,
        operator::an_operator_frees_only_what_is_served_here_with_authority,
        sessions::a_claimed_incarnation_fences_only_until_the_node_was_silent_for_long,
        sessions::open_answers_what_the_session_is,
        sessions::credit_is_what_both_sides_take,
        sessions::ids_do_not_come_again,
        sessions::idle_sessions_end_and_others_stay,
        sessions::a_higher_incarnation_ends_the_older_ones_sessions,
        sessions::a_full_table_takes_from_the_node_with_most_and_nothing_unacknowledged,
        sessions::a_node_at_its_own_limit_gives_up_its_own,
        leases::a_grant_brings_contents_owner_epoch_and_time,
        leases::a_leased_page_is_busy_for_everybody_and_nothing_changes,
        leases::stale_reads_get_the_last_committed_contents,
        leases::a_commit_is_applied_as_a_whole_and_once,
        leases::what_is_late_changes_nothing,
        leases::only_the_owner_commits,
        leases::a_newer_incarnation_ends_the_leases_of_the_older,
        leases::abort_and_commit_release_what_they_cover,
        leases::a_renewal_sets_the_deadline_anew,
        leases::a_repeated_update_gets_the_same_grant_while_it_lasts,
        leases::an_update_gets_all_its_pages_or_none,
        leases::the_table_is_bounded_and_old_ends_give_way,
        leases::freed_and_moved_pages_forget_their_leases,
        leases::a_page_with_two_names_has_one_lease,
        leases::a_lease_that_is_fought_over_is_told_sparingly,
        leases::a_recorded_busy_tells_of_now,
        leases::a_waiting_read_is_sent_before_a_commit_changes_its_page,
        leases::commits_obey_the_rules_of_trains,
        leases::wrong_times_are_refused,
        leases::notices_are_sent_where_somebody_asked,
        sessions::a_slot_that_is_used_again_remembers_nothing,
        trains::any_order_with_duplicates_writes_once,
        trains::interleaved_trains_of_two_sessions_stay_apart,
        trains::a_page_is_written_only_when_all_its_pieces_are_there,
        trains::a_late_copy_of_a_piece_does_not_undo_a_newer_write,
        trains::incomplete_names_what_arrived,
        trains::a_page_refused_in_the_middle_makes_it_partial,
        trains::one_status_for_all_pages_is_the_answer_itself,
        trains::a_range_that_moves_amid_a_train_is_partial_and_names_the_node,
        trains::contradicting_pieces_do_not_disturb_a_train,
        trains::a_train_that_is_given_up_gives_its_buffers_back,
        trains::pressed_trains_lose_their_buffers_only_after_some_silence,
        trains::repeated_pieces_do_not_keep_buffers_that_others_need,
        trains::a_waiting_read_is_sent_before_its_page_changes,
        trains::the_queue_of_replies_is_bounded,
        waiting::waiters_are_answered_in_their_order,
        waiting::whoever_does_not_come_again_never_gets_a_lease,
        waiting::time_alone_ends_the_waiting,
        waiting::what_is_newer_does_not_overtake_a_lease_that_just_ran_out,
        waiting::a_read_gets_the_free_pages_at_once_and_the_others_later,
        waiting::an_update_of_several_pages_is_not_starved,
        waiting::what_is_not_wanted_any_more_waits_no_more,
        waiting::the_queue_is_bounded_in_all_and_per_node,
        waiting::waiters_are_refused_by_what_happens_to_their_pages,
        waiting::more_waiters_than_replies_fit_are_answered_step_by_step,
        window::every_mutating_command_is_repeated_from_its_record,
        window::a_duplicate_has_no_second_effect_until_its_number_expires,
        window::reads_execute_again,
        window::the_window_is_512_numbers_from_the_highest_low_water,
        window::numbers_may_come_in_any_order,
        window::a_number_means_one_command,
        window::overload_and_shutdown_are_not_recorded,
    ];
    TOTALS.with_borrow_mut(Totals::clear);
    for test in tests {
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
