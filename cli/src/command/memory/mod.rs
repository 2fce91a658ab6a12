//! The commands that use the rack's memory, one file each, and what they share.

pub(super) mod alloc_write;
pub(super) mod create;
pub(super) mod delete;
mod input;
pub(super) mod notices;
pub(super) mod ping;
mod progress;
pub(super) mod read;
pub(super) mod update;
pub(super) mod write;
pub(super) mod zero;

use bluebridge::{Placement, Pointer, Region};
use clap::Args;
use serde::Serialize;

use super::member::Session;
use crate::exit::UsageError;

/// Bytes that a long transfer moves at a time, so that it can say how far it is.
const CHUNK_BYTES: usize = 1 << 20;

/// Where new pages go.
#[derive(Debug, Args)]
struct Place {
    /// The memory node to be on, by name or id; without it, the emptier of two drawn at random
    #[arg(long, value_name = "NODE", conflicts_with = "anywhere")]
    on: Option<String>,
    /// Let the switch choose, by the free memory that the nodes reported
    #[arg(long)]
    anywhere: bool,
}

impl Place {
    fn placement(&self, session: &Session) -> Result<Placement, UsageError> {
        match &self.on {
            Some(node) => session.node(node).map(Placement::Node),
            None if self.anywhere => Ok(Placement::Anywhere),
            None => Ok(Placement::TwoChoices),
        }
    }
}

/// An allocation, as it is printed.
#[derive(Debug, Serialize)]
struct Allocation {
    pointer: String,
    bytes: u64,
    node: String,
    node_id: u16,
}

impl Allocation {
    fn of(region: Region, session: &Session) -> Self {
        let pointer = region.base();
        Self {
            pointer: pointer.to_string(),
            bytes: region.length_bytes(),
            node: session.name_of(pointer.node),
            node_id: pointer.node.0,
        }
    }
}

/// The byte that a command starts at.
fn at(pointer: Pointer, offset: u64) -> Result<Pointer, UsageError> {
    let moved = pointer.checked_add(offset);
    moved.map_err(|error| UsageError(format!("{pointer} plus {offset}: {error}")))
}
