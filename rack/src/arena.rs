//! The files in memory in which a rack's memory servers keep their memory, so that it outlives them.

use std::collections::BTreeSet;
use std::collections::hash_map::DefaultHasher;
use std::fs;
use std::hash::{Hash, Hasher};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::RackError;
use crate::daemon::arena_of;
use crate::spec::Node;
use crate::state::{DaemonRecord, RackState};
use bluebridge_bpf::fs::{
    ARENA_VERSION, arena_head, arena_id, arena_pin, may_hide_pins, open_own, remove_arena_pin,
};
use rustix::fs::{StatVfsMountFlags, statvfs};
use rustix::process::geteuid;

/// A file system in memory that every Linux has. The one in which racks are recorded is too small.
const DIRECTORY: &str = "/dev/shm";

/// `bluebridge arena list` shows the files whose names begin so.
const PREFIX: &str = "bluebridge-arena-rack";

/// The beginning of the names of a rack's files. Racks of several users may have the same name, but not the
/// same directory.
fn prefix(directory: &Path) -> String {
    let mut hasher = DefaultHasher::new();
    directory.hash(&mut hasher);
    let name = directory.file_name().unwrap_or_default().to_string_lossy();
    format!("{PREFIX}-{:08x}-{name}-", hasher.finish() & 0xffff_ffff)
}

/// The file of a memory server. Only the server knows how much room it needs there.
pub(crate) fn file(directory: &Path, server: Node) -> PathBuf {
    Path::new(DIRECTORY).join(prefix(directory) + &server.to_string())
}

/// Removes the files of a rack whose servers do not run, and returns their number: those that its record names,
/// wherever the record is now, and those that were named after this directory, which also a rack without a record
/// has. The maps in which the recorded servers had their memory are removed with them, also without a file. What another
/// user has put there under such a name, and what is no regular file, is left alone.
///
/// # Errors
/// [`RackError::LeftMemory`] for the first that cannot be removed; the others are.
pub(crate) fn remove(directory: &Path, state: Option<&RackState>) -> Result<usize, RackError> {
    let recorded = state.into_iter().flat_map(|state| &state.daemons).filter_map(arena_of);
    // No other file: a record may have been edited.
    let mut files: BTreeSet<PathBuf> =
        recorded.map(PathBuf::from).filter(|file| is_named(file, PREFIX)).collect();
    let prefix = prefix(directory);
    match fs::read_dir(DIRECTORY) {
        Ok(entries) => {
            let found = entries.flatten().map(|entry| entry.path());
            files.extend(found.filter(|file| is_named(file, &prefix)));
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(left("list", Path::new(DIRECTORY), error)),
    }
    let (mut removed, mut result) = (0, Ok(()));
    for file in files {
        match open_own(&file) {
            Ok(Some(_)) => {}
            Ok(None) => continue,
            Err(error) => {
                result = result.and(Err(left("open", &file, error)));
                continue;
            }
        }
        // The memory of servers whose READs the kernel answers is in a map with this id.
        if let Ok(Some(id)) = arena_id(&file)
            && let Err(error) = remove_arena_pin(&id)
        {
            // The file names what is left.
            result = result.and(Err(left("remove", &arena_pin(&id), error.source)));
            continue;
        }
        match fs::remove_file(&file) {
            Ok(()) => removed += 1,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => result = result.and(Err(left("remove", &file, error))),
        }
    }
    // Maps whose file was removed or replaced by hand.
    for id in state.into_iter().flat_map(|state| &state.daemons).flat_map(arena_ids) {
        let pin = arena_pin(&id);
        let is_there = pin.symlink_metadata().is_ok();
        match remove_arena_pin(&id) {
            Ok(()) => removed += usize::from(is_there),
            Err(error) => result = result.and(Err(left("remove", &pin, error.source))),
        }
    }
    result.map(|()| removed)
}

/// The arenas that the processes of a server had; the last one is that of the current process. Those in files have no
/// pin.
fn arena_ids(daemon: &DaemonRecord) -> impl Iterator<Item = [u8; 16]> {
    let ids = daemon.arena_ids.iter();
    ids.filter_map(|id| u128::from_str_radix(id, 16).ok()).map(u128::to_be_bytes)
}

/// The arena of the current process of a server, or of its last one.
pub(crate) fn last_id(daemon: &DaemonRecord) -> Option<[u8; 16]> {
    arena_ids(daemon).last()
}

/// The other server of the rack whose memory is in the file of this one, as far as it is recorded.
pub(crate) fn owner_of_contents<'a>(
    state: &'a RackState,
    daemon: &DaemonRecord,
) -> Option<&'a DaemonRecord> {
    let id = arena_head(Path::new(arena_of(daemon)?)).ok().flatten()?.id;
    let holds = |it: &&DaemonRecord| last_id(it) == Some(id);
    if holds(&daemon) {
        return None;
    }
    state.daemons.iter().filter(|it| it.name != daemon.name).find(holds)
}

