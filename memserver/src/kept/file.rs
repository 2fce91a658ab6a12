//! The file of an arena: who may use it, what it holds, and its lock.

use std::{
    fs, io,
    ops::{ControlFlow, Range},
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use bluebridge_bpf::fs::{self as bpf_fs, ARENA_ID_AT};
use bluebridge_wire::{ArenaGeneration, NodeId, Space, address::PAGE_BYTES};
use rustix::{
    fd::OwnedFd,
    fs::{FallocateFlags, fallocate, fstat, fstatfs, ftruncate},
    io::Errno,
    process::geteuid,
};

use super::{
    ArenaFileError, Lack, ShardMemory,
    access::{
        Aside, OTHER_LENGTH, Pages, Purpose, arena_header, check_visible, contents_of,
        has_other_length, is_copy, lack_of_new_file, map_bytes, map_header, occupied, open_file,
        pool_bytes, shape, take_file, write_header,
    },
    layout::{
        Cut, Header, IN_FILE, IN_MAP, Layout, MAGIC, Mapped, SPACES_MAX, STATE_EMPTY, STATE_FULL,
        STATE_NEW, VERSION,
    },
    remedy::LOCK,
    stores,
};
use crate::{
    Arena,
    direct::{
        DirectMemory, NoDirectReads,
        hints::Hints,
        map::{self, Found},
    },
    memory::{self, HUGE_PAGE_BYTES, PageKind, Table, Windows},
    reserve::{self, Claim, Reserved},
    sizes::SHARD_BYTES_MAX,
};

/// Where the files of arenas are unless their user says otherwise: a file system in memory that every
/// Linux has.
pub(super) const DIRECTORY: &str = "/dev/shm";

/// The beginning of the names of files that are chosen by default.
pub(super) const PREFIX: &str = "bluebridge-arena-";

/// Bytes that are allocated between two progress reports.
const STEP_BYTES: usize = 64 << 20;

/// How much memory, and for whom.
#[derive(Clone, Debug)]
pub struct ArenaFile {
    /// The file.
    pub path: PathBuf,
    /// Bytes of pages for all shards together; each shard's part is rounded down to 2 MiB, or to a
    /// page if it is smaller.
    pub bytes: u64,
    /// Shards.
    pub shard_count: u16,
    /// The spaces that the server will serve.
    pub spaces: Vec<Space>,
    /// When the system provides the memory of a new file.
    pub claim: Claim,
    /// Drop what the file holds.
    pub is_fresh: bool,
    /// Put a new arena into a BPF map, so that the kernel can answer READs of it. Needs root, and
    /// everything that [`direct::probe`](crate::direct::probe) finds.
    pub is_direct: bool,
}

/// The node whose contents a file holds.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Holder {
    /// The node.
    pub node: NodeId,
    /// The first generation of the contents.
    pub generation: ArenaGeneration,
    /// The node's token.
    pub token: [u8; 16],
}

/// A file that this process made, and removes again if it does not get so far as to use it.
#[derive(Debug)]
struct Unassigned(Option<(PathBuf, [u8; 16])>);

impl Drop for Unassigned {
    fn drop(&mut self) {
        if let Some((path, id)) = &self.0 {
            let _ = map::remove(id);
            let _ = rustix::fs::unlink(path);
        }
    }
}

/// An arena's file that this process holds: no other can use it meanwhile.
#[derive(Debug)]
pub struct Kept {
    // Dropped first, while the file is locked.
    unassigned: Unassigned,
    path: PathBuf,
    header: Table<Header>,
    shards: Vec<ShardMemory>,
    bytes: u64,
    page_kind: PageKind,
    direct: Result<DirectMemory, NoDirectReads>,
}

impl ArenaFile {
    /// The file that a server of this name has if nothing else was chosen.
    #[must_use]
    pub fn default_path(name: &str) -> PathBuf {
        Path::new(DIRECTORY).join(format!("{PREFIX}{}-{name}", geteuid().as_raw()))
    }

