//! The eBPF data plane: the pipeline in the kernel, on the sender's core.
//!
//! A program on the ingress of every port (TCX) is the complete switch; on XDP ports a second one
//! runs before it. Programs, maps and links are pinned under `/sys/fs/bpf/bluebridge/NAME`, so
//! frames are forwarded with or without an agent. [`EbpfSwitch::open`] finds them again, and
//! [`EbpfSwitch::remove`] removes them, even after a crash.
//!
//! * `control`: the maps as a [`DataPlane`]; `layout`: their keys and values; `store`: reading and writing them.
//! * `port`: interfaces and the programs on them; `bpffs`: the pins.

mod bpffs;
mod control;
mod layout;
mod port;
mod store;
mod structs;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use aya::{
    Ebpf, EbpfLoader,
    maps::{Array, HashMap, Map, MapData, PerCpuArray, RingBuf},
    programs::{SchedClassifier, TestRun as _, TestRunOptions, Xdp},
};
use bluebridge_p4::pipeline::{Entry, Key, SwitchPort};

use crate::dataplane::{PlaneError, Table};
use layout::LAYOUT;
use port::Attached;
pub use port::PortMode;
use store::{Store, failed};
use structs::Config;

#[cfg(ebpf_object)]
static OBJECT: Option<&[u8]> =
    Some(aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/switch.o")));
#[cfg(not(ebpf_object))]
static OBJECT: Option<&[u8]> = None;

/// An entry and the index of its counter.
#[derive(Debug)]
struct Known {
    entry: Entry,
    index: u32,
    /// When it expires by the clock of the programs.
    dead_at: Option<Duration>,
}

/// A switch in the kernel.
///
/// Dropping it leaves the switch running; [`Self::remove`] ends it.
pub struct EbpfSwitch {
    directory: PathBuf,
    programs: Ebpf,
    stores: [Box<dyn Store>; Table::ALL.len()],
    notes: HashMap<MapData, structs::NoteKey, structs::Note>,
    group_map: HashMap<MapData, u16, structs::Group>,
    counters: PerCpuArray<MapData, structs::Counter>,
    drops: PerCpuArray<MapData, u64>,
    port_counters: PerCpuArray<MapData, structs::PortCounter>,
    port_map: Array<MapData, structs::Port>,
    port_of: Array<MapData, structs::PortOf>,
    impairments: Array<MapData, structs::Impairment>,
    config_map: Array<MapData, Config>,
    notify_match: Array<MapData, structs::NotifyMatch>,
    notify_index: Array<MapData, u32>,
    packet_ins: RingBuf<MapData>,
    /// The contents of the maps: only the agent writes them.
    known: [BTreeMap<Key, Known>; Table::ALL.len()],
    free: [Vec<u32>; Table::ALL.len()],
    groups: BTreeMap<u16, Vec<SwitchPort>>,
    ports: BTreeMap<SwitchPort, Attached>,
    config: Config,
}

impl core::fmt::Debug for EbpfSwitch {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("EbpfSwitch").field("directory", &self.directory).finish_non_exhaustive()
    }
}

/// Whether this build and this user can have an eBPF switch.
fn check_build() -> Result<(), PlaneError> {
    if OBJECT.is_none() {
        return Err(PlaneError::NoEbpf);
    }
    if !rustix::process::geteuid().is_root() {
        return Err(PlaneError::NeedsRoot("the eBPF data plane"));
    }
    Ok(())
}

/// The result of one frame in [`EbpfSwitch::test_run`].
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct TestRun {
    /// The program's return value: 7 redirects, 2 drops.
    pub action: u32,
    /// The frame after the program.
    pub frame: Vec<u8>,
    /// The mean time of one run.
    pub duration: Duration,
}

/// The return value of a program that redirects the frame (`TCX_REDIRECT`).
pub const ACTION_REDIRECT: u32 = 7;

impl EbpfSwitch {
    /// Whether this build has the programs: clang was available when it was built.
    #[must_use]
    pub fn is_built() -> bool {
        OBJECT.is_some()
    }

