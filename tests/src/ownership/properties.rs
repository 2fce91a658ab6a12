//! Properties of every state, and properties that must hold eventually.

use stateright::{Model, Property};

use super::{
    Event, Outcome, Scenario,
    state::{Doing, ModelRack},
};

pub(super) fn all() -> Vec<Property<Scenario>> {
    vec![
        Property::always("an epoch is granted once", |_, rack: &ModelRack| {
            !rack.witness.repeated_epoch
        }),
        Property::always("one owner at a time, by running clocks", one_owner),
        Property::always("acknowledged requests were executed", acknowledged_is_done),
        Property::always("refused requests were not executed", refused_is_not_done),
        Property::always("no request is executed twice", done_once),
        Property::always(
            "a COMMIT builds on the contents that it replaces",
            |_, rack: &ModelRack| !rack.witness.lost_update,
        ),
        Property::always("a READ is not behind what was known before", |_, rack: &ModelRack| {
            !rack.witness.stale_read
        }),
        Property::always("a redirect costs one try", redirect_costs_one_try),
        Property::always("there is always a next step until all is done", no_deadlock),
        // All three stay true once they hold, in every run: for such properties the checker is
        // exact.
        Property::eventually("every task ends", |scenario, rack| scenario.is_done(rack)),
        Property::eventually("every lease ends", |scenario, rack| {
            scenario.is_done(rack) && rack.home.lease.is_none() && rack.messages.is_empty()
        }),
        Property::eventually("every redirect ends", |scenario, rack| {
            scenario.is_done(rack)
                && rack.redirect.is_none()
                && rack.home.queue.is_empty()
                && rack.messages.is_empty()
        }),
    ]
}

fn one_owner(scenario: &Scenario, rack: &ModelRack) -> bool {
    let believers = (0..).zip(&rack.threads).filter_map(|(thread, state)| {
        let end = scenario.end_of(thread);
        let runs = rack.ends[usize::from(end)].frozen.is_none();
        state.believed(rack.now).filter(|_| runs)
    });
    // A home that restarted has no earlier leases, and refuses their COMMITs.
    let here = believers.filter(|held| held.epoch >> 4 == rack.home.life);
    here.count() <= 1
}

fn acknowledged_is_done(_: &Scenario, rack: &ModelRack) -> bool {
    ended(rack, |outcome| outcome == Outcome::Done).all(|value| rack.place(value).is_some())
}

fn refused_is_not_done(_: &Scenario, rack: &ModelRack) -> bool {
    let refused = |outcome| {
        matches!(
            outcome,
            Outcome::Aborted | Outcome::Busy | Outcome::LeaseLost | Outcome::NoResponse
        )
    };
    ended(rack, refused).all(|value| rack.place(value).is_none())
}

/// The values of tasks with such an outcome.
fn ended(rack: &ModelRack, how: impl Fn(Outcome) -> bool) -> impl Iterator<Item = u8> {
    (0..).zip(&rack.threads).flat_map(move |(thread, state)| {
        let tasks: Vec<_> = (0..)
            .zip(&state.outcomes)
            .filter(|(_, outcome)| how(**outcome))
            .map(|(task, _)| ModelRack::value_of(thread, task))
            .collect();
        tasks
    })
}

fn done_once(_: &Scenario, rack: &ModelRack) -> bool {
    let changes = &rack.witness.changes;
    (1..changes.len()).all(|at| !changes[..at].contains(&changes[at]))
}

fn redirect_costs_one_try(_: &Scenario, rack: &ModelRack) -> bool {
    rack.threads.iter().all(|thread| match thread.doing {
        Doing::Waiting(call) => call.home_bounces == 0 && call.bounces <= 1,
        _ => true,
    })
}

fn no_deadlock(scenario: &Scenario, rack: &ModelRack) -> bool {
    let mut steps = Vec::new();
    scenario.actions(rack, &mut steps);
    if !steps.is_empty() {
        return true;
    }
    scenario.keep_outcomes(rack);
    let is_good =
        |outcome: &Outcome| matches!(outcome, Outcome::Aborted | Outcome::Done | Outcome::Read(_));
    if rack.threads.iter().flat_map(|thread| &thread.outcomes).all(is_good) {
        scenario.note(Event::AllSucceeded);
    }
    scenario.is_done(rack) && rack.home.queue.is_empty()
}
