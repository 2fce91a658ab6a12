//! A model of leases, small enough that a model checker visits every reachable state.
//!
//! One page, its home, the threads of one or two client endpoints, the controller and the switch.
//! It follows `docs/protocol.md` section 10 and what that needs: numbers and low water, recorded
//! responses, sessions that end with their server, the home bit, the waiting queue. It models the
//! rules and not the code: the simulation runs the code.
//!
//! What the model leaves out, and why this is sound:
//! * Messages stay in flight until they are delivered, in any order, at any time. A lost message is
//!   one that is delivered after everything else, so every safety violation of a run with losses is
//!   also found without; a budget of real losses exists for the liveness properties.
//! * An endpoint's clock shows the home's time, or stands still: the margin of leases covers rates.
//! * OPEN happens at one moment: it changes only what a crash of one of the two endpoints changed.
//! * Every budget is finite, so that runs end and liveness can be checked.

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
