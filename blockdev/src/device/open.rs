//! Making, attaching and deleting disks.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bluebridge::{
    Client, DeleteRequest, Error, NodeId, Pointer, Region, Transport, Update, UpdateOptions,
};
use crossbeam_utils::atomic::AtomicCell;

use super::call::Turn;
use super::descriptor::{ENTRIES, LEASE_MAX, PAGE_BYTES, Page, Properties, TablePage};
use super::health::Health;
use super::keeper::{CALL, Keeper, Ownership, PAUSE};
use super::slabs::Slabs;
use super::{
    Disk, DiskError, Failure, Freeing, MapError, Placement, Reported, SLAB_BYTES_MAX,
    SLAB_BYTES_MIN, SLABS_MAX, is_of_missing_memory, lock,
};
use crate::nbd::NAME_BYTES_MAX;

/// Slabs that are freed at once.
const BATCH: usize = 256;
/// The least time for a change of the map: the outcome of one that is begun too late is unknown.
const CHANGE_TIME: Duration = Duration::from_millis(200);
/// The shortest lease of an owner: a part of it is not used.
pub const LEASE_MIN: Duration = Duration::from_millis(500);
/// The shortest deadline of requests.
const DEADLINE_MIN: Duration = Duration::from_millis(50);
/// The most time of a call in a request's first round, and its least.
const PATIENCE: Duration = Duration::from_secs(1);
/// See [`PATIENCE`].
const PATIENCE_MIN: Duration = Duration::from_millis(20);
/// How often a process that wants a disk looks whether it is free. It does not queue for the lease: it would get it in
/// the moment in which another one that has just attached the disk takes its own.
const LOOK: Duration = Duration::from_millis(25);
/// A lease that was seen so shortly before its end has ended by itself.
const SEEN: Duration = Duration::from_millis(500);
/// How exactly the end of a lease is known.
const ABOUT: Duration = Duration::from_millis(5);
/// For how long a lease is renewed while the earlier owner's ends.
const RENEWED_FOR: Duration = Duration::from_secs(3600);

/// The properties of a new disk.
#[derive(Clone, Debug)]
pub struct DiskOptions {
    /// Its length in bytes, a multiple of 4096.
    pub size_bytes: u64,
    /// Bytes of a slab, a power of two from 1 MiB to 64 MiB.
    pub slab_bytes: u64,
    /// How slabs are distributed.
    pub placement: Placement,
    /// A name, for people and for NBD clients; up to 255 bytes.
    pub name: String,
    /// A number that no other disk has.
    pub id: u64,
}

/// How a process serves a disk.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// How long a request may go without progress, 50 ms at least. Also how long an attach waits for the end of
    /// another process's lease.
    pub deadline: Duration,
    /// How long this process may go on with the disk without a response of the map's server, from [`LEASE_MIN`] to 65 s.
    /// The next owner waits for that time if this one was killed. A server grants at most 10 s by default.
    pub lease: Duration,
    /// The live memory servers.
    pub nodes: Vec<NodeId>,
}

impl DiskOptions {
    /// Checks them, as [`Disk::create`] does.
    ///
    /// # Errors
    /// [`DiskError::Options`].
    pub fn check(&self) -> Result<(), DiskError> {
        let wrong = |words: String| Err(DiskError::Options(words));
        if self.size_bytes == 0 || !self.size_bytes.is_multiple_of(PAGE_BYTES as u64) {
            return wrong(format!("a disk's size must be a multiple of {PAGE_BYTES} bytes"));
        }
        let sizes = SLAB_BYTES_MIN..=SLAB_BYTES_MAX;
        if !self.slab_bytes.is_power_of_two() || !sizes.contains(&self.slab_bytes) {
            return wrong("a slab must have 1M, 2M, 4M, 8M, 16M, 32M or 64M".to_owned());
        }
        if self.size_bytes.div_ceil(self.slab_bytes) > SLABS_MAX {
            return wrong(format!(
                "a disk can have {SLABS_MAX} slabs; make it smaller, or its slabs larger"
            ));
        }
        if self.name.len() > NAME_BYTES_MAX {
            return wrong(format!("a disk's name can have {NAME_BYTES_MAX} bytes"));
        }
        Ok(())
    }
}

