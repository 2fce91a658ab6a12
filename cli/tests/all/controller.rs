//! A controller as a separate process, queried by the commands for operators.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, ChildStderr, Command, Output, Stdio};
use std::time::{Duration, Instant};

use bluebridge_northbound::{Attachment, Carrier, Membership, Registration, Role};
use bluebridge_p4::pipeline::{MacAddr, SwitchPort};
use bluebridge_switch::agent::{Agent, AgentConfig};
use bluebridge_switch::soft::{Link, Pipeline};
use bluebridge_testkit::{Scratch, own_loopback};
use bluebridge_wire::Space;
use serde_json::Value;
use tokio::runtime::Runtime;

const BINARY: &str = env!("CARGO_BIN_EXE_bluebridge");

/// Timeout of every wait.
const PATIENCE: Duration = Duration::from_secs(20);

fn own(port: u16) -> SocketAddr {
    (own_loopback(), port).into()
}

/// A daemon that is killed when dropped.
struct Daemon(Child);

impl Daemon {
    fn start(arguments: &[&str]) -> Self {
        let mut command = Command::new(BINARY);
        command.args(arguments).env_remove("BLUEBRIDGE_LOG").stdin(Stdio::null());
        Self(command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("started"))
    }

    fn log(&mut self) -> BufReader<ChildStderr> {
        BufReader::new(self.0.stderr.take().expect("piped"))
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.0.kill().expect("our own process");
        self.0.wait().expect("our own process");
    }
}

/// A switch's agent with one unconnected port; it ends when dropped.
fn agent(listen: SocketAddr) -> Runtime {
    let mut pipeline = Pipeline::new(Instant::now());
    let link = Link { name: "sw1".to_owned(), mac: MacAddr([2, 1, 0, 0, 0, 1]), mtu: 9000 };
    pipeline.add_link(SwitchPort(1), link).expect("a port");
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let runtime = runtime.expect("a runtime");
    let config = AgentConfig { listen, device_id: 1 };
    let agent = runtime.block_on(Agent::bind(config, Box::new(pipeline))).expect("listens");
    runtime.spawn(agent.serve(std::future::pending()));
    runtime
}

fn query(query: &str, more: &[&str]) -> Output {
    let controller = own(7700).to_string();
    let line = ["controller", query, "--controller", &controller];
    Command::new(BINARY).args(line).args(more).stdin(Stdio::null()).output().expect("ran")
}

fn json(query: &str, more: &[&str]) -> Value {
    let output = self::query(query, &[&["--json"], more].concat());
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

/// Queries until the exit code is this one.
fn status_with(code: i32) -> (String, String) {
    let began = Instant::now();
    loop {
        let output = query("status", &[]);
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let (out, error) = (text(&output.stdout), text(&output.stderr));
        if output.status.code() == Some(code) {
            return (out, error);
        }
        assert!(began.elapsed() < PATIENCE, "{:?}: {out}{error}", output.status);
    }
}

#[test]
fn a_running_controller_is_asked_and_logs_what_happens() {
    let scratch = Scratch::new("controller-asked");
    let store = scratch.path().join("controller.redb").display().to_string();
    let (uri, listen) = (own(9559).to_string(), own(7700).to_string());
    let switch = agent(own(9559));
    let serve = ["controller", "--store", &store, "--listen", &listen, "--switch", &uri];
    let mut controller = Daemon::start(&[&serve[..], &["--log-format", "json"]].concat());
    let log = controller.log();

    let (said, _) = status_with(0);
    assert!(said.starts_with("healthy\n") && said.contains("switch in sync"), "{said}");
    let status = json("status", &[]);
    assert_eq!(
        (&status["healthy"], &status["controller"]["switches"][0]["in_sync"]),
        (&true.into(), &true.into())
    );

    let registration = Registration {
        name: "s1".to_owned(),
        role: Role::Memory { capacity_pages: 10, shard_count: 1 },
        space: Space(1),
        mac: [2, 0, 0, 0, 0, 1],
        switch: String::new(),
        attachment: Attachment::Port(1),
        carrier: Carrier::Socket,
        mtu: 9000,
        previous: None,
        notices: false,
    };
    let member = Membership::join(&format!("http://{listen}"), registration).expect("joined");
    let members = json("members", &[]);
    assert_eq!((&members[0]["name"], &members[0]["state"]), (&"s1".into(), &"live".into()));
    let text = String::from_utf8(query("members", &[]).stdout).expect("text");
    assert!(text.lines().nth(1).is_some_and(|line| line.contains("s1") && line.contains("live")));
    let tables = json("tables", &[]);
    let entries = tables.as_array().expect("a list");
    assert!(entries.iter().any(|entry| entry["table"] == "ingress_guard"), "{tables}");
    assert!(entries.iter().all(|entry| entry["state"] == "in sync"), "{tables}");

    let mut watch = Command::new(BINARY);
    watch.args(["controller", "watch", "--controller", &listen, "--json", "--count", "1"]);
    let mut watch = watch.stdout(Stdio::piped()).spawn().expect("started");
    let mut lines = BufReader::new(watch.stdout.take().expect("piped")).lines();
    let mut event = || -> Value {
        serde_json::from_str(&lines.next().expect("an event").expect("a line")).expect("JSON")
    };
    let snapshot = event();
    assert_eq!(
        (&snapshot["event"], &snapshot["nodes"][0]["name"]),
        (&"snapshot".into(), &"s1".into())
    );
    member.leave().expect("left");
    let change = event();
    assert_eq!((&change["event"], &change["nodes"][0]["name"]), (&"change".into(), &"s1".into()));
    assert!(watch.wait().expect("our own process").success());

    switch.shutdown_background();
    let (said, _) = status_with(1);
    assert!(said.starts_with("not healthy\n  the switch is disconnected: "), "{said}");
    drop(controller);
    let (_, said) = status_with(4);
    assert!(said.contains(&listen) && said.contains("does not respond"), "{said}");

    let events: Vec<Value> = log
        .lines()
        .map(|line| serde_json::from_str(&line.expect("text")).expect("a line of JSON"))
        .collect();
    for words in [
        "the controller starts",
        "connected to the switch, its tables are in sync",
        "joined",
        "left",
        "no connection to the switch; trying again",
    ] {
        let count = events.iter().filter(|event| event["message"] == words).count();
        assert_eq!(count, 1, "{words}: {events:?}");
    }
}
