//! The switches of a fabric, and the links between them.
//!
//! The switches form a tree: multicasts and floods are copied to every port but the one of the sender, so a
//! second path would send each frame around for ever. The path between two switches is therefore unique.

use std::collections::VecDeque;
use std::ops::RangeInclusive;

use bluebridge_p4::declaration::PORT_MAX;
use bluebridge_p4::pipeline::SwitchPort;
use bluebridge_wire::NodeId;

/// The node ids of a block, and therefore the most endpoints of a switch that need no entry of their own in
/// other switches.
pub(crate) const BLOCK_NODES: u16 = 4096;

/// The most switches: each has a block of node ids.
pub const SWITCHES_MAX: usize = 65_536 / BLOCK_NODES as usize;

/// The longest name of a switch, in bytes.
const NAME_MAX: usize = 64;

/// A switch: its number in the topology.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct SwitchId(pub u16);

impl SwitchId {
    /// As an index of lists with an element per switch.
    #[must_use]
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

/// A port of one of the switches.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Place {
    /// The switch.
    pub switch: SwitchId,
    /// Its port.
    pub port: SwitchPort,
}

/// Why switches and links are no topology. The operator's configuration must be corrected.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum TopologyError {
    /// A controller needs a switch.
    #[error("there is no switch")]
    NoSwitch,
    /// There are more switches than blocks of node ids.
    #[error("{0} switches are too many: a controller can have {SWITCHES_MAX}")]
    TooManySwitches(usize),
    /// Endpoints name their switch, and the store identifies it by its name.
    #[error(
        "{0:?} is no name for one of several switches: 1 to 64 letters, digits, '.', '_' and '-'"
    )]
    BadName(String),
    /// Two switches have the same name.
    #[error("two switches have the name {0}")]
    SameName(String),
    /// A link ends at an unknown switch.
    #[error("there is no switch {0}")]
    UnknownSwitch(String),
    /// A switch cannot have such a port.
    #[error("a switch has no port {0}: they are numbered 1 to {PORT_MAX}")]
    BadPort(u16),
    /// A port is the end of two links.
    #[error("port {port} of the switch {switch} is the end of two links")]
    PortUsedTwice {
        /// The switch.
        switch: String,
        /// The port.
        port: u16,
    },
    /// Frames that are copied to all ports would never end.
    #[error("the link {0} closes a loop; the switches must form a tree")]
    Loop(String),
    /// No path leads from the first switch to this one.
    #[error("no links lead from the switch {first} to the switch {other}")]
    Separate {
        /// The first switch.
        first: String,
        /// The other one.
        other: String,
    },
}

/// The switches of a fabric, and the links between them.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Topology {
    names: Vec<String>,
    /// The ports to other switches, by switch: the local port, and the switch at its other end.
    trunks: Vec<Vec<(SwitchPort, SwitchId)>>,
    /// The port through which a switch reaches another one, and the number of links between them.
    routes: Vec<Vec<(SwitchPort, usize)>>,
}

impl Default for Topology {
    /// One switch without a name.
    fn default() -> Self {
        Self { names: vec![String::new()], trunks: vec![Vec::new()], routes: vec![vec![NOWHERE]] }
    }
}

/// The route of a switch to itself, which no frame takes.
const NOWHERE: (SwitchPort, usize) = (SwitchPort(0), 0);

/// An end of a link, as configured: the name of the switch, and its port.
pub type LinkEnd = (String, SwitchPort);

impl Topology {
    /// Switches with these names, connected by these links. A single switch needs no name.
    ///
    /// # Errors
    /// [`TopologyError`].
    pub fn new(names: Vec<String>, links: &[(LinkEnd, LinkEnd)]) -> Result<Self, TopologyError> {
        check_names(&names)?;
        let mut this = Self { trunks: vec![Vec::new(); names.len()], routes: Vec::new(), names };
        for (one, other) in links {
            let text = || format!("{}/{}-{}/{}", one.0, one.1.0, other.0, other.1.0);
            let (from, to) = (this.place(one)?, this.place(other)?);
            if this.distances(from.switch)[to.switch.index()].is_some() {
                return Err(TopologyError::Loop(text()));
            }
            this.connect(from, to.switch)?;
            this.connect(to, from.switch)?;
        }
        let first = this.distances(SwitchId(0));
        if let Some(other) = first.iter().position(Option::is_none) {
            let name = |index: usize| this.names[index].clone();
            return Err(TopologyError::Separate { first: name(0), other: name(other) });
        }
        let all = this.switches().map(|from| this.distances(from));
        this.routes = all
            .map(|routes| routes.into_iter().map(|it| it.unwrap_or(NOWHERE)).collect())
            .collect();
        Ok(this)
    }

