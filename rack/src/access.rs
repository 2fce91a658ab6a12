//! How commands enter a rack that another command built.

use std::ffi::OsString;
use std::path::Path;

pub use bluebridge_northbound::environment::{
    CONTROLLER_VARIABLE, INTERFACE_VARIABLE, NAME_VARIABLE, SWITCH_PORT_VARIABLE,
};

use crate::RackError;
use crate::error::failed;
use crate::layout::{ENDPOINT_INTERFACE, Layout};
use crate::namespace::{self, NamespaceId, NetworkNamespace};
use crate::spec::Node;
use crate::state::{RACK_VARIABLE, RackState, STATE_VARIABLE, StateRoot};

/// Moves the calling process into the rack's user and mount namespaces, if the rack has its own.
///
/// Without root the process must have a single thread.
pub fn join(state: &RackState) -> Result<(), RackError> {
    let Some(record) = &state.user_namespace else { return Ok(()) };
    let holder = record.holder.open().map_err(failed("find the rack's holder"))?;
    let holder = holder.ok_or_else(|| RackError::NotHeld(state.spec.name.clone()))?;
    if NamespaceId::of("/proc/self/ns/user").is_ok_and(|own| own == record.id) {
        return Ok(());
    }
    Ok(namespace::join(&holder)?)
}

/// Opens a node's namespace; call [`join`] first.
pub fn namespace(state: &RackState, node: Node) -> Result<NetworkNamespace, RackError> {
    let path: &Path = state
        .namespace(node)
        .ok_or_else(|| RackError::NoNode { name: state.spec.name.clone(), node })?;
    Ok(NetworkNamespace::open(path)?)
}

/// The environment of a process in a node of the rack: the rack, and the endpoint of the node
/// ([`bluebridge_northbound::environment`]).
pub fn rack_environment(
    root: &StateRoot,
    state: &RackState,
    node: Node,
) -> Vec<(&'static str, OsString)> {
    let layout = Layout::of(&state.spec);
    let mut environment = vec![
        (RACK_VARIABLE, (&state.id).into()),
        (STATE_VARIABLE, root.path().into()),
        (CONTROLLER_VARIABLE, layout.controller().to_string().into()),
        (INTERFACE_VARIABLE, ENDPOINT_INTERFACE.into()),
    ];
    if let Some(port) = layout.port_of(node) {
        environment.push((NAME_VARIABLE, node.to_string().into()));
        environment.push((SWITCH_PORT_VARIABLE, port.number.to_string().into()));
    }
    environment
}
