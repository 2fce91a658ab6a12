//! Wrong usage of the binary, and missing requirements: error texts and exit codes.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use bluebridge_testkit::{Scratch, until};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

const BINARY: &str = env!("CARGO_BIN_EXE_bluebridge");

fn call(arguments: &[&str]) -> Output {
    let mut command = Command::new(BINARY);
    // The test must not use a rack of the machine by accident.
    command.env("BLUEBRIDGE_STATE", "/nonexistent/bluebridge-state");
    command.args(arguments).stdin(Stdio::null()).output().expect("runs")
}

fn result_of(output: &Output) -> (Option<i32>, String) {
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

/// The one JSON object on standard error of a failed command.
fn error(output: &Output) -> Value {
    let said = String::from_utf8_lossy(&output.stderr);
    let lines: Vec<_> = said.lines().collect();
    assert_eq!(lines.len(), 1, "{said}");
    serde_json::from_str::<Value>(lines[0]).expect("JSON")["error"].clone()
}

const ENDPOINT: [&str; 6] = ["--name", "s", "--switch-port", "1", "--controller", "[::1]:9"];

#[test]
fn what_cannot_be_is_wrong_usage() {
    let memserver = |more: &[&'static str]| [&["memserver"], &ENDPOINT[..], more].concat();
    let own_port = |port| {
        let controller = ["controller", "--store", "/nonexistent/x", "--interface", "nope"];
        [&controller[..], &["--switch-port", port]].concat()
    };
    for (arguments, words) in [
        (vec!["rack", "up", "--memory", "0"], "0 is not a valid memory size of a server"),
        (vec!["rack", "up", "--memory", "99T"], "99T is not a valid memory size of a server"),
        (memserver(&["--interface", "nope"]), "interface nope"),
        (memserver(&["--interface", "lo", "--fresh"]), "name it with --arena-file"),
        (
            memserver(&["--interface", "lo", "--fresh", "--arena-file", "none"]),
            "this server has no such file",
        ),
        (memserver(&["--interface", "lo", "--arena-file", ""]), "name a file, such as /dev/shm/"),
        (
            memserver(&["--interface", "lo", "--arena-file", "arena"]),
            "name the file with its whole path, such as /dev/shm/",
        ),
        (memserver(&["--interface", "lo", "--kept-memory", "auto"]), "--arena-file <FILE|none>"),
        (vec!["switch", "--data-plane", "soft", "--port", "1=nope:xdp"], "port 1 has a mode"),
        (vec!["switch", "--device-id", "0"], "--device-id"),
        (vec!["create", "0"], "must have at least one byte"),
        (vec!["create", "2T"], "at most 1T"),
        (vec!["create", "2T", "--nonsense"], "--nonsense"),
        (vec!["controller", "--store", "/nonexistent/x"], "there is no directory /nonexistent;"),
        (own_port("p4"), "cannot use interface nope"),
        (own_port("p0"), "\"p0\" is not a port of a switch"),
        (vec!["rack", "restart", "c1"], "is not a daemon"),
        (vec!["rack", "restart", "s1", "--deadline", "5s"], "no rack is up"),
        (vec!["rack", "restart", "s1", "--deadline", "5m"], "is not a time from 1ms to 3600s"),
        (
            vec!["rebalance", "on", "--window", "500ms"],
            "is not a time from 1s to 3600s, such as 30s",
        ),
        (vec!["rebalance", "--rack", "none", "off"], "there is no rack none"),
        (vec!["migrations", "--rack", "none", "cancel", "7"], "there is no rack none"),
        (vec!["migrations", "cancel", "7", "--rack", "none"], "there is no rack none"),
        (vec!["migrations", "--watch", "cancel", "7"], "--watch shows migrations"),
        (vec!["rack", "kill", "s1"], "no rack is up; `bluebridge rack up` builds one"),
        (vec!["rack", "kill", "s1", "--rack", "one"], "there is no rack one"),
        (vec!["switch", "tables"], "or set the address of the switch's agent with --agent"),
    ] {
        let (code, said) = result_of(&call(&arguments));
        assert_eq!(code, Some(2), "{arguments:?}: {said}");
        assert!(said.contains(words), "{arguments:?}: {said}");
        let output = call(&[&arguments, &["--json"][..]].concat());
        let error = error(&output);
        assert_eq!(output.status.code(), Some(2));
        assert_eq!((&error["code"], &error["kind"]), (&2.into(), &"usage".into()));
        assert!(error["message"].as_str().expect("text").contains(words), "{error}");
        assert!(output.stdout.is_empty());
    }
    assert!(!Path::new("/nonexistent").exists());
}

#[test]
fn a_service_has_a_file_to_begin_afresh_in() {
    let mut command = Command::new(BINARY);
    command.arg("memserver").args(ENDPOINT).args(["--interface", "nope", "--fresh"]);
    command.env("INVOCATION_ID", "0").env("NOTIFY_SOCKET", "/nonexistent/socket");
    let (code, said) = result_of(&command.stdin(Stdio::null()).output().expect("runs"));
    assert!(code == Some(2) && said.contains("interface nope"), "{code:?}: {said}");
}

#[test]
fn files_that_are_no_arenas_are_shown_as_such_and_stay() {
    let directory = PathBuf::from(format!("/dev/shm/bluebridge-test-{}", std::process::id()));
    std::fs::create_dir(&directory).expect("a new directory");
    let [other, empty, gone] = ["other", "empty", "gone"].map(|name| directory.join(name));
    for (path, bytes) in [(&other, &b"something else"[..]), (&empty, b"")] {
        let mut file = File::options().write(true).create_new(true).mode(0o600).open(path);
        file.as_mut().expect("a new file").write_all(bytes).expect("there is room");
    }
    let words = |command: &'static str| {
        let files = [&other, &gone, &empty].map(|path| path.to_str().expect("text").to_owned());
        let mut words = vec!["arena".to_owned(), command.to_owned()];
        words.extend(files);
        words
    };
    let call = |command, more: &[&str]| {
        let words = words(command);
        let words: Vec<_> = words.iter().map(String::as_str).collect();
        call(&[&words, more].concat())
    };
    let stdout = |output: &Output| String::from_utf8_lossy(&output.stdout).into_owned();
    let output = call("list", &[]);
    let (code, said) = result_of(&output);
    assert_eq!((code, said.lines().count()), (Some(2), 1), "{said}");
    let missing = format!("there is no file {}; `bluebridge arena list` shows", gone.display());
    assert!(said.contains(&missing), "{said}");
    let table = stdout(&output);
    assert!(table.contains("not an arena") && table.contains("nothing"), "{table}");
    let listed = call("list", &["--json"]);
    let rows: Value = serde_json::from_slice(&listed.stdout).expect("JSON");
    assert_eq!((&rows[0]["is_arena"], &rows[2]["is_arena"]), (&false.into(), &true.into()));
    assert!(rows[1]["error"].is_string(), "{rows}");
    // What is done for each is printed, also what follows a failure.
    let output = call("drop", &[]);
    let (code, said) = result_of(&output);
    let refused = format!("{} is no arena's file", other.display());
    assert!(code == Some(2) && said.contains(&refused), "{code:?}: {said}");
    assert!(said.contains(&missing), "{said}");
    assert_eq!(stdout(&output), format!("{} is gone; 0 MiB are free\n", empty.display()));
    assert!(other.exists() && !empty.exists());
    let output = call("drop", &["--json"]);
    let rows: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(rows.as_array().map(Vec::len), Some(3));
    assert!(rows[0]["error"].as_str().is_some_and(|words| words.contains("no arena's file")));
    assert_eq!(error(&output)["code"], 2);
    std::fs::remove_dir_all(&directory).expect("it is ours");
}

/// Each names the thing, and what to do.
#[test]
fn what_cannot_be_dropped_is_named_with_what_to_do() {
    let id = "0123456789abcdef0123456789abcdef";
    for (name, code, cause) in [
        (id, 2, format!("no map of an arena with the id {id} ")),
        ("/dev/shm", 2, "/dev/shm is a directory, and no arena's file; ".to_owned()),
        ("nowhere/x", 2, "there is no file nowhere/x; ".to_owned()),
        ("/dev/null", 5, "/dev/null is no regular file, and so no arena's; ".to_owned()),
        ("/etc/passwd", if is_root() { 2 } else { 5 }, "/etc/passwd ".to_owned()),
    ] {
        let (found, said) = result_of(&call(&["arena", "drop", name]));
        assert!(found == Some(code) && said.contains(&cause), "{name}: {found:?}: {said}");
        let remedies = ["`bluebridge arena list` shows", "where that is mounted", "as that user"];
        assert_eq!(remedies.iter().filter(|it| said.contains(**it)).count(), 1, "{said}");
        assert!(!said.contains("--arena-file") && !said.contains("--fresh"), "{said}");
    }
    assert!(Path::new("/etc/passwd").exists());
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// The text for people is one line as well.
#[test]
fn a_command_line_that_cannot_be_read_is_reported_in_a_line() {
    for (arguments, words) in [
        (
            &["create"][..],
            "required arguments were not provided: <SIZE>; see `bluebridge create --help`",
        ),
        (
            &["rack", "up", "--memry", "1G"],
            "tip: a similar argument exists: '--memory'; see `bluebridge rack up",
        ),
        (&["read", "nowhere"], "invalid value 'nowhere' for '<POINTER>'"),
        (&["rack", "up", "--memory", "1X"], "see `bluebridge rack up --help`"),
    ] {
        let (code, said) = result_of(&call(arguments));
        assert_eq!((code, said.lines().count()), (Some(2), 1), "{said}");
        assert!(said.starts_with("bluebridge: ") && said.contains(words), "{said}");
        let error = error(&call(&[arguments, &["--json"]].concat()));
        assert_eq!(format!("bluebridge: {}\n", error["message"].as_str().expect("text")), said);
    }
    let error = error(&call(&["rack", "--json"]));
    assert_eq!(error["message"], "a subcommand is missing; see `bluebridge rack --help`");
}

#[test]
fn variables_are_named_and_empty_ones_count_as_unset() {
    let with = |variable: &str, value: &str, arguments: &[&str]| {
        let mut command = Command::new(BINARY);
        command.env("BLUEBRIDGE_STATE", "/nonexistent/bluebridge-state").stdin(Stdio::null());
        command.env(variable, value).args(arguments);
        result_of(&command.output().expect("runs"))
    };
    let (_, unset) = with("BLUEBRIDGE_NONE", "", &["create", "1"]);
    for (variable, wrong) in [
        ("BLUEBRIDGE_CONTROLLER", "nowhere"),
        ("BLUEBRIDGE_SPACE", "many"),
        ("BLUEBRIDGE_SWITCH_PORT", "p"),
        ("BLUEBRIDGE_LOG_FORMAT", "poem"),
        ("BLUEBRIDGE_NAME", "a b"),
    ] {
        let (_, said) = with(variable, "", &["create", "1"]);
        assert_eq!(said, unset, "{variable}");
        let (code, said) = with(variable, wrong, &["create", "1"]);
        assert_eq!(code, Some(2), "{said}");
        assert!(said.starts_with(&format!("bluebridge: {variable}: invalid value")), "{said}");
    }
    let given = ["create", "1", "--space", "few"];
    let (_, said) = with("BLUEBRIDGE_SPACE", "many", &given);
    assert!(said.starts_with("bluebridge: invalid value 'few' for '--space <N>'"), "{said}");
}

#[test]
fn a_filter_of_logs_that_is_none_is_named() {
    for wrong in ["bluebridge_controller=loud", "a=b=c"] {
        let mut command = Command::new(BINARY);
        command.env("BLUEBRIDGE_LOG", wrong).args(["rack", "list"]).stdin(Stdio::null());
        let (code, said) = result_of(&command.output().expect("runs"));
        assert_eq!(code, Some(2), "{wrong}: {said}");
        assert!(said.contains(&format!("BLUEBRIDGE_LOG={wrong} is not a valid filter")), "{said}");
    }
}

#[test]
fn files_of_tls_that_a_controller_cannot_use_are_wrong_usage() {
    let scratch = Scratch::new("usage-controller-tls");
    let file = |name: &str| scratch.path().join(name).to_str().expect("text").to_owned();
    std::fs::write(file("empty.pem"), "").expect("written");
    let (store, empty) = (file("c.redb"), file("empty.pem"));
    let controller = ["controller", "--listen", "[::1]:0", "--store", &store];
    let trust = ["--tls-certificate", &empty, "--tls-key", &empty];
    let (code, said) = result_of(&call(&[&controller[..], &trust].concat()));
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("empty.pem contains no PEM block -----BEGIN CERTIFICATE-----"), "{said}");
    let missing = file("missing.pem");
    let trust = ["--tls-certificate", &missing, "--tls-key", &missing];
    let (code, said) = result_of(&call(&[&controller[..], &trust].concat()));
    assert!(code == Some(2) && said.contains("missing.pem"), "{code:?}: {said}");
}

/// Files that are missing are a fault of the command line.
#[test]
fn files_that_are_missing_are_wrong_usage() {
    let endpoint = [&["--interface", "lo"][..], &ENDPOINT].concat();
    for command in [
        &["ping", "s1", "--tls-root", "/nonexistent/file"][..],
        &["write", "fdbb:1:1::", "--file", "/nonexistent/file"],
        &["alloc-write", "--file", "/nonexistent/file"],
        &["alloc-write", "--file", "/nonexistent"],
        &["write", "fdbb:1:1::", "--file", "/"],
        &["alloc-write", "--file", "/"],
    ] {
        let (code, said) = result_of(&call(&[command, &endpoint].concat()));
        assert!(code == Some(2) && said.contains("; correct the path"), "{code:?}: {said}");
    }
}

#[test]
fn what_a_machine_lacks_is_shown_with_what_to_do() {
    // Root attaches a program to the interface for a moment, which must not be the machine's.
    let call = |arguments: &[&str]| {
        let mut command = Command::new(if is_root() { "unshare" } else { BINARY });
        if is_root() {
            command.args(["--net", BINARY]);
        }
        command.args(arguments).stdin(Stdio::null()).output().expect("runs")
    };
    let check = ["host", "check", "--interface", "lo"];
    let output = call(&[&check[..], &["--json"]].concat());
    let shown: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(output.status.code(), Some(1), "it leads to no fabric: {shown}");
    let abilities = shown["abilities"].as_array().expect("a list");
    let names: Vec<_> = abilities.iter().map(|it| it["name"].as_str()).collect();
    assert_eq!(names, ["fabric", "direct reads", "pager", "unmodified programs", "rdma"].map(Some));
    let fabric = &abilities[0];
    assert_eq!(fabric["is_ready"], false);
    assert!(
        fabric["words"].as_str().is_some_and(|it| it.contains("bluebridge host up")),
        "{fabric}"
    );
    let is_told = |it: &Value| it["words"].as_str().is_some_and(|words| !words.is_empty());
    assert!(abilities.iter().all(is_told), "{shown}");
    let text = call(&check);
    assert_eq!(text.status.code(), Some(1));
    let text = String::from_utf8_lossy(&text.stdout).into_owned();
    let (code, said) = result_of(&call(&["host", "check", "--interface", "nope"]));
    assert!(code == Some(2) && said.contains("nope"), "{code:?}: {said}");
    assert!(names.iter().flatten().all(|name| text.contains(name)), "{text}");
}

#[test]
fn a_result_that_cannot_be_printed_is_reported_with_a_remedy() {
    let mut command = Command::new(BINARY);
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").expect("on every Linux");
    command.args(["rack", "list", "--json"]).env("BLUEBRIDGE_STATE", "/nonexistent/x");
    let output = command.stdin(Stdio::null()).stdout(full).output().expect("runs");
    let (code, said) = result_of(&output);
    assert!(code == Some(1) && said.contains("free space there"), "{code:?}: {said}");
}

#[test]
fn too_many_open_files_are_reported_with_a_remedy() {
    // Files are opened in several places, and each of them can be the one that needs one too many. An endpoint
    // retries once it has sockets, so it is tried only without.
    let members = ["controller", "members", "--controller", "[::1]:9"];
    let ping = ["ping", "s1", "--interface", "lo", "--deadline", "100ms"];
    let ping = [&ping[..], &ENDPOINT].concat();
    for (arguments, limits) in [(&members[..], 4..12), (&ping, 4..7)] {
        let mut reported = 0;
        for limit in limits {
            let mut command = Command::new("sh");
            let script = format!("ulimit -n {limit}; exec \"$@\"");
            command.args(["-c", &script, "sh", BINARY]).args(arguments);
            command.env("BLUEBRIDGE_STATE", "/nonexistent/x").stdin(Stdio::null());
            let (code, said) = result_of(&command.output().expect("runs"));
            assert!(!said.contains("panicked"), "{limit}: {said}");
            if said.contains("Too many open files") {
                // 4 if it was the connection to the controller.
                assert!(matches!(code, Some(1 | 4)), "{limit}: {code:?}: {said}");
                assert_eq!(said.matches("ulimit -n").count(), 1, "{limit}: {said}");
                reported += 1;
            }
        }
        assert!(reported > 1, "{arguments:?}");
    }
}

#[test]
fn files_of_tls_that_cannot_be_used_are_named() {
    use rcgen::{CertifiedKey, generate_simple_self_signed};
    let scratch = Scratch::new("usage-tls");
    let file = |name: &str, text: &str| {
        let path = scratch.path().join(name);
        std::fs::write(&path, text).expect("written");
        path.to_str().expect("text").to_owned()
    };
    let made = || generate_simple_self_signed(["x".to_owned()]).expect("made");
    let CertifiedKey { cert, signing_key } = made();
    let root = file("root.pem", &cert.pem());
    let key = file("key.pem", &signing_key.serialize_pem());
    let other_key = file("other.pem", &made().signing_key.serialize_pem());
    let empty = file("empty.pem", "");
    let damaged =
        file("damaged.pem", "-----BEGIN PRIVATE KEY-----\n!\n-----END PRIVATE KEY-----\n");
    let block = |label: &str| format!("-----BEGIN {label}-----\nAAAA\n-----END {label}-----\n");
    let secret = file("secret.pem", &block("ENCRYPTED PRIVATE KEY"));
    let hollow = file("hollow.pem", &block("CERTIFICATE"));
    let ping = |trust: &[&str]| {
        let ping = ["ping", "s1", "--interface", "lo", "--deadline", "100ms"];
        result_of(&call(&[&ping[..], &ENDPOINT, trust].concat()))
    };
    for (trust, words) in [
        (
            &["--tls-root", &empty][..],
            "empty.pem contains no PEM block -----BEGIN CERTIFICATE-----",
        ),
        (&["--tls-root", &key], "key.pem contains no PEM block -----BEGIN CERTIFICATE-----"),
        (
            &["--tls-root", &root, "--tls-certificate", &root, "--tls-key", &root],
            "root.pem contains no PEM block -----BEGIN PRIVATE KEY-----",
        ),
        (
            &["--tls-root", &root, "--tls-certificate", &root, "--tls-key", &damaged],
            "damaged.pem contains no private key that can be read",
        ),
        (
            &["--tls-root", &root, "--tls-certificate", &root, "--tls-key", &secret],
            "secret.pem is encrypted; use a decrypted copy (`openssl pkey -in ",
        ),
        (
            &["--tls-root", &root, "--tls-certificate", &root, "--tls-key", &other_key],
            "other.pem is not the private key of the certificate in ",
        ),
        (&["--tls-root", &hollow], "hollow.pem contains no certificate that can be read"),
        (
            &["--tls-root", &root, "--tls-certificate", &hollow, "--tls-key", &key],
            "hollow.pem contains no certificate that can be read",
        ),
        (
            &["--tls-root", &root, "--tls-name", "a b"],
            "\"a b\" is neither a DNS name nor an address",
        ),
    ] {
        let (code, said) = ping(trust);
        assert_eq!(code, Some(2), "{said}");
        assert!(said.contains(words), "{said}");
    }
    let (code, said) = ping(&["--tls-root", &root, "--tls-certificate", &root, "--tls-key", &key]);
    assert_eq!(code, Some(4), "the files are right: {said}");
}

mod root {
    use std::fs::Permissions;
    use std::io::{BufRead, BufReader, Read};
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::os::unix::process::CommandExt;
    use std::path::PathBuf;
    use std::process::Child;
    use std::thread;
    use std::time::Duration;

    use bluebridge_switch::ebpf::EbpfSwitch;
    use bluebridge_testkit::{require_ebpf, require_root, until};

    use super::*;

    #[test]
    fn ports_and_memory_of_a_daemon_are_checked() {
        require_root();
        let soft = ["switch", "--data-plane", "soft", "--listen", "[::1]:0"];
        for port in ["0=lo", "1024=lo", "1=nope"] {
            let (code, said) = result_of(&call(&[&soft[..], &["--port", port]].concat()));
            assert_eq!(code, Some(2), "{port}: {said}");
        }
        let memserver =
            [&["unshare", "--net", BINARY, "memserver", "--interface", "lo"], &ENDPOINT[..]]
                .concat();
        for (memory, expected, words) in
            [("0", 2, "0 bytes for 1 shards"), ("511G", 1, "use a smaller arena")]
        {
            // No controller responds at the address: the memory is allocated before the join.
            let mut command = Command::new(memserver[0]);
            command.args(&memserver[1..]).args(["--memory", memory]).stdin(Stdio::null());
            let (code, said) = result_of(&command.output().expect("runs"));
            assert_eq!(code, Some(expected), "{memory}: {said}");
            assert!(said.contains(words), "{said}");
        }
    }

    /// A network namespace, which lives as long as its process sleeps.
    struct Namespace(Child);

    impl Namespace {
        fn new() -> Self {
            let script = "ip link set lo up && echo && exec sleep 120";
            let mut command = Command::new("unshare");
            command.args(["--net", "sh", "-c", script]).stdin(Stdio::null()).stdout(Stdio::piped());
            let mut child = command.spawn().expect("starts");
            let mut ready = [0];
            let stdout = child.stdout.as_mut().expect("piped");
            stdout.read_exact(&mut ready).expect("the interface is up");
            Self(child)
        }

        /// A switch in the kernel.
        fn switch(&self, device_id: &str, more: &[&str]) -> Child {
            let mut command = Command::new("nsenter");
            command.arg(format!("--net=/proc/{}/ns/net", self.0.id()));
            command.args([BINARY, "switch", "--listen", "[::1]:9559", "--device-id", device_id]);
            command.args(more).stdin(Stdio::null()).stderr(Stdio::piped()).spawn().expect("starts")
        }
    }

    impl Drop for Namespace {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    fn pins(device_id: &str) -> PathBuf {
        EbpfSwitch::directory(&format!("switch{device_id}")).expect("a name")
    }

    #[test]
    fn a_switch_that_does_not_start_leaves_nothing_pinned() {
        require_root();
        require_ebpf(EbpfSwitch::is_built());
        let (scratch, namespace) = (Scratch::new("usage-pins"), Namespace::new());
        for more in
            [&["--port", "1=lo", "--port", "2=nope"][..], &["--port", "1=lo", "--port", "0=lo"]]
        {
            let output = namespace.switch("40971", more).wait_with_output().expect("ends");
            assert_eq!(output.status.code(), Some(2), "{more:?}: {}", result_of(&output).1);
            assert!(!pins("40971").exists(), "{more:?}");
        }
        let elsewhere = scratch.path().join("bpf");
        std::fs::create_dir(&elsewhere).expect("made");
        let mount = Command::new("mount").args(["-t", "bpf", "none"]).arg(&elsewhere).status();
        assert!(mount.expect("runs").success());
        let directory = elsewhere.join("switch");
        let directory = directory.to_str().expect("text");
        let more = ["--port", "1=lo", "--port", "2=nope", "--bpf-directory", directory];
        let output = namespace.switch("40971", &more).wait_with_output().expect("ends");
        let left = Path::new(directory).exists();
        let unmount = Command::new("umount").arg(&elsewhere).status();
        assert!(unmount.expect("runs").success());
        assert_eq!((output.status.code(), left), (Some(2), false), "{}", result_of(&output).1);
    }

    #[test]
    fn what_a_dead_agent_left_pinned_is_removed_by_a_command() {
        require_root();
        require_ebpf(EbpfSwitch::is_built());
        let (id, namespace) = ("40972", Namespace::new());
        let remove = || call(&["switch", "remove", "--device-id", id]);
        let mut agent = namespace.switch(id, &["--port", "1=lo"]);
        let up = (0..500).any(|_| {
            thread::sleep(Duration::from_millis(20));
            pins(id).join("port_1_tc").exists()
        });
        let second = namespace.switch(id, &["--port", "1=lo"]).wait_with_output().expect("ends");
        let early = remove();
        agent.kill().expect("killed");
        agent.wait().expect("waited");
        let stayed = EbpfSwitch::is_pinned_in(&pins(id));
        // A failed start takes nothing from an existing switch.
        let failed =
            namespace.switch(id, &["--port", "1=lo", "--port", "2=nope"]).wait_with_output();
        let failed = failed.expect("ends");
        let stayed_again = EbpfSwitch::is_pinned_in(&pins(id));
        let removed = remove();
        assert!(up, "the switch did not start");
        for output in [&second, &early] {
            let (code, said) = result_of(output);
            assert_eq!(code, Some(1), "{said}");
            assert!(said.contains("has a running agent"), "{said}");
        }
        assert_eq!(failed.status.code(), Some(2), "{}", result_of(&failed).1);
        assert!(stayed && stayed_again, "frames go on without an agent");
        assert!(removed.status.success(), "{}", result_of(&removed).1);
        assert!(!pins(id).exists());
        let again = call(&["switch", "remove", "--device-id", id, "--json"]);
        let again: Value = serde_json::from_slice(&again.stdout).expect("JSON");
        assert_eq!(again["was_there"], false);
    }

    #[test]
    fn a_switch_that_is_stopped_while_it_starts_ends_normally() {
        require_root();
        require_ebpf(EbpfSwitch::is_built());
        let (id, namespace) = ("40973", Namespace::new());
        let mut agent = namespace.switch(id, &["--port", "1=lo"]);
        let pid = Pid::from_child(&agent);
        let started = (0..5000).any(|_| {
            thread::sleep(Duration::from_millis(2));
            pins(id).join("ports").exists()
        });
        // The programs are being verified now, for some hundred milliseconds.
        thread::sleep(Duration::from_millis(30));
        let ended = (0..300).find_map(|_| {
            let _ = kill_process(pid, Signal::TERM);
            thread::sleep(Duration::from_millis(200));
            agent.try_wait().expect("waited")
        });
        let _ = agent.kill();
        let output = agent.wait_with_output().expect("ends");
        let removed = call(&["switch", "remove", "--device-id", id]);
        assert!(started, "the switch did not start");
        assert_eq!(ended.and_then(|status| status.code()), Some(0), "{}", result_of(&output).1);
        assert!(removed.status.success(), "{}", result_of(&removed).1);
    }

    #[test]
    fn a_store_that_this_user_may_not_write_is_not_permitted() {
        require_root();
        let scratch = Scratch::new("usage-store");
        let binary = scratch.path().join("bluebridge");
        std::fs::copy(BINARY, &binary).expect("copied");
        let open = |path: &Path, mode| {
            std::fs::set_permissions(path, Permissions::from_mode(mode)).expect("set");
        };
        open(scratch.path(), 0o755);
        open(&binary, 0o755);
        let others = scratch.path().join("others.redb");
        std::fs::write(&others, "").expect("written");
        open(&others, 0o600);
        // Every user may write this file, but only its owner can change its mode.
        let shared = scratch.path().join("shared.redb");
        std::fs::write(&shared, "").expect("written");
        open(&shared, 0o666);
        for store in [others, shared, scratch.path().join("new.redb")] {
            let mut command = Command::new(&binary);
            command.args(["controller", "--listen", "[::1]:0", "--json", "--store"]).arg(&store);
            let output = command.uid(59_999).gid(59_999).current_dir("/").output().expect("runs");
            assert_eq!(output.status.code(), Some(5), "{}", result_of(&output).1);
        }
    }

    #[test]
    fn what_another_user_may_not_do_is_named() {
        require_root();
        let scratch = Scratch::new("usage-user");
        let binary = scratch.path().join("bluebridge");
        std::fs::copy(BINARY, &binary).expect("copied");
        for path in [scratch.path(), &binary] {
            std::fs::set_permissions(path, Permissions::from_mode(0o755)).expect("set");
        }
        let soft = ["switch", "--data-plane", "soft", "--listen", "[::1]:0", "--port", "1=lo"];
        let file = |name: &str, text: &str, mode| {
            let path = scratch.path().join(name);
            std::fs::write(&path, text).expect("written");
            std::fs::set_permissions(&path, Permissions::from_mode(mode)).expect("set");
            path.to_str().expect("text").to_owned()
        };
        let made = rcgen::generate_simple_self_signed(["x".to_owned()]).expect("made");
        let certificate = file("certificate.pem", &made.cert.pem(), 0o644);
        let key = file("key.pem", &made.signing_key.serialize_pem(), 0o600);
        let serve = ["controller", "--listen", "[::1]:0", "--store", "none.redb"];
        let serve = [&serve[..], &["--tls-certificate", &certificate, "--tls-key", &key]].concat();
        let members = ["controller", "members", "--controller", "[::1]:9"];
        let members = [&members[..], &["--tls-root", &key]].concat();
        for (arguments, words) in [
            (&serve[..], "key.pem: Permission denied (os error 13); run as a user who may read it"),
            (&members, "key.pem: Permission denied (os error 13); run as a user who may read it"),
            (&["host", "up", "--interface", "lo"], "this needs root, or CAP_NET_ADMIN: "),
            (
                &soft,
                "this needs root, or CAP_NET_RAW: cannot open a packet socket on lo: Operation not permitted",
            ),
            (&["switch", "--port", "1=lo"], "the eBPF data plane needs root"),
        ] {
            // A separate network, whose interface is not the machine's.
            let mut command = Command::new("unshare");
            command.args(["--net", "setpriv", "--reuid=59998", "--clear-groups"]).arg(&binary);
            command.args(arguments).current_dir("/").stdin(Stdio::null());
            let (code, said) = result_of(&command.output().expect("runs"));
            assert_eq!(code, Some(5), "{arguments:?}: {said}");
            assert!(said.contains(words), "{arguments:?}: {said}");
        }
    }

    /// Measuring for minutes, interrupted once it has begun.
    fn interrupted(name: &str, arguments: &[&str], begun: &str) {
        require_root();
        let scratch = Scratch::new(name);
        let state = scratch.path().join("state");
        let mut command = Command::new(BINARY);
        command.args(arguments).env("BLUEBRIDGE_STATE", &state).current_dir(scratch.path());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut measuring = command.spawn().expect("starts");
        let mut lines = BufReader::new(measuring.stderr.take().expect("piped")).lines();
        let step = lines.find(|line| line.as_ref().expect("text").contains(begun));
        assert!(step.is_some(), "it ended before its step {begun:?}");
        let pid = Pid::from_child(&measuring);
        kill_process(pid, Signal::INT).expect("signalled");
        until("it ends", || measuring.try_wait().expect("a child").is_some());
        assert_eq!(measuring.wait().expect("ends").code(), Some(1));
        let said: Vec<String> = lines.map(|line| line.expect("text")).collect();
        // The measuring thread may log meanwhile that other processes have ended.
        assert_eq!(said.last().map(String::as_str), Some("bluebridge: interrupted"), "{said:?}");
        assert!(!said.iter().any(|line| line.contains("not taken down")), "{said:?}");
        assert!(!state.exists(), "the rack is taken down");
    }

    #[test]
    fn a_measurement_is_interrupted_at_once() {
        let bench = ["bench", "read", "--rounds", "1000", "--operations", "1000000"];
        interrupted("usage-bench", &bench, "READ of 4096 bytes (1 of 1)");
        let update = ["bench", "update", "--rounds", "1000", "--operations", "1000000"];
        interrupted("usage-update", &update, "(1 of 2)");
        let experiment =
            ["experiment", "ownership", "--seconds", "600", "--clients", "2", "--leases", "1"];
        interrupted("usage-ownership", &experiment, "2 clients for 600 s (2 of 4)");
    }

    #[test]
    fn an_experiments_results_are_printed_even_if_its_files_cannot_be_written() {
        require_root();
        let scratch = Scratch::new("usage-full");
        // A full disk, for one file.
        symlink("/dev/full", scratch.path().join("contention.csv")).expect("a link");
        let mut command = Command::new(BINARY);
        command.env("BLUEBRIDGE_STATE", scratch.path().join("state")).stdin(Stdio::null());
        command.args([
            "experiment",
            "ownership",
            "--seconds",
            "1",
            "--clients",
            "1",
            "--leases",
            "1",
        ]);
        let output =
            command.arg("--json").arg("--output").arg(scratch.path()).output().expect("runs");
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        let message = error(&output)["message"].to_string();
        assert!(message.contains("contention.csv"), "{message}");
        let printed: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        assert_eq!(printed["files"], Value::Array(Vec::new()));
        assert_eq!(printed["findings"].as_array().map(Vec::len), Some(2), "{printed}");
    }
}

#[test]
fn programs_that_an_experiment_needs_are_named_with_their_packages() {
    let (code, said) = result_of(&call(&["experiment", "key-value", "--redis", "/nonexistent"]));
    assert_eq!(code, Some(1), "{said}");
    for words in ["redis-server was not found in /nonexistent", "redis-tools", "--redis"] {
        assert!(said.contains(words), "{said}");
    }
}

/// The process that turns swap off is not ended by a signal for the experiment, but by the experiment's end. The kernel
/// refuses swap to a file on tmpfs, so this test cannot turn any on.
#[test]
fn the_guardian_of_swap_outlives_signals_and_removes_everything() {
    let (mut socket, other) = UnixStream::pair().expect("sockets");
    socket.set_read_timeout(Some(Duration::from_secs(20))).expect("a socket");
    let mut command = Command::new(BINARY);
    command.args(["experiment", "swap-guardian"]).stdin(OwnedFd::from(other));
    let mut guardian = command.spawn().expect("starts");
    // The command holds the other end, too.
    drop(command);
    let path = format!("/dev/shm/bluebridge-swap-test-{}", std::process::id());
    let area = json!({ "kind": "swap-file", "path": path, "number": null });
    writeln!(socket, "{}", json!({ "add_file": { "area": area, "bytes": 1 << 20 } }))
        .expect("sent");
    let mut reply = String::new();
    BufReader::new(&socket).read_line(&mut reply).expect("a reply");
    assert!(reply.contains("failed") && reply.contains("swap file"), "{reply}");
    assert!(Path::new(&path).exists(), "it has made the file: {reply}");
    for signal in [Signal::INT, Signal::TERM, Signal::HUP] {
        kill_process(Pid::from_child(&guardian), signal).expect("our own child");
    }
    std::thread::sleep(Duration::from_millis(100));
    assert!(guardian.try_wait().expect("our own child").is_none(), "it is still there");
    drop(socket);
    until("the guardian ends", || guardian.try_wait().expect("our own child").is_some());
    assert!(guardian.wait().expect("our own child").success());
    assert!(!Path::new(&path).exists());
}
