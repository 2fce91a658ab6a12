//! The soft pipeline as a [`DataPlane`].

use std::{collections::BTreeSet, os::fd::BorrowedFd};

use bluebridge_p4::pipeline::{
    Action, Counter, Entry, Impairment, Key, MacAddr, PACKET_IN_BYTES, SwitchPort,
};

use super::{Link, Offload, Pipeline, frame::ETHERNET_BYTES, impair::Impairer, pipeline::Port};
use crate::dataplane::{
    CloneSession, DataPlane, Drops, ImpairmentCounters, ImpairmentError, InstalledEntry, PacketIn,
    PlaneError, PortError, PortStatus, Table, TableError, action_ports, check_entry, check_group,
    check_impairment, check_port,
};

/// The default MTU of a port.
const MTU: u32 = 9000;

impl Pipeline {
    /// Adds a port with the properties of its link; an existing port with the same link does not change.
    ///
    /// # Errors
    /// [`PortError::Invalid`]: nothing changed.
    pub fn add_link(&mut self, port: SwitchPort, link: Link) -> Result<(), PortError> {
        check_port(port)?;
        match self.ports.get(&port) {
            Some(is) if is.link == link => return Ok(()),
            Some(_) => return Err(PortError::Invalid { port, rule: "it is in use" }),
            None => {}
        }
        let (rx, tx) = (Counter::default(), Counter::default());
        self.ports.insert(port, Port { link, rx, tx, impairer: None });
        Ok(())
    }

    fn check(&self, entry: &Entry) -> Result<(), TableError> {
        check_entry(entry)?;
        let ports = action_ports(&entry.action);
        if let Some(&port) = ports.iter().find(|port| !self.ports.contains_key(port)) {
            return Err(TableError::UnknownPort(port));
        }
        match entry.action {
            Action::SetMulticastGroup { group } if !self.groups.contains_key(&group) => {
                Err(TableError::UnknownGroup(group))
            }
            _ => Ok(()),
        }
    }
}

impl DataPlane for Pipeline {
    fn name(&self) -> &'static str {
        "soft"
    }

    fn insert(&mut self, entry: &Entry) -> Result<(), TableError> {
        self.check(entry)?;
        self.tables.insert(entry, self.now)
    }

    fn modify(&mut self, entry: &Entry) -> Result<(), TableError> {
        self.check(entry)?;
        self.tables.modify(entry, self.now)
    }

    fn delete(&mut self, key: &Key) -> Result<(), TableError> {
        self.tables.delete(key)
    }

    fn entry(&mut self, key: &Key) -> Result<InstalledEntry, TableError> {
        self.tables.entry(key, self.now)
    }

    fn entries(&mut self, table: Table) -> Result<Vec<InstalledEntry>, PlaneError> {
        Ok(self.tables.entries(table, self.now))
    }

    fn set_counter(&mut self, key: &Key, counter: Counter) -> Result<(), TableError> {
        self.tables.slot(key)?.counter = counter;
        Ok(())
    }

    fn set_flood_group(&mut self, group: Option<u16>) -> Result<(), TableError> {
        match group {
            Some(group) if !self.groups.contains_key(&group) => {
                Err(TableError::UnknownGroup(group))
            }
            _ => {
                self.flood_group = group;
                Ok(())
            }
        }
    }

    fn flood_group(&mut self) -> Result<Option<u16>, PlaneError> {
        Ok(self.flood_group)
    }

    fn set_group(&mut self, group: u16, ports: &[SwitchPort]) -> Result<(), TableError> {
        check_group(group, ports, self.groups.contains_key(&group), self.groups.len())?;
        if let Some(&port) = ports.iter().find(|port| !self.ports.contains_key(port)) {
            return Err(TableError::UnknownPort(port));
        }
        let ports: BTreeSet<_> = ports.iter().copied().collect();
        self.groups.insert(group, ports.into_iter().collect());
        Ok(())
    }

    fn delete_group(&mut self, group: u16) -> Result<(), TableError> {
        self.groups.remove(&group).map(drop).ok_or(TableError::UnknownGroup(group))
    }

    fn groups(&mut self) -> Result<Vec<(u16, Vec<SwitchPort>)>, PlaneError> {
        Ok(self.groups.iter().map(|(&group, ports)| (group, ports.clone())).collect())
    }

    fn set_clone_session(&mut self, session: Option<CloneSession>) -> Result<(), PlaneError> {
        self.session =
            session.map(|s| CloneSession { packet_bytes: s.packet_bytes.min(PACKET_IN_BYTES) });
        Ok(())
    }

    fn clone_session(&mut self) -> Result<Option<CloneSession>, PlaneError> {
        Ok(self.session)
    }

    fn pipeline_cookie(&mut self) -> Result<Option<u64>, PlaneError> {
        Ok(self.cookie)
    }

    fn clear(&mut self, pipeline_cookie: Option<u64>) -> Result<(), PlaneError> {
        self.tables.clear();
        self.groups.clear();
        self.flood_group = None;
        self.session = None;
        self.cookie = pipeline_cookie;
        self.drops = Drops::default();
        Ok(())
    }

    fn drops(&mut self) -> Result<Drops, PlaneError> {
        Ok(self.drops)
    }

    fn add_port(&mut self, port: SwitchPort, interface: &str) -> Result<(), PortError> {
        let link = Link { name: interface.to_owned(), mac: MacAddr::default(), mtu: MTU };
        self.add_link(port, link)
    }

    fn remove_port(&mut self, port: SwitchPort) -> Result<(), PortError> {
        self.ports.remove(&port).map(drop).ok_or(PortError::Unknown(port))
    }

    fn ports(&mut self) -> Result<Vec<PortStatus>, PlaneError> {
        let status = |(&port, at): (&SwitchPort, &Port)| PortStatus {
            port,
            name: at.link.name.clone(),
            mac: at.link.mac,
            mtu: at.link.mtu,
            rx: at.rx,
            tx: at.tx,
            impaired: at
                .impairer
                .as_ref()
                .map_or(ImpairmentCounters::default(), |impairer| impairer.counters),
        };
        Ok(self.ports.iter().map(status).collect())
    }

    /// The frame is sent with the next [`Pipeline::handle_timeout`], which is due at once.
    fn packet_out(&mut self, port: SwitchPort, frame: &[u8]) -> Result<(), PortError> {
        let Some(to) = self.ports.get(&port) else { return Err(PortError::Unknown(port)) };
        let longest = to.link.mtu as usize + ETHERNET_BYTES;
        if !(ETHERNET_BYTES..=longest).contains(&frame.len())
            || !self.held.push(self.now, port, frame, Offload::default())
        {
            return Err(PortError::FrameSize(frame.len()));
        }
        Ok(())
    }

    fn poll(&mut self, limit: usize, out: &mut Vec<PacketIn>) -> Result<(), PlaneError> {
        let ready = limit.min(self.events.len());
        out.extend(self.events.drain(..ready));
        Ok(())
    }

    fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn events_lost(&mut self) -> Result<u64, PlaneError> {
        Ok(self.events_lost)
    }

    fn set_impairment(
        &mut self,
        port: SwitchPort,
        impairment: Impairment,
    ) -> Result<(), ImpairmentError> {
        check_impairment(&impairment)?;
        let Some(at) = self.ports.get_mut(&port) else {
            return Err(ImpairmentError::UnknownPort(port));
        };
        let counters = at.impairer.take().map(|before| before.counters).unwrap_or_default();
        let mut impairer = Impairer::new(port, &impairment);
        impairer.counters = counters;
        at.impairer = Some(impairer);
        Ok(())
    }
}
