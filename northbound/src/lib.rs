//! The API between endpoints and the controller, and an endpoint's side of it.
//!
//! * [`proto`]: the messages and the service `bluebridge.v1.Controller`.
//! * [`Membership`]: joins, beats in the background, leaves.

pub mod proto;
