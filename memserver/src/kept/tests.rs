//! Who may use a file, and what it holds.

use std::{
    fs,
    ops::ControlFlow,
    os::unix::fs::{PermissionsExt, symlink},
    path::PathBuf,
};

use bluebridge_wire::{ArenaGeneration, NodeId, Space};
use zerocopy::IntoBytes;

use super::{
    ArenaFile, ArenaFileError, Foreign, Holder, Kept, Lack, Listed, PageRecord, Place, Reader,
    access::{Pages, pool_bytes},
};
use crate::Claim;

/// A directory in memory that is removed at the end.
struct Directory(PathBuf);

impl Directory {
    fn new(name: &str) -> Self {
        let path = format!("/dev/shm/bluebridge-test-{}-{name}", std::process::id());
        fs::create_dir(&path).expect("a new directory");
        Self(path.into())
    }

    fn file(&self) -> ArenaFile {
        ArenaFile {
            path: self.0.join("arena"),
            bytes: 1 << 20,
            shard_count: 2,
            spaces: vec![Space(7)],
            claim: Claim::Prefault,
            is_fresh: false,
            is_direct: false,
        }
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn open(file: &ArenaFile) -> Result<Kept, ArenaFileError> {
    file.open(|_, _| ControlFlow::Continue(()))
}

/// The command that a rack's user can give.
const RESTART: &str = "bluebridge rack restart s1 --rack r";

/// A remedy is said once, after the cause, and is what its reader can do: `server` of who started the server, and
/// `rack` of the user of a rack, who gave no option of a server.
#[track_caller]
fn assert_remedies(error: &ArenaFileError, server: &str, rack: &[&str]) {
    let cause = error.to_string();
    assert!(!cause.contains("--") && !cause.contains(';'), "{cause}");
    let of_server = error.advice(&Reader::Server);
    assert!(of_server.starts_with(&cause) && of_server.contains(server), "{of_server}");
    assert!(!of_server.contains(RESTART), "{of_server}");
    let in_rack = error.advice(&Reader::Rack { restart: RESTART.to_owned(), keeps: false });
    assert!(in_rack.starts_with(&cause), "{in_rack}");
    assert!(rack.iter().all(|words| in_rack.matches(words).count() == 1), "{in_rack}");
    for option in ["--fresh", "--arena-file", "--direct-reads", "--shards"] {
        assert!(!in_rack.contains(option), "{in_rack}");
    }
}

fn holder(node: u16, generation: u16) -> Holder {
    let generation = ArenaGeneration::new(generation).expect("small");
    Holder { node: NodeId(node), generation, token: [node.to_be_bytes()[1]; 16] }
}

#[test]
fn a_file_holds_what_it_was_assigned_until_it_is_dropped() {
    let directory = Directory::new("holds");
    let file = directory.file();
    let kept = open(&file).unwrap();
    assert_eq!((kept.holder(), kept.page_bytes()), (None, 1 << 20));
    // Nothing was assigned, so there is nothing to take over, and it takes no memory.
    drop(kept);
    assert!(!file.path.exists());
    let kept = open(&file).unwrap();
    assert_eq!(kept.holder(), None);
    let parts = kept.assign(holder(3, 5)).unwrap().parts;
    assert!(parts.iter().all(|part| !part.has_contents()));
    drop(parts);
    let kept = open(&file).unwrap();
    assert_eq!(kept.holder(), Some(holder(3, 5)));
    let parts = kept.assign(holder(3, 5)).unwrap().parts;
    assert!(parts.iter().all(|part| part.has_contents()));
    drop(parts);
    let listed = Listed::of(&file.path).unwrap();
    assert_eq!((listed.holder, listed.process), (Some(holder(3, 5)), None));
    assert!(listed.is_arena);
    assert!(listed.bytes >= 1 << 20, "{listed:?}");
    let kept = open(&ArenaFile { is_fresh: true, ..file.clone() }).unwrap();
    assert_eq!(kept.holder(), None);
    drop(kept.assign(holder(3, 6)).unwrap());
    Listed::drop_file(&file.path).unwrap();
    assert!(!file.path.exists());
}

#[test]
fn contents_of_another_node_or_generation_are_not_served() {
    let directory = Directory::new("other");
    let file = directory.file();
    drop(open(&file).unwrap().assign(holder(3, 5)).unwrap());
    for other in [holder(4, 5), holder(3, 6)] {
        let error = open(&file).unwrap().assign(other).unwrap_err();
        assert!(matches!(error, ArenaFileError::Damaged { .. }), "{error}");
    }
    assert_eq!(open(&file).unwrap().holder(), Some(holder(3, 5)), "nothing changed");
}

/// A server opens its file before it joins: one that joins in vain uses up an incarnation.
#[test]
fn damaged_contents_are_refused_when_the_file_is_opened() {
    let directory = Directory::new("damaged");
    let file = directory.file();
    drop(open(&file).unwrap().assign(holder(3, 5)).unwrap());
    let whole = fs::read(&file.path).unwrap();
    let layout = file.layout().unwrap();
    let ((first_redo, _), (_, states)) = (layout.places_of(0), layout.places_of(1));
    let (state_of_3, record) = (states + 3 * size_of::<PageRecord>(), PageRecord::default());
    let old = PageRecord { colour: 4 << 8 | 1, ..record };
    let untagged = PageRecord { colour: 5 << 8, ..record };
    let body = PageRecord { part: 2, link: 1, colour: 5 << 8 | 1, space: 7, ..record };
    let of_other_space = PageRecord { part: 1, space: 8, ..body };
    let good = PageRecord { part: 1, is_complete: 1, ..body };
    let redo = [0xff; 512];
    for (at, bytes, what) in [
        (first_redo, &redo[..], "the record of its last change"),
        (state_of_3, old.as_bytes(), "the colour of page 3"),
        (state_of_3, untagged.as_bytes(), "the colour of page 3"),
        (state_of_3, body.as_bytes(), "the state of page 3"),
        (state_of_3, of_other_space.as_bytes(), "the state of page 3"),
        (state_of_3, good.as_bytes(), ""),
    ] {
        let mut image = whole.clone();
        image[at..at + bytes.len()].copy_from_slice(bytes);
        fs::write(&file.path, &image).unwrap();
        let Err(error) = open(&file) else {
            assert_eq!(what, "", "it is damaged");
            continue;
        };
        let words = error.to_string();
        assert!(matches!(error, ArenaFileError::Damaged { .. }), "{words}");
        assert!(!what.is_empty() && words.contains(what), "{words}");
        assert_remedies(&error, "--fresh", &[RESTART]);
        assert!(fs::read(&file.path).unwrap() == image, "it stays as it is");
    }
}

#[test]
fn a_header_that_no_server_wrote_is_damaged_and_not_another_shape() {
    let directory = Directory::new("header");
    let file = directory.file();
    drop(open(&file).unwrap().assign(holder(3, 5)).unwrap());
    let whole = fs::read(&file.path).unwrap();
    // The first bytes, the state, the bytes of a shard, their number, that of spaces, the generation, the backing, and
    // everything.
    for (at, length) in [(0, 8), (12, 4), (16, 8), (24, 2), (26, 2), (30, 2), (52, 4), (16, 200)] {
        let mut image = whole.clone();
        image[at..at + length].fill(0xa5);
        fs::write(&file.path, &image).unwrap();
        for error in [open(&file).unwrap_err(), ArenaFile::check(&file.path).unwrap_err()] {
            assert!(matches!(error, ArenaFileError::Damaged { .. }), "{at}: {error}");
            let listed = Listed::of(&file.path).unwrap();
            let damage = listed.damage.unwrap_or_default();
            assert!(!damage.is_empty() && error.to_string().ends_with(&damage), "{at}: {damage}");
            assert_eq!((listed.is_arena, listed.holder), (true, None), "{at}");
        }
        assert!(fs::read(&file.path).unwrap() == image, "it stays as it is");
    }
    // A number of shards that could be, but is not that of the file.
    let mut image = whole.clone();
    image[24] += 1;
    fs::write(&file.path, &image).unwrap();
    let error = open(&file).unwrap_err();
    assert!(error.to_string().contains("it has another length than it says"), "{error}");
    assert!(Listed::of(&file.path).unwrap().damage.is_some());
    fs::write(&file.path, &whole).unwrap();
    assert_eq!(Listed::of(&file.path).unwrap().damage, None);
    fs::write(&file.path, [&[0xa5; 8], &whole[8..]].concat()).unwrap();
    Listed::drop_file(&file.path).unwrap();
}

#[test]
fn one_process_at_a_time_uses_a_file() {
    let directory = Directory::new("lock");
    let file = directory.file();
    let kept = open(&file).unwrap();
    let own = std::process::id();
    for is_fresh in [false, true] {
        let error = open(&ArenaFile { is_fresh, ..file.clone() }).unwrap_err();
        assert!(
            matches!(error, ArenaFileError::InUse { process, .. } if process == own),
            "{error}"
        );
    }
    assert_eq!(Listed::of(&file.path).unwrap().process, Some(own));
    assert!(matches!(Listed::drop_file(&file.path), Err(ArenaFileError::InUse { .. })));
    // The memory holds the lock as long as any part of it is used.
    let mut parts = kept.assign(holder(3, 5)).unwrap().parts;
    drop(parts.remove(0));
    assert!(open(&file).is_err());
    drop(parts);
    assert!(open(&file).is_ok());
}

#[test]
fn another_shape_is_refused_and_unchanged() {
    let directory = Directory::new("shape");
    let file = directory.file();
    drop(open(&file).unwrap().assign(holder(3, 5)).unwrap());
    for other in [
        ArenaFile { bytes: 2 << 20, ..file.clone() },
        ArenaFile { shard_count: 1, ..file.clone() },
        ArenaFile { spaces: vec![Space(8)], ..file.clone() },
    ] {
        let error = open(&other).unwrap_err();
        assert!(matches!(error, ArenaFileError::OtherShape { .. }), "{error}");
        assert_remedies(&error, "--fresh", &[RESTART]);
    }
    assert_eq!(open(&file).unwrap().holder(), Some(holder(3, 5)));
    let fresh = ArenaFile { bytes: 2 << 20, is_fresh: true, ..file };
    assert_eq!(open(&fresh).unwrap().page_bytes(), 2 << 20);
}

#[test]
fn files_of_others_and_files_on_a_disk_are_refused() {
    let directory = Directory::new("foreign");
    let file = directory.file();
    fs::write(&file.path, b"something else").unwrap();
    fs::set_permissions(&file.path, fs::Permissions::from_mode(0o644)).unwrap();
    let error = open(&file).unwrap_err();
    assert!(matches!(error, ArenaFileError::Foreign { .. }), "{error}");
    fs::set_permissions(&file.path, fs::Permissions::from_mode(0o600)).unwrap();
    for error in [open(&file).unwrap_err(), Listed::drop_file(&file.path).unwrap_err()] {
        assert!(matches!(error, ArenaFileError::NoArena { .. }), "{error}");
    }
    let fresh = ArenaFile { is_fresh: true, ..file.clone() };
    assert!(matches!(open(&fresh), Err(ArenaFileError::NoArena { .. })), "it may be anything");
    assert_eq!(fs::read(&file.path).unwrap(), b"something else");
    let listed = Listed::of(&file.path).unwrap();
    assert_eq!((listed.is_arena, listed.holder, listed.process), (false, None, None));
    let link = directory.0.join("link");
    symlink(&file.path, &link).unwrap();
    let error = open(&ArenaFile { path: link, ..file.clone() }).unwrap_err();
    assert!(matches!(error, ArenaFileError::Foreign { .. }), "{error}");
    assert!(error.to_string().contains("is a symbolic link"), "{error}");
    let on_disk = PathBuf::from("/proc/self/status");
    let error = open(&ArenaFile { path: on_disk, ..file }).unwrap_err();
    assert!(matches!(error, ArenaFileError::OnDisk { .. }), "{error}");
}

/// Who drops a file has given no option of a server.
#[test]
fn a_file_that_cannot_be_dropped_is_described_without_options_of_a_server() {
    let directory = Directory::new("dropped");
    let [fifo, link, other, open_to_all, missing] =
        ["fifo", "link", "other", "open", "missing"].map(|name| directory.0.join(name));
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &fifo,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::from_raw_mode(0o600),
        0,
    )
    .unwrap();
    for (path, mode) in [(&other, 0o600), (&open_to_all, 0o644)] {
        fs::write(path, b"something else").unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }
    symlink(&other, &link).unwrap();
    for (path, what) in [
        (&fifo, "no regular file"),
        (&link, "a symbolic link"),
        (&other, "no arena's file"),
        (&open_to_all, "may be opened by other users; `chmod 600 "),
        (&missing, "there is no file "),
        (&directory.0, "is a directory"),
    ] {
        let error = Listed::drop_file(path).unwrap_err();
        let said = error.advice(&Reader::Arenas);
        assert!(said.contains(what) && said.contains(&path.display().to_string()), "{said}");
        assert!(said.contains("chmod") || said.contains("`bluebridge arena list`"), "{said}");
        assert!(!said.contains("--"), "{said}");
        assert_eq!(path.symlink_metadata().is_ok(), *path != missing, "it stays");
        assert_eq!(
            Listed::of(path).err().map(|error| error.to_string()),
            match what {
                "no arena's file" => None,
                _ => Some(error.to_string()),
            }
        );
    }
}

#[test]
fn a_file_of_another_version_is_refused_as_such() {
    let directory = Directory::new("version");
    let file = directory.file();
    drop(open(&file).unwrap().assign(holder(3, 5)).unwrap());
    let mut image = fs::read(&file.path).unwrap();
    image[8..12].copy_from_slice(&2_u32.to_ne_bytes());
    fs::write(&file.path, &image).unwrap();
    let error = open(&file).unwrap_err();
    assert!(matches!(error, ArenaFileError::OtherVersion { found: 2, .. }), "{error}");
    assert_remedies(&error, "--fresh", &[RESTART]);
    let checked = ArenaFile::check(&file.path).unwrap_err();
    assert!(matches!(checked, ArenaFileError::OtherVersion { found: 2, .. }), "{checked}");
    let listed = Listed::of(&file.path).unwrap();
    assert_eq!((listed.version, listed.place), (Some(2), Place::InFile));
    // What is at the place of `backing` may be anything in another version, and nothing is gone therefore.
    image[52..56].copy_from_slice(&1_u32.to_ne_bytes());
    fs::write(&file.path, &image).unwrap();
    assert_eq!(Listed::of(&file.path).unwrap().place, Place::InFile);
    let checked = ArenaFile::check(&file.path).unwrap_err();
    assert!(matches!(checked, ArenaFileError::OtherVersion { found: 2, .. }), "{checked}");
    assert!(open(&ArenaFile { is_fresh: true, ..file }).is_ok());
}

#[test]
fn a_file_that_was_not_finished_is_made_again() {
    let directory = Directory::new("stopped");
    let file = directory.file();
    let stopped = file.open(|_, _| ControlFlow::Break(()));
    assert!(matches!(stopped, Err(ArenaFileError::GivenUp)));
    let kept = open(&file).unwrap();
    assert_eq!(kept.holder(), None);
    let mut parts = kept.assign(holder(3, 5)).unwrap().parts;
    let pages = parts.remove(0).pages;
    assert!(pages.get(0..pages.len()).iter().all(|byte| *byte == 0));
}

#[test]
fn a_file_whose_maker_was_killed_is_made_again_or_dropped() {
    let directory = Directory::new("killed");
    let file = directory.file();
    drop(open(&file).unwrap().assign(holder(3, 5)).unwrap());
    let whole = fs::read(&file.path).unwrap();
    // The header is written first, with a state of zeros; then the file gets its length.
    let mut header = whole[..512].to_vec();
    header[12..16].fill(0);
    for length in [header.len(), whole.len()] {
        header.resize(length, 0);
        fs::write(&file.path, &header).unwrap();
        assert_eq!(open(&file).unwrap().holder(), None);
        assert!(!file.path.exists(), "it was not assigned again");
        fs::write(&file.path, &header).unwrap();
        fs::set_permissions(&file.path, fs::Permissions::from_mode(0o600)).unwrap();
        Listed::drop_file(&file.path).unwrap();
        fs::write(&file.path, &header).unwrap();
        fs::set_permissions(&file.path, fs::Permissions::from_mode(0o600)).unwrap();
    }
}

#[test]
fn a_file_without_room_is_refused() {
    let directory = Directory::new("room");
    // Far more than any machine has: that must be known before anything is allocated.
    let file = ArenaFile { bytes: 1 << 47, shard_count: 256, ..directory.file() };
    let error = open(&file).unwrap_err();
    let is_memory = matches!(error, ArenaFileError::NoRoom { lack: Lack::Memory, .. });
    assert!(is_memory, "{error}");
    assert_remedies(&error, "use less --memory", &["rack with less --memory"]);
    assert!(!file.path.exists(), "it takes no memory");
}

/// No user can do something against the want of a page, or of an inode, with a smaller arena.
#[test]
fn less_memory_is_a_remedy_only_if_it_helps() {
    let error = |lack, bytes| ArenaFileError::NoRoom { path: "/dev/shm/x".into(), bytes, lack };
    for lack in [Lack::Files, Lack::Memory, Lack::Quota, Lack::Room] {
        let small = error(lack, 4096);
        assert_remedies(&small, "", &["`bluebridge rack restart`"]);
        for reader in [Reader::Server, Reader::Rack { restart: RESTART.to_owned(), keeps: false }] {
            let helps = lack != Lack::Files;
            assert!(!small.advice(&reader).contains("--memory"), "{lack:?}");
            assert_eq!(error(lack, 1 << 24).advice(&reader).contains("--memory"), helps);
        }
    }
    assert!(error(Lack::Files, 1 << 24).to_string().contains("its inodes are used up"));
    let huge = error(Lack::HugePages(1 << 30), 1 << 24);
    let setting = "/sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages";
    assert_remedies(&huge, setting, &[setting, "`bluebridge rack restart`"]);
    // A machine with more memory does not have more huge pages.
    assert!(!huge.advice(&Reader::Server).contains("end other programs"));
}

/// The rest is tested in a virtual machine, which has a pool of huge pages of its own.
#[test]
fn a_file_in_huge_pages_consists_of_whole_ones() {
    let huge = Pages::Huge(2 << 20);
    for (bytes, whole) in [(0, 0), (1, 2 << 20), (2 << 20, 2 << 20), ((2 << 20) + 1, 4 << 20)] {
        assert_eq!(huge.holding(bytes), whole);
    }
    assert_eq!((Pages::Small.holding(4097), huge.holding(usize::MAX)), (8192, usize::MAX));
    assert_eq!(pool_bytes(12_288), None, "no processor has huge pages of this size");
}

#[test]
fn a_directory_that_is_missing_is_named_with_what_to_do() {
    let directory = Directory::new("gone");
    let file = ArenaFile { path: directory.0.join("none/arena"), ..directory.file() };
    let error = open(&file).unwrap_err();
    assert!(matches!(error, ArenaFileError::NoDirectory { .. }), "{error}");
    let gone = ArenaFileError::NoDirectory { directory: "/dev/shm".into() };
    assert_remedies(&gone, "--arena-file", &["mount -t tmpfs", "`bluebridge rack restart`"]);
    let read_only = ArenaFileError::ReadOnly { path: "/dev/shm/arena".into() };
    assert_remedies(
        &read_only,
        "remount,rw /dev/shm",
        &["remount,rw /dev/shm", "`bluebridge rack restart`"],
    );
    let on_disk = ArenaFileError::OnDisk { path: "/dev/shm/arena".into() };
    assert_remedies(
        &on_disk,
        "on a tmpfs with --arena-file",
        &["mount -t tmpfs", "`bluebridge rack restart`"],
    );
    for what in [Foreign::Link, Foreign::OfUser(7), Foreign::Directory, Foreign::NoRegularFile] {
        let squatted = ArenaFileError::Foreign { path: "/dev/shm/arena".into(), what };
        assert_remedies(&squatted, "--arena-file", &["/dev/shm/arena`", "`rm ", RESTART]);
    }
}

/// What drops the memory is said afterwards, or not at all if it does not help.
#[test]
fn who_wants_to_keep_memory_learns_first_what_keeps_it() {
    let reader = Reader::Rack { restart: RESTART.to_owned(), keeps: true };
    let path = || "/dev/shm/arena".into();
    let foreign = |what| ArenaFileError::Foreign { path: path(), what };
    let keep = format!("then `{RESTART} --keep`");
    for (error, first) in [
        (foreign(Foreign::OpenToOthers), "`chmod 600 /dev/shm/arena`"),
        (foreign(Foreign::OfUser(7)), "if it is the server's, `chown "),
    ] {
        let remedy = error.remedy(&reader).unwrap();
        assert!(remedy.starts_with(first) && remedy.ends_with(&keep), "{remedy}");
        assert_eq!(remedy.matches(RESTART).count(), 1, "{remedy}");
    }
    for error in [
        foreign(Foreign::Directory),
        foreign(Foreign::Link),
        foreign(Foreign::NoRegularFile),
        ArenaFileError::Copy { path: path() },
        ArenaFileError::Missing { path: path() },
        ArenaFileError::NoArena { path: path() },
    ] {
        let remedy = error.remedy(&reader).unwrap();
        assert!(remedy.starts_with("put the server's file back in its place (then `"), "{remedy}");
        assert!(remedy.ends_with(&format!("begin with empty memory (`{RESTART}`)")), "{remedy}");
    }
    let damaged = ArenaFileError::Damaged { path: path(), what: "it has another length".into() };
    assert!(damaged.remedy(&reader).unwrap().contains("drops the contents"));
}

/// As far as that can be seen while a server uses it.
#[test]
fn a_file_in_use_is_checked_without_its_lock() {
    let directory = Directory::new("checked");
    let file = directory.file();
    let missing = ArenaFile::check(&file.path).unwrap_err();
    assert!(matches!(missing, ArenaFileError::Missing { .. }), "{missing}");
    let kept = open(&file).unwrap();
    assert_eq!(ArenaFile::check(&file.path).unwrap(), None);
    let used = kept.assign(holder(3, 5)).unwrap();
    assert_eq!(ArenaFile::check(&file.path).unwrap(), Some(holder(3, 5)));
    let length = fs::metadata(&file.path).unwrap().len();
    let resized = fs::File::options().write(true).open(&file.path).unwrap();
    resized.set_len(length + 4096).unwrap();
    let error = ArenaFile::check(&file.path).unwrap_err();
    assert!(error.to_string().contains("it has another length"), "{error}");
    resized.set_len(length).unwrap();
    assert_eq!(ArenaFile::check(&file.path).unwrap(), Some(holder(3, 5)));
    drop(used);
}
