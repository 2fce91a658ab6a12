//! Another program reads the messages: Wireshark's own implementation of OpenFlow.

mod samples;

use std::fs::File;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use bluebridge_openflow::{Body, Message};
use bluebridge_testkit::Scratch;
use etherparse::PacketBuilder;
use pcap_file::DataLink;
use pcap_file::pcap::{PcapHeader, PcapPacket, PcapWriter};

/// The port of controllers that IANA has assigned.
const CONTROLLER: u16 = 6653;
const SWITCH: u16 = 40_000;

/// One end of a connection: its port and what it has sent.
struct End {
    port: u16,
    sent: u32,
}

/// A capture of one connection.
struct Record {
    writer: PcapWriter<File>,
    packets: u64,
}

impl Record {
    fn new(path: &Path) -> Self {
        let file = File::create(path).expect("a writable temporary directory");
        let header = PcapHeader { datalink: DataLink::RAW, ..PcapHeader::default() };
        let writer = PcapWriter::with_header(file, header).expect("a header");
        Self { writer, packets: 0 }
    }

    fn segment(&mut self, from: &mut End, to: &End, payload: &[u8]) {
        let address = |port| [[0; 15].as_slice(), &[u8::from(port == CONTROLLER) + 1]].concat();
        let [source, destination] = [from.port, to.port]
            .map(|port| address(port).try_into().expect("an address has 16 bytes"));
        let builder = PacketBuilder::ipv6(source, destination, 64)
            .tcp(from.port, to.port, from.sent, 0xffff)
            .ack(to.sent);
        let mut packet = Vec::with_capacity(builder.size(payload.len()));
        builder.write(&mut packet, payload).expect("a segment");
        from.sent += u32::try_from(payload.len()).expect("a short payload");
        let time = Duration::from_millis(self.packets);
        self.packets += 1;
        let length = u32::try_from(packet.len()).expect("a short packet");
        self.writer.write_packet(&PcapPacket::new(time, length, &packet)).expect("recorded");
    }
}

fn encode(xid: usize, body: &Body) -> Vec<u8> {
    let xid = u32::try_from(xid).expect("a few messages");
    let mut out = Vec::new();
    Message { xid, body: body.clone() }.encode(&mut out).expect("a valid message");
    out
}

/// A capture with a segment for each message, first those of the controller, and the lines that `FIELDS` must have.
fn record(path: &Path) -> Vec<String> {
    let mut record = Record::new(path);
    let mut controller = End { port: CONTROLLER, sent: 1 };
    let mut switch = End { port: SWITCH, sent: 1 };
    let mut expected = Vec::new();
    let mut line = |port: u16, kind: u8, body: &Body| {
        let xid = expected.len() + 1;
        let bytes = encode(xid, body);
        expected.push(format!("{port};0x04;{kind};{};{xid};;", bytes.len()));
        bytes
    };
    for (kind, body) in samples::from_controller() {
        let bytes = line(CONTROLLER, kind, &body);
        record.segment(&mut controller, &switch, &bytes);
    }
    for (kind, body) in samples::from_switch() {
        let bytes = line(SWITCH, kind, &body);
        record.segment(&mut switch, &controller, &bytes);
    }
    expected
}

/// The header, and what tshark thinks is wrong; bytes that it cannot interpret are among it.
const FIELDS: [&str; 7] = [
    "tcp.srcport",
    "openflow_v4.version",
    "openflow_v4.type",
    "openflow_v4.length",
    "openflow_v4.xid",
    "_ws.malformed",
    "_ws.expert.message",
];

/// The fields of the packets that pass the filter, a line for each packet. Of several fields with a name, `occurrence`
/// says whether `f`, only the first, or `a`, all, are wanted.
fn read(path: &Path, filter: &str, occurrence: &str, fields: &[&str]) -> Vec<String> {
    let output = Command::new("tshark")
        .args(["-d", &format!("tcp.port=={CONTROLLER},openflow"), "-Y", filter])
        .args(["-T", "fields", "-E", "separator=;", "-E", &format!("occurrence={occurrence}")])
        .args(fields.iter().flat_map(|field| ["-e", field]))
        .arg("-r")
        .arg(path)
        .output()
        .expect("install tshark, or skip the tier: `cargo xtask test --without tools`");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect()
}

#[test]
fn tshark_sees_every_message_with_its_type_and_nothing_wrong() {
    let scratch = Scratch::new("openflow");
    let path = scratch.path().join("connection.pcap");
    let expected = record(&path);
    // Only the first: an error contains the header of its cause.
    assert_eq!(read(&path, "openflow_v4", "f", &FIELDS), expected);
}

