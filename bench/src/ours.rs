//! The client library's operations, one at a time and many at once.

use std::time::Duration;

use bluebridge::{Client, NodeId, Placement, Pointer, ReadRequest, Region, WriteRequest};
use bluebridge_transport::Transport;
use bluebridge_wire::{address::PAGE_BYTES, header::HEADER_BYTES};
use serde::Serialize;

use crate::{contest::Contestant, echo::Sizes, placement::now};

/// Requests in one call of the pipelined measurements; far more than are outstanding.
const CALL_COUNT: usize = 512;

/// What an atomic operation works on.
const WORD_BYTES: usize = 8;

/// The measured operation.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Operation {
    /// CREATE of as many pages as the size needs.
    Create,
    /// DELETE of an allocation of that size.
    Delete,
    /// FETCH_ADD of 8 bytes, whatever the size.
    FetchAdd,
    /// READ of that many bytes.
    Read,
    /// WRITE of that many bytes.
    Write,
}

impl Operation {
    /// The operation's name on the wire.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Create => "CREATE",
            Self::Delete => "DELETE",
            Self::FetchAdd => "FETCH_ADD",
            Self::Read => "READ",
            Self::Write => "WRITE",
        }
    }

    /// The UDP payloads of one operation on `bytes` bytes of a page, with at most `piece_bytes` of them in a
    /// datagram, at least 1; an echo uses the same lengths.
    #[must_use]
    pub const fn sizes(self, bytes: usize, piece_bytes: usize) -> Sizes {
        let (asked, answered) = match self {
            Self::Create | Self::Delete => (0, 0),
            Self::FetchAdd => (WORD_BYTES, WORD_BYTES),
            Self::Read => (0, bytes),
            Self::Write => (bytes, 0),
        };
        Sizes {
            request_bytes: train_bytes(asked, piece_bytes),
            answer_bytes: train_bytes(answered, piece_bytes),
            datagram_bytes: HEADER_BYTES + piece_bytes,
        }
    }
}

/// Each piece has a header, and so has a datagram without data.
const fn train_bytes(data_bytes: usize, piece_bytes: usize) -> usize {
    let pieces = data_bytes.div_ceil(piece_bytes);
    data_bytes + HEADER_BYTES * if pieces == 0 { 1 } else { pieces }
}

/// One operation at a time on one server.
pub struct Ours<T: Transport> {
    client: Client<T>,
    operation: Operation,
    server: NodeId,
    bytes: u64,
    region: Option<Region>,
    data: Vec<u8>,
    /// Whether READs are those that only the server's process answers.
    is_by_server: bool,
    name: String,
}

impl<T: Transport> Ours<T> {
    /// An operation on `bytes` bytes, at least 1, of memory on `server`.
    ///
    /// # Errors
    /// A text, if there is no memory.
    pub fn new(
        mut client: Client<T>,
        operation: Operation,
        server: NodeId,
        bytes: usize,
    ) -> Result<Self, String> {
        let data = vec![0x5a; bytes];
        let bytes = bytes as u64;
        let region = match operation {
            Operation::FetchAdd | Operation::Read | Operation::Write => {
                let place = Placement::Node(server);
                let region = client.create_at(bytes, place).map_err(|e| e.to_string())?;
                client.write(region.base(), &data).map_err(|e| e.to_string())?;
                Some(region)
            }
            Operation::Create | Operation::Delete => None,
        };
        let name = operation.name().to_owned();
        Ok(Self { client, operation, server, bytes, region, data, is_by_server: false, name })
    }

    /// READs that accept stale data: the kernel never answers them, and without leases the server's
    /// process does for them what it does for all READs.
    #[must_use]
    pub fn by_server(self) -> Self {
        Self { is_by_server: true, ..self }.called("by the server")
    }

    /// Gives it a name beside other systems.
    #[must_use]
    pub fn named(self, name: &str) -> Self {
        Self { name: name.to_owned(), ..self }
    }

    /// Says in its name how it differs from others.
    #[must_use]
    pub fn called(self, how: &str) -> Self {
        let name = format!("{}, {how}", self.operation.name());
        Self { name, ..self }
    }

