//! The controller: changes redirects according to copies of replies.

use std::collections::HashMap;

use bluebridge_p4::pipeline::Key;
use bluebridge_wire::{Command, ReplyCopy, Status};

use crate::sim::{SPACE, client_node, network};

/// The change that a copy causes.
#[derive(Clone, Debug)]
pub(super) enum Redirect {
    Begin { page: Key, client: usize, lease_ms: u16 },
    End { page: Key },
}

#[derive(Default)]
pub(super) struct Controller {
    /// The highest epoch seen of a page.
    epochs: HashMap<u64, u64>,
}

impl Controller {
    /// Handles a reply that the server sent; `always` is the policy.
    pub(super) fn see(
        &mut self,
        frame: &[u8],
        server: u16,
        clients: usize,
        always: bool,
    ) -> Option<Redirect> {
        let received = network::receive(frame, network::PORT)?;
        let copy =
            ReplyCopy::parse(received.source, received.destination, received.payload).ok()?;
        if copy.from.node.0 != server || !(always || copy.contended) {
            return None;
        }
        let location = copy.target.location;
        let page = location >> 12;
        let known = self.epochs.entry(page).or_default();
        if copy.lease_epoch < *known {
            return None;
        }
        let key = Key::Redirect { dst_scope: SPACE.scope(), dst_node: server, page };
        match (copy.command, copy.status) {
            (Command::Update | Command::Renew, Status::Ok) | (_, Status::Busy) => {
                let client = (0..clients).find(|index| client_node(*index).0 == copy.node)?;
                *known = copy.lease_epoch;
                let lease_ms = copy.lease_remaining_ms;
                (lease_ms > 0).then_some(Redirect::Begin { page: key, client, lease_ms })
            }
            (Command::Commit | Command::Abort, Status::Ok) => {
                *known = copy.lease_epoch;
                Some(Redirect::End { page: key })
            }
            _ => None,
        }
    }

    /// A restarted controller has no state.
    pub(super) fn forget(&mut self) {
        self.epochs.clear();
    }
}
