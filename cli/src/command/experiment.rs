//! `bluebridge experiment`: experiments in temporary racks, with tables, CSV and plots.

mod ownership;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Subcommand;

use super::Global;
use crate::exit::Exit;
use crate::output;

#[derive(Debug, Subcommand)]
pub(super) enum Experiment {
    /// How fast and how fairly a page passes from owner to owner, and the effect of redirects
    Ownership(ownership::Ownership),
}

pub(super) fn run(experiment: Experiment, global: Global) -> anyhow::Result<Exit> {
    match experiment {
        Experiment::Ownership(ownership) => ownership::run(ownership, global),
    }
}

/// The directory of an experiment's files.
#[derive(Debug)]
struct Folder(PathBuf);

impl Folder {
    fn make(path: &Path) -> anyhow::Result<Self> {
        fs::create_dir_all(path).with_context(|| format!("cannot create {}", path.display()))?;
        Ok(Self(path.to_owned()))
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    fn csv(&self, name: &str, columns: &[&str], rows: &[Vec<String>]) -> anyhow::Result<PathBuf> {
        let path = self.file(name);
        output::csv(&path, columns, rows)?;
        Ok(path)
    }
}
