//! `bluebridge experiment`: experiments in temporary racks, with tables, CSV and plots.

mod comparison;
mod in_rack;
mod key_value;
pub(super) mod migration;
mod ownership;
pub(super) mod paging_latency;
mod rebalance;
mod restarts;
mod rolling;
mod workout;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context;
use bluebridge_bench::workout::Workout;
use clap::Subcommand;

use super::Global;
use crate::exit::Exit;
use crate::output;

#[derive(Debug, Subcommand)]
pub(super) enum Experiment {
    /// How fast and how fairly a page passes from owner to owner, and the effect of redirects
    Ownership(ownership::Ownership),
    /// A key-value store (redis-server, unmodified) with a part of its memory local
    KeyValue(key_value::KeyValue),
    /// Memory that moves to another server while clients use it
    Migration(migration::Migration),
    /// How long a page fault takes: remote, resolved from memory, from the page cache, a disk and swap
    PagingLatency(paging_latency::PagingLatency),
    /// Memory that moves by itself to servers with less traffic; computed, without a rack
    Rebalance(rebalance::Rebalance),
    /// A memory server that is killed again and again under load, and goes on with its memory
    Restarts(restarts::Restarts),
    /// Every memory server of a rack in turn: drained, restarted with empty memory, and used again, under load
    Rolling(rolling::Rolling),
    /// An array that is written in order, with a part of it local
    Testswap(workout::Options),
    /// Integers that are sorted, with a part of them local
    Quicksort(workout::Options),
    /// Bodies that attract each other, in an octree, with a part of them local
    BarnesHut(workout::Options),
    /// Turns swap off after an experiment; started by it
    #[command(hide = true)]
    SwapGuardian,
    /// Works in a cgroup; started by an experiment
    #[command(hide = true)]
    SwapWorker,
}

pub(super) fn run(experiment: Experiment, global: Global) -> anyhow::Result<Exit> {
    match experiment {
        Experiment::Ownership(ownership) => ownership::run(ownership, global),
        Experiment::KeyValue(asked) => key_value::run(asked, global),
        Experiment::Migration(asked) => migration::run(asked, global),
        Experiment::PagingLatency(latency) => paging_latency::run(latency, global),
        Experiment::Rebalance(asked) => rebalance::run(&asked, global),
        Experiment::Restarts(restarts) => restarts::run(&restarts, global),
        Experiment::Rolling(asked) => rolling::run(&asked, global),
        Experiment::Testswap(options) => workout::run(Workout::Testswap, options, global),
        Experiment::Quicksort(options) => workout::run(Workout::Quicksort, options, global),
        Experiment::BarnesHut(options) => workout::run(Workout::BarnesHut, options, global),
        Experiment::SwapGuardian => comparison::guard(),
        Experiment::SwapWorker => comparison::work(),
    }
}

/// The directory of an experiment's files.
#[derive(Clone, Debug)]
pub(super) struct Folder(PathBuf);

impl Folder {
    pub(super) fn make(path: &Path) -> anyhow::Result<Self> {
        fs::create_dir_all(path).with_context(|| format!("cannot create {}", path.display()))?;
        Ok(Self(path.to_owned()))
    }

    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    pub(super) fn csv(
        &self,
        name: &str,
        columns: &[&str],
        rows: &[Vec<String>],
    ) -> anyhow::Result<PathBuf> {
        let path = self.file(name);
        output::csv(&path, columns, rows)?;
        Ok(path)
    }
}
