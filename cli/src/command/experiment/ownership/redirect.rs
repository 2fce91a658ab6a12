//! How soon after a grant the switch sends requests to the owner.

use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use anyhow::{Context, anyhow};
use bluebridge::{Client, Error, Event, Placement, Pointer, Region};
use bluebridge_bench::placement::now;
use bluebridge_bench::summary::{Samples, Summary};
use bluebridge_rack::Rack;
use bluebridge_rack::spec::Node;
use bluebridge_transport::udp::UdpTransport;
use bluebridge_wire::address::PAGE_BYTES;
use serde::Serialize;

use super::join;

const OWNER: Node = Node::Client(1);
const ASKER: Node = Node::Client(2);

/// How long to wait for a redirect; less than the lease that the owner requests.
const PATIENCE: Duration = Duration::from_millis(400);

/// The results of requesting a page continuously while another client owns it.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Redirected {
    /// From the grant to the first request that reached the owner.
    pub(super) installed: Summary,
    /// From the COMMIT's response to the first request that the home served again.
    pub(super) removed: Summary,
    /// Leases without a request to the owner in time.
    pub(super) missed_count: u64,
    /// Requests until then to which the home responded.
    pub(super) home_count: u64,
    /// Requests to which the owner responded.
    pub(super) owner_count: u64,
}

/// One client owns a page repeatedly while another requests it without waiting.
pub(super) fn measure(rack: &Rack, lease_count: usize) -> anyhow::Result<Redirected> {
    let (to_owner, steps) = mpsc::channel();
    let (to_asker, times) = mpsc::channel();
    let region = rack.enter(OWNER, || {
        let mut client = join(rack, OWNER)?;
        anyhow::Ok(client.create_at(PAGE_BYTES as u64, Placement::Anywhere)?)
    })??;
    thread::scope(|scope| {
        let own = move || own(rack, region, &steps, &to_asker);
        let ask = move || ask(rack, region.base(), lease_count, &to_owner, &times);
        let owning = scope.spawn(move || rack.enter(OWNER, own));
        let asking = scope.spawn(move || rack.enter(ASKER, ask));
        let asked = asking.join().map_err(|_| anyhow!("the asking client panicked"))??;
        owning.join().map_err(|_| anyhow!("the owning client panicked"))???;
        asked
    })
}

/// Owns the page from one step to the next; sends the times of grant and commit.
fn own(
    rack: &Rack,
    region: Region,
    steps: &mpsc::Receiver<()>,
    times: &mpsc::Sender<Duration>,
) -> anyhow::Result<()> {
    let mut client = join(rack, OWNER)?;
    let mut page = [0; PAGE_BYTES];
    while steps.recv().is_ok() {
        let update = client.update(region.base(), &mut page)?;
        times.send(now())?;
        steps.recv().context("the asking client failed")?;
        update.commit()?;
        times.send(now())?;
    }
    Ok(client.delete(region)?)
}

fn ask(
    rack: &Rack,
    pointer: Pointer,
    lease_count: usize,
    steps: &mpsc::Sender<()>,
    times: &mpsc::Receiver<Duration>,
) -> anyhow::Result<Redirected> {
    let mut client = join(rack, ASKER)?;
    let (mut installed, mut removed) = (Samples::default(), Samples::default());
    let (mut missed_count, mut home_count, mut owner_count) = (0, 0, 0);
    for _ in 0..lease_count {
        steps.send(())?;
        let granted = times.recv().context("the owning client failed")?;
        loop {
            let reached = try_once(&mut client, pointer)?;
            let waited = now().saturating_sub(granted);
            if reached {
                owner_count += 1;
                installed.add(waited);
                break;
            }
            home_count += 1;
            if waited > PATIENCE {
                missed_count += 1;
                break;
            }
        }
        steps.send(())?;
        let committed = times.recv().context("the owning client failed")?;
        while try_once(&mut client, pointer)? {
            owner_count += 1;
            if now().saturating_sub(committed) > PATIENCE {
                break;
            }
        }
        removed.add(now().saturating_sub(committed));
    }
    let (installed, removed) = (installed.summary(), removed.summary());
    Ok(Redirected { installed, removed, missed_count, home_count, owner_count })
}

/// Requests the page without waiting; returns whether the owner responded first.
fn try_once(client: &mut Client<UdpTransport>, pointer: Pointer) -> anyhow::Result<bool> {
    let returned = |client: &Client<UdpTransport>| client.counters().of(Event::RedirectReturn);
    let before = returned(client);
    let mut word = [0; 8];
    match client.try_update(pointer, &mut word) {
        Ok(update) => update.abort()?,
        Err(Error::Busy { .. }) => {}
        Err(error) => return Err(error.into()),
    }
    Ok(returned(client) > before)
}
