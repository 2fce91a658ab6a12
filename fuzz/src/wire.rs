//! What must hold for any bytes that arrive as datagrams, or as text for a pointer.

use std::net::Ipv6Addr;

use bluebridge_wire::{
    Datagram, DatagramError, Pointer, PointerError,
    header::{HEADER_BYTES, HeaderView},
    seal,
    tlv::{self, Tlvs},
};

/// A source address, a destination address and a UDP payload: they are parsed and emitted
/// unchanged, or refused; also with a valid CRC.
pub fn datagram(input: &[u8]) {
    let Some((source, rest)) = input.split_first_chunk::<16>() else { return };
    let Some((destination, payload)) = rest.split_first_chunk::<16>() else { return };
    let (source, destination) = (Ipv6Addr::from(*source), Ipv6Addr::from(*destination));
    check_datagram(source, destination, payload);

    // Random input almost never has a valid CRC, and most checks come after it.
    let mut sealed = payload.to_vec();
    if let Ok(view) = HeaderView::new(payload) {
        let (head, data) = sealed.split_at_mut(HEADER_BYTES + view.options().len());
        seal(source, destination, head, data);
        let error = check_datagram(source, destination, &sealed);
        assert_ne!(error, Some(DatagramError::Crc), "sealed a moment ago");
    }
}

fn check_datagram(
    source: Ipv6Addr,
    destination: Ipv6Addr,
    payload: &[u8],
) -> Option<DatagramError> {
    let datagram = match Datagram::parse(source, destination, payload) {
        Ok(datagram) => datagram,
        Err(error) => return Some(error),
    };
    let options: Vec<_> = datagram.tlvs().map(|tlv| tlv.expect("parse checked it")).collect();
    let option_bytes = options.iter().map(|tlv| tlv::emitted_bytes(tlv.value.len())).sum();
    let mut head = vec![0; HEADER_BYTES];
    datagram.header.emit(&mut head, option_bytes);
    for option in options {
        let end = head.len() + tlv::emitted_bytes(option.value.len());
        head.extend([option.kind, u8::try_from(option.value.len()).expect("one byte of length")]);
        head.extend(option.value);
        head.resize(end, 0);
    }
    let rest = [datagram.data, datagram.trailer].concat();
    seal(source, destination, &mut head, &rest);
    assert_eq!([head, rest].concat(), payload, "emitted as it came");
    assert_eq!(datagram.header.target, datagram.target.to_ipv6());
    assert_eq!(datagram.is_reply(), datagram.command().is_reply());
    None
}

/// Options: the iteration ends, each lies inside the input, and they cover it if none is invalid.
pub fn tlv(input: &[u8]) {
    let mut covered = 0;
    let mut errors = 0;
    for option in Tlvs::new(input) {
        match option {
            Ok(option) => covered += tlv::emitted_bytes(option.value.len()),
            Err(_) => errors += 1,
        }
    }
    assert!(errors <= 1, "nothing follows an error");
    assert!(covered <= input.len());
    assert_eq!(errors == 0, covered == input.len());
}

/// Text that is parsed as a pointer is printed as the same address with the same meaning.
pub fn pointer(input: &[u8]) {
    let Ok(text) = str::from_utf8(input) else { return };
    let address = text.parse::<Ipv6Addr>();
    match text.parse::<Pointer>() {
        Ok(pointer) => {
            assert_eq!(Ok(pointer.to_ipv6()), address);
            assert_eq!(pointer.to_string().parse(), Ok(pointer));
        }
        Err(error) => assert_eq!(error == PointerError::NotIpv6, address.is_err()),
    }
}
