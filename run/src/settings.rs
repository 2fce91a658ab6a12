//! What a program's memory is like, as text of one line.

use std::fmt;
use std::str::FromStr;

use bluebridge::{EndpointConfig, MemoryNode, NodeId, Space};

/// The environment variable with the path of the [`Ledger`](crate::Ledger), which contains the settings.
pub const VARIABLE: &str = "BLUEBRIDGE_RUN";

/// What a program's memory is like, and which endpoint it uses.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Settings {
    /// The endpoint's space.
    pub space: u16,
    /// Its node.
    pub node: u16,
    /// Its incarnation.
    pub incarnation: u32,
    /// The space's largest piece in bytes; 0: what the interface allows.
    pub piece_bytes: u16,
    /// The memory nodes, and how many serving cores each has.
    pub nodes: Vec<(u16, u16)>,
    /// The interface that leads to the switch.
    pub interface: String,
    /// Bytes of a process that may be local.
    pub local_bytes: u64,
    /// Bytes of addresses that each process reserves.
    pub reserved_bytes: u64,
    /// Anonymous mappings of at least this many bytes are remote.
    pub mapping_bytes: u64,
    /// Threads of a process that resolve page faults.
    pub handlers: usize,
    /// Milliseconds after which a fault has failed.
    pub deadline_ms: u64,
    /// Whether a thread then waits, instead of getting SIGBUS.
    pub waits: bool,
}

/// A text is not one of [`Settings`].
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error(
    "the settings of `bluebridge run` are damaged: {what} is missing or wrong; the library and the program must be of one version"
)]
pub struct SettingsError {
    what: &'static str,
}

impl fmt::Display for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { space, node, incarnation, piece_bytes, interface, .. } = self;
        let nodes: Vec<_> =
            self.nodes.iter().map(|(node, cores)| format!("{node}/{cores}")).collect();
        write!(
            f,
            "{space} {node} {incarnation} {piece_bytes} {} {interface} {} {} {} {} {} {}",
            nodes.join(","),
            self.local_bytes,
            self.reserved_bytes,
            self.mapping_bytes,
            self.handlers,
            self.deadline_ms,
            u8::from(self.waits),
        )
    }
}

impl FromStr for Settings {
    type Err = SettingsError;

    fn from_str(text: &str) -> Result<Self, SettingsError> {
        fn number<T: FromStr>(what: &'static str, word: Option<&str>) -> Result<T, SettingsError> {
            word.and_then(|word| word.parse().ok()).ok_or(SettingsError { what })
        }
        let mut words = text.split(' ');
        let mut next = || words.next();
        let settings = Self {
            space: number("the space", next())?,
            node: number("the node", next())?,
            incarnation: number("the incarnation", next())?,
            piece_bytes: number("the piece size", next())?,
            nodes: next()
                .unwrap_or_default()
                .split(',')
                .map(|node| {
                    let (node, cores) = node.split_once('/').unzip();
                    Ok((
                        number("a memory node", node)?,
                        number("the cores of a memory node", cores)?,
                    ))
                })
                .collect::<Result<_, _>>()?,
            interface: number("the interface", next())?,
            local_bytes: number("the local memory", next())?,
            reserved_bytes: number("the reserved memory", next())?,
            mapping_bytes: number("the size of mappings", next())?,
            handlers: number("the number of handler threads", next())?,
            deadline_ms: number("the deadline", next())?,
            waits: number::<u8>("what follows the deadline", next())? != 0,
        };
        if next().is_some() {
            return Err(SettingsError { what: "the end" });
        }
        Ok(settings)
    }
}

impl Settings {
    /// The identity of a client of the endpoint, with a random seed.
    #[must_use]
    pub fn client(&self) -> EndpointConfig {
        let mut config =
            EndpointConfig::new(Space(self.space), NodeId(self.node), self.incarnation);
        config.piece_bytes = Some(self.piece_bytes).filter(|bytes| *bytes > 0);
        let nodes = self.nodes.iter();
        config.memory_nodes = nodes
            .map(|(node, shards)| MemoryNode { node: NodeId(*node), shard_count: *shards })
            .collect();
        config
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_survive_as_text() {
        let settings = Settings {
            space: 1,
            node: 65_534,
            incarnation: 7,
            piece_bytes: 4096,
            nodes: vec![(1, 1), (2, 4)],
            interface: "eth0".to_owned(),
            local_bytes: 1 << 28,
            reserved_bytes: 1 << 40,
            mapping_bytes: 1 << 20,
            handlers: 2,
            deadline_ms: 10_000,
            waits: true,
        };
        let text = settings.to_string();
        assert_eq!(text.parse(), Ok(settings));
        assert!(format!("{text} 1").parse::<Settings>().is_err());
        for (at, _) in text.match_indices(' ') {
            assert!(text[..at].parse::<Settings>().is_err(), "{:?}", &text[..at]);
        }
    }
}