/// How a server gets its own file back, in whose place is that of another one.
pub(crate) fn remedy_of_other(
    state: &RackState,
    daemon: &DaemonRecord,
    owner: &DaemonRecord,
) -> String {
    let back = "put the server's own file back in its place";
    let Some(place) = arena_of(owner) else { return back.to_owned() };
    // To move a file there would replace the server's own one.
    let is_swapped = owner_of_contents(state, owner).is_some_and(|it| it.name == daemon.name);
    if is_swapped {
        return format!("{back}: it is {place} now, so exchange the two files");
    }
    format!("{back}, and that of {} in {place}", owner.node)
}

/// Records which arena the memory of a server that is ready is in, as the last one. Its file may be gone when the rack is
/// taken down, or in the place of another one's.
pub(crate) fn note_id(daemon: &mut DaemonRecord) {
    let head = arena_of(daemon).and_then(|file| arena_head(Path::new(file)).ok().flatten());
    let Some(head) = head else { return };
    let id = format!("{:032x}", u128::from_be_bytes(head.id));
    // Those without a pin need not be removed; what another mount namespace hides is not gone.
    if !may_hide_pins() {
        let gone: Vec<_> = arena_ids(daemon).map(|id| !arena_pin(&id).exists()).collect();
        let mut gone = gone.into_iter();
        daemon.arena_ids.retain(|_| !gone.next().unwrap_or(false));
    }
    daemon.arena_ids.retain(|earlier| *earlier != id);
    daemon.arena_ids.push(id);
}

/// The error of memory that stays, with what its user can do.
fn left(doing: &'static str, path: &Path, source: io::Error) -> RackError {
    let remedy = match source.kind() {
        io::ErrorKind::ReadOnlyFilesystem => {
            let mount = match path.starts_with(DIRECTORY) {
                true => DIRECTORY,
                false => "/sys/fs/bpf",
            };
            format!("make it writable (`mount -o remount,rw {mount}`)")
        }
        io::ErrorKind::PermissionDenied => "become the user who built the rack, or root".to_owned(),
        _ => format!("remove it by hand (`rm {}`)", path.display()),
    };
    RackError::LeftMemory { doing, path: path.to_owned(), source, remedy }
}

/// Why the next process of a server cannot go on with its memory, and what to do.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Loss {
    /// The cause and the remedy.
    pub words: String,
    /// With the remedy, it can.
    pub is_recoverable: bool,
}

impl Loss {
    fn for_now(words: String) -> Self {
        Self { words, is_recoverable: true }
    }
}

/// What is lost of the memory in a server's file, or out of reach; `None` if it seems that the next process can go on
/// with it. `last` is the arena that the server had last, as far as that is recorded, and `restart` is the command that
/// begins with empty memory. A cheap look, which reads no contents.
pub(crate) fn loss(file: &Path, last: Option<[u8; 16]>, restart: &str) -> Option<Loss> {
    let shown = file.display();
    let anew = format!("`{restart}` gives it new, empty memory");
    let unreadable = |error: io::Error| {
        Some(Loss::for_now(format!("its file {shown} cannot be read: {error}; {anew}")))
    };
    let replaced = |by: &str| {
        Some(Loss::for_now(format!(
            "{by} is in the place of its file {shown}; put that back, or remove what is there (`rm -r {shown}`), then \
             {anew}"
        )))
    };
    let found = match fs::symlink_metadata(file) {
        Ok(found) => found,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Some(Loss::for_now(format!(
                "its file {shown} is gone; put it back in its place, or {anew}"
            )));
        }
        Err(error) => return unreadable(error),
    };
    let own = geteuid().as_raw();
    if found.is_file() && found.uid() != own {
        return Some(Loss::for_now(format!(
            "{shown} belongs to another user (uid {}); if it is the server's, `chown {own} {shown}` as root gives it back",
            found.uid()
        )));
    }
    match open_own(file) {
        Ok(Some(_)) => {}
        Ok(None) => return replaced("something else"),
        Err(error) => return unreadable(error),
    }
    if found.mode() & 0o077 != 0 {
        return Some(Loss::for_now(format!(
            "its file {shown} may be opened by other users; `chmod 600 {shown}` ends that"
        )));
    }
    match arena_head(file) {
        Ok(Some(head)) if head.version != ARENA_VERSION => Some(Loss::for_now(format!(
            "its file {shown} is in layout {} of another version of bluebridge; start it with the program of that \
             version, or {anew}",
            head.version
        ))),
        Ok(Some(head)) => {
            let is_gone = |id: &[u8; 16]| {
                let pin = arena_pin(id).symlink_metadata();
                pin.is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
            };
            if head.is_damaged {
                let words = format!("the header of its file {shown} is damaged; {anew}");
                return Some(Loss { words, is_recoverable: false });
            }
            if !head.is_in_map || !is_gone(&head.id) || may_hide_pins() {
                return None;
            }
            // Maps have other ids than files, so this one is a map.
            let words = match last.filter(|last| *last != head.id && !is_gone(last)) {
                Some(last) => format!(
                    "the id in its file {shown} is damaged: its memory is in the BPF map {:032x}; {anew}",
                    u128::from_be_bytes(last)
                ),
                None => format!("the BPF map of its file {shown} is gone; {anew}"),
            };
            Some(Loss { words, is_recoverable: false })
        }
        Ok(None) if found.len() == 0 => replaced("an empty file"),
        Ok(None) => replaced("a copy, or a file that is no arena's,"),
        Err(error) => unreadable(error),
    }
}

