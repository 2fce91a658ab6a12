//! One state of a controller in the embedded switch and in Open vSwitch, seen from both sides: the tools of each, and
//! `bluebridge switch show`.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{Ipv6Addr, TcpStream};
use std::process::{Child, Command, Stdio};

use bluebridge_controller::core::Body;
use bluebridge_controller::driver::{
    OpenFlowAddress, OpenFlowConnector, P4RuntimeConnector, Pipeline, SwitchConnector,
};
use bluebridge_controller::plan::{Object, TableUpdate};
use bluebridge_controller::store::ElectionId;
use bluebridge_p4::declaration::TABLES;
use bluebridge_p4::entry::{ActionSpec, decode_key, decode_table_action};
use bluebridge_p4::pipeline::{
    Action, Forward, Key, MacAddr, SwitchPort, Ternary, WeightedForward,
};
use bluebridge_p4::proto::p4::v1;
use bluebridge_testkit::{Scratch, ip, namespace::in_thread, until};
use serde_json::Value;
use tokio::runtime::Runtime;

/// Where the switches listen, in the test's own namespace.
const P4RUNTIME: &str = "127.0.0.1:9559";
const OPENFLOW: &str = "127.0.0.1:6653";

const SCOPE: u32 = 0xfdbb_0001;

/// The tables of the directory: `ingress_guard`, `redirect`, `directory`.
type Directory = BTreeMap<Key, Action>;

/// A switch that ends with the test.
struct Running(Child);

