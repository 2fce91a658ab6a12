//! Scenarios: the requester against replies made by hand.
//!
//! Each scenario is a test and returns what was counted, so that one more test can see that every
//! event happens in some scenario.

mod bench;
mod reads;

/// Makes a test of each scenario, and a list of all of them.
macro_rules! scenarios {
    ($($module:ident: $($name:ident),+;)*) => {
        $(mod $module { $(#[test] fn $name() { crate::requester::tests::$module::$name(); })+ })*
    };
}
pub(super) mod run {
    scenarios! {
        reads: a_page_is_read_in_one_round_trip, pieces_come_in_any_order_and_twice, missing_pieces_are_asked_for_again,
            a_newer_version_restarts_its_page, pages_are_refused_one_by_one, credit_and_window_hold_operations_back;
    }
}
