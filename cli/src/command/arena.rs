//! `bluebridge arena`: the memory that memory servers left.

use std::path::PathBuf;

use bluebridge_memserver::kept::{self, Listed};
use clap::{Args, Subcommand};
use serde::Serialize;

use super::Global;
use crate::exit::Exit;
use crate::output;

#[derive(Debug, Subcommand)]
pub(super) enum Arena {
    List(List),
    Drop(Drop),
}

/// List this user's memory that outlives memory servers
///
/// A memory server with `--arena-file` leaves its memory to the next server of that file. Memory that nobody will use
/// any more is freed with `bluebridge arena drop`.
#[derive(Debug, Args)]
pub(super) struct List {
    /// These files instead of those that are named by default
    files: Vec<PathBuf>,
}

/// Free the memory that memory servers left; its contents are lost
#[derive(Debug, Args)]
pub(super) struct Drop {
    /// The files, as listed
    #[arg(required = true)]
    files: Vec<PathBuf>,
}

/// A file, as printed.
#[derive(Debug, Serialize)]
struct Row {
    file: PathBuf,
    /// Bytes of memory.
    bytes: u64,
    /// The node whose contents it holds; null if it holds none.
    node: Option<u16>,
    /// The first arena generation of the contents.
    generation: Option<u16>,
    /// The memory server that uses it; null if none does.
    pid: Option<u32>,
}

impl From<Listed> for Row {
    fn from(listed: Listed) -> Self {
        let Listed { path, bytes, holder, process } = listed;
        Self {
            file: path,
            bytes,
            node: holder.map(|holder| holder.node.0),
            generation: holder.map(|holder| holder.generation.number()),
            pid: process,
        }
    }
}

pub(super) fn run(command: &Arena, global: Global) -> anyhow::Result<Exit> {
    match command {
        Arena::List(list) => self::list(list, global),
        Arena::Drop(drop) => self::drop(drop, global),
    }
}

fn list(options: &List, global: Global) -> anyhow::Result<Exit> {
    let listed = if options.files.is_empty() {
        kept::list()?
    } else {
        options.files.iter().map(|file| Listed::of(file)).collect::<Result<_, _>>()?
    };
    let rows: Vec<Row> = listed.into_iter().map(Row::from).collect();
    if global.json {
        output::json(&rows)?;
        return Ok(Exit::Ok);
    }
    if rows.is_empty() {
        output::text("no memory server left its memory")?;
        return Ok(Exit::Ok);
    }
    let cells = rows.iter().map(|row| {
        let number = |number: Option<u32>| number.map_or_else(String::new, |it| it.to_string());
        vec![
            row.file.display().to_string(),
            format!("{} MiB", row.bytes >> 20),
            number(row.node.map(u32::from)),
            number(row.generation.map(u32::from)),
            row.pid.map_or_else(|| "nobody".to_owned(), |pid| format!("pid {pid}")),
        ]
    });
    output::table(&["file", "memory", "node", "generation", "used by"], cells.collect())?;
    Ok(Exit::Ok)
}

fn drop(options: &Drop, global: Global) -> anyhow::Result<Exit> {
    let mut dropped = Vec::new();
    for file in &options.files {
        let listed = Listed::of(file)?;
        Listed::drop_file(file)?;
        dropped.push(Row::from(listed));
    }
    if global.json {
        output::json(&dropped)?;
        return Ok(Exit::Ok);
    }
    for row in &dropped {
        output::text(&format!("{} is gone; {} MiB are free", row.file.display(), row.bytes >> 20))?;
    }
    Ok(Exit::Ok)
}
