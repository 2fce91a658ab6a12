//! `bluebridge workload`: measures as an endpoint of a running rack.
//!
//! `bench` builds a rack and measures in its own process; these commands join a rack that others built, such as
//! a Mininet topology.

mod crud;
mod directory;
pub(super) mod faults;
mod moving;
mod pages;

use std::time::Duration;

use clap::{Args, Subcommand};

use super::Global;
use crate::exit::Exit;

#[derive(Debug, Subcommand)]
pub(super) enum Workload {
    Crud(crud::Crud),
    Directory(directory::Serve),
    Faults(faults::Options),
    Moving(moving::Moving),
    Pages(pages::Pages),
    Reads(moving::Reads),
}

impl Workload {
    pub(super) const fn is_daemon(&self) -> bool {
        matches!(self, Self::Directory(_))
    }
}

/// How a process waits.
#[derive(Clone, Copy, Debug, Args)]
struct Waiting {
    /// Microseconds to poll before sleeping
    #[arg(long, value_name = "US", default_value_t = 50, value_parser = clap::value_parser!(u64).range(..=1_000_000))]
    spin: u64,
}

impl Waiting {
    const fn spin(self) -> Duration {
        Duration::from_micros(self.spin)
    }
}

pub(super) fn run(workload: Workload, global: Global) -> anyhow::Result<Exit> {
    match workload {
        Workload::Crud(crud) => crud::run(crud, global),
        Workload::Directory(directory) => directory::run(directory),
        Workload::Faults(faults) => faults::run(&faults, global),
        Workload::Moving(moving) => moving::run(&moving, global),
        Workload::Pages(pages) => pages::run(pages, global),
        Workload::Reads(reads) => moving::read(&reads, global),
    }
}
