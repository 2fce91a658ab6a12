//! The commands of operators, and those that inspect the switch, with a running rack.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use bluebridge_testkit::{Scratch, until};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::test_rack::{Killed, TestRack};

/// The rows of a node in a table.
fn of_node<'a>(rows: &'a Value, node: &str) -> Vec<&'a Value> {
    rows.as_array().expect("rows").iter().filter(|row| row["node"] == node).collect()
}

#[test]
fn operators_look_and_free_beside_a_program_that_is_the_endpoint() {
    let rack = TestRack::up("cmd-purge", &["--memory", "16M"]);
    let left = rack.text(&["create", "10K", "--on", "s1"]);
    let of_c2 = rack.text(&["create", "1", "--on", "s2", "--as", "c2"]);
    let mut program = rack.command(&["notices", "--count", "1000", "--within", "100s"]);
    let program = program.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("starts");
    let mut program = Killed(program);
    let live = || of_node_named(&rack.json(&["controller", "members"]), "c1") == "live";
    until("the program is c1", live);

    let listed = rack.json(&["list"]);
    let [row] = of_node(&listed, "s1")[..] else { panic!("{listed}") };
    assert_eq!((&row["pointer"], &row["bytes"]), (&left.as_str().into(), &12_288.into()));
    assert_eq!((&row["client"], &row["client_live"]), (&"c1".into(), &false.into()));
    let [row] = of_node(&listed, "s2")[..] else { panic!("{listed}") };
    assert_eq!((&row["pointer"], &row["client"]), (&of_c2.as_str().into(), &"c2".into()));
    let life = format!("{}:{}", row["client_id"], row["client_incarnation"]);
    assert_eq!(rack.json(&["list", "--client", &life]).as_array().map(Vec::len), Some(1));
    assert!(rack.text(&["list", "s1"]).contains(&left));
    assert_eq!(rack.json(&["stat", "s1"])[0]["used_pages"], 3);

    // The memory of c1 before the program became c1, but not that of c2.
    let purged = rack.json(&["purge", "--left-by", "c1"]);
    assert_eq!((&purged[0]["freed_pages"], &purged[1]["freed_count"]), (&3.into(), &0.into()));
    assert_eq!(rack.failure(&["read", &left, "--as", "c2"]).0, Some(3));
    rack.text(&["read", &of_c2, "--as", "c2"]);
    let counted = rack.json(&["stat", "s1", "--refusals"]);
    let refusals = counted[0]["refusals"].as_array().expect("rows");
    let refused = refusals.iter().find(|it| it["reason"] == "the page is not allocated");
    // More than once if the READ was sent again meanwhile.
    let count = refused.expect("the READ was refused")["count"].as_u64();
    assert!(count.is_some_and(|count| count >= 1), "{counted}");
    assert!(rack.text(&["stat", "--refusals"]).contains("the page is not allocated"));
    assert_eq!(program.0.try_wait().expect("our child"), None, "the program is still c1");
    assert!(live());

    // Leased memory stays, and the command says so.
    let mut update =
        rack.command(&["update", &of_c2, "--set", "x", "--hold", "100s", "--as", "c2"]);
    let update = update.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("starts");
    let update = Killed(update);
    until("the page is leased", || rack.json(&["list", "s2"])[0]["leased"] == true);
    let kept = rack.call(&["purge", "--all", "--json"]);
    assert_eq!(kept.status.code(), Some(1), "{}", String::from_utf8_lossy(&kept.stderr));
    let kept: Value = serde_json::from_slice(&kept.stdout).expect("JSON");
    assert_eq!((&kept[1]["busy_count"], &kept[1]["freed_count"]), (&1.into(), &0.into()));
    drop(update);
    until("the lease ran out", || rack.call(&["purge", "--all"]).status.success());
    assert_eq!(rack.json(&["list"]).as_array().map(Vec::len), Some(0));

    let (code, said) = rack.failure(&["purge", "--left-by", "c9"]);
    assert!(code == Some(2) && said.contains("no client c9"), "{code:?}: {said}");
    let (code, said) = rack.failure(&["list", "s9"]);
    assert!(code == Some(2) && said.contains("no memory node s9 here, only s1, s2"), "{said}");
    assert_eq!(rack.failure(&["purge"]).0, Some(2), "it says what");
    assert_eq!(rack.failure(&["purge", "--all", "--left-by", "c1"]).0, Some(2), "one of them");
}

