//! Memory for arenas, reserved completely at the start, or refused.

use std::{fs, ops::ControlFlow};

use rustix::io::Errno;

use crate::{
    direct::{DirectMemory, NoDirectReads},
    kept::ShardMemory,
    memory::{self, HUGE_PAGE_BYTES, Memory, PageKind},
    sizes::SHARD_BYTES_MAX,
};

/// When the system provides the memory.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Claim {
    /// At the start, completely, so that the promised memory is there.
    #[default]
    Prefault,
    /// At the start, and it can never be swapped out. Needs CAP_IPC_LOCK or RLIMIT_MEMLOCK.
    Lock,
    /// When a page is first used. The start is fast, and other processes can use the memory until
    /// then, but a system that runs short later may kill the server.
    OnDemand,
}

/// Bytes that are populated between two progress reports of [`Reservation::reserve_with_progress`].
const STEP_BYTES: usize = 64 << 20;

/// How much memory, and of what kind.
#[derive(Clone, Copy, Debug)]
pub struct Reservation {
    /// Bytes for all shards together.
    pub bytes: u64,
    /// Shards, which get equal parts.
    pub shard_count: u16,
    /// When the system provides it.
    pub claim: Claim,
    /// Try huge pages of the system's pool first, then transparent ones; else take plain pages.
    pub prefer_huge_pages: bool,
}

/// Memory that was reserved.
#[derive(Debug)]
pub struct Reserved {
    /// A part per shard, in the order of the shards.
    pub parts: Vec<ShardMemory>,
    /// The kind of its pages.
    pub page_kind: PageKind,
    /// Why better kinds were not available; empty if the best was.
    pub refusals: Vec<(PageKind, String)>,
    /// What the kernel needs to answer READs of it, or why it does not.
    pub direct: Result<DirectMemory, NoDirectReads>,
}

/// The memory is not available; the operator must request less, free some, or raise a limit.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReserveError {
    /// The caller stopped the reservation.
    #[error("reserving {bytes} bytes of memory was stopped")]
    GivenUp {
        /// Bytes requested.
        bytes: u64,
    },
    /// The memory cannot be locked.
    #[error(
        "cannot lock {bytes} bytes in memory: {error}; raise the limit of locked memory \
         (ulimit -l), or start without locking"
    )]
    Lock {
        /// Bytes requested.
        bytes: u64,
        /// The system's error.
        #[source]
        error: Errno,
    },
    /// No mapping of this size is possible.
    #[error("cannot map {bytes} bytes of memory: {error}; use a smaller arena")]
    Map {
        /// Bytes requested.
        bytes: u64,
        /// The system's error.
        #[source]
        error: Errno,
    },
    /// The system, or the limit of the process's control group, does not have as much.
    #[error(
        "{bytes} bytes of memory were requested, but only {available_bytes} are available; \
         use a smaller arena"
    )]
    NotAvailable {
        /// Bytes requested.
        bytes: u64,
        /// Bytes available.
        available_bytes: u64,
    },
    /// The system ran short of memory while it provided the pages.
    #[error("the system could not provide {bytes} bytes of memory: {error}; request less")]
    Populate {
        /// Bytes requested.
        bytes: u64,
        /// The system's error.
        #[source]
        error: Errno,
    },
    /// The size is outside of the limits: every shard has at least a page, and at most 512 GiB.
    #[error(
        "{bytes} bytes for {shard_count} shards; a shard takes 4 KiB to 512 GiB, \
         and there are 1 to 256 shards"
    )]
    Size {
        /// Bytes requested.
        bytes: u64,
        /// Shards.
        shard_count: u16,
    },
}

impl Reservation {
    /// Reserves the memory: one zeroed mapping, with a part per shard. Each part is rounded down to
    /// 2 MiB, or to a page if it is smaller, so that no more than the requested memory is used.
    ///
    /// # Errors
    /// [`ReserveError`] if it is not available; then nothing stays reserved.
    pub fn reserve(self) -> Result<Reserved, ReserveError> {
        self.reserve_with_progress(|_, _| ControlFlow::Continue(()))
    }