impl Disk {
    /// Makes a disk without slabs; returns the pointer that names it, at which it can be attached.
    ///
    /// # Errors
    /// [`DiskError`]; nothing stays allocated unless an outcome is unknown.
    pub fn create<T: Transport>(
        client: &mut Client<T>,
        options: &DiskOptions,
    ) -> Result<Pointer, DiskError> {
        options.check()?;
        let properties = Properties {
            id: options.id,
            owner: 0,
            size_bytes: options.size_bytes,
            slab_bytes: options.slab_bytes,
            placement: options.placement,
            is_deleted: false,
            has_ended: true,
            lease: Duration::ZERO,
            name: options.name.as_str().into(),
            node: 0,
        };
        let map = client.create(properties.map_bytes())?;
        let filled = (|| {
            for number in 0..properties.table_pages() {
                let page = TablePage::empty(properties.id, 0, number).sealed();
                client.write(table_pointer(map.base(), number)?, &page)?;
            }
            // Last, because it makes the memory a disk.
            client.write(map.base(), &properties.encode())
        })();
        match filled {
            Ok(()) => Ok(map.base()),
            Err(error) => {
                // The caller gets no pointer to it.
                let _ = client.delete(map);
                Err(error.into())
            }
        }
    }

    /// Attaches a disk: from now on this process alone serves it, until the keeper is stopped.
    ///
    /// Waits for the end of another process's lease, for the deadline of the options. If that process did not give the disk
    /// up, waits for the length of its lease then: a server that was restarted forgets leases, and their owners do not.
    ///
    /// # Errors
    /// [`DiskError`].
    pub fn attach<T: Transport + Send + 'static>(
        mut client: Client<T>,
        pointer: Pointer,
        options: OpenOptions,
    ) -> Result<(Arc<Self>, Keeper<T>), DiskError> {
        if options.lease < LEASE_MIN {
            return Err(DiskError::Options(format!(
                "a disk's lease must be {LEASE_MIN:?} or more"
            )));
        }
        let deadline = options.deadline.max(DEADLINE_MIN);
        client.set_deadline(options.deadline);
        let taken = take(&mut client, pointer, Some(options.lease))?;
        let pages = {
            // The lease that the keeper will have, so that another process is refused from now on.
            let mut page: Page = [0; PAGE_BYTES];
            let mut held = hold(&mut client, pointer, &mut page, &taken.properties, options.lease)?;
            let pages = take_table(held.client(), pointer, &taken.properties)?;
            taken.wait();
            pages
        };
        let properties = declare(&mut client, pointer, taken.properties, options.lease)?;
        let slab = |number: u64| {
            let (page, entry) = place(number);
            pages.get(page).and_then(|page| page.slab(entry))
        };
        let freeing = |page: &TablePage| Freeing {
            slab: AtomicCell::new(page.freeing()),
            turn: Turn::default(),
            // The keeper frees it, if it is not free: servers that do not respond keep nobody waiting.
            is_owed: AtomicBool::new(page.freeing().is_some()),
        };
        let patience = PATIENCE.min(deadline / 4).max(PATIENCE_MIN);
        let slabs = Slabs::new(&properties, (0..properties.slab_count()).map(slab));
        let disk = Arc::new(Self {
            pointer,
            slabs,
            ownership: Ownership::new(options.lease),
            health: Health::default(),
            passed_over: Health::default(),
            turn: Turn::default(),
            nodes: Mutex::new(Vec::new()),
            deadline,
            patience,
            enough: PATIENCE.min(deadline / 2),
            pass_time: patience.min(options.lease / 8),
            change_time: CHANGE_TIME.min(deadline / 8).min(options.lease / 16),
            freeing: pages.iter().map(freeing).collect(),
            reported: Reported::new(),
            properties,
        });
        lock(&disk.nodes).reserve(256);
        disk.set_nodes(options.nodes.into_iter());
        let keeper = Keeper::start(client, Arc::clone(&disk), options.lease)?;
        Ok((disk, keeper))
    }

    /// Frees a disk that no process serves, with all its slabs.
    ///
    /// With `force`, it is freed although slabs cannot be; the caller gets their pointers, because nobody else has them
    /// then, also if it is unknown whether the map is freed.
    ///
    /// # Errors
    /// [`DiskError`]; it can be repeated.
    pub fn delete<T: Transport>(
        client: &mut Client<T>,
        pointer: Pointer,
        force: bool,
    ) -> Result<Deleted, DiskError> {
        let taken = take(client, pointer, None)?;
        let properties = &taken.properties;
        let pages = take_table(client, pointer, properties)?;
        taken.wait();
        let slabs: Vec<_> = (0..properties.slab_count())
            .filter_map(|number| {
                let (page, entry) = place(number);
                let slab = pages.get(page)?.slab(entry)?;
                let start = number * properties.slab_bytes;
                let length = (properties.size_bytes - start).min(properties.slab_bytes);
                Region::new(slab, length).ok()
            })
            .collect();
        let slab_count = slabs.len() as u64;
        let mut freed = Freed::default();
        freed.free(client, &slabs)?;
        for slab in pages.iter().filter_map(TablePage::freeing) {
            // Usually it is free.
            freed.free_given_up(client, slab);
        }
        let Freed { left, first, .. } = freed;
        if let Some(first) = first
            && !force
        {
            return Err(DiskError::SlabsLeft { count: left.len() as u64, first });
        }
        let map = Region::new(pointer, properties.map_bytes()).map_err(Error::from)?;
        match client.delete(map) {
            Ok(()) => Ok(Deleted { slab_count, left, map: None }),
            Err(error) if left.is_empty() => Err(error.into()),
            Err(error) => Ok(Deleted { slab_count, left, map: Some(error) }),
        }
    }
}