/// The state of a member.
#[test]
fn memory_moves_by_command() {
    let rack = TestRack::up("cmd-migrate", &["--memory", "16M"]);
    assert_eq!(rack.text(&["migrations", "--watch"]), "there are no migrations");
    let pointer = rack.text(&["create", "4K", "--on", "s1"]);
    let migrate = || rack.failure(&["migrate", &pointer, "--to", "s2"]);
    until("the servers are connected", || migrate().0 == Some(0));
    let closed = || rack.text(&["migrations"]).contains("closed");
    until("the migration is closed", closed);
    assert!(rack.text(&["migrations"]).contains("100 %"), "{}", rack.text(&["migrations"]));
    let (code, words) = migrate();
    assert_eq!(code, Some(3), "{words}");
    assert!(words.contains("s2 serves these pages already"), "{words}");
    let (code, words) = rack.failure(&["migrations", "cancel", "7"]);
    assert_eq!(code, Some(2), "{words}");
    assert!(words.contains("there is no migration 7"), "{words}");
    // It is freed where it is, and its line can come home.
    let of_s2 = rack.text(&["create", "12K", "--on", "s1"]);
    rack.text(&["delete", &pointer]);
    let (_, words) = rack.failure(&["read", &pointer, "--length", "8"]);
    assert!(words.contains("is not allocated"), "{words}");
    let are_closed = || {
        let all = rack.json(&["migrations"]);
        all.as_array().expect("rows").iter().all(|it| it["state"] == "closed")
    };
    rack.text(&["migrate", &pointer, "--to", "s1"]);
    until("it is at home", are_closed);
    // An operator frees what is elsewhere, too.
    rack.text(&["migrate", &of_s2, "--to", "s2"]);
    until("it is elsewhere", are_closed);
    rack.text(&["purge", "--all"]);
    until("it is freed", || {
        let (_, words) = rack.failure(&["read", &of_s2, "--length", "8"]);
        words.contains("is not allocated")
    });
    rack.text(&["migrate", &of_s2, "--to", "s1"]);
    until("it is at home", are_closed);
    // What is free stays there.
    rack.text(&["migrate", "s1:64-127", "--to", "s2"]);
    until("the migration is closed", are_closed);
    let all = rack.json(&["migrations"]);
    let last = all.as_array().expect("rows").last().expect("five");
    assert_eq!((&last["kept_pages"], &last["free_lines"]), (&0.into(), &8.into()), "{last}");
    assert_eq!(last["why"], Value::Null);
}

#[test]
fn servers_are_drained_by_command() {
    let rack = TestRack::up("cmd-drain", &["--memory", "16M"]);
    rack.text(&["create", "80K", "--on", "s1"]);
    let text = rack.text(&["drain", "s1", "--deadline", "20s"]);
    assert!(text.contains("s1 is draining") && text.contains("s1 is drained: "), "{text}");
    let moved = rack.json(&["migrations"]);
    let reason = moved[0]["reason"].as_str().expect("the controller chose it");
    assert!(reason.starts_with("s1 is drained, and s2 has the most free memory"), "{reason}");
    let members = rack.json(&["controller", "members"]);
    let of = |name: &str| {
        let rows = members.as_array().expect("rows").iter();
        rows.clone().find(|it| it["name"] == name).expect("it is a member").clone()
    };
    assert_eq!(of("s1")["drain"], "drained");
    // New allocations are not led there. Either server may have joined first.
    let pointer = rack.text(&["create", "4K", "--anywhere"]);
    let prefix = of("s2")["prefix"].as_str().expect("text").replace("::/48", ":");
    assert!(pointer.starts_with(&prefix), "{pointer}: {prefix}");
    let drained = rack.json(&["drain", "s1", "--no-wait"]);
    assert_eq!((&drained["state"], &drained["problem"]), (&"drained".into(), &Value::Null));
    assert_eq!(rack.json(&["undrain", "s1"])["was_drained"], true);
    assert_eq!(rack.text(&["undrain", "s1"]), "s1 was not drained");
    let (code, words) = rack.failure(&["drain", "s9"]);
    assert!(code == Some(2) && words.contains("no memory node s9 here"), "{code:?}: {words}");
}

fn of_node_named(members: &Value, name: &str) -> String {
    let member = members.as_array().expect("rows").iter().find(|it| it["name"] == name);
    member.map_or_else(String::new, |it| it["state"].as_str().expect("text").to_owned())
}

