//! The daemon `hosts` of a rack: it does for every node what `bluebridge host up --watch` does for a host.

use std::thread;

use crate::error::failed;
use crate::layout::Layout;
use crate::links::wanted;
use crate::network::NetworkError;
use crate::network::watch::InterfaceWatch;
use crate::state::RackState;
use crate::{RackError, access};

/// Watches the interfaces of all nodes until the process ends; calls `ready` once no change can be missed.
///
/// # Errors
/// A namespace cannot be entered, or the network may not be changed.
pub fn watch(state: &RackState, ready: impl FnOnce()) -> Result<(), RackError> {
    let layout = Layout::of(&state.spec);
    let mut watches = Vec::new();
    for port in layout.ports() {
        // A socket stays in the namespace in which it was opened.
        let opened = access::namespace(state, port.peer)?
            .enter(|| InterfaceWatch::open(wanted(port)))?
            .map_err(|source| RackError::Network { node: port.peer, source })?;
        watches.push((port.peer, opened));
    }
    // Ready means that everything is set up, as far as possible.
    for (node, watch) in &mut watches {
        watch.settle().map_err(|source| RackError::Network { node: *node, source })?;
    }
    tracing::info!(nodes = watches.len(), "watching the interfaces of the rack's nodes");
    ready();
    let (ended, end) = std::sync::mpsc::channel();
    for (node, watch) in watches {
        let ended = ended.clone();
        let run = move || {
            let result: Result<(), NetworkError> = watch.run();
            let _ = ended.send(result.map_err(|source| RackError::Network { node, source }));
        };
        let spawned = thread::Builder::new().name(format!("watch {node}")).spawn(run);
        spawned.map_err(failed(format!("start the watch of {node}")))?;
    }
    drop(ended);
    end.recv().unwrap_or(Ok(()))
}
