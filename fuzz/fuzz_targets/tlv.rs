#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| bluebridge_fuzz::wire::tlv(input));