    /// As [`Self::reserve`], and calls `progress` after every step with the bytes that are provided
    /// and the bytes in all: large memory takes seconds. `progress` may stop the reservation.
    ///
    /// # Errors
    /// [`ReserveError`] if it is not available or `progress` stopped it; then nothing stays
    /// reserved.
    pub fn reserve_with_progress(
        self,
        mut progress: impl FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<Reserved, ReserveError> {
        let Self { bytes, shard_count, claim, .. } = self;
        let size_error = ReserveError::Size { bytes, shard_count };
        let shards = u64::from(shard_count);
        if shards == 0 || shards > 256 || bytes == 0 {
            return Err(size_error);
        }
        let share = bytes / shards;
        let huge = HUGE_PAGE_BYTES as u64;
        let unit = if share >= huge { huge } else { bluebridge_wire::address::PAGE_BYTES as u64 };
        let shard_bytes = share - share % unit;
        if shard_bytes == 0 || shard_bytes > SHARD_BYTES_MAX {
            return Err(size_error);
        }
        let Ok(total) = usize::try_from(shard_bytes * shards) else { return Err(size_error) };
        let (mut whole, page_kind, refusals) = self.map(total)?;
        // The mapping set aside huge pages of the pool already.
        if page_kind != PageKind::Huge {
            check_available(total as u64, available_bytes())?;
        }
        if claim != Claim::OnDemand {
            let bytes = total as u64;
            for start in (0..total).step_by(STEP_BYTES) {
                let end = total.min(start + STEP_BYTES);
                memory::populate(&mut whole, start..end)
                    .map_err(|error| ReserveError::Populate { bytes, error })?;
                if progress(end as u64, bytes).is_break() {
                    return Err(ReserveError::GivenUp { bytes });
                }
            }
        }
        if claim == Claim::Lock {
            memory::lock(&mut whole)
                .map_err(|error| ReserveError::Lock { bytes: total as u64, error })?;
        }
        let parts = memory::split(whole, usize::from(shard_count))
            .into_iter()
            .map(|part| Memory::mapped(part).into())
            .collect();
        Ok(Reserved { parts, page_kind, refusals, direct: Err(NoDirectReads::NotKept) })
    }

    /// Maps the best available kind of pages.
    fn map(self, bytes: usize) -> Result<Mapped, ReserveError> {
        let mut refusals = Vec::new();
        let candidates: &[(PageKind, bool)] = if self.prefer_huge_pages {
            &[(PageKind::Huge, true), (PageKind::Transparent, true), (PageKind::Transparent, false)]
        } else {
            &[]
        };
        for &(kind, is_shared) in candidates {
            let allowed = match kind {
                PageKind::Transparent => transparent_allowed(is_shared),
                _ => Ok(()),
            };
            let mapped = allowed.and_then(|()| {
                memory::map(bytes, kind, is_shared).map_err(|error| error.to_string())
            });
            match mapped {
                Ok(part) => return Ok((part, kind, refusals)),
                Err(reason) => refusals.push((kind, reason)),
            }
        }
        match memory::map(bytes, PageKind::Plain, true) {
            Ok(part) => Ok((part, PageKind::Plain, refusals)),
            Err(error) => Err(ReserveError::Map { bytes: bytes as u64, error }),
        }
    }
}

type Mapped = (memory::Part, PageKind, Vec<(PageKind, String)>);

/// Whether the system gives transparent huge pages to mappings that request them.
fn transparent_allowed(is_shared: bool) -> Result<(), String> {
    let name = if is_shared { "shmem_enabled" } else { "enabled" };
    let path = format!("/sys/kernel/mm/transparent_hugepage/{name}");
    let setting = fs::read_to_string(&path).map_err(|error| format!("{path}: {error}"))?;
    let chosen = setting.split_once('[').and_then(|(_, rest)| rest.split_once(']'));
    match chosen {
        Some(("never" | "deny", _)) | None => Err(format!("{path} says {}", setting.trim())),
        Some(_) => Ok(()),
    }
}

fn check_available(bytes: u64, available: Option<u64>) -> Result<(), ReserveError> {
    match available {
        Some(available_bytes) if available_bytes < bytes => {
            Err(ReserveError::NotAvailable { bytes, available_bytes })
        }
        _ => Ok(()),
    }
}

/// What the system and the process's control group have available; `None` if neither is known.
pub(crate) fn available_bytes() -> Option<u64> {
    let system = fs::read_to_string("/proc/meminfo").ok().and_then(|text| mem_available(&text));
    [system, group_room()].into_iter().flatten().min()
}

fn mem_available(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kibibytes.checked_mul(1024)
}

/// The smallest remaining memory of this process's control group (version 2) and of those above it.
fn group_room() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = groups.lines().find_map(|line| line.strip_prefix("0::"))?;
    let root = std::path::Path::new("/sys/fs/cgroup");
    let own = root.join(path.trim_start_matches('/'));
    own.ancestors()
        .take_while(|directory| directory.starts_with(root))
        .filter_map(|directory| {
            let number = |name: &str| {
                fs::read_to_string(directory.join(name)).ok()?.trim().parse::<u64>().ok()
            };
            Some(number("memory.max")?.saturating_sub(number("memory.current")?))
        })
        .min()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn small(claim: Claim, prefer_huge_pages: bool) -> Reservation {
        Reservation { bytes: 8 << 20, shard_count: 2, claim, prefer_huge_pages }
    }