#[test]
fn the_switch_shows_its_tables_and_ports_and_is_impaired() {
    let rack = TestRack::up("cmd-switch", &["--memory", "16M"]);
    let status = rack.json(&["rack", "status", "--name", &rack.name]);
    let controller = &status["controller"];
    assert_eq!(
        (&status["healthy"], &controller["switches"][0]["in_sync"]),
        (&true.into(), &true.into())
    );
    let nodes = controller["nodes"].as_array().expect("rows");
    let second = nodes.iter().find(|node| node["name"] == "s2").expect("joined");
    let switch = &controller["switches"][0];
    assert_eq!(switch["desired_entry_count"], switch["installed_entry_count"]);

    let directory = |node: &str| {
        let tables = rack.json(&["rack", "tables", "--name", &rack.name]);
        let rows = tables.as_array().expect("rows").iter();
        let mut rows = rows.filter(|row| row["table"] == "directory");
        let row = rows.find(|row| row["action"]["node"] == *node).expect("an entry");
        let prefix = row["match"]["destination"].as_str().expect("text").to_owned();
        (prefix, row["packets"].as_u64().expect("a count"))
    };
    let before = directory("s2");
    assert_eq!(second["prefix"], before.0);
    assert_eq!(before.0, format!("fdbb:1:{}::/48", second["id"]));
    rack.text(&["ping", "s2", "--count", "50"]);
    assert!(directory("s2").1 >= before.1 + 100, "{before:?} {:?}", directory("s2"));

    rack.text(&[
        "switch",
        "impair",
        "--node",
        "s1",
        "--loss",
        "0.3",
        "--duplicate",
        "0.2",
        "--seed",
        "9",
    ]);
    rack.text(&["ping", "s1", "--count", "100"]);
    let ports = rack.json(&["switch", "ports"]);
    let port = &ports["ports"][0];
    assert_eq!((&port["node"], &ports["data_plane"]), (&"s1".into(), &"ebpf".into()));
    assert!(port["impaired"]["lost"].as_u64() > Some(10), "{port}");
    assert!(port["impaired"]["duplicated"].as_u64() > Some(5), "{port}");
    rack.text(&["switch", "impair", "--port", "1"]);
    let lost = || rack.json(&["switch", "ports"])["ports"][0]["impaired"]["lost"].as_u64();
    let healed = lost();
    rack.text(&["ping", "s1", "--count", "100"]);
    assert_eq!(lost(), healed);
    let (exit, said) = rack.failure(&["switch", "impair", "--node", "s1", "--loss", "1.5"]);
    assert_eq!(exit, Some(2), "{said}");
    let (exit, said) = rack.failure(&["switch", "impair", "--port", "99", "--loss", "0.5"]);
    assert_eq!(exit, Some(3), "{said}");
    for (option, value, words) in
        [("--delay", "50", "ebpf cannot delay"), ("--reorder", "0.5", "ebpf cannot reorder")]
    {
        let (exit, said) = rack.failure(&["switch", "impair", "--port", "1", option, value]);
        assert!(exit == Some(2) && said.contains(words), "{said}");
        assert!(said.contains("`bluebridge rack up --switch soft`"), "{said}");
    }
    let (exit, said) = rack.failure(&["switch", "tables", "--agent", "[::1]:1"]);
    assert_eq!(exit, Some(4), "{said}");
}

/// A root, and a certificate and key that it issued, as files.
fn certificate(scratch: &Scratch) -> [PathBuf; 3] {
    use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
    let key = || KeyPair::generate().expect("a key");
    let mut params = CertificateParams::new(Vec::new()).expect("a root");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let root = CertifiedIssuer::self_signed(params, key()).expect("signed");
    let own = key();
    let params = CertificateParams::new(["controller.test".to_owned()]).expect("a name");
    let certificate = params.signed_by(&own, &root).expect("signed").pem();
    let texts = [("root", root.pem()), ("certificate", certificate), ("key", own.serialize_pem())];
    texts.map(|(name, text)| {
        let path = scratch.path().join(format!("{name}.pem"));
        std::fs::write(&path, text).expect("written");
        path
    })
}

/// Starts another controller in the rack on another port, for the same switch.
fn secure_controller(rack: &TestRack, certificate: &Path, key: &Path) -> std::process::Child {
    let mut command = rack.command(&["rack", "exec", "--name", &rack.name, "switch", "--"]);
    command.arg(env!("CARGO_BIN_EXE_bluebridge")).args(["controller", "--listen", "[::]:7701"]);
    // Its store is new, and the switch has entries of the rack's servers.
    command.arg("--force").arg("--store").arg(rack.scratch.path().join("secure.redb"));
    command.arg("--tls-certificate").arg(certificate).arg("--tls-key").arg(key);
    command.stderr(Stdio::null()).spawn().expect("starts")
}