/// Whether nothing is left of what kept a server from using its file when it started. Only of causes that can be seen:
/// whether there is room now is not known.
pub(crate) fn is_mended(file: &Path, cause: &str) -> bool {
    if cause.contains(&*file.to_string_lossy()) {
        // Something else had its place, and what is there now can be used, or made.
        let is_free = file.symlink_metadata().is_err_and(|it| it.kind() == io::ErrorKind::NotFound);
        return is_free || loss(file, None, "").is_none();
    }
    let Some(system) = file.parent().and_then(|directory| statvfs(directory).ok()) else {
        return false;
    };
    let is_missing = cause.contains("there is no directory");
    let is_read_only = cause.contains("read-only file system");
    (is_missing || is_read_only) && !system.f_flag.contains(StatVfsMountFlags::RDONLY)
}

/// Whether it is a file of [`DIRECTORY`] whose name begins so.
fn is_named(file: &Path, prefix: &str) -> bool {
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    file.parent() == Some(Path::new(DIRECTORY)) && name.starts_with(prefix)
}

#[cfg(test)]
mod tests {
    use bluebridge_bpf::fs::{
        ARENA_BACKING_AT, ARENA_ID_AT, ARENA_IN_MAP, ARENA_INODE_AT, ARENA_MAGIC, ARENA_VERSION_AT,
    };

    use super::*;
    #[test]
    fn a_rack_whose_directory_was_moved_finds_its_files() {
        let process = std::process::id();
        let directory = |name: &str| PathBuf::from(format!("/nonexistent/{process}/{name}"));
        let (first, moved) = (directory("first"), directory("moved"));
        let spec = crate::tests::spec("kept-moved", 1, 1);
        let at_first = Path::new(DIRECTORY).join(prefix(&first) + "s1");
        let unrecorded = Path::new(DIRECTORY).join(prefix(&moved) + "s2");
        let of_user = Path::new(DIRECTORY).join(format!("of-user-{process}"));
        let other = Path::new(DIRECTORY).join(prefix(&directory("other")) + "s1");
        let all = [&at_first, &unrecorded, &of_user, &other];
        for file in all {
            fs::write(file, b"").expect("there is room");
        }
        let mut state = RackState::new(spec);
        let gone = Path::new(DIRECTORY).join(prefix(&first) + "s3");
        for file in [&at_first, &of_user, &gone, &PathBuf::from("none")] {
            let words = ["memserver", "--arena-file", file.to_str().expect("text")];
            state.daemons.push(DaemonRecord {
                name: "memserver-s1".to_owned(),
                node: Node::Server(1),
                arguments: words.map(str::to_owned).to_vec(),
                log: PathBuf::new(),
                process: None,
                ready: false,
                kept_memory: None,
                arena_ids: Vec::new(),
            });
        }
        let removed = remove(&moved, Some(&state)).expect("they are ours");
        let left = all.map(|file| file.exists());
        for file in all {
            let _ = fs::remove_file(file);
        }
        assert_eq!(removed, 2);
        assert_eq!(left, [false, false, true, true]);
        assert_eq!(remove(&moved, None).expect("there are none"), 0);
    }