    fn place(&self, (name, port): &LinkEnd) -> Result<Place, TopologyError> {
        let known = self.names.iter().position(|known| known == name);
        let switch = known.ok_or_else(|| TopologyError::UnknownSwitch(name.clone()))?;
        if !(1..=PORT_MAX).contains(&port.0) {
            return Err(TopologyError::BadPort(port.0));
        }
        Ok(Place { switch: number(switch), port: *port })
    }

    fn connect(&mut self, from: Place, to: SwitchId) -> Result<(), TopologyError> {
        if self.is_trunk(from) {
            let switch = self.names[from.switch.index()].clone();
            return Err(TopologyError::PortUsedTwice { switch, port: from.port.0 });
        }
        self.trunks[from.switch.index()].push((from.port, to));
        Ok(())
    }

    /// How a switch reaches each switch, `None` for one that it cannot reach.
    fn distances(&self, from: SwitchId) -> Vec<Option<(SwitchPort, usize)>> {
        let mut routes = vec![None; self.names.len()];
        routes[from.index()] = Some(NOWHERE);
        let mut queue = VecDeque::from([(from, NOWHERE)]);
        while let Some((switch, (port, distance))) = queue.pop_front() {
            for (trunk, next) in &self.trunks[switch.index()] {
                if routes[next.index()].is_none() {
                    let first = if switch == from { *trunk } else { port };
                    let route = (first, distance + 1);
                    routes[next.index()] = Some(route);
                    queue.push_back((*next, route));
                }
            }
        }
        routes
    }

    /// Every switch.
    pub fn switches(&self) -> impl Iterator<Item = SwitchId> + use<> {
        (0..self.names.len()).map(number)
    }

    /// The number of switches, at least 1.
    #[must_use]
    pub const fn switch_count(&self) -> usize {
        self.names.len()
    }

    /// The name of a switch; that of a single switch may be empty.
    #[must_use]
    pub fn name(&self, switch: SwitchId) -> &str {
        self.names.get(switch.index()).map_or("", String::as_str)
    }

    /// The switch with a name. No name means the only switch.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<SwitchId> {
        if name.is_empty() && self.names.len() == 1 {
            return Some(SwitchId(0));
        }
        self.names.iter().position(|known| known == name).map(number)
    }

    /// The port through which frames leave a switch for a place.
    #[must_use]
    pub fn port_toward(&self, from: SwitchId, place: Place) -> SwitchPort {
        if from == place.switch { place.port } else { self.route(from, place.switch).0 }
    }

    /// The links between two switches.
    #[must_use]
    pub fn distance(&self, from: SwitchId, to: SwitchId) -> usize {
        self.route(from, to).1
    }

    fn route(&self, from: SwitchId, to: SwitchId) -> (SwitchPort, usize) {
        let routes = self.routes.get(from.index());
        routes.and_then(|routes| routes.get(to.index())).copied().unwrap_or(NOWHERE)
    }

    /// The ports of a switch that lead to other switches.
    pub fn trunks(&self, switch: SwitchId) -> impl Iterator<Item = SwitchPort> {
        self.trunks.get(switch.index()).into_iter().flatten().map(|(port, _)| *port)
    }

    /// Whether a port leads to another switch.
    #[must_use]
    pub fn is_trunk(&self, place: Place) -> bool {
        self.trunks(place.switch).any(|port| port == place.port)
    }

    /// The node ids that new endpoints of a switch get: all if it is the only one, otherwise a block, so that
    /// other switches need one entry for all of them.
    #[must_use]
    pub fn block(&self, switch: SwitchId) -> RangeInclusive<u16> {
        let (least, greatest) = (1, NodeId::ALL.0 - 1);
        if self.names.len() == 1 {
            return least..=greatest;
        }
        let first = switch.0 * BLOCK_NODES;
        first.max(least)..=(first + (BLOCK_NODES - 1)).min(greatest)
    }
}

#[expect(clippy::cast_possible_truncation, reason = "there are at most SWITCHES_MAX")]
const fn number(index: usize) -> SwitchId {
    SwitchId(index as u16)
}

