//! Applies faults and ends them.

use core::time::Duration;

use bluebridge_protocol::{Timestamp, requester::OperationId, store::PageStore};

use super::{Event, World};
use crate::sim::{migration::Move, network::Direction, plan::Fault, server_node};

/// How long a server responds SHUTTING_DOWN.
const SHUTDOWN: Duration = Duration::from_millis(5);

impl World {
    pub(super) fn faults(&mut self) -> Result<(), String> {
        while let Some(&(after, fault)) = self.plan.faults.get(self.next_fault)
            && after < self.started
        {
            self.next_fault += 1;
            trace!(self, "{fault:?}");
            self.strike(fault)?;
        }
        Ok(())
    }

    pub(super) fn strike(&mut self, fault: Fault) -> Result<(), String> {
        self.report.count_fault(fault);
        let (now, clients) = (self.now, self.clients.len());
        match fault {
            Fault::Astray { server, endpoint, length } => {
                // No trouble for the server's clients: nothing may end by what another node replies.
                self.network.lead_astray(server_node(server), endpoint);
                self.push(now + length, Event::EndAstray { server });
            }
            Fault::Authority { server, length } => {
                self.trouble(server, now + length);
                self.servers[server].set_authority(false);
                self.push(now + length, Event::Authority { server });
            }
            Fault::ClientRestart { client, zombie } => {
                // With short sessions a zombie's CREATE would be repeated in one session after the
                // other.
                let zombie = zombie && self.plan.session_idle > Duration::from_secs(1);
                for slot in self.clients[client].slots.iter() {
                    self.ledger.forget(now, client, (slot, zombie))?;
                }
                self.clients[client].restart(&self.plan, client, zombie);
                self.push(now, Event::Think { client });
            }
            Fault::Freeze { endpoint, length } => {
                self.ends[endpoint].frozen_until = Some(now + length);
                self.report.frozen.insert(endpoint);
                self.push(now + length, Event::Thaw { endpoint });
            }
            Fault::Migrate => self.migrate(),
            Fault::MoveBack => self.move_back(),
            Fault::Partition { endpoint, up, down, length } => {
                for (direction, cut) in [(Direction::Up, up), (Direction::Down, down)] {
                    if cut {
                        self.network.cut(endpoint, direction, now + length);
                    }
                }
            }
            Fault::ServerRestart { server, contents, away } => {
                self.stop_server(server, contents, away);
            }
            Fault::ServerShutdown { server } => {
                self.trouble(server, now + SHUTDOWN);
                self.servers[server].responder.begin_shutdown();
                self.push(now + SHUTDOWN, Event::Return { server, contents: false });
            }
            Fault::SwitchRestart { away } => {
                self.network.restart_switch();
                self.push(now + away, Event::Program);
            }
            Fault::SwitchWipe { away } => {
                self.network.wipe_switch();
                self.push(now + away, Event::Program);
            }
        }
        debug_assert!(clients > 0, "a run has clients");
        Ok(())
    }

    /// Cancels an outstanding operation of this incarnation.
    pub(super) fn cancel(
        &mut self,
        client: usize,
        id: OperationId,
        token: u64,
    ) -> Result<(), String> {
        let now = self.local(client);
        if self.is_frozen(client) || !self.clients[client].requester.cancel(now, id) {
            return Ok(());
        }
        let slot = self.clients[client].slots.remove(token).ok_or("a cancelled operation")?;
        trace!(self, "client {client} cancels {:?}", slot.task);
        self.report.operations += 1;
        self.ledger.forget(self.now, client, (&slot, false))?;
        self.pump(client)
    }

    /// Moves a line to another server, if possible: its contents, and the servers' state.
    pub(super) fn migrate(&mut self) {
        let regions = self.ledger.regions.iter_mut();
        let movable = regions
            .filter(|region| region.is_usable() && !region.busy && region.deleting_from.is_none());
        let Some((region, line)) = movable
            .filter_map(|region| region.line().map(|line| (region, line)))
            .find(|(region, _)| !region.was_moved)
        else {
            return;
        };
        let (from, to) = (region.server, (region.server + 1) % self.servers.len());
        let Some(moved) = Move::begin(self.now, &mut self.servers, (from, to), line) else {
            return;
        };
        region.was_moved = true;
        trace!(self, "line {:?} of server {from} moved to {to}", moved.pages);
        self.moves.push(moved);
        self.report.count("move", "line moved", 1);
    }

    pub(super) fn move_back(&mut self) {
        let Some(moved) = self.moves.pop() else { return };
        if !moved.end(self.now, &mut self.servers) {
            self.moves.push(moved);
            return;
        }
        trace!(self, "line {:?} of server {} moved back", moved.pages, moved.from);
        self.report.count("move", "line moved back", 1);
    }

    pub(super) fn trouble(&mut self, server: usize, until: Timestamp) {
        let facts = &mut self.ledger.servers[server];
        facts.troubled_until = facts.troubled_until.max(until);
    }

    pub(super) fn stop_server(&mut self, server: usize, contents: bool, away: Duration) {
        self.servers[server].is_away = true;
        self.trouble(server, self.now + away);
        self.push(self.now + away, Event::Return { server, contents });
    }

    pub(super) fn return_server(&mut self, server: usize, contents: bool) {
        trace!(self, "server {server} is back");
        self.report.add_responder(&self.servers[server].responder);
        let provisional = self.servers[server].responder.provisional_pages();
        let now = self.local(self.clients.len() + server);
        self.servers[server].restart(now, &self.plan, server, contents);
        self.servers[server].is_away = false;
        self.trouble(server, self.now);
        let facts = &mut self.ledger.servers[server];
        facts.generation = self.servers[server].store.generation();
        if contents {
            // Pages that were not confirmed, or are requested again in a new session, stay
            // allocated.
            let pages = (0..provisional).map(|_| 1);
            self.ledger.servers[server].orphans.extend(pages);
            self.ledger.orphan_creates(server, self.clients.iter().flat_map(|c| c.slots.iter()));
        } else {
            self.ledger.lose(self.now, server);
        }
        self.ends[self.clients.len() + server].timer = None;
    }

    pub(super) fn thaw(&mut self, endpoint: usize) -> Result<(), String> {
        let end = &mut self.ends[endpoint];
        if end.frozen_until.is_some_and(|until| until > self.now) {
            return Ok(());
        }
        trace!(self, "endpoint {endpoint} continues");
        let end = &mut self.ends[endpoint];
        end.frozen_until = None;
        for frame in core::mem::take(&mut end.waiting) {
            self.receive(endpoint, &frame)?;
        }
        self.after(endpoint)?;
        self.timeout(endpoint)
    }
}