    /// Opens the switch with this name: a pinned one, or a new one without ports.
    ///
    /// # Errors
    /// [`PlaneError::NoEbpf`] if this build has none, [`PlaneError::NeedsRoot`], and
    /// [`PlaneError::Ebpf`] if the kernel refuses the programs or another version pinned the maps.
    pub fn open(name: &str) -> Result<Self, PlaneError> {
        check_build()?;
        Self::pinned_in(bpffs::open(name)?)
    }

    /// Like [`Self::open`], for a directory on a BPF file system that is already mounted. It is created
    /// if it is missing, and the caller must remove it.
    ///
    /// # Errors
    /// As for [`Self::open`].
    pub fn open_in(directory: &Path) -> Result<Self, PlaneError> {
        check_build()?;
        bpffs::make(directory)?;
        Self::pinned_in(directory.to_owned())
    }

    fn pinned_in(directory: PathBuf) -> Result<Self, PlaneError> {
        let object = OBJECT.ok_or(PlaneError::NoEbpf)?;
        let mut programs = EbpfLoader::new()
            .default_map_pin_directory(&directory)
            .load(object)
            .map_err(|e| failed(&e))?;
        classifier(&mut programs)?.load().map_err(|e| failed(&e))?;
        xdp(&mut programs)?.load().map_err(|e| failed(&e))?;
        let mut switch = Self::from_maps(directory, programs)?;
        switch.read_back()?;
        Ok(switch)
    }

    /// Removes the switch with this name and everything that it left; it may be gone already.
    ///
    /// # Errors
    /// If something cannot be removed.
    pub fn remove(name: &str) -> Result<(), PlaneError> {
        bpffs::remove(name)
    }

    /// The directory of the switch with this name, whether it exists or not.
    ///
    /// # Errors
    /// If the name is invalid.
    pub fn directory(name: &str) -> Result<PathBuf, PlaneError> {
        bpffs::directory(name)
    }

    /// Whether a switch is pinned in a directory.
    #[must_use]
    pub fn is_pinned_in(directory: &Path) -> bool {
        bpffs::is_pinned_in(directory)
    }

    /// Removes the switch that is pinned in a directory, and its pins; other files there
    /// stay.
    ///
    /// # Errors
    /// If no switch is pinned there, or part of it cannot be removed.
    pub fn remove_in(directory: &Path) -> Result<(), PlaneError> {
        bpffs::remove_in(directory)
    }

    /// Runs the program on a frame as if it had arrived at a port, without forwarding it
    /// (copies to groups and duplicates are sent). The tables count the hits.
    ///
    /// # Errors
    /// If there is no such port, or the kernel does not run a program on such a frame.
    pub fn test_run(
        &mut self,
        port: SwitchPort,
        frame: &[u8],
        repeat: u32,
    ) -> Result<TestRun, PlaneError> {
        /// Bytes of a `struct __sk_buff`, and where its `ifindex` is.
        const CONTEXT_BYTES: usize = 192;
        const IFINDEX: core::ops::Range<usize> = 40..44;
        let Some(attached) = self.ports.get(&port) else {
            let source = io::Error::from(io::ErrorKind::NotFound);
            return Err(PlaneError::Io { doing: format!("find port {}", port.0), source });
        };
        let mut context = [0; CONTEXT_BYTES];
        context[IFINDEX].copy_from_slice(&attached.interface.index.to_ne_bytes());
        let mut out = vec![0; frame.len() + 64];
        let options = TestRunOptions {
            data_in: Some(frame),
            data_out: Some(&mut out),
            ctx_in: Some(&context),
            repeat,
            ..TestRunOptions::new()
        };
        let result = classifier(&mut self.programs)?.test_run(options).map_err(|e| failed(&e))?;
        out.truncate(result.data_size_out as usize);
        Ok(TestRun { action: result.return_value, frame: out, duration: result.duration })
    }

