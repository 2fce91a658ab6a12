//! The pins of the eBPF data plane: their owner, and their removal after a failed start.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::Context;
use bluebridge_switch::ebpf::EbpfSwitch;
use clap::Args;
use rustix::fs::{FlockOperation, flock};
use serde_json::json;

use crate::command::Global;
use crate::exit::Exit;
use crate::output;

/// The directory of a switch's pins.
#[derive(Debug, Args)]
pub(super) struct Place {
    /// P4Runtime's number for this switch, at least 1
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    pub(super) device_id: u64,
    /// The directory in which the eBPF data plane pins its maps, on a mounted BPF file system; a switch that
    /// exists there continues with its tables. The default is /sys/fs/bpf/bluebridge/switchDEVICE-ID,
    /// mounted and created if necessary
    #[arg(long, value_name = "DIRECTORY")]
    bpf_directory: Option<PathBuf>,
}

/// The pins of a switch, locked against other processes while this lives.
#[derive(Debug)]
pub(super) struct Pins {
    place: Pinned,
    directory: PathBuf,
    lock: Option<File>,
    /// Whether a switch was already pinned there.
    were_there: bool,
}

#[derive(Debug)]
enum Pinned {
    /// In the default directory.
    Named(String),
    /// In a directory of the caller's choice.
    In(PathBuf),
}

/// Another process uses the pins.
#[derive(Debug, thiserror::Error)]
#[error(
    "the switch pinned in {} has a running agent, which must end first; use another --device-id or \
     --bpf-directory for another switch", .0.display()
)]
pub(super) struct InUseError(PathBuf);

impl Place {
    /// Locks the directory, if no other process has it.
    pub(super) fn take(&self) -> anyhow::Result<Pins> {
        let (place, directory) = match &self.bpf_directory {
            Some(directory) => (Pinned::In(directory.clone()), directory.clone()),
            None => {
                let name = format!("switch{}", self.device_id);
                let directory = EbpfSwitch::directory(&name)?;
                (Pinned::Named(name), directory)
            }
        };
        let lock = lock(&directory)?;
        let were_there = EbpfSwitch::is_pinned_in(&directory);
        Ok(Pins { place, directory, lock, were_there })
    }
}

impl Pins {
    /// Opens the switch that is pinned, or a new one.
    pub(super) fn open(&mut self) -> anyhow::Result<EbpfSwitch> {
        let opened = match &self.place {
            Pinned::Named(name) => EbpfSwitch::open(name),
            Pinned::In(directory) => EbpfSwitch::open_in(directory),
        };
        let switch = opened?;
        if self.lock.is_none() {
            self.lock = lock(&self.directory)?;
        }
        Ok(switch)
    }

    /// Removes the pins of a failed start; a switch that existed before stays, so that
    /// frames are still forwarded.
    pub(super) fn forget_start(self) {
        if self.were_there {
            return;
        }
        if let Err(error) = self.remove() {
            tracing::warn!(%error, "the pins could not be removed; `bluebridge switch remove` removes it");
        }
    }

    fn remove(self) -> anyhow::Result<()> {
        match &self.place {
            Pinned::Named(name) => {
                // An open descriptor would keep the file system mounted.
                drop(self.lock);
                EbpfSwitch::remove(name)?;
            }
            Pinned::In(directory) if EbpfSwitch::is_pinned_in(directory) => {
                EbpfSwitch::remove_in(directory)?;
            }
            Pinned::In(_) => {}
        }
        Ok(())
    }
}

/// Locks a directory if it exists.
fn lock(directory: &Path) -> anyhow::Result<Option<File>> {
    let file = match File::open(directory) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        // Without access to the directory this user cannot load programs either, and the switch will report that.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return Ok(None),
        Err(error) => {
            return Err(error).with_context(|| format!("cannot open {}", directory.display()));
        }
    };
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Some(file)),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(InUseError(directory.to_owned()).into()),
        Err(errno) => Err(io::Error::from(errno))
            .with_context(|| format!("cannot lock {}", directory.display())),
    }
}

/// `bluebridge switch remove`.
pub(super) fn remove(place: &Place, global: Global) -> anyhow::Result<Exit> {
    let pins = place.take()?;
    let (directory, were_there) = (pins.directory.clone(), pins.were_there);
    pins.remove()?;
    if global.json {
        output::json(&json!({ "directory": directory, "was_there": were_there }))?;
    } else if were_there {
        output::text(&format!("the switch pinned in {} is removed", directory.display()))?;
    } else {
        output::text(&format!("no switch is pinned in {}", directory.display()))?;
    }
    Ok(Exit::Ok)
}
