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
use std::thread;
use std::time::{Duration, Instant};

use bluebridge_northbound::environment::SPACE_VARIABLE;
use bluebridge_northbound::{MembershipError, proto};
use bluebridge_rack::control::operations::ALLOCATIONS_MAX;
use bluebridge_rack::control::{Contact, ControlError, controller_state};
use bluebridge_rack::controller_report::{ControllerReport, NodeReport};
use clap::Args;

use super::controller::query::Target;
use super::member::{Deadline, no_such_node};
use crate::exit::UsageError;

/// How long a command that waits goes on while the controller does not respond: more than a restart takes.
const RESTART: Duration = Duration::from_secs(30);

/// The time between two tries then.
const PAUSE: Duration = Duration::from_millis(200);

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
    /// The first generation of its present contents.
    generation: u32,
}

/// The selected memory servers, and the connection to them.
struct Chosen {
    controller: Contact,
    servers: Vec<Server>,
    /// Those that are drained and gone: others may have memory that their pointers lead to.
    gone: Vec<Server>,
    /// Those that are gone without being drained: nothing can be asked of them.
    ended: Vec<Server>,
}

impl Servers {
    /// The servers of the space, or the one with a name or id.
    fn choose(&self, node: Option<&str>) -> anyhow::Result<Chosen> {
        let (controller, report) = self.target.ask(|controller| {
            let state = controller_state(controller, false)?;
            Ok((controller.clone(), ControllerReport::of(&state)))
        })?;
        let mut chosen = Chosen::of(controller, report.nodes, self.space);
        if let Some(node) = node {
            // One that is drained and gone is of interest, but has nothing to tell by itself.
            chosen.servers = vec![chosen.pick(chosen.with_gone(), node)?];
        }
        Ok(chosen)
    }
}

impl Chosen {
    /// The memory servers of a space.
    fn of(controller: Contact, mut members: Vec<NodeReport>, space: u16) -> Self {
        members.retain(|member| member.role == "memory" && member.space == space);
        // Ids follow the order of joining.
        members.sort_by(|one, other| one.name.cmp(&other.name));
        let mut chosen =
            Self { controller, servers: Vec::new(), gone: Vec::new(), ended: Vec::new() };
        for NodeReport { name, id, drain, state, arena_generation: generation, .. } in members {
            let list = match (state, drain) {
                ("gone", None) => &mut chosen.ended,
                ("gone", Some(_)) => &mut chosen.gone,
                _ => &mut chosen.servers,
            };
            list.push(Server { name, id, drain, generation });
        }
        chosen
    }

    /// Also those that are drained and gone.
    fn with_gone(&self) -> Vec<Server> {
        [&self.servers[..], &self.gone[..]].concat()
    }

    /// The one of these with a name or id.
    fn pick(&self, servers: Vec<Server>, node: &str) -> Result<Server, UsageError> {
        let error = match pick(servers, node) {
            Ok(server) => return Ok(server),
            Err(error) => error,
        };
        let gone = self.gone.iter().chain(&self.ended).cloned().collect();
        let Ok(Server { name, .. }) = pick(gone, node) else { return Err(error) };
        Err(UsageError(format!("the memory server {name} is gone; start it again first")))
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

/// Asks the controller until it responds: it may be about to be started again. The first failure is printed, unless it
/// is to be quiet.
///
/// # Errors
/// What the controller says; the last failure, if it does not respond for [`RESTART`].
fn patiently<T>(
    is_quiet: bool,
    mut ask: impl FnMut() -> Result<T, ControlError>,
) -> Result<T, ControlError> {
    let began = Instant::now();
    let mut is_told = is_quiet;
    loop {
        match ask() {
            Err(error) if is_of_restart(&error) && began.elapsed() < RESTART => {
                if !std::mem::replace(&mut is_told, true) {
                    crate::output::complain("the controller does not respond; asking again");
                }
                thread::sleep(PAUSE);
            }
            answer => return answer,
        }
    }
}

/// Whether a controller that is started again may be the reason: it is not there yet, or ended before it responded.
fn is_of_restart(error: &ControlError) -> bool {
    match error {
        ControlError::Unreachable { .. } => true,
        ControlError::Connection(broken) => matches!(**broken, MembershipError::Closed { .. }),
        _ => false,
    }
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
        let nobody = std::net::SocketAddr::from(([127, 0, 0, 1], 1));
        let chosen = Chosen::of(nobody.into(), members, 1);
        let names =
            |servers: &[Server]| servers.iter().map(|it| it.name.clone()).collect::<Vec<_>>();
        assert_eq!(names(&chosen.servers), ["s1", "s3"]);
        assert_eq!(names(&chosen.with_gone()), ["s1", "s3", "s4"]);
        let pick = |text: &str| chosen.pick(chosen.servers.clone(), text).map(|server| server.id);
        assert_eq!(pick("s3").expect("it is there"), 3);
        for (text, words) in [
            ("s4", "the memory server s4 is gone; start it again first"),
            ("5", "the memory server s5 is gone; start it again first"),
            ("s6", "there is no memory node s6 here, only s1, s3"),
        ] {
            assert_eq!(pick(text).expect_err("it is not there").to_string(), words);
        }
    }

    #[test]
    fn what_a_restart_of_the_controller_causes_is_waited_for() {
        let nobody: std::net::SocketAddr = ([127, 0, 0, 1], 1).into();
        let peer = bluebridge_rack::control::Peer::Controller;
        let unreachable =
            || ControlError::Unreachable { peer, address: nobody, reason: "refused".to_owned() };
        let broken = |error| ControlError::Connection(Box::new(error));
        let (uri, reason) = (String::new(), String::new());
        let closed = MembershipError::Closed { uri, reason, source: None };
        let mut answers = vec![Ok(7), Err(broken(closed)), Err(unreachable())];
        let answer = patiently(true, || answers.pop().expect("it ends"));
        assert_eq!(answer.expect("the third one"), 7);
        let mut refusals = vec![Err::<(), _>(broken(MembershipError::Taken("x".to_owned())))];
        assert!(patiently(true, || refusals.pop().expect("asked once")).is_err());
    }

    #[test]
    fn a_server_has_a_name_or_an_id() {
        let servers = || {
            [("s1", 2), ("s2", 1)]
                .map(|(name, id)| Server { name: name.to_owned(), id, drain: None, generation: 1 })
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