#[test]
fn tshark_reads_the_numbers_that_were_written() {
    let scratch = Scratch::new("openflow");
    let path = scratch.path().join("connection.pcap");
    record(&path);
    let fields: Vec<_> = NUMBERS
        .iter()
        .flat_map(|(part, fields)| fields.split_whitespace().map(move |field| (part, field)))
        .map(|(part, field)| format!("openflow_v4.{part}.{field}"))
        .collect();
    let fields: Vec<_> = fields.iter().map(String::as_str).collect();
    let present = |line: &String| {
        line.split(';').filter(|value| !value.is_empty()).collect::<Vec<_>>().join(" ")
    };
    let lines: Vec<_> = read(&path, "openflow_v4", "a", &fields)
        .iter()
        .map(present)
        .filter(|line| !line.is_empty())
        .collect();
    assert_eq!(lines, EXPECTED, "{lines:#?}");
}

/// Fields of Wireshark (`tshark -G fields`) by the structure that has them.
const NUMBERS: [(&str, &str); 20] = [
    ("hello_element", "type length version.bitmap"),
    ("error", "type code"),
    ("switch_features", "datapath_id n_buffers n_tables auxiliary_id capabilities"),
    ("switch_config", "flags.fragments miss_send_len"),
    ("packet_in", "buffer_id total_len reason table_id cookie"),
    ("flow_removed", "cookie priority reason table_id duration_sec duration_nsec"),
    ("flow_removed", "idle_timeout hard_timeout packet_count byte_count"),
    ("port_status", "reason"),
    ("port", "hw_addr name config sate current peer curr_speed max_speed"),
    ("packet_out", "buffer_id in_port acts_len"),
    ("flowmod", "cookie cookie_mask table_id command idle_timeout hard_timeout priority"),
    ("flowmod", "out_port out_group flags"),
    ("instruction", "goto_table.table_id write_metadata.value write_metadata.mask meter.meter_id"),
    ("action", "output.port group.group_id"),
    ("groupmod", "command type group_id"),
    ("bucket", "length weight watch_port watch_group"),
    ("role_request", "role generation_id"),
    ("role_reply", "role generation_id"),
    ("flow_stats", "length table_id duration_sec priority"),
    ("port_stats", "port_no rx_packets tx_packets"),
];

/// Their values in the samples, a line for each message that has one of them.
const EXPECTED: [&str; 28] = [
    "1 8 00000010",
    "1 65535",
    "4294967295 4294967293 104 2,4294967293 7",
    "0xb1e0000000000001 0xffff000000000000 2 0 0 30 100 4294967295 4294967295 0x0001 3 \
     0x0000000000000200 0x000000000000ff00 1 2,4294967293 7,7",
    "0xb1e0000000000001 0xffff000000000000 2 1 0 30 100 4294967295 4294967295 0x0001",
    "0xb1e0000000000001 0xffff000000000000 2 2 0 30 100 4294967295 4294967295 0x0001 3 \
     0x0000000000000200 0x000000000000ff00 1 2,4294967293 7,7",
    "0xb1e0000000000001 0xffff000000000000 2 3 0 30 100 4294967295 4294967295 0x0001",
    "0xb1e0000000000001 0xffff000000000000 2 4 0 30 100 4294967295 4294967295 0x0001",
    "1,2 0 1 7 32,40 1,3 4294967295,4294967295 4294967295,4294967295",
    "1,2 1 0 7 32,40 1,3 4294967295,4294967295 4294967295,4294967295",
    "2 2 7",
    "0x00000000 0x0000000000000009",
    "0x00000001 0x0000000000000009",
    "0x00000002 0x0000000000000009",
    "0x00000003 0x0000000000000009",
    "6 3",
    "0x0102030405060708 256 254 1 0x0000004f",
    "1 65535",
    "4294967295 14 1 3 0x0000000000001234",
    "0x0000000000001234 100 1 3 5 6 7 8 9 10",
    "0 02:00:00:00:00:02 eth2 0x00000001 0x00000004 0x00000840 0x00000840 10000000 40000000",
    "1 02:00:00:00:00:02 eth2 0x00000001 0x00000004 0x00000840 0x00000840 10000000 40000000",
    "2 02:00:00:00:00:02 eth2 0x00000001 0x00000004 0x00000840 0x00000840 10000000 40000000",
    "3,3 0x0000000000000200,0x0000000000000200 0x000000000000ff00,0x000000000000ff00 1,1 \
     2,4294967293,2,4294967293 7,7,7,7 376,56,376 3,0,3 5,0,5 100,0,100",
    "1,2 1,1 2,2",
    "1,2,1,2 32,40,32,40 1,3,1,3 4294967295,4294967295,4294967295,4294967295 \
     4294967295,4294967295,4294967295,4294967295",
    "02:00:00:00:00:02,02:00:00:00:00:02 eth2,eth2 0x00000001,0x00000001 0x00000004,0x00000004 \
     0x00000840,0x00000840 0x00000840,0x00000840 10000000,10000000 40000000,40000000",
    "0x00000002 0x0000000000000009",
];