/// A disk that was deleted.
#[derive(Clone, Debug)]
pub struct Deleted {
    /// How many slabs it had.
    pub slab_count: u64,
    /// Those that are still allocated.
    pub left: Vec<Pointer>,
    /// Why the map may still be allocated, if some are left; then the disk can be deleted again.
    pub map: Option<Error>,
}

/// Slabs that are being freed.
#[derive(Default)]
struct Freed {
    left: Vec<Pointer>,
    /// The first error.
    first: Option<Error>,
    /// Servers that did not respond: they are not asked again.
    silent: Vec<NodeId>,
}

impl Freed {
    fn free<T: Transport>(
        &mut self,
        client: &mut Client<T>,
        slabs: &[Region],
    ) -> Result<(), DiskError> {
        for batch in slabs.chunks(BATCH) {
            let is_skipped = |slab: &Region| self.silent.contains(&slab.base().node);
            let (skipped, asked): (Vec<_>, Vec<_>) = batch.iter().copied().partition(is_skipped);
            self.left.extend(skipped.into_iter().map(Region::base));
            let mut requests: Vec<_> = asked.into_iter().map(DeleteRequest::new).collect();
            client.delete_many(&mut requests)?;
            for request in requests {
                self.note(request.region.base(), request.result);
            }
        }
        Ok(())
    }

    fn free_given_up<T: Transport>(&mut self, client: &mut Client<T>, slab: Pointer) {
        if self.silent.contains(&slab.node) {
            self.left.push(slab);
        } else {
            let result = client.delete_pointer(slab).map(drop);
            self.note(slab, result);
        }
    }

    fn note(&mut self, slab: Pointer, result: Result<(), Error>) {
        match result {
            Ok(()) => {}
            // An earlier try, or its server, has freed it.
            Err(error) if is_of_missing_memory(&error) => {}
            Err(error) => {
                if Failure::of(&error) == Failure::Unanswered {
                    self.silent.push(slab.node);
                }
                self.left.push(slab);
                self.first.get_or_insert(error);
            }
        }
    }
}

/// The page and the entry of a slab.
pub(super) fn place(slab: u64) -> (usize, usize) {
    let entries = ENTRIES as u64;
    let page = usize::try_from(slab / entries).unwrap_or(usize::MAX);
    (page, usize::try_from(slab % entries).unwrap_or(0))
}

pub(super) fn table_pointer(map: Pointer, page: u64) -> Result<Pointer, Error> {
    Ok(map.checked_add((1 + page) * PAGE_BYTES as u64)?)
}

/// The disk is the caller's, but for what an earlier owner still has in flight.
struct Taken {
    properties: Properties,
    /// When the earlier owner has certainly stopped.
    from: Instant,
}

impl Taken {
    /// Waits until the earlier owner has stopped: it may still trust its lease.
    fn wait(&self) {
        let time = self.from.saturating_duration_since(Instant::now());
        if !time.is_zero() {
            tracing::info!(
                ?time,
                "the disk's earlier owner did not give it up; waiting for its lease"
            );
            std::thread::sleep(time);
        }
    }
}

