//! Keeps the configuration of a fabric interface.
//!
//! When an interface goes down, the kernel removes its routes, its addresses and even its permanent neighbours,
//! and does not restore them. One process per host watches this, not each endpoint: a client may
//! lack the privileges. This is `bluebridge host up --watch` on a host, and the daemon `hosts` in a rack.

use std::fmt;
use std::net::Ipv6Addr;
use std::time::{Duration, Instant};

use futures::{Stream, StreamExt};
use ipnet::Ipv6Net;
use rtnetlink::{Handle, MulticastGroup};
use tokio::sync::mpsc;
use tokio::time::{sleep_until, timeout};

use super::host::{HostFabric, HostPart};
use super::{Netlink, NetworkError};

/// How often everything is checked without a report of the kernel, which drops reports that are not read in time.
pub const RECHECK: Duration = Duration::from_secs(5);

/// The shortest time between two checks because of reports: each reads all routes of the host, and another
/// program may change them without end.
const CHECK_PAUSE: Duration = Duration::from_millis(100);

const GROUPS: [MulticastGroup; 5] = [
    MulticastGroup::Link,
    MulticastGroup::Neigh,
    MulticastGroup::Ipv6Ifaddr,
    MulticastGroup::Ipv6Route,
    MulticastGroup::Ipv6Rule,
];

/// Reports of the kernel.
#[derive(Debug)]
struct Reports {
    /// Whether there were reports; it ends with the connection.
    arrived: mpsc::Receiver<()>,
    /// Without it the connection ends.
    _handle: Handle,
}

/// The configuration that an interface must have while it is up.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// The interface.
    pub interface: String,
    /// Its connection to the fabric, if it has one.
    pub fabric: Option<HostFabric>,
    /// Its addresses, with the prefixes of their links.
    pub addresses: Vec<Ipv6Net>,
}

/// A part of an interface's configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// An address of its own.
    Address(Ipv6Addr),
    /// The route to the link that one of its addresses is on.
    Link(Ipv6Net),
    /// A part of its connection to the fabric.
    Part(HostPart),
}

impl fmt::Display for Need {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(address) => write!(f, "address {address}"),
            Self::Link(link) => write!(f, "route to {link}"),
            Self::Part(part) => part.fmt(f),
        }
    }
}

impl Wanted {
    /// The missing parts; if the interface is down, everything that the kernel keeps only while it is up.
    ///
    /// # Errors
    /// There is no such interface, or the kernel does not respond.
    pub fn missing(&self, netlink: &Netlink) -> Result<Vec<Need>, NetworkError> {
        let parts = self.fabric.as_ref().map_or(Ok(Vec::new()), |it| it.missing(netlink))?;
        let there = netlink.addresses(&self.interface)?;
        let mut missing = Vec::new();
        for own in &self.addresses {
            if !there.contains(&own.addr()) {
                missing.push(Need::Address(own.addr()));
            } else if !netlink.has_connected_route(*own, &self.interface)? {
                missing.push(Need::Link(own.trunc()));
            }
        }
        missing.extend(parts.into_iter().map(Need::Part));
        Ok(missing)
    }

    /// Creates the missing parts, unless the interface is down; returns them.
    ///
    /// # Errors
    /// There is no such interface, or the kernel refuses.
    pub fn restore(&self, netlink: &Netlink) -> Result<Vec<Need>, NetworkError> {
        if !netlink.link(&self.interface)?.enabled {
            return Ok(Vec::new());
        }
        let missing = self.missing(netlink)?;
        for address in &self.addresses {
            // The kernel also makes the link's route again when it is given an address again.
            let needs = [Need::Address(address.addr()), Need::Link(address.trunc())];
            if needs.iter().any(|need| missing.contains(need)) {
                netlink.add_address(&self.interface, *address)?;
            }
        }
        if let Some(fabric) = &self.fabric {
            fabric.restore(netlink)?;
        }
        Ok(missing)
    }
}

/// Watches one interface in the namespace of the thread that opened it.
#[derive(Debug)]
pub struct InterfaceWatch {
    wanted: Wanted,
    netlink: Netlink,
    reports: Reports,
    looked_at: Instant,
    /// The error that was logged last, until the interface can be set up again.
    problem: Option<String>,
}

impl InterfaceWatch {
    /// Starts listening to the kernel; changes from now on are detected.
    ///
    /// # Errors
    /// The sockets cannot be opened.
    pub fn open(wanted: Wanted) -> Result<Self, NetworkError> {
        let netlink = Netlink::open()?;
        let reports = listen(&netlink)?;
        Ok(Self { wanted, netlink, reports, looked_at: Instant::now(), problem: None })
    }