impl Running {
    fn start(arguments: &[&str], listen: &str) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_bluebridge"));
        command.arg("switch").args(arguments).args(["--listen", listen]).stdin(Stdio::null());
        let running = Self(command.spawn().expect("it starts"));
        until("the switch listens", || TcpStream::connect(listen).is_ok());
        running
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn forward(port: u16) -> Forward {
    let [high, low] = port.to_be_bytes();
    Forward { port: SwitchPort(port), dst_mac: MacAddr([2, 0xbb, 0, 0, high, low]) }
}

fn location(node: u16, location: u64, prefix_len: u8) -> Key {
    let prefix = u128::from(SCOPE) << 80 | u128::from(node) << 64 | u128::from(location);
    Key::Directory { prefix, prefix_len }
}

/// The directory: two nodes, a range that migrated, a page that is shut, a leased page, and a blocked source.
fn directory() -> Directory {
    let guard =
        |port, src_node| Key::IngressGuard { port: SwitchPort(port), src_scope: SCOPE, src_node };
    let page = 0x12_3456_7890;
    Directory::from([
        (guard(1, 1), Action::Allow),
        (guard(2, 2), Action::Allow),
        (guard(2, 0xfffe), Action::Allow),
        (guard(1, 3), Action::Drop),
        (location(1, 0, 48), Action::Forward(forward(1))),
        (location(2, 0, 48), Action::Forward(forward(2))),
        (location(2, 0x0001_0000_4000_0000, 82), Action::Forward(forward(1))),
        (location(2, 0x5000, 100), Action::Drop),
        (location(0xfffe, 0, 48), Action::Forward(forward(2))),
        (Key::Redirect { dst_scope: SCOPE, dst_node: 2, page }, Action::Forward(forward(1))),
    ])
}

/// Everything that the controller installs, groups first.
fn state() -> Vec<TableUpdate> {
    let ports = BTreeSet::from([SwitchPort(1), SwitchPort(2)]);
    let (any, contended) = (Ternary::default(), Ternary { value: 0xc0, mask: 0xc0 });
    let members = [1, 2].map(|port| WeightedForward { forward: forward(port), weight: 3 * port });
    let notify =
        Key::Notify { src_command: contended, dst_command: any, src_status: any, priority: 1 };
    let entries = directory().into_iter().chain([
        (Key::Anycast { dst_scope: SCOPE }, Action::Select(members.to_vec())),
        (Key::Multicast { dst_scope: SCOPE }, Action::SetMulticastGroup { group: 7 }),
        (notify, Action::CopyToController),
        (Key::L2 { dst_mac: forward(2).dst_mac }, Action::Forward(forward(2))),
        (Key::PortMac { port: SwitchPort(2) }, Action::SetDstMac(forward(2).dst_mac)),
    ]);
    let groups = [Object::Group(7, ports.clone()), Object::Group(1, ports)];
    let entries = entries.map(|(key, action)| Object::Entry(key, Body::new(action)));
    let inserted = groups.into_iter().chain(entries).chain([Object::NotifySession]);
    let flood = TableUpdate::Modify(Object::FloodGroup(1));
    inserted.map(TableUpdate::Insert).chain([flood]).collect()
}

fn install(runtime: &Runtime, connector: &mut dyn SwitchConnector) {
    runtime.block_on(async {
        let id = ElectionId { high: 1, low: 1 };
        let mut driver = connector.connect(id).await.expect("the switch is free");
        assert_eq!(driver.ensure_pipeline().await, Ok(Pipeline::Pushed));
        for update in state() {
            let result = driver.apply(std::slice::from_ref(&update)).await;
            assert_eq!(result, Ok(vec![Ok(())]), "{update:?}");
        }
    });
}

/// The value and the mask of an address in a flow: `ADDRESS/LENGTH` or `ADDRESS/MASK`.
fn masked(text: &str) -> (u128, u128) {
    let (value, mask) = text.split_once('/').unwrap_or((text, "128"));
    let address = |text: &str| u128::from(text.parse::<Ipv6Addr>().expect("an address"));
    let mask = match mask.parse::<u32>() {
        Ok(length) => u128::MAX.checked_shl(128 - length).unwrap_or(0),
        Err(_) => address(mask),
    };
    (address(value), mask)
}

fn number(text: &str) -> u16 {
    let hex = text.strip_prefix("0x").map(|hex| u16::from_str_radix(hex, 16));
    hex.unwrap_or_else(|| text.parse()).expect("a number")
}

/// Scope and node of an address.
fn scope_and_node(address: u128) -> (u32, u16) {
    let top = |shift: u32| u32::try_from(address >> shift & u128::from(u32::MAX)).expect("32 bits");
    (top(96), u16::try_from(top(80) & 0xffff).expect("16 bits"))
}

/// What `ovs-ofctl dump-flows` shows of the directory. Flows at priorities below 1000 are always there.
fn flows() -> Directory {
    let mut command = Command::new("ovs-ofctl");
    command.args(["-O", "OpenFlow13", "dump-flows", &format!("tcp:{OPENFLOW}")]);
    let output = command.output().expect("ovs-ofctl runs");
    let text = String::from_utf8(output.stdout).expect("text");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let entries = text.lines().filter_map(|line| {
        let (conditions, actions) = line.trim().split_once(" actions=")?;
        let fields: BTreeMap<&str, &str> =
            conditions.split([',', ' ']).filter_map(|field| field.split_once('=')).collect();
        if number(fields.get("priority")?) < 1000 {
            return None;
        }
        let forward = || {
            let (mac, rest) = actions.strip_prefix("set_field:")?.split_once("->eth_dst,")?;
            let port = rest.strip_prefix("write_metadata:")?.strip_suffix(",goto_table:10")?;
            let dst_mac = MacAddr::try_from(mac.to_owned()).expect("a MAC address");
            Some(Action::Forward(Forward { port: SwitchPort(number(port)), dst_mac }))
        };
        Some(match *fields.get("table")? {
            "1" => {
                let (src, mask) = masked(fields["ipv6_src"]);
                assert_eq!(mask, u128::MAX << 80, "{line}");
                let (src_scope, src_node) = scope_and_node(src);
                let port = SwitchPort(number(fields["in_port"]));
                let is_allowed = actions == "goto_table:2";
                assert!(is_allowed || actions == "drop", "{line}");
                if is_allowed {
                    // Only into its own space.
                    let space = u128::from(src_scope) << 96;
                    assert_eq!(masked(fields["ipv6_dst"]), (space, u128::MAX << 96), "{line}");
                }
                let action = if is_allowed { Action::Allow } else { Action::Drop };
                (Key::IngressGuard { port, src_scope, src_node }, action)
            }
            "6" => {
                let (dst, mask) = masked(fields["ipv6_dst"]);
                assert_eq!(mask, u128::MAX << 80 | u128::from(u64::MAX << 12), "{line}");
                let (dst_scope, dst_node) = scope_and_node(dst);
                let page = u64::try_from(dst & u128::from(u64::MAX)).expect("64 bits") >> 12;
                (Key::Redirect { dst_scope, dst_node, page }, forward().expect(line))
            }
            "7" => {
                let (dst, mask) = masked(fields["ipv6_dst"]);
                let (high, low) = (mask >> 80, mask & u128::from(u64::MAX));
                assert_eq!(mask & (0xffff << 64), 0, "command and tag are free: {line}");
                let prefix = dst >> 80 << 64 | dst & u128::from(u64::MAX);
                let length = high.count_ones() + low.count_ones();
                assert_eq!(number(fields["priority"]), 1000 + u16::try_from(length).expect("112"));
                let prefix_len = u8::try_from(length).expect("112 at most");
                let action = if actions == "drop" { Some(Action::Drop) } else { forward() };
                (Key::Directory { prefix, prefix_len }, action.expect(line))
            }
            _ => return None,
        })
    });
    entries.collect()
}

/// What a P4Runtime client reads of the directory.
fn p4runtime_entries(runtime: &Runtime) -> Directory {
    let names = ["ingress_guard", "redirect", "directory"];
    let tables: Vec<_> = TABLES.iter().filter(|table| names.contains(&table.alias)).collect();
    assert_eq!(tables.len(), names.len());
    let wanted = |id| v1::Entity {
        entity: Some(v1::entity::Entity::TableEntry(v1::TableEntry {
            table_id: id,
            ..v1::TableEntry::default()
        })),
    };
    let request = v1::ReadRequest {
        device_id: 1,
        entities: tables.iter().map(|table| wanted(table.id)).collect(),
        ..v1::ReadRequest::default()
    };
    let read = runtime.block_on(async {
        let mut client =
            v1::p4_runtime_client::P4RuntimeClient::connect(format!("http://{P4RUNTIME}"))
                .await
                .expect("the agent listens");
        let mut responses = client.read(request).await.expect("it can be read").into_inner();
        let mut read = Vec::new();
        while let Some(response) = responses.message().await.expect("whole") {
            read.extend(response.entities);
        }
        read
    });
    let entry = |entity: v1::Entity| {
        let Some(v1::entity::Entity::TableEntry(entry)) = entity.entity else {
            panic!("{entity:?} is no entry")
        };
        let table = tables.iter().find(|table| table.id == entry.table_id).expect("requested");
        let action = decode_table_action(table, entry.action.as_ref()).expect("an action");
        let ActionSpec::Direct(action) = action else { panic!("{action:?} is indirect") };
        (decode_key(&entry).expect("a key"), action)
    };
    read.into_iter().map(entry).collect()
}

fn show(agent: &str, more: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_bluebridge"));
    command.args(["switch", "show", "--agent", agent]).args(more);
    let output = command.output().expect("it runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

#[test]
fn both_kinds_of_switch_show_the_same_directory() {
    in_thread(|| {
        ip("link set lo up");
        let scratch = Scratch::new("same-directory");
        let own = scratch.path().join("ovs").display().to_string();
        // Two ports of each switch, at the ends of two links.
        for link in 1..=2 {
            ip(&format!("link add soft{link} type veth peer name ovs{link}"));
        }
        let soft = ["--data-plane", "soft", "--port", "1=soft1", "--port", "2=soft2"];
        let _soft = Running::start(&soft, P4RUNTIME);
        let ovs = ["--data-plane", "ovs", "--port", "1=ovs1", "--port", "2=ovs2"];
        let ovs = [&ovs[..], &["--ovs-directory", &own]].concat();
        let _ovs = Running::start(&ovs, OPENFLOW);
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        let runtime = builder.worker_threads(1).enable_all().build().expect("a runtime");
        install(&runtime, &mut P4RuntimeConnector::new(&format!("http://{P4RUNTIME}"), 1));
        let address = OpenFlowAddress::Connect(OPENFLOW.parse().expect("an address"));
        install(&runtime, &mut OpenFlowConnector::new(address));

        assert_eq!(p4runtime_entries(&runtime), directory());
        assert_eq!(flows(), directory());

        let openflow = format!("openflow://{OPENFLOW}");
        let shown = show(P4RUNTIME, &[]);
        assert_eq!(show(&openflow, &[]), shown);
        for line in [
            "ingress_guard  port 1 from fdbb:1:1::/48",
            "redirect       fdbb:1:2:: page 0x1234567890",
            "fdbb:1:2:0:1:0:4000:0/98",
            "one of port 1 (weight 3), port 2 (weight 6)",
            "frames dropped: none",
        ] {
            assert!(shown.contains(line), "{line:?} is missing in:\n{shown}");
        }
        let entries = |agent| {
            let text = show(agent, &["--json"]);
            let rows: Vec<Value> = serde_json::from_str(&text).expect("JSON");
            let (drops, entries): (Vec<_>, Vec<_>) =
                rows.into_iter().partition(|row| row["table"] == "drops");
            (drops.len(), entries)
        };
        let (embedded, ovs) = (entries(P4RUNTIME), entries(&openflow));
        assert_eq!(embedded.1, ovs.1);
        assert_eq!((embedded.0, ovs.0), (12, 11), "Open vSwitch has no impairments");
    });
}
