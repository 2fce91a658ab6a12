//! Which protocol a switch speaks, to explain the failure of a connection by the wrong one.
//!
//! The libraries only report that the first bytes made no sense. A second connection asks again, in the other
//! protocol. This happens only after a failure.

use std::time::Duration;

use bluebridge_openflow::{Body, Hello, Message, VERSION};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpStream, ToSocketAddrs};
use tokio::time::timeout;

use super::DriverError;

/// Time limit of a question, with its connection.
const PROBE_DEADLINE: Duration = Duration::from_millis(500);

/// The versions of OpenFlow, 1.0 to 1.5.
const OPENFLOW_VERSIONS: std::ops::RangeInclusive<u8> = 1..=6;

/// The bytes of the header of an OpenFlow message.
const OPENFLOW_HEADER_BYTES: usize = 8;

/// What a client of HTTP/2 sends first (RFC 9113, section 3.4): the preface and empty settings.
const HTTP2_PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

/// The bytes of the header of a frame of HTTP/2.
const HTTP2_HEADER_BYTES: usize = 9;

/// The type of the frame with which a server of HTTP/2 begins.
const HTTP2_SETTINGS: u8 = 4;

/// The failure of a P4Runtime connection, replaced by a better one if an OpenFlow switch is there.
pub(super) async fn explain_p4runtime(error: DriverError, address: &str) -> DriverError {
    if may_be_protocol(&error) && speaks_openflow(address).await {
        return DriverError::WrongProtocol {
            address: address.to_owned(),
            found: "an OpenFlow switch",
            expected: "a P4Runtime server",
            scheme: "openflow",
        };
    }
    error
}

/// The failure of an OpenFlow connection, replaced by a better one if a P4Runtime server is there.
pub(super) async fn explain_openflow(error: DriverError, address: &str) -> DriverError {
    if may_be_protocol(&error) && speaks_http2(address).await {
        return DriverError::WrongProtocol {
            address: address.to_owned(),
            found: "a P4Runtime server",
            expected: "an OpenFlow switch",
            scheme: "p4runtime",
        };
    }
    error
}

/// Whether a failure can be that of the wrong protocol.
const fn may_be_protocol(error: &DriverError) -> bool {
    matches!(error, DriverError::Lost(_) | DriverError::Timeout(_))
}

/// Whether an OpenFlow switch of any version listens at an address.
async fn speaks_openflow(address: impl ToSocketAddrs + Send) -> bool {
    let mut hello = Vec::new();
    let message = Message { xid: 1, body: Body::Hello(Hello::for_version(VERSION)) };
    if message.encode(&mut hello).is_err() {
        return false;
    }
    let first = first_bytes::<OPENFLOW_HEADER_BYTES>(address, &hello).await;
    first.is_some_and(|[version, kind, high, low, ..]| {
        // HELLO, or the ERROR with which it refuses a version.
        OPENFLOW_VERSIONS.contains(&version)
            && kind <= 1
            && usize::from(u16::from_be_bytes([high, low])) >= OPENFLOW_HEADER_BYTES
    })
}

/// Whether a server of HTTP/2 listens at an address.
async fn speaks_http2(address: impl ToSocketAddrs + Send) -> bool {
    let first = first_bytes::<HTTP2_HEADER_BYTES>(address, HTTP2_PREFACE).await;
    first.is_some_and(|[_, _, _, kind, _, stream @ ..]| kind == HTTP2_SETTINGS && stream == [0; 4])
}

/// The first bytes of the response to a question.
async fn first_bytes<const COUNT: usize>(
    address: impl ToSocketAddrs + Send,
    question: &[u8],
) -> Option<[u8; COUNT]> {
    let ask = async {
        let mut stream = TcpStream::connect(address).await.ok()?;
        stream.write_all(question).await.ok()?;
        let mut first = [0; COUNT];
        stream.read_exact(&mut first).await.ok()?;
        Some(first)
    };
    timeout(PROBE_DEADLINE, ask).await.ok().flatten()
}