    #[test]
    fn what_has_become_of_a_file_is_seen() {
        let process = std::process::id();
        let file = Path::new(DIRECTORY).join(format!("loss-{process}"));
        let loss_of =
            |file: &Path| loss(file, None, "RESTART").map_or_else(String::new, |it| it.words);
        // A file that is there no more can be somewhere else.
        let gone = loss_of(&file);
        std::os::unix::fs::symlink("/etc/passwd", &file).expect("there is room");
        let link = loss_of(&file);
        fs::remove_file(&file).expect("it is ours");
        let mut found = Vec::new();
        let mut header = vec![0; ARENA_INODE_AT + 8];
        header[..ARENA_MAGIC.len()].copy_from_slice(&ARENA_MAGIC);
        let number = |header: &mut [u8], at: usize, number: u32| {
            header[at..at + 4].copy_from_slice(&number.to_ne_bytes());
        };
        number(&mut header, ARENA_VERSION_AT, ARENA_VERSION);
        header[ARENA_ID_AT..][..16].copy_from_slice(b"in no map at all");
        fs::write(&file, b"").expect("there is room");
        let set_mode = |mode| {
            let mode = std::os::unix::fs::PermissionsExt::from_mode(mode);
            fs::set_permissions(&file, mode).expect("it is ours");
        };
        set_mode(0o600);
        found.push(loss_of(&file));
        let inode = fs::metadata(&file).expect("it is there").ino();
        header[ARENA_INODE_AT..].copy_from_slice(&(inode + 1).to_ne_bytes());
        fs::write(&file, &header).expect("there is room");
        found.push(loss_of(&file));
        header[ARENA_INODE_AT..].copy_from_slice(&inode.to_ne_bytes());
        // A file of a page is not therefore one of memory in a map, which has a page, too.
        header.resize(4096, 0);
        fs::write(&file, &header).expect("there is room");
        found.push(loss_of(&file));
        set_mode(0o640);
        found.push(loss_of(&file));
        set_mode(0o600);
        header.truncate(ARENA_INODE_AT + 8);
        number(&mut header, ARENA_BACKING_AT, ARENA_IN_MAP);
        fs::write(&file, &header).expect("there is room");
        let in_map = loss_of(&file);
        header[0] ^= 1;
        fs::write(&file, &header).expect("there is room");
        let damaged = loss(&file, None, "RESTART").expect("its magic number is damaged");
        header[0] ^= 1;
        // Where another version has its memory is not known.
        number(&mut header, ARENA_VERSION_AT, ARENA_VERSION + 1);
        fs::write(&file, &header).expect("there is room");
        found.push(loss_of(&file));
        fs::remove_file(&file).expect("it is ours");
        assert!(gone.contains("is gone; put it back in its place, or `RESTART`"), "{gone}");
        assert!(link.contains("something else is in the place"), "{link}");
        assert!(link.contains("put that back, or remove what is there"), "{link}");
        assert!(found[0].contains("an empty file") && found[1].contains("a copy"), "{found:?}");
        assert_eq!(found[2], "");
        assert!(found[3].ends_with(&format!("; `chmod 600 {}` ends that", file.display())));
        // Whether it is there cannot be seen from everywhere.
        assert_eq!(in_map.contains("the BPF map of its file"), !may_hide_pins(), "{in_map}");
        assert!(damaged.words.starts_with("the header of its file ") && !damaged.is_recoverable);
        let other = format!("in layout {} of another version", ARENA_VERSION + 1);
        assert!(found[4].contains(&other) && !found[4].contains("gone"), "{found:?}");
    }

    /// Every user may make them in that directory.
    #[test]
    fn links_and_pipes_with_the_name_of_a_file_are_left_alone() {
        let process = std::process::id();
        let directory = PathBuf::from(format!("/nonexistent/{process}/foreign"));
        let [link, pipe, own] =
            ["s1", "s2", "s3"].map(|name| Path::new(DIRECTORY).join(prefix(&directory) + name));
        let target = Path::new(DIRECTORY).join(format!("of-other-rack-{process}"));
        for file in [&target, &own] {
            fs::write(file, b"").expect("there is room");
        }
        std::os::unix::fs::symlink(&target, &link).expect("there is room");
        let fifo = rustix::fs::FileType::Fifo;
        let mode = rustix::fs::Mode::from_raw_mode(0o666);
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, fifo, mode, 0).expect("there is room");
        // Opened for reading, a pipe without a writer waits for ever.
        let (done, waits) = std::sync::mpsc::channel();
        let looked = directory.clone();
        std::thread::spawn(move || done.send(remove(&looked, None)));
        let removed = waits.recv_timeout(std::time::Duration::from_secs(10));
        let of_target = open_own(&link);
        let all = [&link, &pipe, &target, &own];
        let left = all.map(|file| file.symlink_metadata().is_ok());
        for file in all {
            let _ = fs::remove_file(file);
        }
        assert_eq!(removed.expect("it does not wait").expect("own is ours"), 1);
        assert!(of_target.expect("it may be looked at").is_none(), "a link is not followed");
        assert_eq!(left, [true, true, true, false]);
    }
}
