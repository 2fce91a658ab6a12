//! `bluebridge arena`: the memory that memory servers left.

use std::path::{Path, PathBuf};

use bluebridge_memserver::ArenaFileError;
use bluebridge_memserver::kept::{self, Listed, Place, Reader};
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
/// any more is freed with `bluebridge arena drop`. Memory in the kernel (BPF maps) that no file describes any more is
/// listed by where it is pinned.
#[derive(Debug, Args)]
pub(super) struct List {
    /// These files instead of those that are named by default
    files: Vec<PathBuf>,
}

/// Free the memory that memory servers left; its contents are lost
#[derive(Debug, Args)]
pub(super) struct Drop {
    /// The files, as listed, or the ids of maps without a file
    #[arg(required = true, value_name = "FILE|ID")]
    files: Vec<PathBuf>,
}

/// A file, as printed.
#[derive(Debug, Serialize)]
struct Row {
    file: PathBuf,
    #[serde(flatten)]
    found: Found,
}

/// What a file is, or why that is unknown.
#[derive(Debug, Serialize)]
#[serde(untagged)]
enum Found {
    File {
        /// Bytes of memory.
        bytes: u64,
        /// Where it is.
        memory: Memory,
        /// The id of an arena in a BPF map.
        id: Option<String>,
        /// False for a file that no memory server made.
        is_arena: bool,
        /// The version of the file's layout; null if none says it.
        layout: Option<u32>,
        /// The node whose contents it holds; null if it holds none.
        node: Option<u16>,
        /// The first arena generation of the contents.
        generation: Option<u16>,
        /// The memory server that uses it; null if none does.
        pid: Option<u32>,
        /// What is wrong with its header; null if nothing is seen.
        damage: Option<String>,
    },
    Failed {
        error: String,
    },
}

#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
enum Memory {
    Gone,
    InFile,
    InMap,
    InMapAlone,
    NotVisible,
    OfOriginal,
}

impl From<Place> for Memory {
    fn from(place: Place) -> Self {
        match place {
            Place::Gone => Self::Gone,
            Place::InFile => Self::InFile,
            Place::InMap => Self::InMap,
            Place::InMapAlone => Self::InMapAlone,
            Place::NotVisible => Self::NotVisible,
            Place::OfOriginal => Self::OfOriginal,
        }
    }
}

impl From<Listed> for Row {
    fn from(listed: Listed) -> Self {
        let Listed { path, bytes, is_arena, version, holder, process, place, id, damage } = listed;
        let found = Found::File {
            bytes,
            memory: place.into(),
            id: id.map(|id| format!("{:032x}", u128::from_be_bytes(id))),
            is_arena,
            layout: version,
            node: holder.map(|holder| holder.node.0),
            generation: holder.map(|holder| holder.generation.number()),
            pid: process,
            damage,
        };
        Self { file: path, found }
    }
}

pub(super) fn run(command: &Arena, global: Global) -> anyhow::Result<Exit> {
    match command {
        Arena::List(list) => self::list(list, global),
        Arena::Drop(drop) => self::drop(drop, global),
    }
}

fn list(options: &List, global: Global) -> anyhow::Result<Exit> {
    if options.files.is_empty() {
        let (listed, result) = kept::list();
        return print(listed.into_iter().map(Row::from).collect(), result.map_err(advised), global);
    }
    let files: Vec<_> = options.files.iter().map(|file| kept::place_named(file)).collect();
    let (rows, result) = each(&files, global, Listed::of);
    print(rows, result, global)
}

/// The rows of files, and the first failure. The others are treated nevertheless.
fn each(
    files: &[PathBuf],
    global: Global,
    look: impl Fn(&Path) -> Result<Listed, ArenaFileError>,
) -> (Vec<Row>, anyhow::Result<()>) {
    let mut first = Ok(());
    let rows = files.iter().map(|file| match look(file) {
        Ok(listed) => Row::from(listed),
        Err(error) => {
            let words = error.advice(&Reader::Arenas);
            if first.is_ok() {
                first = Err(advised(error));
            } else if !global.json {
                output::complain(&words);
            }
            Row { file: file.clone(), found: Found::Failed { error: words } }
        }
    });
    let rows = rows.collect();
    (rows, first)
}

/// The error with what the user of these commands can do.
fn advised(error: ArenaFileError) -> anyhow::Error {
    let words = error.advice(&Reader::Arenas);
    anyhow::Error::new(error).context(words)
}

fn print(rows: Vec<Row>, result: anyhow::Result<()>, global: Global) -> anyhow::Result<Exit> {
    if global.json {
        output::json(&rows)?;
    } else if rows.is_empty() {
        if result.is_ok() {
            output::text("no memory server left its memory")?;
        }
    } else {
        let cells: Vec<_> = rows.iter().filter_map(Row::cells).collect();
        if !cells.is_empty() {
            output::table(&["file", "memory", "layout", "contents", "used by"], cells)?;
        }
    }
    result?;
    Ok(Exit::Ok)
}

impl Row {
    /// `None` if the file could not be read.
    fn cells(&self) -> Option<Vec<String>> {
        let Found::File { bytes, memory, is_arena, layout, node, generation, pid, damage, .. } =
            &self.found
        else {
            return None;
        };
        let of_node = node.zip(*generation);
        let contents = match (is_arena, memory, of_node) {
            (false, ..) => "not an arena".to_owned(),
            (true, Memory::Gone, _) => "nothing, its map is gone".to_owned(),
            (true, Memory::InMapAlone, _) => "a map whose file is gone or was moved".to_owned(),
            (true, Memory::NotVisible, _) => "a map that is not visible here".to_owned(),
            (true, Memory::OfOriginal, _) => "nothing, it is a copy".to_owned(),
            (true, _, None) => "nothing".to_owned(),
            (true, _, Some((node, generation))) => format!("node {node}, generation {generation}"),
        };
        let contents = damage.as_ref().map_or(contents, |damage| format!("damaged: {damage}"));
        let user = match (memory, pid) {
            (_, Some(pid)) => format!("pid {pid}"),
            (Memory::InMapAlone, None) => "unknown".to_owned(),
            (_, None) => "nobody".to_owned(),
        };
        let layout = layout.map_or_else(String::new, |layout| layout.to_string());
        let memory = format!("{} MiB", bytes >> 20);
        Some(vec![self.file.display().to_string(), memory, layout, contents, user])
    }
}

fn drop(options: &Drop, global: Global) -> anyhow::Result<Exit> {
    let files: Vec<_> = options.files.iter().map(|file| kept::place_named(file)).collect();
    let (rows, result) = each(&files, global, |file| {
        let listed = Listed::of(file)?;
        Listed::drop_file(file)?;
        Ok(listed)
    });
    if global.json {
        output::json(&rows)?;
    } else {
        for Row { file, found } in &rows {
            if let Found::File { bytes, .. } = found {
                output::text(&format!("{} is gone; {} MiB are free", file.display(), bytes >> 20))?;
            }
        }
    }
    result?;
    Ok(Exit::Ok)
}
