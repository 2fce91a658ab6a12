//! The commands that inspect memory servers and free memory there, one file each.
//!
//! They query the controller, which queries the servers. They therefore need no endpoint of the fabric, and
//! do not disturb a program that is one.

pub(super) mod drain;
pub(super) mod list;
pub(super) mod migrate;
pub(super) mod migrations;
pub(super) mod purge;
pub(super) mod rebalance;
pub(crate) mod stat;

use std::collections::BTreeSet;
use std::str::FromStr;

use bluebridge_northbound::environment::SPACE_VARIABLE;
use bluebridge_northbound::proto;
use bluebridge_rack::control::operations::ALLOCATIONS_MAX;
use bluebridge_rack::control::{Contact, ControlError, controller_state};
use bluebridge_rack::controller_report::{ControllerReport, NodeReport};
use clap::Args;

use super::controller::query::Target;
use super::member::{Deadline, no_such_node};
use crate::exit::UsageError;

/// Selects the memory servers.
#[derive(Clone, Debug, Args)]
struct Servers {
    /// The space (tenant)
    #[arg(long, env = SPACE_VARIABLE, value_name = "N", default_value_t = 1)]
    space: u16,
    /// Time limit of each response, such as 500ms or 5s
    #[arg(long, value_name = "TIME", default_value = "5s")]
    deadline: Deadline,
    #[command(flatten)]
    target: Target,
}

/// A memory server in the controller's view.
#[derive(Clone, Debug)]
struct Server {
    name: String,
    id: u16,
    /// `draining` or `drained`, if an operator drains it.
    drain: Option<&'static str>,
}

/// The selected memory servers, and the connection to them.
struct Chosen {
    controller: Contact,
    servers: Vec<Server>,
    /// Those that are drained and gone: others may have memory that their pointers lead to.
    gone: Vec<Server>,
}

impl Servers {
    /// The servers of the space, or the one with a name or id.
    fn choose(&self, node: Option<&str>) -> anyhow::Result<Chosen> {
        let (controller, report) = self.target.ask(|controller| {
            let state = controller_state(controller, false)?;
            Ok((controller.clone(), ControllerReport::of(&state)))
        })?;
        let (servers, gone) = divide(report.nodes, self.space);
        let mut chosen = Chosen { controller, servers, gone };
        if let Some(node) = node {
            // One that is drained and gone is of interest, but has nothing to tell by itself.
            chosen.servers = vec![pick(chosen.with_gone(), node)?];
        }
        Ok(chosen)
    }
}

/// The memory servers of a space that are there, and those that are drained and gone.
fn divide(members: Vec<NodeReport>, space: u16) -> (Vec<Server>, Vec<Server>) {
    let is_of_interest = |member: &NodeReport| {
        let is_there = member.state != "gone" || member.drain.is_some();
        member.role == "memory" && is_there && member.space == space
    };
    let mut members: Vec<_> = members.into_iter().filter(is_of_interest).collect();
    // Ids follow the order of joining.
    members.sort_by(|one, other| one.name.cmp(&other.name));
    let (gone, there): (Vec<_>, Vec<_>) = members.into_iter().partition(|it| it.state == "gone");
    let servers = |members: Vec<NodeReport>| {
        let server = |of: NodeReport| Server { name: of.name, id: of.id, drain: of.drain };
        members.into_iter().map(server).collect()
    };
    (servers(there), servers(gone))
}

impl Chosen {
    /// Also those that are gone.
    fn with_gone(&self) -> Vec<Server> {
        [&self.servers[..], &self.gone[..]].concat()
    }
}

fn pick(servers: Vec<Server>, node: &str) -> Result<Server, UsageError> {
    let names: Vec<_> = servers.iter().map(|server| server.name.clone()).collect();
    let id = node.parse::<u16>().ok();
    let mut found = servers.into_iter();
    found
        .find(|server| server.name == node || Some(server.id) == id)
        .ok_or_else(|| no_such_node(node, names.iter().map(String::as_str)))
}

