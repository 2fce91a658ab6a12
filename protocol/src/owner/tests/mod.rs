//! Scenarios: the owner against constructed requests and notices.
//!
//! Each scenario is a test and returns the counters, so that one more test can check that every
//! event happens in some scenario.

mod bench;
mod drops;
mod replies;
mod table;
mod waiting;

use super::{Counters, Event};

macro_rules! scenarios {
    ($($module:ident: $($name:ident),+;)*) => {
        $(mod $module { $(#[test] fn $name() { crate::owner::tests::$module::$name(); })+ })*
        const ALL: &[fn() -> Counters] = &[$($(crate::owner::tests::$module::$name),+),*];
    };
}

mod run {
    use super::{Counters, Event};

    scenarios! {
        replies: a_held_page_is_busy_until_it_is_released, every_redirected_command_is_referred_to_the_home,
            last_committed_contents_are_served, contents_that_are_not_kept_are_not_served,
            leases_are_bounded_and_swept, a_reply_names_the_attempt_of_its_request;
        drops: requests_that_no_redirect_forwards_are_dropped, notices_come_from_memory_servers;
        waiting: a_waiter_is_notified_when_the_lease_ends, a_waiter_whose_time_is_over_gets_no_reply,
            waiting_is_bounded_and_in_order, replies_are_bounded;
    }

    #[test]
    fn every_event_happens_in_some_scenario() {
        let counters: Vec<Counters> = ALL.iter().map(|scenario| scenario()).collect();
        for event in Event::ALL {
            let count: u64 = counters.iter().map(|counters| counters.of(*event)).sum();
            assert!(count > 0, "{} never happened", event.name());
        }
    }
}
