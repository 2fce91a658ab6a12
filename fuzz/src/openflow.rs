//! What must hold for any bytes that an OpenFlow switch sends.

use bluebridge_openflow::{MESSAGE_BYTES_MAX, Message, VERSION, frame_length};

/// A stream of messages: each is refused, or means the same after it is encoded; also with a valid header.
pub fn stream(input: &[u8]) {
    let mut rest = input;
    while let Ok(Some(length)) = frame_length(rest) {
        let (frame, after) = rest.split_at(length);
        assert_eq!(frame_length(frame), Ok(Some(length)));
        assert_eq!(frame_length(&frame[..length - 1]), Ok(None), "its last byte counts");
        check_message(frame);
        rest = after;
    }

    // Random input seldom has the version and the length that all else depends on.
    let mut whole = input.iter().copied().take(MESSAGE_BYTES_MAX).collect::<Vec<_>>();
    let length = u16::try_from(whole.len()).expect("at most the longest message");
    if let [version, _, high, low, ..] = &mut whole[..] {
        *version = VERSION;
        [*high, *low] = length.to_be_bytes();
    }
    check_message(&whole);
}

fn check_message(frame: &[u8]) {
    let Ok(message) = Message::decode(frame) else { return };
    let mut encoded = Vec::new();
    message.encode(&mut encoded).expect("it fitted a message");
    assert_eq!(frame_length(&encoded), Ok(Some(encoded.len())));
    assert_eq!(Message::decode(&encoded).as_ref(), Ok(&message));
}