    /// Frees the memory and returns the client.
    ///
    /// # Errors
    /// A text.
    pub fn finish(mut self) -> Result<Client<T>, String> {
        self.delete()?;
        Ok(self.client)
    }

    fn create(&mut self) -> Result<(), String> {
        let placement = Placement::Node(self.server);
        self.region =
            Some(self.client.create_at(self.bytes, placement).map_err(|e| e.to_string())?);
        Ok(())
    }

    fn delete(&mut self) -> Result<(), String> {
        match self.region.take() {
            Some(region) => self.client.delete(region).map_err(|e| e.to_string()),
            None => Ok(()),
        }
    }

    fn base(&self) -> Result<Pointer, String> {
        self.region.map(|region| region.base()).ok_or_else(|| "there is no memory".to_owned())
    }
}

impl<T: Transport> Contestant for Ours<T> {
    fn name(&self) -> &str {
        &self.name
    }

    fn prepare(&mut self) -> Result<(), String> {
        match self.operation {
            Operation::Create => self.delete(),
            Operation::Delete => self.create(),
            Operation::FetchAdd | Operation::Read | Operation::Write => Ok(()),
        }
    }

    fn operate(&mut self) -> Result<(), String> {
        match self.operation {
            Operation::Create => self.create(),
            Operation::Delete => self.delete(),
            Operation::FetchAdd => {
                let added = self.client.fetch_add(self.base()?, 1);
                added.map(drop).map_err(|error| error.to_string())
            }
            Operation::Read => {
                let base = self.base()?;
                let read = if self.is_by_server {
                    self.client.read_stale(base, &mut self.data).map(drop)
                } else {
                    self.client.read(base, &mut self.data)
                };
                read.map_err(|error| error.to_string())
            }
            Operation::Write => {
                let base = self.base()?;
                self.client.write(base, &self.data).map_err(|error| error.to_string())
            }
        }
    }
}

/// Executes `operation_count` READs or WRITEs of `bytes` bytes, each on a different page of `region`,
/// with as many outstanding as the client allows; returns the elapsed time.
///
/// # Errors
/// A text: the first operation that failed, or an operation that cannot be pipelined.
pub fn pipeline<T: Transport>(
    client: &mut Client<T>,
    operation: Operation,
    region: Region,
    bytes: usize,
    operation_count: usize,
) -> Result<Duration, String> {
    let pages = usize::try_from(region.length_bytes()).unwrap_or(0) / PAGE_BYTES;
    let pointers = (0..CALL_COUNT.min(operation_count))
        .map(|index| region.at((index % pages.max(1) * PAGE_BYTES) as u64))
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| error.to_string())?;
    let mut memory = vec![0x5a; bytes * pointers.len()];
    let mut left = operation_count;
    let start = now();
    while left > 0 {
        let count = left.min(pointers.len());
        let memory = memory.chunks_exact_mut(bytes).zip(&pointers).take(count);
        match operation {
            Operation::Read => {
                let mut requests: Vec<_> =
                    memory.map(|(buffer, pointer)| ReadRequest::new(*pointer, buffer)).collect();
                client.read_many(&mut requests).map_err(|error| error.to_string())?;
                first_error(requests.into_iter().map(|request| request.result))?;
            }
            Operation::Write => {
                let mut requests: Vec<_> =
                    memory.map(|(data, pointer)| WriteRequest::new(*pointer, data)).collect();
                client.write_many(&mut requests).map_err(|error| error.to_string())?;
                first_error(requests.into_iter().map(|request| request.result))?;
            }
            Operation::Create | Operation::Delete | Operation::FetchAdd => {
                return Err(format!("{} is not pipelined", operation.name()));
            }
        }
        left -= count;
    }
    Ok(now() - start)
}

fn first_error(
    mut results: impl Iterator<Item = Result<(), bluebridge::Error>>,
) -> Result<(), String> {
    results.find_map(Result::err).map_or(Ok(()), |error| Err(error.to_string()))
}