#[test]
fn commands_join_a_controller_that_speaks_tls() {
    let rack = TestRack::up("cmd-tls", &["--memory", "16M"]);
    let [root, certificate, key] = certificate(&rack.scratch);
    let status = rack.json(&["rack", "status", "--name", &rack.name]);
    let daemons = status["daemons"].as_array().expect("rows");
    let plain = daemons.iter().find(|it| it["name"] == "controller").expect("there");
    let pid = plain["pid"].as_i64().and_then(|pid| i32::try_from(pid).ok());
    kill_process(pid.and_then(Pid::from_raw).expect("a pid"), Signal::KILL).expect("killed");
    let mut controller = secure_controller(&rack, &certificate, &key);

    let links = status["links"].as_array().expect("rows");
    let switch = links.iter().find(|it| it["node"] == "switch").expect("there");
    let address = format!("[{}]:7701", switch["control_address"].as_str().expect("text"));
    let joins = |node: &str, port: &str, trust: &[&str]| {
        let exec = ["rack", "exec", "--name", &rack.name, node, "--"];
        let create = [env!("CARGO_BIN_EXE_bluebridge"), "create", "1", "--deadline", "20s"];
        let to = ["--controller", &address, "--switch-port", port];
        rack.call(&[&exec[..], &create, &to, trust].concat())
    };
    let root = root.to_string_lossy().into_owned();
    let trusted = joins("c1", "3", &["--tls-root", &root, "--tls-name", "controller.test"]);
    let plain = joins("c2", "4", &[]);
    let other_name = joins("c2", "4", &["--tls-root", &root]);
    // The commands of operators say the same.
    let asks = |trust: &[&str]| {
        let exec = ["rack", "exec", "--name", &rack.name, "c2", "--"];
        let status = [env!("CARGO_BIN_EXE_bluebridge"), "controller", "status"];
        rack.failure(&[&exec[..], &status, &["--controller", &address], trust].concat())
    };
    let stranger = Scratch::new("cmd-tls-stranger");
    let [stranger, ..] = self::certificate(&stranger);
    let trust_nobody = ["--tls-root", &stranger.to_string_lossy(), "--tls-name", "controller.test"];
    let (asked_plainly, asked_a_stranger) = (asks(&[]), asks(&trust_nobody));
    let is_asked = asks(&["--tls-root", &root, "--tls-name", "controller.test"]);
    controller.kill().expect("killed");
    controller.wait().expect("ends");
    let said = String::from_utf8_lossy(&trusted.stderr);
    let is_member = said.contains("no memory node is known");
    assert!(
        is_member && trusted.status.code() == Some(4),
        "no server joined this controller: {said}"
    );
    assert_eq!(plain.status.code(), Some(3), "{}", String::from_utf8_lossy(&plain.stderr));
    let hints = ["if it has a certificate, join with TLS", "it may require TLS"];
    let (code, said) = asked_plainly;
    assert!(code == Some(3) && hints.iter().any(|hint| said.contains(hint)), "{code:?}: {said}");
    let (code, said) = asked_a_stranger;
    assert!(code == Some(3) && said.contains("its certificate is not trusted"), "{code:?}: {said}");
    assert!(matches!(is_asked.0, Some(0 | 1)), "it is asked: {is_asked:?}");
    assert_eq!(
        other_name.status.code(),
        Some(3),
        "{}",
        String::from_utf8_lossy(&other_name.stderr)
    );
}

#[test]
fn a_host_sends_complete_checksums_on_request() {
    let rack = TestRack::up("cmd-offload", &["--servers", "1", "--clients", "1"]);
    let program = env!("CARGO_BIN_EXE_bluebridge");
    let host = |interface, more: &'static str| {
        let inside =
            ["rack", "exec", "c1", "--rack", &rack.name, "--", program, "host", "no-offload"];
        rack.call(&[&inside[..], &["--interface", interface, more]].concat())
    };
    let done = host("eth0", "--json");
    let printed: Value = serde_json::from_slice(&done.stdout).expect("JSON");
    assert_eq!((done.status.code(), &printed["interface"]), (Some(0), &"eth0".into()));
    let absent = host("eth9", "--json");
    let said = String::from_utf8_lossy(&absent.stderr);
    assert!(!absent.status.success() && said.contains("eth9"), "{said}");
}
