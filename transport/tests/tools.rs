//! Other tools can read a capture.

use std::fs::File;
use std::io::BufWriter;
use std::process::Command;

use bluebridge_testkit::Scratch;
use bluebridge_transport::capture::Capture;
use bluebridge_transport::memory::Hub;
use bluebridge_transport::{Outgoing, Transport, Wait};

const PORT: u16 = 1000;

#[test]
fn tshark_reads_a_capture_and_finds_its_checksums_right() {
    let scratch = Scratch::new("capture");
    let path = scratch.path().join("two.pcap");
    record(BufWriter::new(File::create(&path).expect("a writable temporary directory")));
    let output = Command::new("tshark")
        .args(["-o", "udp.check_checksum:TRUE", "-T", "fields", "-E", "separator=,"])
        .args(["-e", "ipv6.src", "-e", "ipv6.dst", "-e", "udp.srcport", "-e", "udp.length"])
        .args(["-e", "udp.checksum.status", "-e", "udp.payload", "-r"])
        .arg(&path)
        .output()
        .expect("install tshark, or skip the tier: `cargo xtask test --without tools`");
    let text = String::from_utf8_lossy(&output.stdout);
    let lines: Vec<_> = text.lines().collect();
    let expected = [
        "fdbb:1:1::1,fdbb:1:2::2,1000,15,1,6f646469747921",
        "fdbb:1:1::1,fdbb:1:2::2,1000,8,1,",
        "fdbb:1:2::2,fdbb:1:1::1,1000,11,1,6f6464",
    ];
    assert_eq!(lines, expected, "{}", String::from_utf8_lossy(&output.stderr));
}

/// Two datagrams sent, of odd and of no length, and one received.
fn record(writer: BufWriter<File>) {
    let hub = Hub::new(8);
    let prefix = |text: &str| text.parse().expect("a prefix");
    let here = hub.attach(PORT, &[prefix("fdbb:1:1::/48")]).expect("free");
    let mut there = hub.attach(PORT, &[prefix("fdbb:1:2::/48")]).expect("free");
    let mut here = Capture::new(here, writer).expect("a header");
    let out = Outgoing {
        source: "fdbb:1:1::1".parse().expect("an address"),
        destination: "fdbb:1:2::2".parse().expect("an address"),
        destination_port: PORT,
        header: b"odd",
        data: b"ity!",
    };
    assert_eq!(here.transmit(&[out, Outgoing { header: b"", data: b"", ..out }]).expect("sent"), 2);
    let back = Outgoing { source: out.destination, destination: out.source, data: b"", ..out };
    there.transmit(&[back]).expect("sent");
    assert_eq!(here.receive(Wait::NONE).expect("received"), 1);
    here.finish().expect("recorded");
}
