//! A client: a requester, its owner of leases, and its jobs.

use core::time::Duration;

use bluebridge_protocol::{
    Timestamp,
    owner::{Owner, OwnerConfig, Policy},
    requester::{Buffers, Config, Requester},
};
use bluebridge_wire::Datagram;

use super::job::Job;
use crate::sim::{SPACE, client_node, network};

/// Jobs by their token.
#[derive(Default)]
pub(super) struct Jobs(pub(super) Vec<Option<Job>>);

impl Jobs {
    pub(super) fn get(&mut self, token: u64) -> Option<&mut Job> {
        self.0.get_mut(usize::try_from(token).ok()?)?.as_mut()
    }

    pub(super) fn take(&mut self, token: u64) -> Option<Job> {
        self.0.get_mut(usize::try_from(token).ok()?)?.take()
    }

    pub(super) fn insert(&mut self, job: Job) -> u64 {
        self.0.push(Some(job));
        self.0.len() as u64 - 1
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Job> {
        self.0.iter().flatten()
    }

    pub(super) fn count(&self) -> usize {
        self.iter().count()
    }
}

impl Buffers for Jobs {
    fn outgoing(&self, token: u64) -> &[u8] {
        let index = usize::try_from(token).unwrap_or(usize::MAX);
        self.0.get(index).and_then(Option::as_ref).map_or(&[], |job| &job.outgoing)
    }

    fn incoming(&mut self, token: u64) -> &mut [u8] {
        self.get(token).map_or(&mut [], |job| &mut job.incoming)
    }
}

/// The configuration of all clients of a run.
#[derive(Clone, Copy, Debug)]
pub(super) struct ClientConfig {
    pub(super) seed: u64,
    /// What an owner does with requests that are redirected to it.
    pub(super) policy: Policy,
    /// How long an owner lets a request wait.
    pub(super) owner_wait: Duration,
    /// The idle time after which a session ends.
    pub(super) session_idle: Duration,
}

pub(super) struct Client {
    pub(super) requester: Requester,
    pub(super) owner: Owner,
    pub(super) jobs: Jobs,
    config: ClientConfig,
    incarnation: u32,
}

impl Client {
    pub(super) fn new(config: ClientConfig, index: usize, incarnation: u32) -> Self {
        let node = client_node(index);
        let seed = config.seed ^ (index as u64 + 1) << 40 ^ u64::from(incarnation) << 20;
        let mut owner = OwnerConfig::new(SPACE, node, incarnation);
        (owner.policy, owner.wait) = (config.policy, config.owner_wait);
        owner.wait_count = 2;
        let mut requester = Config::new(SPACE, node, incarnation, seed);
        requester.piece_bytes = 1368;
        requester.timing.session_idle = config.session_idle;
        Self {
            requester: Requester::new(requester),
            owner: Owner::new(owner),
            jobs: Jobs::default(),
            config,
            incarnation,
        }
    }

    /// The process crashes, and starts again.
    pub(super) fn next_life(&self, index: usize) -> Self {
        Self::new(self.config, index, self.incarnation + 1)
    }

    pub(super) fn receive(
        &mut self,
        now: Timestamp,
        received: &network::Received<'_>,
        payload: &[u8],
    ) {
        let Ok(datagram) = Datagram::parse(received.source, received.destination, payload) else {
            return;
        };
        if datagram.is_reply() {
            self.requester.handle_datagram(now, &datagram, &mut self.jobs);
        } else {
            // Notices are not used here.
            let port = received.source_port;
            let _ = self.owner.handle_datagram(now, port, &datagram, |_| false);
        }
    }

    pub(super) fn handle_timeout(&mut self, now: Timestamp) {
        self.requester.handle_timeout(now);
        self.owner.handle_timeout(now);
    }

    pub(super) fn poll_timeout(&self) -> Option<Timestamp> {
        [self.requester.poll_timeout(), self.owner.poll_timeout()].into_iter().flatten().min()
    }

    /// All frames that it has to send now.
    pub(super) fn frames(&mut self, now: Timestamp) -> Vec<Vec<u8>> {
        let mut frames = Vec::new();
        while let Some(transmit) = self.requester.poll_transmit(now, &self.jobs) {
            let parts = [transmit.head(), transmit.data];
            let ports = (network::PORT, network::PORT);
            frames.push(network::frame(transmit.source, transmit.destination, ports, parts));
        }
        while let Some(transmit) = self.owner.poll_transmit() {
            let ports = (network::PORT, transmit.destination_port);
            let parts = [transmit.head, transmit.data];
            frames.push(network::frame(transmit.source, transmit.destination, ports, parts));
        }
        frames
    }
}
