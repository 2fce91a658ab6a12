//! The memory servers, as the pager of this process uses them.

use std::io;
use std::time::{Duration, Instant};

use bluebridge::{Client, Error, ReadRequest, Region, UdpConfig, UdpTransport, WriteRequest};
use bluebridge_pager::{Error as PagerError, RemoteMemory};
use bluebridge_run::Settings;

use crate::run::run;

/// A client of the endpoint; what it allocates is noted in the ledger.
struct Noted {
    client: Client<UdpTransport>,
    /// When the counters were last published.
    published: Instant,
}

/// How often the counters are published, so that they are known of a process that is killed.
const PERIOD: Duration = Duration::from_millis(100);

/// Opens a client.
pub(crate) fn open(settings: &Settings) -> Result<Box<dyn RemoteMemory>, PagerError> {
    let config = settings.client();
    let carrier = UdpConfig {
        address: Some(config.address()),
        device: Some(settings.interface.clone()),
        ..UdpConfig::default()
    };
    let transport = UdpTransport::open(&carrier).map_err(|error| PagerError::System {
        what: "open a socket to the memory servers",
        error: io::Error::other(error),
    })?;
    Ok(Box::new(Noted { client: Client::open(config, transport), published: Instant::now() }))
}

impl RemoteMemory for Noted {
    fn create(&mut self, length_bytes: u64) -> Result<Region, Error> {
        let region = self.client.create(length_bytes)?;
        if run().is_none_or(|run| run.note(region)) {
            return Ok(region);
        }
        self.client.delete(region)?;
        // The ledger has no room for more.
        Err(Error::Length)
    }

    fn delete(&mut self, region: Region) -> Result<(), Error> {
        self.client.delete(region)?;
        if let Some(run) = run() {
            run.forget(region);
        }
        Ok(())
    }

    fn fault_begun(&mut self, at: Instant) {
        if at.saturating_duration_since(self.published) > PERIOD {
            self.published = at;
            if let Some(run) = run() {
                run.publish(&run.region().counts());
            }
        }
    }

    fn is_alone(&mut self) -> bool {
        run().is_none_or(|run| run.ledger.is_alone(run.slot()))
    }

    fn set_polling(&mut self, polls: bool) {
        self.client.set_polling(polls);
    }

    fn read_many(&mut self, requests: &mut [ReadRequest<'_>]) -> Result<(), Error> {
        self.client.read_many(requests)
    }

    fn write_many(&mut self, requests: &mut [WriteRequest<'_>]) -> Result<(), Error> {
        let result = self.client.write_many(requests);
        // With each batch: if the process is killed soon, it is known at least that its memory did not stay local.
        if let Some(run) = run() {
            run.publish(&run.region().counts());
        }
        result
    }
}
