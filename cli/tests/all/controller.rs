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
    query_at(7700, query, more)
}

fn query_at(port: u16, query: &str, more: &[&str]) -> Output {
    let controller = own(port).to_string();
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

/// A root, and what it issued.
struct Authority(rcgen::CertifiedIssuer<'static, rcgen::KeyPair>);

impl Authority {
    fn new() -> Self {
        let mut params = rcgen::CertificateParams::new(Vec::new()).expect("a root");
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let key = rcgen::KeyPair::generate().expect("a key");
        Self(rcgen::CertifiedIssuer::self_signed(params, key).expect("signed"))
    }

    /// A certificate that is valid until the beginning of a year, and its key, as files.
    fn issue(&self, scratch: &Scratch, file: &str, name: &str, year: i32) -> [String; 2] {
        let key = rcgen::KeyPair::generate().expect("a key");
        let mut params = rcgen::CertificateParams::new([name.to_owned()]).expect("a name");
        params.not_after = rcgen::date_time_ymd(year, 1, 1);
        let certificate = params.signed_by(&key, &self.0).expect("signed").pem();
        [
            written(scratch, &format!("{file}.pem"), &certificate),
            written(scratch, &format!("{file}.key"), &key.serialize_pem()),
        ]
    }
}

fn written(scratch: &Scratch, name: &str, text: &str) -> String {
    std::fs::write(scratch.path().join(name), text).expect("written");
    scratch.path().join(name).display().to_string()
}

/// Not the port of another test, which may run in the same process.
const TLS_PORT: u16 = 7701;

/// Each refusal names the files of this side, and what is wrong.
#[test]
fn certificates_that_do_not_fit_are_named_with_their_files() {
    let scratch = Scratch::new("controller-tls");
    let (ours, strange) = (Authority::new(), Authority::new());
    let root = written(&scratch, "root.pem", &ours.0.pem());
    let stranger = written(&scratch, "stranger.pem", &strange.0.pem());
    let [good, good_key] = ours.issue(&scratch, "good", "controller.test", 4000);
    let [expired, expired_key] = ours.issue(&scratch, "expired", "controller.test", 2021);
    let [mine, my_key] = ours.issue(&scratch, "mine", "alice", 4000);
    let [old, old_key] = ours.issue(&scratch, "old", "alice", 2021);
    let serve = |certificate: &str, key: &str, more: &[&str]| {
        let store = scratch.path().join("controller.redb").display().to_string();
        let (listen, switch) = (own(TLS_PORT).to_string(), own(9560).to_string());
        let serve = ["controller", "--store", &store, "--listen", &listen, "--switch", &switch];
        let trust = ["--tls-certificate", certificate, "--tls-key", key, "--log-format", "json"];
        let mut daemon = Daemon::start(&[&serve[..], &trust, more].concat());
        let mut said = String::new();
        let mut log = daemon.log();
        while !said.contains("the controller starts") {
            assert!(log.read_line(&mut said).expect("text") > 0, "it ended: {said}");
        }
        (daemon, said)
    };
    let ask = |trust: &[&str]| {
        let began = Instant::now();
        loop {
            let output = query_at(TLS_PORT, "members", trust);
            // The address is in use until the controller before has ended.
            if output.status.code() != Some(4) || began.elapsed() > PATIENCE {
                return (
                    output.status.code(),
                    String::from_utf8_lossy(&output.stderr).into_owned(),
                );
            }
        }
    };
    let assert_refused = |trust: &[&str], words: &[&str]| {
        let (code, said) = ask(trust);
        assert_eq!((code, said.lines().count()), (Some(3), 1), "{said}");
        assert!(words.iter().all(|words| said.contains(words)), "{words:?}: {said}");
    };
    let trusting = ["--tls-root", &root, "--tls-name", "controller.test"];

    let (daemon, said) = serve(&expired, &expired_key, &[]);
    assert!(
        said.contains("the controller's certificate expired ") && said.contains("expired.pem"),
        "{said}"
    );
    assert_refused(
        &trusting,
        &["root.pem", "its certificate is not trusted", "renew the controller's certificate"],
    );
    drop(daemon);

    let (daemon, said) = serve(&good, &good_key, &["--tls-client-root", &root]);
    assert!(!said.contains("expired"), "{said}");
    let with = |certificate: &'_ str, key: &'_ str| {
        let own = ["--tls-certificate", certificate, "--tls-key", key];
        [&trusting[..], &own].concat().into_iter().map(str::to_owned).collect::<Vec<_>>()
    };
    let (right, outdated) = (with(&mine, &my_key), with(&old, &old_key));
    let right: Vec<&str> = right.iter().map(String::as_str).collect();
    let outdated: Vec<&str> = outdated.iter().map(String::as_str).collect();
    let (code, said) = ask(&right);
    assert_eq!(code, Some(0), "{said}");
    assert_refused(
        &["--tls-root", &stranger, "--tls-name", "controller.test"],
        &["with the TLS root ", "stranger.pem", "specify the root of the controller's certificate"],
    );
    assert_refused(
        &["--tls-root", &root, "--tls-name", "other.test"],
        &["only valid for DnsName(\"controller.test\")", "specify a name of that certificate"],
    );
    // The alert may be lost; the defect of the own certificate is named in each case.
    assert_refused(&outdated, &["root.pem and the certificate ", "old.pem, which expired "]);
    drop(daemon);
}