/// Makes the caller the owner: counts the owner's number up. It will have a `lease`, or deletes the disk. It waits until
/// the client's deadline for another owner's lease.
///
/// An owner that lives may have no lease at the moment: its server forgets it when it is restarted, and then it takes it
/// again as soon as it sees that. It is given the time for that, unless its lease was seen to end by itself, or it was an
/// earlier process of the caller's node.
fn take<T: Transport>(
    client: &mut Client<T>,
    pointer: Pointer,
    lease: Option<Duration>,
) -> Result<Taken, DiskError> {
    let until = Instant::now() + client.deadline();
    let options = UpdateOptions { wait: false, ..UpdateOptions::default() };
    // When the lease was seen last, and its end then.
    let mut seen: Option<(Instant, Instant)> = None;
    let mut has_waited = false;
    // Since when every look after that found no lease.
    let mut free_since: Option<Instant> = None;
    let own = client.node().0;
    let mut page: Page = [0; PAGE_BYTES];
    let mut update = loop {
        match client.update_with(pointer, &mut page, options) {
            Ok(update) => {
                let now = Instant::now();
                let has_ended = seen.is_some_and(|(at, end)| now < at + SEEN && now + ABOUT >= end);
                let found = Properties::decode(&copied(&update));
                match found {
                    Ok(earlier)
                        if !earlier.has_ended
                            && earlier.node != own
                            && !has_ended
                            && !has_waited =>
                    {
                        drop(update);
                        has_waited = true;
                        // It still trusts the lease, then leaves others an eighth of it, then asks; a call that began
                        // before the server was back may take its time.
                        let time = earlier.lease + earlier.lease / 4 + CALL;
                        tracing::info!(
                            ?time,
                            "the disk was not given up; its owner may take it again"
                        );
                        std::thread::sleep(time);
                    }
                    // An owner that lives gives its lease up for moments while the map's server is drained.
                    Ok(earlier)
                        if !earlier.has_ended
                            && earlier.node != own
                            && !has_ended
                            && free_since.get_or_insert(now).elapsed()
                                < 4 * PAUSE + earlier.lease / 4 =>
                    {
                        drop(update);
                        std::thread::sleep(LOOK);
                    }
                    _ => break update,
                }
            }
            Err(Error::Busy { owner, remaining_ms, .. }) => {
                let now = Instant::now();
                if now >= until {
                    return Err(DiskError::InUse { owner, remaining_ms });
                }
                seen = Some((now, now + Duration::from_millis(remaining_ms.into())));
                (has_waited, free_since) = (false, None);
                std::thread::sleep(LOOK);
            }
            Err(error) => return Err(error.into()),
        }
    };
    let earlier = Properties::decode(&copied(&update)).and_then(|properties| {
        if properties.is_deleted && lease.is_some() {
            Err(MapError::Deleted)
        } else {
            Ok(properties)
        }
    });
    let earlier = match earlier {
        Ok(properties) => properties,
        Err(error) => {
            // Its lease would end by itself.
            let _ = update.abort();
            return Err(error.into());
        }
    };
    let waits = if earlier.has_ended { Duration::ZERO } else { earlier.lease };
    let properties = Properties {
        owner: earlier.owner + 1,
        is_deleted: lease.is_none(),
        has_ended: lease.is_none() && earlier.has_ended,
        // If this process ends now, the next one waits for whoever has longer.
        lease: waits.max(lease.unwrap_or_default()),
        node: own,
        ..earlier
    };
    update.copy_from_slice(&properties.encode());
    update.commit()?;
    Ok(Taken { properties, from: Instant::now() + waits })
}

/// Takes the lease on the properties, if the disk is still the caller's.
fn hold<'a, T: Transport>(
    client: &'a mut Client<T>,
    pointer: Pointer,
    page: &'a mut Page,
    properties: &Properties,
    lease: Duration,
) -> Result<Update<'a, T>, DiskError> {
    let options =
        UpdateOptions { lease: Some(lease), renew_limit: RENEWED_FOR, ..UpdateOptions::default() };
    let update = client.update_with(pointer, page, options)?;
    let found = Properties::decode(&copied(&update))?;
    if (found.id, found.owner) != (properties.id, properties.owner) {
        return Err(DiskError::TakenOver);
    }
    Ok(update)
}

/// Says for how long the next owner must wait, now that the earlier owner has stopped.
fn declare<T: Transport>(
    client: &mut Client<T>,
    pointer: Pointer,
    properties: Properties,
    lease: Duration,
) -> Result<Properties, DiskError> {
    let lease = lease.min(LEASE_MAX);
    if properties.lease == lease {
        return Ok(properties);
    }
    let mut page: Page = [0; PAGE_BYTES];
    let mut update = hold(client, pointer, &mut page, &properties, lease)?;
    let properties = Properties { lease, ..properties };
    update.copy_from_slice(&properties.encode());
    update.commit()?;
    Ok(properties)
}

/// Reads the table, and keeps earlier owners from changing it.
fn take_table<T: Transport>(
    client: &mut Client<T>,
    pointer: Pointer,
    properties: &Properties,
) -> Result<Vec<TablePage>, DiskError> {
    let mut pages = Vec::new();
    for number in 0..properties.table_pages() {
        let mut page: Page = [0; PAGE_BYTES];
        let mut update = client.update(table_pointer(pointer, number)?, &mut page)?;
        let mut table = match TablePage::decode(copied(&update), properties.id, number) {
            Ok(table) => table,
            Err(error) => {
                let _ = update.abort();
                return Err(error.into());
            }
        };
        if table.owner() > properties.owner {
            let _ = update.abort();
            return Err(DiskError::TakenOver);
        }
        table.set_owner(properties.owner);
        update.copy_from_slice(&table.clone().sealed());
        update.commit()?;
        pages.push(table);
    }
    Ok(pages)
}

/// The page that an update holds.
pub(super) fn copied(bytes: &[u8]) -> Page {
    let mut page = [0; PAGE_BYTES];
    page.copy_from_slice(bytes);
    page
}
