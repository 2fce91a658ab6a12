//! A model of leases, small enough for a checker to visit every state that it can reach.
//!
//! One page, its home, the threads of one or two client endpoints, the controller and the switch.
//! It follows `docs/protocol.md` section 10 with what that rests on: numbers and low water,
//! recorded answers, sessions that end with their server, the home bit, the waiting queue. It is a
//! model of the rules and not of the code: the simulation runs the code.
//!
//! What is left out, and why nothing is lost by it:
//! * Messages stay in flight until they are delivered, in any order, at any time. A message that
//!   is lost is one that is delivered after everything else, so every safe state of a run with
//!   losses is one of a run without; a budget of real losses is there for what must happen at last.
//! * An endpoint's clock is the home's, or stands still: rates are what the margin is for.
//! * OPEN happens at one moment: it changes nothing but what a crash of either end changed.
//! * Every budget is finite, so that runs end and "at last" can be checked.

mod client;
mod hint;
mod home;
mod model;
mod properties;
mod scenario;
mod state;

pub use model::Step;
pub use scenario::{Bug, Copies, Event, Outcomes, Policy, Scenario, Task};
pub use state::{ModelRack, Outcome};