    #[test]
    fn parts_are_disjoint_zeroed_and_as_large_as_requested() {
        for claim in [Claim::Prefault, Claim::OnDemand] {
            for prefer_huge_pages in [false, true] {
                let mut reserved = small(claim, prefer_huge_pages).reserve().unwrap();
                let [low, high] = reserved.parts.as_mut_slice() else { panic!("two parts") };
                let (low, high) = (&mut low.pages, &mut high.pages);
                assert_eq!((low.len(), high.len()), (4 << 20, 4 << 20));
                let are = |part: &Memory, value| {
                    part.get(0..part.len()).iter().all(|&byte| byte == value)
                };
                assert!(are(low, 0) && are(high, 0));
                low.get_mut(0..4 << 20).fill(1);
                assert!(are(high, 0));
                high.get_mut(0..4 << 20).fill(2);
                assert!(are(low, 1));
                drop(reserved.parts.pop());
                assert!(are(&reserved.parts[0].pages, 1));
            }
        }
    }

    #[test]
    fn every_step_reports_progress_and_can_be_the_last() {
        let bytes = 2 * STEP_BYTES as u64 + (4 << 20);
        let request =
            |claim| Reservation { bytes, shard_count: 1, claim, prefer_huge_pages: false };
        let mut steps = Vec::new();
        let reserved = request(Claim::Prefault).reserve_with_progress(|done, of| {
            steps.push((done, of));
            ControlFlow::Continue(())
        });
        assert_eq!(reserved.unwrap().parts[0].page_bytes() as u64, bytes);
        let step = STEP_BYTES as u64;
        assert_eq!(steps, [(step, bytes), (2 * step, bytes), (bytes, bytes)]);
        let stopped = request(Claim::Prefault).reserve_with_progress(|_, _| ControlFlow::Break(()));
        assert!(matches!(stopped, Err(ReserveError::GivenUp { .. })));
        let never = |_, _| panic!("nothing is handed over at the start");
        assert!(request(Claim::OnDemand).reserve_with_progress(never).is_ok());
    }

    #[test]
    fn huge_pages_fall_back_and_report_why() {
        let reserved = small(Claim::OnDemand, true).reserve().unwrap();
        let best = reserved.page_kind == PageKind::Huge;
        assert_eq!(best, reserved.refusals.is_empty(), "{:?}", reserved.refusals);
        assert!(reserved.refusals.iter().all(|(_, reason)| !reason.is_empty()));
        let plain = small(Claim::OnDemand, false).reserve().unwrap();
        assert_eq!((plain.page_kind, plain.refusals.len()), (PageKind::Plain, 0));
    }

    #[test]
    fn more_than_the_available_memory_is_refused() {
        let available = available_bytes().expect("the system reports its available memory");
        for claim in [Claim::Prefault, Claim::Lock, Claim::OnDemand] {
            let request = Reservation {
                bytes: available + (1 << 30),
                shard_count: 1,
                claim,
                prefer_huge_pages: false,
            };
            let error = request.reserve().unwrap_err();
            assert!(matches!(error, ReserveError::NotAvailable { .. }), "{error}");
            assert!(error.to_string().contains("use a smaller arena"));
        }
    }

    #[test]
    fn invalid_sizes_are_refused() {
        let too_large = (1 << 40) + (2 << 20);
        for (bytes, shard_count) in [(0, 1), (4095, 1), (1, 0), (1 << 30, 257), (too_large, 1)] {
            let claim = Claim::OnDemand;
            let request = Reservation { bytes, shard_count, claim, prefer_huge_pages: false };
            assert!(matches!(request.reserve(), Err(ReserveError::Size { .. })), "{bytes}");
        }
    }

    #[test]
    fn no_more_than_the_requested_memory_is_taken() {
        for (bytes, shard_count, taken) in [
            (1 << 20, 256, 1 << 20),
            (10_000, 2, 2 * 4096),
            ((4 << 20) + 4096, 1, 4 << 20),
            (9 << 20, 2, 8 << 20),
        ] {
            let claim = Claim::OnDemand;
            let request = Reservation { bytes, shard_count, claim, prefer_huge_pages: false };
            let parts = request.reserve().unwrap().parts;
            let total: usize = parts.iter().map(|part| part.page_bytes()).sum();
            assert_eq!(total, taken, "{bytes} in {shard_count}");
        }
    }

    #[test]
    fn reads_the_files_of_the_system() {
        assert_eq!(mem_available("MemTotal: 9 kB\nMemAvailable:    12 kB\n"), Some(12288));
        assert_eq!(mem_available("MemTotal: 9 kB\n"), None);
        assert!(check_available(5, Some(4)).is_err());
        assert!(check_available(5, Some(5)).is_ok());
        assert!(check_available(5, None).is_ok());
    }
}
