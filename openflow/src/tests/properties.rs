//! What holds for every message, and for every sequence of bytes.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;

use super::arbitrary::message;
use crate::*;

fn encode(message: &Message) -> Vec<u8> {
    let mut out = Vec::new();
    message.encode(&mut out).unwrap();
    out
}

/// What is decoded can be encoded, and means the same then.
fn check_stable(frame: &[u8]) -> Result<(), TestCaseError> {
    let Ok(message) = Message::decode(frame) else { return Ok(()) };
    let mut again = Vec::new();
    prop_assert_eq!(message.encode(&mut again), Ok(()), "{:?}", message);
    prop_assert_eq!(Message::decode(&again), Ok(message));
    Ok(())
}

/// States the length that the bytes have; otherwise almost every change would be noticed by it alone.
fn state_length(frame: &mut [u8]) {
    let length = u16::try_from(frame.len()).unwrap();
    if let Some(field) = frame.get_mut(2..4) {
        field.copy_from_slice(&length.to_be_bytes());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn every_message_is_decoded_as_it_was_encoded(message in message()) {
        let frame = encode(&message);
        prop_assert_eq!(frame_length(&frame), Ok(Some(frame.len())));
        prop_assert_eq!(Message::decode(&frame), Ok(message));
    }

    #[test]
    fn messages_are_found_in_a_stream(messages in vec(message(), 0..5)) {
        let mut stream = Vec::new();
        for message in &messages {
            message.encode(&mut stream).unwrap();
        }
        let mut rest = &stream[..];
        for message in messages {
            let length = frame_length(rest).unwrap().unwrap();
            prop_assert_eq!(frame_length(&rest[..length - 1]), Ok(None));
            prop_assert_eq!(Message::decode(&rest[..length]), Ok(message));
            rest = &rest[length..];
        }
        prop_assert_eq!(frame_length(rest), Ok(None));
    }

    #[test]
    fn cut_messages_are_refused_or_keep_their_meaning(message in message(), cut in any::<Index>()) {
        let mut frame = encode(&message);
        frame.truncate(cut.index(frame.len()));
        prop_assert!(Message::decode(&frame).is_err(), "its length is wrong");
        state_length(&mut frame);
        check_stable(&frame)?;
    }

    #[test]
    fn changed_messages_are_refused_or_keep_their_meaning(
        message in message(),
        changes in vec(any::<(Index, u8)>(), 1..4),
        inserted in vec(any::<(Index, u8)>(), 0..2),
    ) {
        let mut frame = encode(&message);
        for (at, byte) in changes {
            let at = at.index(frame.len());
            frame[at] = byte;
        }
        for (at, byte) in inserted {
            frame.insert(at.index(frame.len()), byte);
        }
        check_stable(&frame)?;
        state_length(&mut frame);
        check_stable(&frame)?;
    }

    #[test]
    fn arbitrary_bytes_are_refused_or_keep_their_meaning(
        mut frame in vec(any::<u8>(), 0..200),
        kind in 0..30_u8,
    ) {
        check_stable(&frame)?;
        let _ = frame_length(&frame);
        if let [version, first, ..] = &mut frame[..] {
            (*version, *first) = (VERSION, kind);
        }
        state_length(&mut frame);
        check_stable(&frame)?;
    }

    #[test]
    fn what_does_not_fit_is_refused_and_leaves_the_output_unchanged(
        message in message(),
        before in vec(any::<u8>(), 0..20),
        extra in 0..1000_usize,
    ) {
        let mut body = message.body;
        let much = vec![0; MESSAGE_BYTES_MAX - 7 + extra];
        match &mut body {
            Body::Error(error) => error.data = much,
            Body::PacketIn(packet) => packet.data = much,
            Body::PacketOut(packet) => packet.data = much,
            // A flow is at least 56 bytes long, a bucket 16, an instruction or an action 8.
            Body::FlowMod(change) => {
                let count = much.len() / 8;
                change.instructions = vec![Instruction::ClearActions; count];
            }
            Body::GroupMod(change) => {
                let bucket =
                    Bucket { weight: 0, watch_port: 0, watch_group: 0, actions: Vec::new() };
                change.buckets = vec![bucket; much.len() / 16];
            }
            Body::MultipartReply(reply) => {
                reply.part = MultipartPart::Flows(vec![FlowStats::default(); much.len() / 56]);
            }
            other => *other = Body::EchoRequest(much),
        }
        let mut out = before.clone();
        let message = Message { xid: message.xid, body };
        prop_assert_eq!(message.encode(&mut out), Err(EncodeError::TooLong("a message")));
        prop_assert_eq!(out, before);
    }
}
