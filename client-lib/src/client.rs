//! The client: one thread's access to the rack's memory.

use core::time::Duration;

use bluebridge_protocol::requester::{Counters, Operation, Output, Requester, Server};
use bluebridge_transport::{Transport, udp::UdpTransport};
use bluebridge_wire::{NodeId, Pointer, Region, Usage};

use crate::{
    allocate::pages,
    config::EndpointConfig,
    drive::Driver,
    error::Error,
    many::{ReadRequest, WriteRequest, ZeroRequest},
    placement::{Placement, Places},
    service::{Notices, ServiceCounters, ServiceState, Tenant},
    update::SpareLists,
    work::{close::Closing, single::Single, transfer::Transfers},
};

/// How long [`Client::close`] waits for the servers, all together.
const CLOSE_DEADLINE: Duration = Duration::from_millis(100);

/// One thread's access to the rack's memory; see the crate's documentation.
///
/// `Client` without a carrier named is what joins a rack: over the kernel's UDP sockets.
///
/// A client that is dropped notifies every server with which it has a session, once, and does not
/// wait for responses; [`Client::close`] waits for them.
pub struct Client<T: Transport = UdpTransport> {
    pub(crate) driver: Driver<T>,
    pub(crate) deadline: Duration,
    pub(crate) placement: Placement,
    pub(crate) places: Places,
    /// This client's side of the endpoint's service thread.
    pub(crate) tenant: Option<Tenant>,
    /// Whether the client has already tried to start or find the service.
    pub(crate) met_service: bool,
    #[cfg(feature = "join")]
    pub(crate) lease_count: u16,
    pub(crate) spare_lists: SpareLists,
    /// The most data bytes of a datagram that the carrier takes.
    #[cfg(feature = "join")]
    pub(crate) largest_piece_bytes: u16,
    #[cfg(feature = "join")]
    pub(crate) membership: Option<crate::join::Joined>,
}

impl<T: Transport> Client<T> {
    /// A client with the identity that the controller gave, over a carrier that was set up for it.
    ///
    /// Nothing is sent yet; sessions are opened when they are needed.
    #[must_use]
    pub fn open(config: EndpointConfig, transport: T) -> Self {
        #[cfg(feature = "join")]
        let largest_piece_bytes =
            crate::config::fitting_piece(transport.capabilities()).unwrap_or(u16::MAX);
        let requester = Requester::new(config.requester(transport.capabilities()));
        Self {
            driver: Driver::new(transport, requester, config.spin),
            deadline: config.deadline,
            placement: config.placement,
            places: Places::new(&config.memory_nodes, config.seed),
            tenant: config.service.as_ref().map(|service| service.admit(config.lease_count)),
            met_service: config.service.is_some(),
            #[cfg(feature = "join")]
            lease_count: config.lease_count,
            spare_lists: SpareLists::new(),
            #[cfg(feature = "join")]
            largest_piece_bytes,
            #[cfg(feature = "join")]
            membership: None,
        }
    }

    /// Sets how long each later call may take.
    pub const fn set_deadline(&mut self, deadline: Duration) {
        self.deadline = deadline;
    }

    /// The node of its endpoint.
    #[must_use]
    pub const fn node(&self) -> NodeId {
        self.driver.requester.config().node
    }

    /// How long each call may take.
    #[must_use]
    pub const fn deadline(&self) -> Duration {
        self.deadline
    }

    /// Whether later calls poll for responses before they sleep, for as long as the endpoint is configured to; they do at
    /// first. Without polling a call leaves its core to other threads at once, and responses are seen a little later.
    pub const fn set_polling(&mut self, polls: bool) {
        self.driver.polls = polls;
    }

    /// Reads `buffer.len()` bytes.
    ///
    /// # Errors
    /// [`Error`]; the buffer's contents are then unspecified.
    pub fn read(&mut self, pointer: Pointer, buffer: &mut [u8]) -> Result<(), Error> {
        let mut requests = [ReadRequest::new(pointer, buffer)];
        self.driver.run(&mut Transfers(&mut requests), self.deadline)?;
        let [request] = requests;
        request.result
    }