fn check_names(names: &[String]) -> Result<(), TopologyError> {
    if names.is_empty() {
        return Err(TopologyError::NoSwitch);
    }
    if names.len() > SWITCHES_MAX {
        return Err(TopologyError::TooManySwitches(names.len()));
    }
    for (index, name) in names.iter().enumerate() {
        let unnamed = names.len() == 1 && name.is_empty();
        if !unnamed && !bluebridge_northbound::is_name(name) {
            let shown = name.chars().take(NAME_MAX).collect();
            return Err(TopologyError::BadName(shown));
        }
        if names[..index].contains(name) {
            return Err(TopologyError::SameName(name.clone()));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn topology(
        names: &[&str],
        links: &[(&str, u16, &str, u16)],
    ) -> Result<Topology, TopologyError> {
        let end = |name: &str, port| (name.to_owned(), SwitchPort(port));
        let links: Vec<_> = links.iter().map(|(a, p, b, q)| (end(a, *p), end(b, *q))).collect();
        Topology::new(names.iter().map(|name| (*name).to_owned()).collect(), &links)
    }

    #[test]
    fn frames_take_the_only_path() {
        let two = topology(
            &["tor1", "tor2", "spine"],
            &[("tor1", 9, "spine", 1), ("spine", 2, "tor2", 8)],
        )
        .expect("a tree");
        let [tor1, tor2, spine] = [0, 1, 2].map(SwitchId);
        let host = Place { switch: tor2, port: SwitchPort(3) };
        assert_eq!(two.port_toward(tor1, host), SwitchPort(9));
        assert_eq!(two.port_toward(spine, host), SwitchPort(2));
        assert_eq!(two.port_toward(tor2, host), SwitchPort(3));
        assert_eq!([tor1, tor2, spine].map(|to| two.distance(tor1, to)), [0, 2, 1]);
        assert!(two.is_trunk(Place { switch: tor2, port: SwitchPort(8) }) && !two.is_trunk(host));
        assert_eq!(two.trunks(spine).collect::<Vec<_>>(), [SwitchPort(1), SwitchPort(2)]);
        assert_eq!(two.find("tor2"), Some(tor2));
        assert_eq!((two.find(""), two.find("tor3")), (None, None));
    }

    #[test]
    fn a_single_switch_needs_no_name_and_has_all_node_ids() {
        let only = Topology::default();
        assert_eq!(topology(&[""], &[]), Ok(only.clone()));
        assert_eq!(only.find(""), Some(SwitchId(0)));
        assert_eq!(only.block(SwitchId(0)), 1..=0xfffe);
        let named = topology(&["tor1"], &[]).expect("one switch");
        assert_eq!((named.find(""), named.find("tor1")), (Some(SwitchId(0)), Some(SwitchId(0))));
    }

    #[test]
    fn blocks_are_prefixes_and_leave_out_the_reserved_ids() {
        let names: Vec<String> = (0..SWITCHES_MAX).map(|n| format!("s{n}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let links: Vec<_> = names.windows(2).map(|pair| (pair[0], 1, pair[1], 2)).collect();
        let line = topology(&names, &links).expect("a line is a tree");
        assert_eq!(line.block(SwitchId(0)), 1..=0x0fff);
        assert_eq!(line.block(SwitchId(3)), 0x3000..=0x3fff);
        assert_eq!(line.block(SwitchId(15)), 0xf000..=0xfffe);
        assert_eq!(line.distance(SwitchId(0), SwitchId(15)), 15);
    }

    #[test]
    fn what_is_no_tree_is_refused() {
        use TopologyError as E;
        let link = ("a", 1, "b", 1);
        assert_eq!(topology(&[], &[]), Err(E::NoSwitch));
        assert_eq!(topology(&["a", "a"], &[]), Err(E::SameName("a".to_owned())));
        assert_eq!(topology(&["a", ""], &[]), Err(E::BadName(String::new())));
        assert_eq!(topology(&["a/b"], &[]), Err(E::BadName("a/b".to_owned())));
        assert_eq!(
            topology(&["a", "b"], &[("a", 1, "c", 1)]),
            Err(E::UnknownSwitch("c".to_owned()))
        );
        assert_eq!(topology(&["a", "b"], &[("a", 0, "b", 1)]), Err(E::BadPort(0)));
        let far = Err(E::Separate { first: "a".to_owned(), other: "c".to_owned() });
        assert_eq!(topology(&["a", "b", "c"], &[link]), far);
        let twice = E::PortUsedTwice { switch: "a".to_owned(), port: 1 };
        assert_eq!(topology(&["a", "b", "c"], &[link, ("a", 1, "c", 1)]), Err(twice));
        let closing = topology(&["a", "b", "c"], &[link, ("b", 2, "c", 2), ("c", 3, "a", 3)]);
        assert_eq!(closing, Err(E::Loop("c/3-a/3".to_owned())));
        assert_eq!(topology(&["a"], &[("a", 1, "a", 2)]), Err(E::Loop("a/1-a/2".to_owned())));
        let many: Vec<&str> = ["x"; SWITCHES_MAX + 1].into();
        assert_eq!(topology(&many, &[]), Err(E::TooManySwitches(17)));
    }
}
