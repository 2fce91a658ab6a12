//! Getting and freeing many allocations at once, pipelined over all the servers.

use bluebridge_protocol::requester::{Operation, Output, Server};
use bluebridge_transport::Transport;
use bluebridge_wire::{Region, address::LINE_BYTES};

use crate::{
    allocate::{allocated, pages},
    client::Client,
    error::Error,
    placement::Placement,
    work::allocation::{Creations, Deletions},
};

/// Memory to allocate.
#[derive(Debug)]
pub struct CreateRequest<'a> {
    bytes: u64,
    data: &'a [u8],
    /// Where it goes.
    pub placement: Placement,
    /// The region; the call sets it.
    pub result: Result<Region, Error>,
    /// The operation to request, once its place is chosen.
    operation: Option<Operation>,
}

impl<'a> CreateRequest<'a> {
    /// Zeroed memory for `bytes` bytes; the region is made of whole pages.
    #[must_use]
    pub const fn new(bytes: u64, placement: Placement) -> Self {
        Self { bytes, data: &[], placement, result: Err(Error::Length), operation: None }
    }

    /// Memory that holds `data`, 1 byte to 32 KiB.
    #[must_use]
    pub const fn holding(data: &'a [u8], placement: Placement) -> Self {
        let mut request = Self::new(data.len() as u64, placement);
        request.data = data;
        request
    }

    fn pages(&self) -> Result<u32, Error> {
        if self.data.len() > LINE_BYTES {
            return Err(Error::Length);
        }
        pages(self.bytes)
    }

    fn ask(&mut self, server: Option<Server>) -> Result<(), Error> {
        let pages = self.pages()?;
        self.operation = Some(if self.data.is_empty() {
            Operation::Create { server, pages }
        } else {
            let length = u32::try_from(self.data.len()).map_err(|_| Error::Length)?;
            Operation::AllocWrite { server, length }
        });
        Ok(())
    }

    /// The operation to request; `None` before its place is chosen.
    pub(crate) const fn operation(&self) -> Option<Operation> {
        self.operation
    }

    /// The data to write; empty if only zeroed memory is requested.
    pub(crate) const fn data(&self) -> &[u8] {
        self.data
    }

    /// Stores what the server returned.
    pub(crate) fn settle(&mut self, result: Result<Output, Error>) {
        self.result = result.and_then(|answer| allocated(answer, self.pages()?));
    }
}

/// An allocation to free.
#[derive(Debug)]
pub struct DeleteRequest {
    /// The whole region, as it was created.
    pub region: Region,
    /// The result; the call sets it.
    pub result: Result<(), Error>,
}

impl DeleteRequest {
    /// A request that was not sent yet.
    #[must_use]
    pub const fn new(region: Region) -> Self {
        Self { region, result: Ok(()) }
    }
}

impl<T: Transport> Client<T> {
    /// Allocates many regions at once; each request gets its region, or the reason why it has none.
    ///
    /// # Errors
    /// Only if the carrier failed; requests that were in flight may leave memory allocated.
    pub fn create_many(&mut self, requests: &mut [CreateRequest<'_>]) -> Result<(), Error> {
        for request in &mut *requests {
            let server = self.choose(request.placement, request.pages().unwrap_or(0));
            let asked = server.and_then(|server| request.ask(server));
            // Replaced by the result; a request that could not be sent keeps its error.
            request.result = asked.and(Err(Error::Length));
        }
        self.driver.run(&mut Creations(requests), self.deadline)?;
        for request in requests {
            let is_full = request.result.as_ref().is_err_and(Error::is_of_full_server);
            if is_full && request.placement == Placement::TwoChoices {
                request.result = if request.data.is_empty() {
                    self.create_at(request.bytes, request.placement)
                } else {
                    self.alloc_write_at(request.data, request.placement)
                };
            }
        }
        Ok(())
    }

    /// The server that gets the request; any for [`Placement::Anywhere`].
    fn choose(&mut self, placement: Placement, pages: u32) -> Result<Option<Server>, Error> {
        #[cfg(feature = "join")]
        self.refresh_places();
        match placement {
            Placement::Anywhere => Ok(None),
            Placement::Node(node) => Ok(Some(self.places.draw_of(node))),
            Placement::TwoChoices => {
                let (first, second) = self.places.draw_two().ok_or(Error::NoMemoryNode)?;
                let (better, _) = self.compare(first, second);
                self.places.take(better, pages);
                Ok(self.places.at(better).map(|place| place.server))
            }
        }
    }

    /// Frees many allocations at once, in no order; each request gets its own result.
    ///
    /// # Errors
    /// Only if the carrier failed; allocations whose requests were in flight may be freed.
    pub fn delete_many(&mut self, requests: &mut [DeleteRequest]) -> Result<(), Error> {
        for request in &mut *requests {
            request.result = Ok(());
        }
        self.driver.run(&mut Deletions(requests), self.deadline)
    }
}
