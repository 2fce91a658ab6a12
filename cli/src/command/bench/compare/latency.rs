//! One operation outstanding.

use anyhow::{Context, anyhow};
use bluebridge_bench::contest::{self, Contestant, Length, Outcome};
use bluebridge_bench::echo::Echo;
use bluebridge_bench::ours::{Operation, Ours};
use bluebridge_bench::peers::{Waiting, memcached::Datagrams};
use bluebridge_bench::pin;
use bluebridge_bench::placement::Probe;
use bluebridge_bench::summary::Samples;
use bluebridge_transport::udp::{Frames, UdpTransport};

use super::super::CLIENT_CORE;
use super::super::measure::{Plan, frames_of_environment};
use super::systems::System;
use super::{ECHO, OWN, Setting};

/// A contestant, how its client waits, and where it has its server.
struct Entry {
    contestant: Box<dyn Contestant>,
    waiting: Waiting,
    turn: usize,
}

/// Has its own turns.
struct Alone<'a> {
    entry: Entry,
    setting: &'a Setting<'a>,
}

impl Contestant for Alone<'_> {
    fn name(&self) -> &str {
        self.entry.contestant.name()
    }

    fn operate(&mut self) -> Result<(), String> {
        self.entry.contestant.operate()
    }

    fn turn(&mut self, length: Length) -> Result<Samples, String> {
        self.setting.turns.give(self.entry.turn);
        self.entry.contestant.turn(length)
    }
}

impl Setting<'_> {
    pub(super) fn latency(&self, plan: Plan, probe: &Probe) -> anyhow::Result<(Outcome, Vec<f64>)> {
        pin(CLIENT_CORE).context("cannot pin the client")?;
        let mut entries = self.ours(plan)?;
        entries.extend(self.echoes(plan)?);
        entries.extend(self.others(plan)?);
        let waiting: Vec<Waiting> = entries.iter().map(|entry| entry.waiting).collect();
        let mut all: Vec<_> =
            entries.into_iter().map(|entry| Alone { entry, setting: self }).collect();
        let mut contestants: Vec<&mut dyn Contestant> =
            all.iter_mut().map(|of| -> &mut dyn Contestant { of }).collect();
        let outcome = contest::run(&mut contestants, plan.length, self.turns, probe);
        let outcome = outcome.map_err(|error| anyhow!(error))?;
        // BlueBridge's own two are the first ones.
        let of_ours = |waiting: &Waiting| usize::from(*waiting == Waiting::Sleeping);
        let ratios =
            waiting.iter().enumerate().map(|(at, waiting)| outcome.ratio(at, of_ours(waiting)));
        let ratios = ratios.collect();
        Ok((outcome, ratios))
    }

    /// BlueBridge: first the two ways to wait.
    fn ours(&self, plan: Plan) -> anyhow::Result<Vec<Entry>> {
        let frames = frames_of_environment()?;
        let open = |name: &str, waiting, frames| -> anyhow::Result<Ours<UdpTransport>> {
            let client = self.endpoints.waiting_client(1, frames, waiting)?;
            let ours = Ours::new(client, plan.operation, self.endpoints.server, plan.bytes);
            Ok(ours.map_err(|error| anyhow!(error))?.named(name))
        };
        let entry = |ours: Ours<UdpTransport>, waiting| Entry {
            contestant: Box::new(ours),
            waiting,
            turn: OWN,
        };
        let (spinning, sleeping) = (Waiting::Spinning, Waiting::Sleeping);
        let mut entries = vec![
            entry(open("BlueBridge, spinning", spinning, frames)?, spinning),
            entry(open("BlueBridge, sleeping", sleeping, frames)?, sleeping),
            entry(open("BlueBridge by the UDP socket, spinning", spinning, Frames::Off)?, spinning),
        ];
        if plan.operation == Operation::Read {
            for (name, waiting) in [
                ("BlueBridge by the server's process, spinning", spinning),
                ("BlueBridge by the server's process, sleeping", sleeping),
            ] {
                let ours = open(name, waiting, frames)?.by_server().named(name);
                entries.push(entry(ours, waiting));
            }
        }
        Ok(entries)
    }

    fn echoes(&self, plan: Plan) -> anyhow::Result<Vec<Entry>> {
        let (sizes, to) = (self.endpoints.sizes(plan), self.endpoints.echo_server());
        let echo = || -> anyhow::Result<Echo> {
            Ok(Echo::unconnected(self.endpoints.echo_socket()?, to, sizes)?)
        };
        let entry = |echo, waiting, turn| Entry { contestant: Box::new(echo), waiting, turn };
        Ok(vec![
            entry(echo()?, Waiting::Spinning, ECHO),
            entry(echo()?.sleeping()?, Waiting::Sleeping, ECHO + 1),
        ])
    }

    fn others(&self, plan: Plan) -> anyhow::Result<Vec<Entry>> {
        let mut entries = Vec::new();
        for system in self.systems.all() {
            let exchange = system.exchange(plan.operation, plan.bytes);
            for waiting in [Waiting::Spinning, Waiting::Sleeping] {
                let client = self.systems.client(system, waiting, exchange.clone())?;
                let contestant = Box::new(client);
                entries.push(Entry { contestant, waiting, turn: OWN });
            }
            if system == System::Memcached && Datagrams::fit(&exchange) {
                let waiting = Waiting::Spinning;
                let name = format!("memcached over UDP, {}", waiting.words());
                let to = self.systems.address(system);
                let client = Datagrams::new(name, to, waiting, exchange.clone());
                let contestant = Box::new(client.context("cannot use memcached over UDP")?);
                entries.push(Entry { contestant, waiting, turn: OWN });
            }
        }
        Ok(entries)
    }
}
