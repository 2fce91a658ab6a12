use core::time::Duration;
use std::io::{self, Write};

use super::Capture;
use crate::memory::Hub;
use crate::{ManualClock, Outgoing, Timestamp, Transport, Wait};

const PORT: u16 = 1000;

fn captured() -> Vec<u8> {
    let clock = ManualClock::default();
    let hub = Hub::in_virtual_time(clock.clone(), 8);
    let here = hub.attach(PORT, &["fdbb:1:1::/48".parse().expect("a prefix")]).expect("free");
    let mut there = hub.attach(PORT, &["fdbb:1:2::/48".parse().expect("a prefix")]).expect("free");
    let mut here = Capture::with_origin(here, Vec::new(), Duration::from_secs(1_000)).expect("ok");
    clock.advance_to(Timestamp::from_nanos(1_500_000_001));
    let out = Outgoing {
        source: "fdbb:1:1::1".parse().expect("an address"),
        destination: "fdbb:1:2::2".parse().expect("an address"),
        destination_port: PORT,
        header: b"odd",
        data: b"ity!",
    };
    let empty = Outgoing { header: b"", data: b"", ..out };
    assert_eq!(here.transmit(&[out, empty]).expect("sent"), 2);
    let back = Outgoing { source: out.destination, destination: out.source, data: b"", ..out };
    there.transmit(&[back]).expect("sent");
    assert_eq!(here.receive(Wait::NONE).expect("received"), 1);
    assert_eq!(here.incoming(0).payload, b"odd");
    assert_eq!(here.recorded_count(), 3);
    here.finish().expect("recorded").1
}

#[test]
fn a_capture_has_the_bytes_of_the_format() {
    let file = captured();
    assert_eq!(file.len(), 24 + 3 * (16 + 48) + 7 + 3);
    assert_eq!(file[..8], [0x4d, 0x3c, 0xb2, 0xa1, 2, 0, 4, 0]);
    assert_eq!(file[20..24], [101, 0, 0, 0]);
    assert_eq!(file[24..28], 1_001_u32.to_le_bytes());
    assert_eq!(file[28..32], 500_000_001_u32.to_le_bytes());
    assert_eq!(file[32..36], 55_u32.to_le_bytes());
    assert_eq!(file[40..48], [0x60, 0, 0, 0, 0, 15, 17, 64]);
    assert_eq!(file[88..95], *b"oddity!");
    assert_eq!(file, captured());
}

#[test]
fn a_full_disk_stops_the_record_and_not_the_traffic() {
    struct Full(usize);
    impl Write for Full {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0 = self.0.checked_sub(bytes.len()).ok_or(io::ErrorKind::StorageFull)?;
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let hub = Hub::new(8);
    let node = hub.attach(PORT, &["fdbb::/16".parse().expect("a prefix")]).expect("free");
    let mut node = Capture::new(node, Full(100)).expect("room for the header");
    let address = "fdbb::1".parse().expect("an address");
    let (source, destination) = (address, address);
    let out = Outgoing { source, destination, destination_port: PORT, header: b"x", data: b"" };
    assert_eq!(node.transmit(&[out; 3]).expect("sent"), 3);
    assert_eq!(node.receive(Wait::NONE).expect("received"), 3);
    assert_eq!(node.recorded_count(), 1);
    assert_eq!(node.finish().err().map(|e| e.kind()), Some(io::ErrorKind::StorageFull));
}
