//! Scenarios: the owner against requests and notices made by hand.
//!
//! Each scenario is a test and returns what was counted, so that one more test can see that every
//! event happens in some scenario.

mod answers;
mod bench;
mod drops;
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
        answers: a_held_page_is_busy_until_it_is_released, every_command_that_is_led_here_goes_home,
            last_committed_contents_are_served, contents_that_are_not_known_are_not_served,
            leases_are_bounded_and_swept, an_answer_names_the_try_that_it_answers;
        drops: what_was_not_led_here_is_dropped, notices_come_from_their_memorys_node;
        waiting: who_waits_is_told_when_the_lease_ends, who_waits_for_too_long_goes_home_alone,
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
