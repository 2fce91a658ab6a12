//! The program that answers READs.

#![allow(unsafe_code, reason = "types of the program's maps must be declared as plain data")]

use std::{fmt, io, sync::Arc};

use aya::{
    Ebpf, EbpfError, EbpfLoader,
    programs::{LinkOrder, ProgramError, SchedClassifier, TcAttachType, tc::TcAttachOptions},
};
use bluebridge_bpf::fs as bpf_fs;
use bluebridge_wire::{NodeId, address::PAGE_BYTES};
use rustix::thread::CapabilitySet;

use super::{
    Counters, DirectMemory, PROCESSORS, Places, ReadCounts, SESSIONS,
    crc::CrcTables,
    map::{Lent, cause, remedy},
};
use crate::DirectInterface;

#[cfg(ebpf_object)]
static OBJECT: Option<&[u8]> =
    Some(aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/read.o")));
#[cfg(not(ebpf_object))]
static OBJECT: Option<&[u8]> = None;

/// The program's name in the object.
const PROGRAM: &str = "answer_read";

/// A value of the arena's map: a page.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct ArenaValue([u8; PAGE_BYTES]);

// SAFETY: it is an array of bytes.
unsafe impl aya::Pod for ArenaValue {}

// SAFETY: it consists of arrays of numbers, without padding.
unsafe impl aya::Pod for CrcTables {}

/// Why the kernel answers no READs. The server answers them itself then.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NoDirectReads {
    /// The program orders its loads as x86 does.
    #[error("this processor is not an x86-64")]
    Architecture,
    /// The program's buffers rely on not being preempted.
    #[error("this kernel may preempt programs (PREEMPT_RT)")]
    Realtime,
    /// The kernel refuses the program, or a feature that it needs.
    #[error("the kernel refuses the program: {0}")]
    Kernel(String),
    /// The program cannot be attached so that it ends with the process.
    #[error("the kernel cannot attach programs that end with the process (TCX, Linux 6.6): {0}")]
    Attach(String),
    /// The memory ends with the process.
    #[error("the memory is not kept: it ends with the process")]
    NotKept,
    /// The contents were made without it.
    #[error("the memory was made by a server without it; a server that begins empty has it")]
    InFile,
    /// A program in the kernel can read only memory in a BPF map.
    #[error("the memory is in huge pages (hugetlbfs), which no program in the kernel can read")]
    InHugePages,
    /// It was not wanted.
    #[error("it is turned off")]
    Off,
    /// Clang was missing when this program was built.
    #[error("this build has no eBPF programs: install clang and build again")]
    NotBuilt,
    /// Root is needed.
    #[error("it needs root, in the user namespace of the host")]
    Root,
    /// Root has it, except in containers.
    #[error(
        "this process lacks {0}; start it with these capabilities, a container for example with --cap-add"
    )]
    Capabilities(String),
    /// The memory would not be kept.
    #[error(
        "the BPF file system that this server can mount ends with its mount namespace, and the memory with it; mount \
         one at /sys/fs/bpf before that namespace is made"
    )]
    Namespace,
    /// Another way out.
    #[error("the memory cannot be in a BPF map: {error}; {remedy}", error = .0, remedy = remedy(.0))]
    Map(#[source] io::Error),
}

/// The program on an interface. Dropping it, and the end of the process, detach it.
pub struct DirectReads {
    /// Holds the program and its link.
    _program: Ebpf,
    counters: Arc<Counters>,
}

impl fmt::Debug for DirectReads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DirectReads").finish_non_exhaustive()
    }
}

/// Whether READs can be answered on an interface: loads the program without an arena, and attaches it for a moment.
///
/// # Errors
/// [`NoDirectReads`] says what is missing.
pub fn probe(interface: &str) -> Result<(), NoDirectReads> {
    if !cfg!(target_arch = "x86_64") {
        return Err(NoDirectReads::Architecture);
    }
    refuse_preemption()?;
    if OBJECT.is_none() {
        return Err(NoDirectReads::NotBuilt);
    }
    if !rustix::process::geteuid().is_root() {
        return Err(NoDirectReads::Root);
    }
    let missing = missing_capabilities();
    if !missing.is_empty() {
        return Err(NoDirectReads::Capabilities(missing.join(", ")));
    }
    // No endpoint has node 0, so nothing is answered. The other numbers are such that the kernel checks the whole
    // program: it leaves out what can never be executed.
    let places = Places {
        states: 2,
        shared: 3,
        pages: 4,
        counters: 1,
        lines: 5,
        frames: 6,
        stride: 4,
        shard_pages: 1 << 20,
        shard_count: 2,
        session_count: SESSIONS,
        processors: PROCESSORS,
        mtu: u32::MAX,
        ..Places::default()
    };
    load(&places, None).and_then(|mut program| attach(&mut program, interface)).or_else(|refusal| {
        // A kernel that cannot attach programs may not understand this one either; without pages it is a short one.
        let empty = Places { processors: 1, shard_count: 1, ..Places::default() };
        load(&empty, None).and_then(|mut program| attach(&mut program, interface))?;
        Err(refusal)
    })
}

/// The capabilities that the program needs and this thread does not have.
fn missing_capabilities() -> Vec<&'static str> {
    // A kernel that does not tell refuses the program itself.
    let Ok(sets) = rustix::thread::capabilities(None) else { return Vec::new() };
    let has = |wanted| sets.effective.contains(wanted);
    let is_admin = has(CapabilitySet::SYS_ADMIN);
    [
        ("CAP_BPF", is_admin || has(CapabilitySet::BPF)),
        ("CAP_PERFMON", is_admin || has(CapabilitySet::PERFMON)),
        ("CAP_NET_ADMIN", has(CapabilitySet::NET_ADMIN)),
    ]
    .into_iter()
    .filter_map(|(name, is_there)| (!is_there).then_some(name))
    .collect()
}