    fn from_maps(directory: PathBuf, mut programs: Ebpf) -> Result<Self, PlaneError> {
        fn typed<M: TryFrom<Map, Error = aya::maps::MapError>>(
            programs: &mut Ebpf,
            name: &str,
        ) -> Result<M, PlaneError> {
            M::try_from(take(programs, name)?).map_err(|e| failed(&e))
        }
        let p = &mut programs;
        let mut stores = Vec::with_capacity(Table::ALL.len());
        for table in Table::ALL {
            stores.push(store::table_store(table, take(p, table.name())?)?);
        }
        let stores =
            stores.try_into().map_err(|_| PlaneError::Ebpf("a table has no map".to_owned()))?;
        Ok(Self {
            directory,
            stores,
            notes: typed(p, "notes")?,
            group_map: typed(p, "groups")?,
            counters: typed(p, "counters")?,
            drops: typed(p, "drops")?,
            port_counters: typed(p, "port_counters")?,
            port_map: typed(p, "ports")?,
            port_of: typed(p, "port_of")?,
            impairments: typed(p, "impairments")?,
            config_map: typed(p, "config")?,
            notify_match: typed(p, "notify_match")?,
            notify_index: typed(p, "notify_index")?,
            packet_ins: typed(p, "packet_ins")?,
            known: Default::default(),
            free: Default::default(),
            groups: BTreeMap::new(),
            ports: BTreeMap::new(),
            config: Config::default(),
            programs,
        })
    }

    /// Reads the contents of the maps.
    fn read_back(&mut self) -> Result<(), PlaneError> {
        self.config = self.config_map.get(&0, 0).map_err(|e| failed(&e))?;
        let layout = self.config.layout;
        if layout != LAYOUT && layout != 0 {
            return Err(PlaneError::Ebpf(format!(
                "another version (layout {layout}) created {}; remove that switch first",
                self.directory.display()
            )));
        }
        self.config.layout = LAYOUT;
        self.write_config()?;
        let mut base = 1;
        for table in Table::ALL {
            self.read_table(table, base)?;
            base += u32::try_from(table.capacity()).unwrap_or(0);
            // An agent that was killed after it had written an entry did not execute this.
            self.refresh(table)?;
        }
        self.read_groups()?;
        self.read_ports()
    }

    fn read_table(&mut self, table: Table, base: u32) -> Result<(), PlaneError> {
        let at = table as usize;
        let mut used = BTreeSet::new();
        for (key, value) in self.stores[at].all()? {
            let key = layout::decode_key(table, &key);
            let (index, action) = layout::decode_action(table, &value);
            let note = self.notes.get(&layout::note_key(&key), 0);
            let (idle_timeout, metadata) =
                note.map_or((None, Vec::new()), |note| layout::decode_note(&note));
            used.insert(index);
            let dead_at = layout::decode_end(table, &value);
            let entry = Entry { key, action, idle_timeout, metadata };
            self.known[at].insert(key, Known { entry, index, dead_at });
        }
        let end = base + u32::try_from(table.capacity()).unwrap_or(0);
        self.free[at] = (base..end).rev().filter(|index| !used.contains(index)).collect();
        Ok(())
    }

    fn write_config(&mut self) -> Result<(), PlaneError> {
        self.config_map.set(0, self.config, 0).map_err(|e| failed(&e))
    }
}

fn take(programs: &mut Ebpf, name: &str) -> Result<Map, PlaneError> {
    let missing = || PlaneError::Ebpf(format!("the programs have no map {name}"));
    programs.take_map(name).ok_or_else(missing)
}

fn classifier(programs: &mut Ebpf) -> Result<&mut SchedClassifier, PlaneError> {
    let missing = || PlaneError::Ebpf("the object has no program switch_tc".to_owned());
    let program = programs.program_mut("switch_tc").ok_or_else(missing)?;
    program.try_into().map_err(|e: aya::programs::ProgramError| failed(&e))
}

fn xdp(programs: &mut Ebpf) -> Result<&mut Xdp, PlaneError> {
    let missing = || PlaneError::Ebpf("the object has no program switch_xdp".to_owned());
    let program = programs.program_mut("switch_xdp").ok_or_else(missing)?;
    program.try_into().map_err(|e: aya::programs::ProgramError| failed(&e))
}