/// A client on the command line: its name, or a node id and an incarnation.
#[derive(Clone, Debug, Eq, PartialEq)]
struct ClientName(proto::Client);

impl FromStr for ClientName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some((node, incarnation)) = text.split_once(':') {
            let numbers = node.parse::<u16>().ok().zip(incarnation.parse::<u32>().ok());
            let (node, incarnation) = numbers.ok_or_else(|| {
                format!("{text:?} is not a node id with an incarnation, such as 65534:7")
            })?;
            let node = node.into();
            return Ok(Self(proto::Client { name: String::new(), node, incarnation }));
        }
        if bluebridge_northbound::is_name(text) {
            return Ok(Self(proto::Client { name: text.to_owned(), ..proto::Client::default() }));
        }
        Err(format!("{text:?} is neither a name of an endpoint nor a node id with an incarnation"))
    }
}

/// The first of several failures determines the exit code; the others are printed when they occur.
#[derive(Debug, Default)]
struct Failures {
    first: Option<ControlError>,
    /// Several servers can fail for the same reason.
    printed: BTreeSet<String>,
}

impl Failures {
    /// Keeps the first failure, and prints any other once.
    fn add(&mut self, error: ControlError) {
        let text = error.to_string();
        if self.printed.insert(text.clone()) {
            match &self.first {
                None => self.first = Some(error),
                Some(_) => crate::output::complain(&text),
            }
        }
    }

    fn end<T>(self, done: T) -> anyhow::Result<T> {
        self.first.map_or(Ok(done), |error| Err(error.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_has_a_name_or_an_id_with_an_incarnation() {
        let parse = |text: &str| text.parse::<ClientName>().map(|client| client.0);
        let named = proto::Client { name: "c1".to_owned(), ..proto::Client::default() };
        assert_eq!(parse("c1"), Ok(named));
        let one = proto::Client { name: String::new(), node: 65_534, incarnation: 7 };
        assert_eq!(parse("65534:7"), Ok(one));
        for bad in ["", "a b", ":", "65536:1", "7:", ":7", "c1:2"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_server_that_is_drained_and_gone_has_a_name_too() {
        let node = |name: &str, id, state: proto::NodeState, is_draining| {
            NodeReport::of(&proto::Node {
                name: name.to_owned(),
                node: id,
                role: proto::Role::Memory.into(),
                state: state.into(),
                space: 1,
                is_draining,
                ..proto::Node::default()
            })
        };
        let members = vec![
            node("s3", 3, proto::NodeState::Silent, false),
            node("s4", 4, proto::NodeState::Gone, true),
            node("s5", 5, proto::NodeState::Gone, false),
            node("s1", 1, proto::NodeState::Live, true),
            NodeReport { space: 2, ..node("s6", 6, proto::NodeState::Live, false) },
        ];
        let (there, gone) = divide(members, 1);
        let names =
            |servers: &[Server]| servers.iter().map(|it| it.name.clone()).collect::<Vec<_>>();
        assert_eq!(
            (names(&there), names(&gone)),
            (vec!["s1".into(), "s3".into()], vec!["s4".into()])
        );
    }

    #[test]
    fn a_server_has_a_name_or_an_id() {
        let servers = || {
            [("s1", 2), ("s2", 1)]
                .map(|(name, id)| Server { name: name.to_owned(), id, drain: None })
                .to_vec()
        };
        for (text, id) in [("s1", 2), ("1", 1), ("2", 2)] {
            assert_eq!(pick(servers(), text).expect("it is there").id, id);
        }
        let error = pick(servers(), "s3").expect_err("it is not there");
        assert_eq!(error.to_string(), "there is no memory node s3 here, only s1, s2");
        let error = pick(Vec::new(), "s3").expect_err("nothing is there");
        assert_eq!(error.to_string(), "there is no memory node s3 here, and no other");
    }
}
