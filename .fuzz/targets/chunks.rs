#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| corelane_fuzz::cases::chunks(data));
