//! A client: a requester, the owner that answers for its leases, and its jobs.

use bluebridge_protocol::{
    Instant,
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

    pub(super) fn count(&self) -> usize {
        self.0.iter().flatten().count()
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

pub(super) struct Client {
    pub(super) requester: Requester,
    pub(super) owner: Owner,
    pub(super) jobs: Jobs,
    incarnation: u32,
}

impl Client {
    pub(super) fn new(seed: u64, index: usize, policy: Policy, incarnation: u32) -> Self {
        let node = client_node(index);
        let seed = seed ^ (index as u64 + 1) << 40 ^ u64::from(incarnation) << 20;
        let mut owner = OwnerConfig::new(SPACE, node, incarnation);
        owner.policy = policy;
        owner.wait_count = 2;
        let mut config = Config::new(SPACE, node, incarnation, seed);
        config.piece_bytes = 1368;
        Self {
            requester: Requester::new(config),
            owner: Owner::new(owner),
            jobs: Jobs::default(),
            incarnation,
        }
    }

    /// The process dies, and starts again.
    pub(super) fn next_life(&self, seed: u64, index: usize) -> Self {
        Self::new(seed, index, self.owner.config().policy, self.incarnation + 1)
    }

    pub(super) fn hear(&mut self, now: Instant, heard: &network::Heard<'_>, payload: &[u8]) {
        let Ok(datagram) = Datagram::parse(heard.source, heard.destination, payload) else {
            return;
        };
        if datagram.is_reply() {
            self.requester.handle_datagram(now, &datagram, &mut self.jobs);
        } else {
            // Nobody asks for notices here.
            let _ = self.owner.handle_datagram(now, heard.source_port, &datagram);
        }
    }

    pub(super) fn handle_timeout(&mut self, now: Instant) {
        self.requester.handle_timeout(now);
        self.owner.handle_timeout(now);
    }

    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        [self.requester.poll_timeout(), self.owner.poll_timeout()].into_iter().flatten().min()
    }

    /// All that it has to send now.
    pub(super) fn frames(&mut self, now: Instant) -> Vec<Vec<u8>> {
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