    /// Writes `data`.
    ///
    /// # Errors
    /// [`Error`]; pages other than the one it names may be written.
    pub fn write(&mut self, pointer: Pointer, data: &[u8]) -> Result<(), Error> {
        let mut requests = [WriteRequest::new(pointer, data)];
        self.driver.run(&mut Transfers(&mut requests), self.deadline)?;
        let [request] = requests;
        request.result
    }

    /// Zeroes `length` bytes in place.
    ///
    /// # Errors
    /// [`Error`]; pages other than the one it names may be zeroed.
    pub fn zero(&mut self, pointer: Pointer, length: u64) -> Result<(), Error> {
        let mut requests = [ZeroRequest::new(pointer, length)];
        self.driver.run(&mut Transfers(&mut requests), self.deadline)?;
        let [request] = requests;
        request.result
    }

    /// Reads many ranges at once; each request gets its own result.
    ///
    /// # Errors
    /// Only if the carrier failed, and with it every request that had not ended.
    pub fn read_many(&mut self, requests: &mut [ReadRequest<'_>]) -> Result<(), Error> {
        for request in &mut *requests {
            *request = ReadRequest::new(request.pointer, core::mem::take(&mut request.buffer));
        }
        self.driver.run(&mut Transfers(requests), self.deadline)
    }

    /// Writes many ranges at once, in no order; each request gets its own result.
    ///
    /// # Errors
    /// Only if the carrier failed; data that was in flight may be written.
    pub fn write_many(&mut self, requests: &mut [WriteRequest<'_>]) -> Result<(), Error> {
        for request in &mut *requests {
            *request = WriteRequest::new(request.pointer, request.data);
        }
        self.driver.run(&mut Transfers(requests), self.deadline)
    }

    /// Replaces the 8 bytes at an aligned pointer (little endian) by `new` if they are `expected`;
    /// returns their previous value, so that equality with `expected` means success.
    ///
    /// # Errors
    /// [`Error`].
    pub fn compare_swap(
        &mut self,
        pointer: Pointer,
        expected: u64,
        new: u64,
    ) -> Result<u64, Error> {
        let operation = Operation::CompareSwap { pointer, expected, new };
        self.word(pointer, operation)
    }

    /// Adds to the 8 bytes at an aligned pointer (little endian, wrapping); returns their previous value.
    ///
    /// # Errors
    /// [`Error`].
    pub fn fetch_add(&mut self, pointer: Pointer, addend: u64) -> Result<u64, Error> {
        self.word(pointer, Operation::FetchAdd { pointer, addend })
    }

    /// Frees an allocation; its whole region, as it was created.
    ///
    /// # Errors
    /// [`Error`].
    pub fn delete(&mut self, region: Region) -> Result<(), Error> {
        self.free(region.base(), pages(region.length_bytes())?).map(|_| ())
    }

    /// Frees the allocation that begins at `pointer`, whatever its length; returns its number of pages.
    ///
    /// # Errors
    /// [`Error`].
    pub fn delete_pointer(&mut self, pointer: Pointer) -> Result<u32, Error> {
        self.free(pointer, 0)
    }

    /// The memory use of a node, all its shards together.
    ///
    /// # Errors
    /// [`Error`].
    pub fn stat(&mut self, node: NodeId) -> Result<Usage, Error> {
        let mut total = self.stat_server(Server { node, shard: 0 })?;
        let count = u8::try_from(total.shard_count.saturating_sub(1)).unwrap_or(u8::MAX);
        for shard in 1..=count {
            let usage = self.stat_server(Server { node, shard })?;
            total.capacity_pages += usage.capacity_pages;
            total.free_pages += usage.free_pages;
            total.quota_pages = total.quota_pages.saturating_add(usage.quota_pages);
            total.used_pages += usage.used_pages;
            total.provisional_pages += usage.provisional_pages;
            total.session_count += usage.session_count;
            total.answered_count += usage.answered_count;
            total.retired_pages += usage.retired_pages;
        }
        Ok(total)
    }

    /// Checks that a node responds; returns the round-trip time.
    ///
    /// # Errors
    /// [`Error`].
    pub fn ping(&mut self, node: NodeId) -> Result<Duration, Error> {
        let server = Server { node, shard: 0 };
        // The first response of a new session would include the time of its opening.
        self.single(Operation::Ping { server, length: 0 }, None, &[])?;
        let before = self.driver.now();
        self.single(Operation::Ping { server, length: 0 }, None, &[])?;
        Ok(self.driver.now() - before)
    }

    /// Closes all sessions, so that the servers need not wait until they expire.
    ///
    /// # Errors
    /// Only if the carrier failed.
    pub fn close(mut self) -> Result<(), Error> {
        let servers = self.driver.requester.open_servers().collect();
        self.driver.run(&mut Closing(servers), CLOSE_DEADLINE)
    }

    /// The counters of the protocol's requester.
    #[must_use]
    pub const fn counters(&self) -> &Counters {
        self.driver.requester.counters()
    }

    /// Received datagrams that were damaged or do not belong to the protocol.
    #[must_use]
    pub const fn malformed_count(&self) -> u64 {
        self.driver.malformed_count
    }

    /// Datagrams that the carrier was too busy to take; they were sent again later.
    #[must_use]
    pub const fn unsent_count(&self) -> u64 {
        self.driver.unsent_count
    }

    /// What the endpoint's service thread can do: renew leases, respond to redirected requests, receive
    /// notices.
    #[must_use]
    pub fn service_state(&self) -> ServiceState {
        if let Some(tenant) = &self.tenant {
            return tenant.service().state();
        }
        #[cfg(feature = "join")]
        if let Some(joined) = &self.membership {
            return joined.service_state();
        }
        ServiceState::Absent
    }

    /// What the endpoint's service thread did so far; `None` if it has none, or none that started.
    #[must_use]
    pub fn service_counters(&self) -> Option<ServiceCounters> {
        self.tenant.as_ref().map(|tenant| tenant.service().counters())
    }

    /// The notices of the space that arrive from now on; starts the endpoint's service thread if
    /// that is not done. `None` if it has none.
    ///
    /// They arrive only if they were requested when joining, and can be lost, late or repeated.
    pub fn notices(&mut self) -> Option<Notices> {
        self.meet_service();
        self.tenant.as_ref().map(|tenant| tenant.service().notices())
    }

    /// Connects the client to the endpoint's service, if there is one and this was not done yet.
    pub(crate) fn meet_service(&mut self) {
        if self.met_service {
            return;
        }
        self.met_service = true;
        #[cfg(feature = "join")]
        if let Some(service) = self.membership.as_ref().and_then(crate::join::Joined::service) {
            self.tenant = Some(service.admit(self.lease_count));
        }
    }

    /// The carrier.
    #[must_use]
    pub const fn transport(&self) -> &T {
        &self.driver.transport
    }

    /// Does one operation that sends `data` and receives no bytes.
    pub(crate) fn single(
        &mut self,
        operation: Operation,
        pointer: Option<Pointer>,
        data: &[u8],
    ) -> Result<Output, Error> {
        self.run_single(Single::new(operation, pointer, data, &mut []), self.deadline)
    }

    /// Does one operation.
    pub(crate) fn run_single(
        &mut self,
        mut single: Single<'_>,
        deadline: Duration,
    ) -> Result<Output, Error> {
        self.driver.run(&mut single, deadline)?;
        single.result()
    }

    pub(crate) fn stat_server(&mut self, server: Server) -> Result<Usage, Error> {
        match self.single(Operation::Stat { server }, None, &[])? {
            Output::Usage(usage) => Ok(usage),
            _ => Err(Error::Violation { node: server.node }),
        }
    }

    fn word(&mut self, pointer: Pointer, operation: Operation) -> Result<u64, Error> {
        match self.single(operation, Some(pointer), &[])? {
            Output::Previous(word) => Ok(word),
            _ => Err(Error::Violation { node: pointer.node }),
        }
    }

    fn free(&mut self, pointer: Pointer, pages: u32) -> Result<u32, Error> {
        match self.single(Operation::Delete { pointer, pages }, Some(pointer), &[])? {
            Output::Freed(pages) => Ok(pages),
            _ => Err(Error::Violation { node: pointer.node }),
        }
    }
}

impl<T: Transport> Drop for Client<T> {
    fn drop(&mut self) {
        self.driver.leave();
    }
}
