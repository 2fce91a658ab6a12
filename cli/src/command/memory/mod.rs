//! The commands that use the rack's memory, one file each, and their common code.

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

/// Bytes per step of a long transfer, for its progress bar.
const CHUNK_BYTES: usize = 1 << 20;

/// The placement of new pages.
#[derive(Debug, Args)]
struct Place {
    /// The memory node, by name or id; the default is the one with more free memory of two random nodes
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

/// An allocation, as printed.
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

/// Frees memory that nobody can use, because its pointer was not printed or its contents are not complete; returns
/// the error with the result.
fn freed_again(region: Region, session: &mut Session, error: anyhow::Error) -> anyhow::Error {
    match session.client.delete(region) {
        Ok(_) => error.context(format!("the memory at {} is freed again", region.base())),
        Err(left) => error.context(format!(
            "the memory at {} stays allocated, because it could not be freed ({left}); delete it later",
            region.base()
        )),
    }
}

/// The error of a part of a range that begins `done` bytes behind the range's start; the bytes before it were found.
fn after(done: u64, error: bluebridge::Error) -> bluebridge::Error {
    if done == 0 { error } else { error.after_found_memory() }
}

/// The first byte of a command.
fn at(pointer: Pointer, offset: u64) -> Result<Pointer, UsageError> {
    let moved = pointer.checked_add(offset);
    moved.map_err(|error| UsageError(format!("{pointer} plus {offset}: {error}")))
}