    /// Takes over the file, or makes it. `progress` is called with the bytes that are allocated and
    /// the bytes in all, and may stop it.
    ///
    /// # Errors
    /// [`ArenaFileError`]; contents that are not to be dropped are unchanged.
    pub fn open(
        &self,
        progress: impl FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<Kept, ArenaFileError> {
        let layout = self.layout()?;
        let file = take_file(&self.path, Purpose::Make).map_err(|error| match &error {
            ArenaFileError::Io { error: source, .. } => {
                let lack = lack_of_new_file(&self.path, source);
                let needed = self.needed(&layout, Pages::Small);
                lack.map_or(error, |lack| self.no_room(needed, lack))
            }
            _ => error,
        })?;
        let pages = Pages::of(&file).map_err(|error| self.failed("examine", error.into()))?;
        match pages {
            Pages::Huge(_) if self.is_direct => {
                let in_file = Self { is_direct: false, ..self.clone() };
                let kept = in_file.open_taken(file, pages, &layout, progress)?;
                Ok(Kept { direct: Err(NoDirectReads::InHugePages), ..kept })
            }
            _ => self.open_taken(file, pages, &layout, progress),
        }
    }

    /// [`Self::open`], of a file that this process has taken.
    fn open_taken(
        &self,
        mut file: OwnedFd,
        pages: Pages,
        layout: &Layout,
        progress: impl FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<Kept, ArenaFileError> {
        let earlier = arena_header(&self.path, &file)?;
        if let Some(header) = &earlier {
            let stat = fstat(&file).map_err(|error| self.failed("examine", error.into()))?;
            check_visible(&self.path, header, &stat)?;
        }
        let mut held = self.held(&file, layout)?;
        if held.is_some_and(|header| self.is_to_be_remade(&header)) {
            held = None;
        }
        let has_contents = held.is_some_and(|header| header.state == STATE_FULL);
        let bytes = pages.holding(layout.file_bytes());
        let mut unassigned = Unassigned(None);
        let id = match held {
            Some(header) => header.id,
            None => new_id().map_err(|error| self.failed("read", error))?,
        };
        let mut new_map = None;
        if held.is_none() {
            if earlier.is_none() {
                unassigned.0 = Some((self.path.clone(), id));
            }
            self.check_room(&file, pages, layout, earlier.as_ref())?;
            // What it held is dropped from here on.
            unassigned.0 = Some((self.path.clone(), id));
            let stat = fstat(&file).map_err(|error| self.failed("examine", error.into()))?;
            if let Some(header) = earlier.filter(|header| !is_copy(header, &stat)) {
                map::remove(&header.id)
                    .map_err(|error| self.failed("drop the memory of", error))?;
            }
            file = self.with_header(file, pages, layout, id)?;
            new_map = self.make(&file, pages, layout, id, progress)?;
        } else if self.claim != Claim::OnDemand {
            // An earlier server may have left out pages that were not used.
            let stat = fstat(&file).map_err(|error| self.failed("examine", error.into()))?;
            let wanted = u64::try_from(stat.st_size).unwrap_or(0);
            if u64::try_from(stat.st_blocks).unwrap_or(0) * 512 < wanted {
                let wanted = usize::try_from(wanted).unwrap_or(bytes);
                self.allocate(&file, pages, 0..wanted, wanted, progress)?;
            }
        }
        let is_direct = held.map_or(self.is_direct, |header| header.backing == IN_MAP);
        let mapped = |file, bytes, locked| {
            memory::map_kept(file, bytes, locked)
                .map_err(|error| self.not_given("map", bytes as u64, pages, error))
        };
        let mut direct_map = None;
        let (mut header, cut) = if is_direct {
            let map = match new_map {
                Some(map) => map,
                None => self.held_map(&id, bytes)?,
            };
            let again = |descriptor: &OwnedFd| {
                descriptor.try_clone().map_err(|error| self.failed("open", error))
            };
            // The memory outlives the mapping of the header, and the file must be locked as long.
            let mut tables = mapped(again(&map)?, layout.tables_bytes(), Some(again(&file)?))?;
            let there = &mut tables[ARENA_ID_AT..ARENA_ID_AT + id.len()];
            if held.is_none() {
                there.copy_from_slice(&id);
            } else if *there != id {
                // Before anything in it is changed: it may be in use.
                return Err(self.damaged("its memory is another arena's"));
            }
            map::note_file(&mut tables, &self.path);
            let pages = Windows::new(again(&map)?, &layout.pages_range(), again(&file)?);
            let pages = pages.map_err(|error| self.failed("map", error.into()))?;
            direct_map = Some((map, pages.mapper()));
            let cut = layout.cut(Mapped::InWindows { tables, pages }, has_contents);
            (Table::mapped(mapped(file, PAGE_BYTES, None)?, 1), cut)
        } else {
            let mut whole = mapped(file, bytes, None)?;
            // Huge pages are never swapped.
            if self.claim == Claim::Lock && pages == Pages::Small {
                memory::lock(&mut whole).map_err(|error| self.failed(LOCK, error.into()))?;
            }
            let mut cut = layout.cut(Mapped::Whole(whole), has_contents);
            (core::mem::replace(&mut cut.header, Table::heap(0)), cut)
        };
        let Cut { counters, mut shards, .. } = cut;
        let direct = match direct_map {
            Some((map, mapper)) => {
                let (places, counters) = (layout.direct_places(), counters.into());
                let hints = Self::hints(&id, layout.adopted_lines(), &mut shards);
                let memory =
                    hints.map(|hints| DirectMemory { id, map, mapper, places, hints, counters });
                memory.map_err(NoDirectReads::Map)
            }
            None if self.is_direct => Err(NoDirectReads::InFile),
            None => Err(NoDirectReads::Off),
        };
        if let Some(first) = held.and_then(|header| contents_of(&header)) {
            // Now, because a node that joins and cannot serve has used up an incarnation in vain.
            let checked = shards.into_iter().map(|shard| Arena::check(shard, first.generation));
            shards = checked.collect::<Result<_, _>>().map_err(|damage| {
                let (path, what) = (self.path.clone(), damage.to_string());
                ArenaFileError::Damaged { path, what }
            })?;
        }
        if let [header] = header.as_mut() {
            stores::set(&mut header.process, std::process::id());
            if held.is_none() {
                stores::set_in_order(&mut header.state, STATE_EMPTY);
            }
        }
        let page_bytes = shards.iter().map(|shard| shard.page_bytes() as u64).sum();
        let page_kind = match pages {
            Pages::Small => PageKind::Plain,
            Pages::Huge(_) => PageKind::Huge,
        };
        let path = self.path.clone();
        Ok(Kept { unassigned, path, header, shards, bytes: page_bytes, page_kind, direct })
    }

    /// Makes the table in which shards tell direct readers where lines of other servers are.
    fn hints(id: &[u8; 16], lines: usize, shards: &mut [ShardMemory]) -> io::Result<Hints> {
        let hints = Hints::create(id, lines)?;
        for kept in shards.iter_mut().filter_map(|shard| shard.kept.as_mut()) {
            kept.hints = Some(hints.share(kept.lines.entries.len())?);
        }
        Ok(hints)
    }

    /// Whether a server of the same sizes could take over what a file holds, as far as that can be seen while another
    /// process uses it: its header and its map, but nothing that changes. Returns whose contents they are; `None` if it
    /// holds nothing.
    ///
    /// # Errors
    /// [`ArenaFileError`].
    pub fn check(path: &Path) -> Result<Option<Holder>, ArenaFileError> {
        let file = open_file(path, Purpose::Look)?;
        let Some(header) = arena_header(path, &file)? else { return Ok(None) };
        let spaces = header.spaces.iter().take(header.space_count.into());
        let same = Self {
            path: path.to_owned(),
            bytes: header.shard_bytes.saturating_mul(header.shard_count.into()),
            shard_count: header.shard_count,
            spaces: spaces.copied().map(Space).collect(),
            claim: Claim::OnDemand,
            is_fresh: false,
            is_direct: header.backing == IN_MAP,
        };
        // A header that is damaged or of another version may have any sizes.
        same.check_header(&header)?;
        let layout = same.layout().map_err(|error| same.damaged(&error.to_string()))?;
        let Some(held) = same.held(&file, &layout)? else { return Ok(None) };
        let stat = fstat(&file).map_err(|error| same.failed("examine", error.into()))?;
        check_visible(path, &held, &stat)?;
        if held.backing == IN_MAP {
            let map = same.held_map(&held.id, layout.file_bytes())?;
            let first = memory::map_kept(map, PAGE_BYTES, None);
            let first = first.map_err(|error| same.failed("map", error.into()))?;
            if first[ARENA_ID_AT..][..held.id.len()] != held.id {
                return Err(same.damaged("its memory is another arena's"));
            }
        }
        Ok(contents_of(&held))
    }

    /// Refuses a header that no server of this version wrote.
    fn check_header(&self, header: &Header) -> Result<(), ArenaFileError> {
        if header.version != VERSION {
            let path = self.path.clone();
            return Err(ArenaFileError::OtherVersion { path, found: header.version });
        }
        header.damage().map_or(Ok(()), |what| Err(self.damaged(what)))
    }

    /// Whether an arena without contents is to be in another place than it is.
    const fn is_to_be_remade(&self, header: &Header) -> bool {
        header.state == STATE_EMPTY && self.is_direct != (header.backing == IN_MAP)
    }

    /// The map of the contents.
    fn held_map(&self, id: &[u8; 16], bytes: usize) -> Result<OwnedFd, ArenaFileError> {
        let found = map::open(id, bytes);
        let found = found.map_err(|error| self.failed("open the BPF map of", error))?;
        match found {
            Found::Map(map) => Ok(map),
            Found::OtherSize => Err(self.damaged(OTHER_SIZE)),
            Found::None => Err(match map::named_after(&self.path) {
                Some(other) => self.damaged(&other_map(&other)),
                None => self.damaged("its memory, a BPF map, is gone"),
            }),
        }
    }

    fn damaged(&self, what: &str) -> ArenaFileError {
        ArenaFileError::Damaged { path: self.path.clone(), what: what.to_owned() }
    }

    pub(crate) fn layout(&self) -> Result<Layout, ArenaFileError> {
        let Self { bytes, shard_count, .. } = *self;
        if self.spaces.len() > SPACES_MAX {
            let count = self.spaces.len();
            let words =
                format!("a server with kept memory has at most {SPACES_MAX} spaces, not {count}");
            return Err(ArenaFileError::Size(words));
        }
        let share = bytes.checked_div(shard_count.into()).unwrap_or(0);
        // As without a file.
        let huge = HUGE_PAGE_BYTES as u64;
        let unit = if share >= huge { huge } else { PAGE_BYTES as u64 };
        let shard_bytes = usize::try_from(share - share % unit).unwrap_or(usize::MAX);
        let fits = shard_bytes as u64 <= SHARD_BYTES_MAX;
        if shard_bytes == 0 || shard_count > 256 || !fits {
            let words = format!(
                "{bytes} bytes for {shard_count} shards; a shard takes 4 KiB to 512 GiB, and there are \
                 1 to 256 shards"
            );
            return Err(ArenaFileError::Size(words));
        }
        Ok(Layout { shard_bytes, shard_count, spaces: self.spaces.clone() })
    }

    /// What the file holds and is to be kept; `None` if it is to be made.
    fn held(&self, file: &OwnedFd, layout: &Layout) -> Result<Option<Header>, ArenaFileError> {
        let path = || self.path.clone();
        let Some(header) = arena_header(&self.path, file)? else { return Ok(None) };
        if header.state == STATE_NEW || self.is_fresh {
            return Ok(None);
        }
        self.check_header(&header)?;
        let stat = fstat(file).map_err(|error| self.failed("examine", error.into()))?;
        if is_copy(&header, &stat) {
            return Err(ArenaFileError::Copy { path: path() });
        }
        let pages = Pages::of(file).map_err(|error| self.failed("examine", error.into()))?;
        if has_other_length(&header, pages, &stat) {
            return Err(self.damaged(OTHER_LENGTH));
        }
        let (found, wanted) = (shape(&header), shape(&self.new_header(layout)));
        if found != wanted {
            return Err(ArenaFileError::OtherShape { path: path(), found, wanted });
        }
        Ok(Some(header))
    }

    /// Whether there is memory for a new arena, in addition to that of an earlier one of this file.
    fn check_room(
        &self,
        file: &OwnedFd,
        pages: Pages,
        layout: &Layout,
        earlier: Option<&Header>,
    ) -> Result<(), ArenaFileError> {
        let total = pages.holding(layout.file_bytes()) as u64;
        // Before any of it is allocated: a file system in memory may be larger than the memory.
        let examined = |error: Errno| self.failed("examine", error.into());
        let system = fstatfs(file).map_err(examined)?;
        let stat = fstat(file).map_err(examined)?;
        let own = occupied(pages, &stat);
        let block = u64::try_from(system.f_bsize).unwrap_or(0);
        let free = match system.f_blocks {
            _ if self.is_direct => u64::MAX,
            0 => u64::MAX,
            _ => system.f_bavail.saturating_mul(block).saturating_add(own),
        };
        let own = own.saturating_add(earlier.map_or(0, |header| map_bytes(header, &stat)));
        if let Pages::Huge(huge_page) = pages {
            // They are no part of the memory that is available otherwise. The mount may have reserved some for itself
            // (min_size), so what is free is only looked up before contents are dropped.
            let pool = pool_bytes(huge_page).filter(|_| earlier.is_some());
            let pool = pool.map_or(u64::MAX, |bytes| bytes.saturating_add(own));
            return match free < total {
                true => Err(self.no_room(total, Lack::Room)),
                false if pool < total => Err(self.no_room(total, Lack::HugePages(huge_page))),
                false => Ok(()),
            };
        }
        let available =
            reserve::available_bytes().map_or(u64::MAX, |bytes| bytes.saturating_add(own));
        if available < total && self.is_direct {
            return Err(self.no_map(total, io::ErrorKind::OutOfMemory.into()));
        }
        if available.min(free) < total {
            let lack = if available < total { Lack::Memory } else { Lack::Room };
            return Err(self.no_room(total, lack));
        }
        Ok(())
    }

    /// Bytes that the file needs.
    fn needed(&self, layout: &Layout, pages: Pages) -> u64 {
        let bytes = if self.is_direct { PAGE_BYTES } else { layout.file_bytes() };
        pages.holding(bytes) as u64
    }

    fn no_room(&self, bytes: u64, lack: Lack) -> ArenaFileError {
        ArenaFileError::NoRoom { path: self.path.clone(), bytes, lack }
    }

    /// The error of giving the file so many bytes.
    fn not_given(
        &self,
        doing: &'static str,
        bytes: u64,
        pages: Pages,
        error: Errno,
    ) -> ArenaFileError {
        let error = error.into();
        match Lack::of(&error, pages) {
            Some(lack) => self.no_room(bytes, lack),
            None => self.failed(doing, error),
        }
    }

    fn no_map(&self, bytes: u64, error: io::Error) -> ArenaFileError {
        ArenaFileError::NoMap { path: self.path.clone(), bytes, error }
    }

    /// Drops what a file holds, and gives it its length and a header. The header comes first, so that a file that is not
    /// finished is known as one. Returns the file, which is another one if it is in huge pages.
    fn with_header(
        &self,
        file: OwnedFd,
        pages: Pages,
        layout: &Layout,
        id: [u8; 16],
    ) -> Result<OwnedFd, ArenaFileError> {
        let length = self.needed(layout, pages);
        let failed = |error| self.not_given("resize", length, pages, error);
        let header_of = |file: &OwnedFd| {
            let stat = fstat(file).map_err(|error| self.failed("examine", error.into()));
            stat.map(|stat| Header { id, inode: stat.st_ino, ..self.new_header(layout) })
        };
        ftruncate(&file, 0).map_err(failed)?;
        let Pages::Huge(first) = pages else {
            let written = write_header(&file, &header_of(&file)?);
            written.and_then(|()| ftruncate(&file, length)).map_err(failed)?;
            return Ok(file);
        };
        // Only a mapping can write there, and a file has its length before it can be mapped: so the file gets its name
        // when it has its header.
        let aside = Aside::make(&self.path)
            .map_err(|(doing, error)| self.not_given(doing, length, pages, error))?;
        let new = aside.file();
        ftruncate(new, length).map_err(failed)?;
        self.allocate(new, pages, 0..first, first, |_, _| ControlFlow::Continue(()))?;
        map_header(new, first, &header_of(new)?)
            .map_err(|error| self.not_given("map", length, pages, error))?;
        // `file` is locked until then.
        aside.take_place().map_err(|error| self.failed("rename", error.into()))
    }

    /// Gives a file with a header memory for the rest; or makes the map.
    fn make(
        &self,
        file: &OwnedFd,
        pages: Pages,
        layout: &Layout,
        id: [u8; 16],
        mut progress: impl FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<Option<OwnedFd>, ArenaFileError> {
        let bytes = layout.file_bytes();
        let total = bytes as u64;
        if self.is_direct {
            let go_on = |_, _| ControlFlow::Continue(());
            self.allocate(file, pages, 0..PAGE_BYTES, PAGE_BYTES, go_on)?;
            let map = wait_for_map(&id, bytes, || progress(0, total))?;
            return map.map(Some).map_err(|error| self.no_map(total, error));
        }
        // The tables of page states must be there even if pages are provided on demand: without room
        // for them the server would be killed at any time.
        let end = match self.claim {
            Claim::OnDemand => layout.tables_bytes(),
            Claim::Lock | Claim::Prefault => bytes,
        };
        self.allocate(file, pages, 0..end, bytes, progress)?;
        Ok(None)
    }

    /// Gives a range of the file memory.
    fn allocate(
        &self,
        file: &OwnedFd,
        pages: Pages,
        range: Range<usize>,
        bytes: usize,
        mut progress: impl FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<(), ArenaFileError> {
        let total = bytes as u64;
        for start in range.clone().step_by(STEP_BYTES) {
            let end = range.end.min(start + STEP_BYTES);
            let (from, length) = (start as u64, (end - start) as u64);
            loop {
                match fallocate(file, FallocateFlags::empty(), from, length) {
                    Ok(()) => break,
                    Err(Errno::INTR) => {}
                    Err(error) => return Err(self.not_given("allocate", total, pages, error)),
                }
            }
            if progress(end as u64, total).is_break() {
                return Err(ArenaFileError::GivenUp);
            }
        }
        Ok(())
    }

    fn new_header(&self, layout: &Layout) -> Header {
        let mut spaces = [0; SPACES_MAX];
        for (to, space) in spaces.iter_mut().zip(&self.spaces) {
            *to = space.0;
        }
        Header {
            magic: MAGIC,
            version: VERSION,
            state: STATE_NEW,
            shard_bytes: layout.shard_bytes as u64,
            shard_count: layout.shard_count,
            space_count: u16::try_from(self.spaces.len()).unwrap_or(u16::MAX),
            node: 0,
            generation: 0,
            token: [0; 16],
            process: std::process::id(),
            backing: if self.is_direct { IN_MAP } else { IN_FILE },
            id: [0; 16],
            inode: 0,
            spaces,
        }
    }

    fn failed(&self, doing: &'static str, error: io::Error) -> ArenaFileError {
        ArenaFileError::Io { doing, path: self.path.clone(), error }
    }
}

impl Kept {
    /// The node whose contents it holds; `None` if it holds nothing.
    #[must_use]
    pub fn holder(&self) -> Option<Holder> {
        contents_of(self.header.first()?)
    }

    /// Why the kernel cannot answer READs of it; `None` if it can.
    #[must_use]
    pub fn direct_refusal(&self) -> Option<&NoDirectReads> {
        self.direct.as_ref().err()
    }

    /// Whether the memory ends with the mount namespace of this process, because its map does.
    #[must_use]
    pub fn ends_with_namespace(&self) -> bool {
        self.direct.is_ok() && bpf_fs::ends_with_namespace()
    }

    /// The file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes of pages, of all shards.
    #[must_use]
    pub const fn page_bytes(&self) -> u64 {
        self.bytes
    }

    /// Records for whom the memory is from now on, and returns it. It must be the same node and
    /// generation that it holds, if it holds any.
    ///
    /// # Errors
    /// [`ArenaFileError::Damaged`] if not; nothing changed.
    pub fn assign(mut self, to: Holder) -> Result<Reserved, ArenaFileError> {
        let held = self.holder();
        if held.is_some_and(|held| (held.node, held.generation) != (to.node, to.generation)) {
            let what =
                "its contents are of another node or generation than the controller assigned";
            let what = what.to_owned();
            return Err(ArenaFileError::Damaged { path: self.path, what });
        }
        if let [header] = self.header.as_mut() {
            if held.is_none() {
                stores::set(&mut header.node, to.node.0);
                stores::set(&mut header.generation, to.generation.number());
            }
            // With the same contents the token is the same, too.
            stores::set(&mut header.token, to.token);
            stores::set_in_order(&mut header.state, STATE_FULL);
        }
        self.unassigned.0 = None;
        Ok(Reserved {
            parts: self.shards,
            page_kind: self.page_kind,
            refusals: Vec::new(),
            direct: self.direct,
        })
    }
}

/// What is wrong with a header that does not belong to its map.
pub(super) const OTHER_SIZE: &str = "its memory, a BPF map, has another size than it says";

/// What is wrong with a header whose map is not there, if there is another map that was last used with this file.
pub(super) fn other_map(id: &[u8; 16]) -> String {
    format!(
        "the BPF map with its id is gone, or the id is damaged: the map {:032x} was last used with this file",
        u128::from_be_bytes(*id)
    )
}

/// How often progress is reported while the kernel makes a map.
const MAP_REPORT: Duration = Duration::from_millis(200);

/// Makes a map in a thread of its own, because the kernel needs seconds for a large one. If the caller stops it, it ends
/// when the map is made.
fn wait_for_map(
    id: &[u8; 16],
    bytes: usize,
    mut progress: impl FnMut() -> ControlFlow<()>,
) -> Result<io::Result<OwnedFd>, ArenaFileError> {
    thread::scope(|scope| {
        let waiting = thread::current();
        let making = scope.spawn(move || {
            let made = map::create(id, bytes);
            waiting.unpark();
            made
        });
        let mut is_stopped = false;
        while !making.is_finished() {
            is_stopped = is_stopped || progress().is_break();
            thread::park_timeout(MAP_REPORT);
        }
        let made = making.join().unwrap_or_else(|_| Err(io::ErrorKind::Other.into()));
        if is_stopped { Err(ArenaFileError::GivenUp) } else { Ok(made) }
    })
}

/// An id that no other arena has.
fn new_id() -> io::Result<[u8; 16]> {
    let mut id = [0; 16];
    io::Read::read_exact(&mut fs::File::open("/dev/urandom")?, &mut id)?;
    Ok(id)
}

#[cfg(test)]
impl Kept {
    /// Where the file is mapped.
    pub(crate) fn start(&self) -> usize {
        self.header.as_ptr() as usize
    }
}