/// Whether the memory that a server puts into a map outlives it. Mounts the BPF file system if it is not.
///
/// # Errors
/// [`NoDirectReads::Namespace`] if not, and [`NoDirectReads::Map`] if there is no BPF file system.
pub fn check_namespace() -> Result<(), NoDirectReads> {
    let made = bpf_fs::make_arenas();
    made.map_err(|error| NoDirectReads::Map(io::Error::new(error.source.kind(), error)))?;
    if !bpf_fs::ends_with_namespace() {
        // Another server may be about to use it, too: it stays mounted.
        return Ok(());
    }
    let _ = bpf_fs::tidy();
    Err(NoDirectReads::Namespace)
}

impl DirectReads {
    /// Answers READs on an interface from now on, as far as the arena's shards are open.
    ///
    /// # Errors
    /// [`NoDirectReads`].
    pub fn begin(
        memory: &DirectMemory,
        node: NodeId,
        incarnation: u32,
        interface: &DirectInterface,
    ) -> Result<Self, NoDirectReads> {
        let DirectMemory { places, counters, .. } = memory;
        let DirectInterface { name, mtu, has_far_peer } = interface;
        let (mtu, to_peer) = (*mtu, (*has_far_peer).into());
        let places = Places { node: node.0, incarnation, mtu, to_peer, ..*places };
        refuse_preemption()?;
        let mut program = load(&places, Some(memory))?;
        attach(&mut program, name)?;
        Ok(Self { _program: program, counters: Arc::clone(counters) })
    }

    /// What was answered and passed on.
    #[must_use]
    pub fn counts(&self) -> ReadCounts {
        self.counters.counts()
    }

    /// What counts them, also after this was dropped.
    pub(crate) fn counters(&self) -> Arc<Counters> {
        Arc::clone(&self.counters)
    }
}

fn refuse_preemption() -> Result<(), NoDirectReads> {
    // The file is there on kernels that were built so.
    let is_realtime = std::fs::read_to_string("/sys/kernel/realtime");
    match is_realtime.is_ok_and(|text| text.trim() == "1") {
        true => Err(NoDirectReads::Realtime),
        false => Ok(()),
    }
}

/// Loads the program for an arena's map, or for one of a single page.
pub(super) fn load(places: &Places, arena: Option<&DirectMemory>) -> Result<Ebpf, NoDirectReads> {
    let object = OBJECT.ok_or(NoDirectReads::NotBuilt)?;
    let tables = CrcTables::new();
    let mut loader = EbpfLoader::new();
    loader.override_global("places", places, true);
    loader.override_global("crc_tables", &*tables, true);
    // Maps can be handed over by name only.
    let lent = arena.map(Lent::new).transpose().map_err(NoDirectReads::Map)?;
    if let Some(lent) = &lent {
        loader.map_pin_path("arena", lent.arena());
        loader.map_pin_path("hints", lent.hints());
    }
    let mut program = loader.load(object).map_err(refused)?;
    classifier(&mut program)?.load().map_err(|error| kernel(&error))?;
    Ok(program)
}

/// Attaches the program so that it ends with the process.
fn attach(program: &mut Ebpf, interface: &str) -> Result<(), NoDirectReads> {
    let options = TcAttachOptions::TcxOrder(LinkOrder::first());
    let attached =
        classifier(program)?.attach_with_options(interface, TcAttachType::Ingress, options);
    attached.map(drop).map_err(|error| NoDirectReads::Attach(causes(&error)))
}

pub(super) fn classifier(program: &mut Ebpf) -> Result<&mut SchedClassifier, NoDirectReads> {
    let program = program.program_mut(PROGRAM);
    let program = program.ok_or_else(|| NoDirectReads::Kernel(format!("no {PROGRAM}")))?;
    program.try_into().map_err(|error: ProgramError| kernel(&error))
}

fn refused(error: EbpfError) -> NoDirectReads {
    match error {
        EbpfError::MapError(error) => match cause(error) {
            error if error.kind() == io::ErrorKind::PermissionDenied => NoDirectReads::Root,
            error => NoDirectReads::Map(error),
        },
        other => kernel(&other),
    }
}

fn kernel(error: &dyn std::error::Error) -> NoDirectReads {
    NoDirectReads::Kernel(causes(error))
}

/// The longest line of a verifier's log that is shown, in characters.
const LINE_CHARS: usize = 200;

/// An error with its causes; of a verifier's log, the first line and the last ones, which say what is wrong.
fn causes(error: &dyn std::error::Error) -> String {
    let mut words = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        words = format!("{words}: {cause}");
        next = cause.source();
    }
    // The verifier ends with its statistics.
    let is_said = |line: &&str| {
        let statistics = ["processed ", "stack depth ", "verification time "];
        !line.trim().is_empty() && !statistics.iter().any(|start| line.starts_with(start))
    };
    let lines: Vec<&str> = words.lines().filter(is_said).collect();
    let shown: Vec<&str> = match lines.as_slice() {
        [first, .., instruction, reason] if lines.len() > 3 => {
            vec![first, "..", instruction, reason]
        }
        few => few.to_vec(),
    };
    let short = |line: &&str| line.chars().take(LINE_CHARS).collect::<String>();
    shown.iter().map(short).collect::<Vec<_>>().join(" ")
}