    /// Waits for a change in the namespace, at most for `limit`, then restores the missing parts; returns
    /// them. An interface that is down is left down. Changes soon after the last check wait for a tenth of a second, so
    /// that one check handles many.
    ///
    /// # Errors
    /// There is no such interface, the kernel refuses, or the sockets fail.
    pub fn wait(&mut self, limit: Duration) -> Result<Vec<Need>, NetworkError> {
        let soonest = self.looked_at + CHECK_PAUSE;
        let arrived = &mut self.reports.arrived;
        let next = self.netlink.runtime.block_on(next(arrived, limit, soonest));
        match next {
            Ok(Some(())) => {}
            // The connection ends if the kernel had to drop reports.
            Ok(None) => self.reports = listen(&self.netlink)?,
            Err(_) if self.looked_at.elapsed() < RECHECK => return Ok(Vec::new()),
            Err(_) => {}
        }
        self.look()
    }

    /// Restores the missing parts now; returns them.
    ///
    /// # Errors
    /// There is no such interface, or the kernel refuses.
    pub fn look(&mut self) -> Result<Vec<Need>, NetworkError> {
        self.looked_at = Instant::now();
        self.wanted.restore(&self.netlink)
    }

    /// Restores the missing parts now, and logs each change of state once.
    ///
    /// # Errors
    /// As for [`Self::run`].
    pub fn settle(&mut self) -> Result<(), NetworkError> {
        let looked = self.look();
        self.report(looked)
    }

    /// Watches without limit, and logs each change of state once.
    ///
    /// # Errors
    /// The caller may not change the network, or the sockets fail. Temporary errors do not end it: an interface that
    /// does not exist, or a request that the kernel refuses for another reason.
    pub fn run(mut self) -> Result<(), NetworkError> {
        self.settle()?;
        loop {
            let looked = self.wait(RECHECK);
            self.report(looked)?;
        }
    }

    fn report(&mut self, looked: Result<Vec<Need>, NetworkError>) -> Result<(), NetworkError> {
        let interface = &self.wanted.interface;
        match looked {
            Ok(restored) => {
                if self.problem.take().is_some() {
                    tracing::info!(interface, "the interface can be set up again");
                }
                for need in restored {
                    tracing::warn!(interface, restored = %need, "restored what the interface had lost");
                }
            }
            Err(error) if error.is_permission() => return Err(error),
            Err(error @ NetworkError::Open(_)) => return Err(error),
            Err(error) => {
                let words = error.to_string();
                if self.problem.as_ref() != Some(&words) {
                    tracing::warn!(interface, error = words, "the interface cannot be set up");
                    self.problem = Some(words);
                }
            }
        }
        Ok(())
    }
}

/// Waits for reports, at most for `limit`, and then until `soonest`; those of that time are included. `None` if the
/// connection has ended.
async fn next(
    arrived: &mut mpsc::Receiver<()>,
    limit: Duration,
    soonest: Instant,
) -> Result<Option<()>, tokio::time::error::Elapsed> {
    let next = timeout(limit, arrived.recv()).await?;
    sleep_until(soonest.into()).await;
    if next.is_some() {
        let _ = arrived.try_recv();
    }
    Ok(next)
}

/// Whether messages arrived, however many: they are dropped, because the check finds out by itself what changed.
fn coalesce<T>(
    messages: impl Stream<Item = T> + Send + 'static,
    runtime: &tokio::runtime::Runtime,
) -> mpsc::Receiver<()> {
    let (sender, arrived) = mpsc::channel(1);
    runtime.spawn(async move {
        let mut messages = std::pin::pin!(messages);
        while messages.next().await.is_some() {
            // If it is full, a check is due anyway.
            let _ = sender.try_send(());
        }
    });
    arrived
}

fn listen(netlink: &Netlink) -> Result<Reports, NetworkError> {
    let _guard = netlink.runtime.enter();
    let (connection, handle, messages) =
        rtnetlink::new_multicast_connection(&GROUPS).map_err(NetworkError::Open)?;
    netlink.runtime.spawn(connection);
    let arrived = coalesce(messages, &netlink.runtime);
    Ok(Reports { arrived, _handle: handle })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_reports_are_one_check_after_a_pause() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
        let runtime = runtime.expect("built");
        let (sender, messages) = futures::channel::mpsc::unbounded();
        let mut arrived = coalesce(messages, &runtime);
        let minute = Duration::from_secs(60);
        let burst = || {
            for number in 0..10_000 {
                sender.unbounded_send(number).expect("it is drained");
            }
        };
        burst();
        let began = Instant::now();
        let first = runtime.block_on(next(&mut arrived, minute, began));
        assert_eq!(first, Ok(Some(())));
        burst();
        let soonest = Instant::now() + CHECK_PAUSE;
        let second = runtime.block_on(next(&mut arrived, minute, soonest));
        assert_eq!(second, Ok(Some(())));
        assert!(Instant::now() >= soonest, "the pause was kept");
        let none = runtime.block_on(next(&mut arrived, Duration::ZERO, soonest));
        assert!(none.is_err(), "all were handled: {none:?}");
        drop(sender);
        assert_eq!(runtime.block_on(next(&mut arrived, minute, soonest)), Ok(None));
    }
}
