//! Getting pages.

use core::time::Duration;

use bluebridge_protocol::requester::{Operation, Output, Server};
use bluebridge_transport::Transport;
use bluebridge_wire::{
    NodeId, Region,
    address::{LINE_BYTES, PAGE_BYTES},
};

use crate::{client::Client, error::Error, placement::Placement};

/// How long a placement waits for a node's report of its free pages; the other node may respond.
const STAT_PATIENCE: Duration = Duration::from_millis(250);

impl<T: Transport> Client<T> {
    /// Allocates zeroed memory for `bytes` bytes at the configured placement.
    ///
    /// The region is made of whole pages, so it may be longer.
    ///
    /// # Errors
    /// [`Error`].
    pub fn create(&mut self, bytes: u64) -> Result<Region, Error> {
        self.create_at(bytes, self.placement)
    }

    /// Allocates zeroed memory for `bytes` bytes.
    ///
    /// # Errors
    /// [`Error`].
    pub fn create_at(&mut self, bytes: u64, placement: Placement) -> Result<Region, Error> {
        let pages = pages(bytes)?;
        self.allocate(pages, placement, |server| Operation::Create { server, pages }, &[])
    }

    /// Allocates memory at the configured placement and writes `data` to it; up to 32 KiB in one
    /// round trip.
    ///
    /// # Errors
    /// [`Error`]; no memory stays allocated unless its outcome is unknown.
    pub fn alloc_write(&mut self, data: &[u8]) -> Result<Region, Error> {
        self.alloc_write_at(data, self.placement)
    }

    /// Allocates memory and writes `data` to it; up to 32 KiB in one round trip.
    ///
    /// # Errors
    /// [`Error`]; no memory stays allocated unless its outcome is unknown.
    pub fn alloc_write_at(&mut self, data: &[u8], placement: Placement) -> Result<Region, Error> {
        if data.is_empty() {
            return Err(Error::Length);
        }
        if data.len() > LINE_BYTES {
            let region = self.create_at(data.len() as u64, placement)?;
            if let Err(error) = self.write(region.base(), data) {
                // The caller gets no pointer to the region, so it must not stay allocated.
                let _ = self.delete(region);
                return Err(error);
            }
            return Ok(region);
        }
        let length = u32::try_from(data.len()).map_err(|_| Error::Length)?;
        let pages = pages(data.len() as u64)?;
        self.allocate(pages, placement, |server| Operation::AllocWrite { server, length }, data)
    }

    fn allocate(
        &mut self,
        pages: u32,
        placement: Placement,
        operation: impl Fn(Option<Server>) -> Operation,
        data: &[u8],
    ) -> Result<Region, Error> {
        #[cfg(feature = "join")]
        self.refresh_places();
        match placement {
            // The switch would drop it, and the call would fail only at its deadline.
            #[cfg(feature = "join")]
            Placement::Anywhere if self.knows_that_none_is_there() => Err(Error::NoMemoryNode),
            Placement::Anywhere => self.allocate_on(operation(None), pages, data),
            Placement::Node(node) => {
                let server = self.places.draw_of(node);
                self.allocate_on(operation(Some(server)), pages, data)
            }
            Placement::TwoChoices => {
                let (first, second) = self.places.draw_two().ok_or(Error::NoMemoryNode)?;
                let (better, worse) = self.compare(first, second);
                match self.allocate_at(better, pages, &operation, data) {
                    Err(error) if error.is_of_full_server() && worse != better => {
                        self.allocate_at(worse, pages, &operation, data)
                    }
                    result => result,
                }
            }
        }
    }

    /// Two places, the one with more free pages first; one that does not respond comes last.
    pub(crate) fn compare(&mut self, first: usize, second: usize) -> (usize, usize) {
        if first == second {
            return (first, second);
        }
        let (here, there) = (self.free_pages(first), self.free_pages(second));
        if there > here { (second, first) } else { (first, second) }
    }

    fn free_pages(&mut self, place: usize) -> Option<u64> {
        let now = self.driver.now();
        let known = self.places.at(place)?;
        if let Some(free_pages) = known.fresh(now) {
            return Some(free_pages);
        }
        let server = known.server;
        let deadline = self.deadline;
        self.deadline = deadline.min(STAT_PATIENCE);
        let usage = self.stat_server(server);
        self.deadline = deadline;
        let usage = usage.ok()?;
        let now = self.driver.now();
        self.places.note(place, usage.free_pages, now);
        Some(usage.free_pages)
    }

    fn allocate_at(
        &mut self,
        place: usize,
        pages: u32,
        operation: impl Fn(Option<Server>) -> Operation,
        data: &[u8],
    ) -> Result<Region, Error> {
        let server = self.places.at(place).map(|place| place.server);
        let region = self.allocate_on(operation(server), pages, data)?;
        self.places.take(place, pages);
        Ok(region)
    }

    fn allocate_on(
        &mut self,
        operation: Operation,
        pages: u32,
        data: &[u8],
    ) -> Result<Region, Error> {
        allocated(self.single(operation, None, data)?, pages)
    }
}

/// The pages that `bytes` bytes take.
///
/// # Errors
/// [`Error::Length`] if there are none, or more than one allocation has.
pub(crate) fn pages(bytes: u64) -> Result<u32, Error> {
    let pages = u32::try_from(bytes.div_ceil(PAGE_BYTES as u64)).ok();
    pages.filter(|pages| *pages > 0).ok_or(Error::Length)
}

/// The region of `pages` pages that a server returned.
pub(crate) fn allocated(output: Output, pages: u32) -> Result<Region, Error> {
    match output {
        Output::Pointer(pointer) => {
            let length = u64::from(pages) * PAGE_BYTES as u64;
            Region::new(pointer, length).map_err(|_| Error::Violation { node: pointer.node })
        }
        _ => Err(Error::Violation { node: NodeId::ANY }),
    }
}
