//! `bluebridge experiment`: questions answered by a rack made for them, with tables, CSV and plots.

mod ownership;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Subcommand;

use super::Global;
use crate::exit::Exit;

#[derive(Debug, Subcommand)]
pub(super) enum Experiment {
    /// How fast and how fairly a page goes from owner to owner, and what redirects do to that
    Ownership(ownership::Ownership),
}

pub(super) fn run(experiment: Experiment, global: Global) -> anyhow::Result<Exit> {
    match experiment {
        Experiment::Ownership(ownership) => ownership::run(ownership, global),
    }
}

/// Where an experiment's files go.
#[derive(Debug)]
struct Folder(PathBuf);

impl Folder {
    fn make(path: &Path) -> anyhow::Result<Self> {
        fs::create_dir_all(path).with_context(|| format!("cannot make {}", path.display()))?;
        Ok(Self(path.to_owned()))
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Writes rows of numbers and words that need no quotes.
    fn csv(&self, name: &str, columns: &[&str], rows: &[Vec<String>]) -> anyhow::Result<PathBuf> {
        let path = self.file(name);
        let rows = rows.iter().map(|row| row.join(","));
        let lines: Vec<String> = std::iter::once(columns.join(",")).chain(rows).collect();
        let text = lines.join("\n") + "\n";
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
        Ok(path)
    }
}
